"""Checkpoints of Llama, Mistral, GPT-2 and T5 on disk -> transformers' own modules -> their adapters.

The modules are made without memory and filled from the file, tensor by tensor: those of the layers that were asked for,
and a few rows of the embeddings for parity. That a checkpoint is what its config says is proved by the adapter, which
runs transformers' own forward.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from export.adapters.encoder_files import layer_range
from export.adapters.registry import pack
from export.checkpoint import Checkpoint, read_json
from export.errors import SourceError, first_line
from export.packed import Packed

_POOL: Final = 512  # rows of the embeddings that are read
_SEED: Final = 0


@dataclass(frozen=True)
class Family:
    """Where the parts of a family are, in its modules and in its files.

    model: transformers' class; prefixes: what its tensors' names may begin with in a file; layers, norm, words,
    positions: names of its parts; ignored: tensors of a layer that hold no weights.
    """

    model: str
    config: str
    prefixes: tuple[str, ...]
    layers: str
    norm: str
    words: str
    positions: str | None = None
    ignored: str = r"(?!)"


_LLAMA: Final = Family(
    "transformers.models.llama.modeling_llama.LlamaModel",
    "transformers.models.llama.configuration_llama.LlamaConfig",
    ("model.", ""),
    "layers",
    "norm",
    "embed_tokens",
    ignored=r"self_attn\.rotary_emb\.inv_freq",
)
# config.json's `model_type` -> family
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": _LLAMA,
    "mistral": replace(
        _LLAMA,
        model="transformers.models.mistral.modeling_mistral.MistralModel",
        config="transformers.models.mistral.configuration_mistral.MistralConfig",
    ),
    "gpt2": Family(
        "transformers.models.gpt2.modeling_gpt2.GPT2Model",
        "transformers.models.gpt2.configuration_gpt2.GPT2Config",
        ("transformer.", ""),
        "h",
        "ln_f",
        "wte",
        positions="wpe",
        ignored=r"attn\.(masked_)?bias",
    ),
    "t5": Family(
        "transformers.models.t5.modeling_t5.T5EncoderModel",
        "transformers.models.t5.configuration_t5.T5Config",
        ("",),
        "encoder.block",
        "encoder.final_layer_norm",
        "shared",
    ),
}


def pack_files(
    weights: Path, config: Path, model_types: tuple[str, ...], *, layers: str | None = None, seed: int = 0
) -> Packed:
    """Read layers as one stack, float32; the last norm is part of it where the last layer is.

    Args:
        weights: a checkpoint in safetensors (see `Checkpoint`).
        config: its `config.json`.
        model_types: what its `model_type` may be.
        layers: a range `start:stop` as in Python, or one index; all if None.
        seed: of the proof's random tokens.

    Raises:
        SourceError: names the file and the tensor or key that is missing, misshapen, not finite or contradicting; or
            transformers is not installed.
        ExportError: the model has a part without a packed form.
    """
    values = read_json(config)
    model_type = values.get("model_type")
    if model_type not in model_types:
        raise SourceError(f"{config}: model_type is {model_type!r}, expected {' or '.join(map(repr, model_types))}")
    family = FAMILIES[model_type]
    try:
        with torch.device("meta"):
            model: Any = _class(family.model)(_class(family.config).from_dict(values))
    except ImportError as cause:
        raise SourceError(f"{model_type}: reading it needs the package transformers ({first_line(cause)})") from cause
    except Exception as cause:
        raise SourceError(f"{config}: transformers refuses it: {first_line(cause)}") from cause
    count = len(model.get_submodule(family.layers))
    chosen = layer_range(layers, count)
    with Checkpoint(weights) as checkpoint:
        prefix = _prefix(checkpoint, family)
        _check_foreign(checkpoint, family, prefix, model)
        tensors = {name: checkpoint.read(prefix + name, shape) for name, shape in _wanted(model, family, chosen)}
        for part in (family.words, family.positions):
            if part is not None:
                tensors[f"{part}.weight"] = _some_rows(checkpoint, f"{prefix}{part}.weight", whole=part != family.words)
        source = checkpoint.provenance()
    _fill(model, family, chosen, tensors)
    if chosen.stop != count:
        _set(model, family.norm, nn.Identity())
    return replace(pack(model, seed=seed), source=source)


def _class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _prefix(checkpoint: Checkpoint, family: Family) -> str:
    found = {
        prefix
        for prefix in family.prefixes
        if any(key.startswith(f"{prefix}{family.layers}.0.") for key in checkpoint.keys())  # noqa: SIM118 - no mapping
    }
    if len(found) != 1:
        names = " or ".join(f"'{prefix}{family.layers}.<i>.*'" for prefix in family.prefixes)
        raise SourceError(
            f"{checkpoint.path}: {'no' if not found else 'more than one'} stack of tensors is named {names}"
        )
    return found.pop()


def _check_foreign(checkpoint: Checkpoint, family: Family, prefix: str, model: nn.Module) -> None:
    """Every tensor of a layer in the file is one of the module's, in every layer."""
    ours = model.state_dict()
    start = f"{prefix}{family.layers}."
    for key in checkpoint.keys():  # noqa: SIM118
        if not key.startswith(start) or key.removeprefix(prefix) in ours:
            continue
        if re.fullmatch(rf"\d+\.{family.ignored}", key.removeprefix(start)) is None:
            raise SourceError(f"{checkpoint.path}: {key} has no place in the model that the config describes")


def _wanted(model: nn.Module, family: Family, chosen: range) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the chosen layers' tensors and the last norm's."""
    for name, tensor in model.state_dict().items():
        layer = re.match(rf"{re.escape(family.layers)}\.(\d+)\.", name)
        if name.startswith(f"{family.norm}.") or (layer is not None and int(layer[1]) in chosen):
            yield name, tuple(tensor.shape)


def _some_rows(checkpoint: Checkpoint, key: str, *, whole: bool) -> Tensor:
    if whole:
        return checkpoint.read(key)
    if key not in checkpoint.keys():  # noqa: SIM118
        raise SourceError(f"{checkpoint.path}: it has no tensor {key}")
    rows = checkpoint.shape(key)[0]
    ids = np.sort(np.random.default_rng(_SEED).choice(rows, min(_POOL, rows), replace=False))
    return torch.cat([checkpoint.rows(key, int(row), int(row) + 1) for row in ids])


def _fill(model: Any, family: Family, chosen: range, tensors: Mapping[str, Tensor]) -> None:
    """Give `model` its tensors, in place, and keep the chosen layers alone."""
    for name, tensor in tensors.items():
        place, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(place), leaf, nn.Parameter(tensor, requires_grad=False))
    kept = model.get_submodule(family.layers)
    _set(model, family.layers, nn.ModuleList(kept[index] for index in chosen))
    model.config.num_hidden_layers = len(chosen)
    if hasattr(model, "rotary_emb"):  # its frequencies are computed, not stored
        model.rotary_emb = type(model.rotary_emb)(model.config)
    if hasattr(model, "encoder"):  # one table, two names
        model.encoder.embed_tokens = model.shared


def _set(model: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, part)
