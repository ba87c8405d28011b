"""Checkpoints of Llama, Mistral, Mixtral, GPT-2, T5 and Switch on disk -> transformers' own modules -> their adapters.

The modules are made without memory and filled from the file, tensor by tensor: those of the layers that were asked for,
and a few rows of the embeddings for parity. That a checkpoint is what its config says is proved by the adapter, which
runs transformers' own forward.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from export.adapters.encoder_files import layer_range
from export.adapters.registry import pack
from export.adapters.transformers_families import Family, Pieces, Place, Shape
from export.checkpoint import Checkpoint, read_json
from export.errors import SourceError, first_line
from export.packed import Packed

_POOL: Final = 512  # rows of the embeddings that are read
_SEED: Final = 0


def pack_files(
    weights: Path,
    config: Path,
    families: Mapping[str, Family],
    *,
    layers: str | None = None,
    trust_pickle: bool = False,
    seed: int = 0,
) -> Packed:
    """Read layers as one stack, float32; the last norm is part of it where the last layer is.

    Args:
        weights: a checkpoint (see `Checkpoint`).
        config: its `config.json`.
        families: what its `model_type` may be, and where the layers are then.
        layers: a range `start:stop` as in Python, or one index; all if None.
        trust_pickle: see `Checkpoint`.
        seed: of the proof's random tokens.

    Raises:
        SourceError: names the file and the tensor or key that is missing, misshapen, not finite or contradicting; or
            transformers is not installed.
        ExportError: the model has a part without a packed form.
    """
    values = read_json(config)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in families:
        raise SourceError(f"{config}: model_type is {model_type!r}, expected {' or '.join(map(repr, families))}")
    family = families[model_type]
    try:
        with torch.device("meta"):
            model: Any = _class(family.model)(_class(family.config).from_dict(values))
    except ImportError as cause:
        raise SourceError(f"{model_type}: reading it needs the package transformers ({first_line(cause)})") from cause
    except Exception as cause:
        raise SourceError(f"{config}: transformers refuses it: {first_line(cause)}") from cause
    count = len(model.get_submodule(family.layers))
    chosen = layer_range(layers, count)
    with Checkpoint(weights, trust_pickle=trust_pickle) as checkpoint:
        prefix = _prefix(checkpoint, family)
        pieces = family.pieces(checkpoint.keys(), prefix)
        _check_foreign(checkpoint, family, prefix, pieces, model)
        tensors = {
            name: _read(checkpoint, prefix, pieces(name, shape), shape)
            for name, shape in _wanted(model, family, chosen)
        }
        for part in (family.words, family.positions):
            if part is not None:
                tensors[f"{part}.weight"] = _some_rows(checkpoint, f"{prefix}{part}.weight", whole=part != family.words)
        source = checkpoint.provenance()
    _fill(model, family, chosen, tensors)
    if chosen.stop != count:
        _set(model, family.norm, nn.Identity())
    return replace(pack(model.get_submodule(family.part), seed=seed), source=source)


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


def _check_foreign(checkpoint: Checkpoint, family: Family, prefix: str, pieces: Pieces, model: nn.Module) -> None:
    """Every tensor of a layer in the file is one of the module's, in every layer."""
    ours = {piece for name, tensor in model.state_dict().items() for piece, _ in pieces(name, tuple(tensor.shape))}
    start = f"{prefix}{family.layers}."
    for key in checkpoint.keys():  # noqa: SIM118
        if not key.startswith(start) or key.removeprefix(prefix) in ours:
            continue
        if re.fullmatch(rf"\d+\.{family.ignored}", key.removeprefix(start)) is None:
            raise SourceError(f"{checkpoint.path}: {key} has no place in the model that the config describes")


def _read(checkpoint: Checkpoint, prefix: str, pieces: Iterator[tuple[str, Place]], shape: Shape) -> Tensor:
    """One tensor of the module, put together where the file has it in pieces."""
    whole: Tensor | None = None
    for name, place in pieces:
        if not place:
            return checkpoint.read(prefix + name, shape)
        whole = torch.empty(shape) if whole is None else whole
        part = whole[place]
        part.copy_(checkpoint.read(prefix + name, tuple(part.shape)))
    assert whole is not None
    return whole


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
    part = model.get_submodule(family.part)
    part.config.num_hidden_layers = len(chosen)
    if hasattr(part, "rotary_emb"):  # its frequencies are computed, not stored
        part.rotary_emb = type(part.rotary_emb)(part.config)
    if family.part:  # one table, two names
        part.embed_tokens = model.get_submodule(family.words)


def _set(model: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, part)
