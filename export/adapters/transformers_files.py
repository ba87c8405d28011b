"""Checkpoints of Llama, Mistral, Mixtral, GPT-2, T5 and Switch on disk -> transformers' own modules -> their adapters.

The modules are made without memory and filled from the file, tensor by tensor: those of the layers that were asked for,
and a few rows of the embeddings for parity. That a checkpoint is what its config says is proved by the adapter, which
runs transformers' own forward.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from export.adapters.config_keys import ConfigFile
from export.adapters.encoder_files import layer_range
from export.adapters.lora_files import FileUpdates
from export.adapters.registry import pack
from export.adapters.transformers_families import Family, Pieces, Place, Shape
from export.checkpoint import Checkpoint
from export.errors import SourceError, first_line
from export.lora import Lora
from export.packed import Packed

_POOL: Final = 512  # rows of the embeddings that are read
_SEED: Final = 0


def pack_files(
    weights: Path,
    config: Path,
    families: Mapping[str, Family],
    *,
    layers: str | None = None,
    lora: Path | None = None,
    trust_pickle: bool = False,
    seed: int = 0,
) -> Packed:
    """Read layers as one stack, float32; the last norm is part of it where the last layer is.

    Args:
        weights: a checkpoint (see `Checkpoint`).
        config: its `config.json`.
        families: what its `model_type` may be, and where the layers are then.
        layers: a range `start:stop` as in Python, or one index; all if None.
        lora: folder of a LoRA adapter in PEFT's format, which is merged as its weights are read.
        trust_pickle: see `Checkpoint`.
        seed: of the proof's random tokens.

    Raises:
        SourceError: names the file and the tensor or key that is missing, misshapen, not finite or contradicting; or
            transformers is not installed.
        ExportError: the model has a part without a packed form.
    """
    file = ConfigFile(config)
    model_type = file.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in families:
        raise file.fault("model_type", " or ".join(map(repr, families)))
    family = families[model_type]
    activations = _activations(model_type)
    family.keys.check(file, activations)
    _check_rope(file)
    adapter = None if lora is None else Lora(lora)
    with Checkpoint(weights, trust_pickle=trust_pickle) as checkpoint:
        prefix = _prefix(checkpoint, family)
        count = _check_counts(checkpoint, family, prefix, file)
        chosen = layer_range(layers, count)
        model = _empty_model(family, file)
        pieces = family.pieces(checkpoint.keys(), prefix)
        _check_foreign(checkpoint, family, prefix, pieces, model)
        updates = FileUpdates(adapter, family, model, chosen, set(checkpoint.keys()))
        tensors = {
            name: updates.merge_into(name, _read(checkpoint, prefix, list(pieces(name, shape)), shape))
            for name, shape in _wanted(model, family, chosen)
        }
        for part in (family.words, family.positions):
            if part is not None:
                d = model.get_submodule(part).embedding_dim
                tensors[f"{part}.weight"] = _some_rows(
                    checkpoint, f"{prefix}{part}.weight", d, whole=part != family.words
                )
        source = {**checkpoint.provenance(), **updates.provenance}
    _fill(model, family, chosen, tensors)
    if chosen.stop != count:
        _set(model, family.norm, nn.Identity())
    return replace(pack(model.get_submodule(family.part), seed=seed), source=source)


def _activations(model_type: str) -> Mapping[str, Any]:
    """transformers' activations, by the names that its configs have for them."""
    try:
        found: Mapping[str, Any] = _attribute("transformers.activations.ACT2FN")
    except ImportError as cause:
        raise SourceError(f"{model_type}: reading it needs the package transformers ({first_line(cause)})") from cause
    return found


def _check_rope(file: ConfigFile) -> None:
    """The numbers and the name of a rotary embedding, under its two keys; transformers answers with a bare KeyError."""
    known = {"default", *_attribute("transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS")}
    for key in ("rope_parameters", "rope_scaling"):
        file.check_numbers(key, ignored=("rope_type", "type"))
        for inner in ("rope_type", "type"):
            name = (file.values.get(key) or {}).get(inner, "default")
            if not isinstance(name, str) or name not in known:
                raise SourceError(f"{file.path}: {key}.{inner} is {name!r}, expected one of {', '.join(sorted(known))}")


def _empty_model(family: Family, file: ConfigFile) -> Any:
    """transformers' module of that config, without values."""
    try:
        with torch.device("meta"):
            return _attribute(family.model)(_attribute(family.config).from_dict(file.values))
    except Exception as cause:
        words = " ".join(str(cause).split())  # its validation says which key it was in the second line
        raise SourceError(f"{file.path}: transformers refuses it: {type(cause).__name__}: {words}") from cause


def _check_counts(checkpoint: Checkpoint, family: Family, prefix: str, file: ConfigFile) -> int:
    """As many layers, and experts in each layer that names its own, as the config says; the number of layers.

    Before the module is made: a thousand times too many would take that much longer to make.
    """
    keys = family.keys
    stem = re.escape(f"{prefix}{family.layers}.")
    indices = {int(found[1]) for key in checkpoint.keys() if (found := re.match(rf"{stem}(\d+)\.", key))}  # noqa: SIM118
    if sorted(indices) != list(range(len(indices))):
        raise SourceError(f"{checkpoint.path}: its layers are {sorted(indices)}, some are missing")
    key = keys.layers if file.values.get(keys.layers) is not None else "num_layers"  # a T5 decoder is as deep
    file.check_count(key, len(indices), "layers", checkpoint.path)
    experts: dict[str, set[str]] = {}
    for name in checkpoint.keys():  # noqa: SIM118
        if found := re.match(rf"({stem}.+\.experts)\.(?:expert_)?(\d+)\.", name):
            experts.setdefault(found[1], set()).add(found[2])
    for place, found_experts in sorted(experts.items()):
        if keys.experts is not None:
            file.check_count(keys.experts, len(found_experts), f"experts in {place}", checkpoint.path)
    return len(indices)


def _attribute(name: str) -> Any:
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


def _read(checkpoint: Checkpoint, prefix: str, pieces: Sequence[tuple[str, Place]], shape: Shape) -> Tensor:
    """One tensor of the module, put together where the file has it in pieces."""
    first, place = pieces[0]
    if not place:
        return checkpoint.read(prefix + first, shape)
    shapes = torch.empty(shape, device="meta")
    for name, place in pieces:  # before memory is taken for all of it
        checkpoint.check(prefix + name, tuple(shapes[place].shape))
    whole = torch.empty(shape)
    for name, place in pieces:
        whole[place] = checkpoint.read(prefix + name)
    return whole


def _wanted(model: nn.Module, family: Family, chosen: range) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the chosen layers' tensors and the last norm's."""
    for name, tensor in model.state_dict().items():
        layer = re.match(rf"{re.escape(family.layers)}\.(\d+)\.", name)
        if name.startswith(f"{family.norm}.") or (layer is not None and int(layer[1]) in chosen):
            yield name, tuple(tensor.shape)


def _some_rows(checkpoint: Checkpoint, key: str, d: int, *, whole: bool) -> Tensor:
    rows = checkpoint.table(key, d)
    if whole:
        return checkpoint.read(key)
    ids = np.sort(np.random.default_rng(_SEED).choice(rows, min(_POOL, rows), replace=False))
    return checkpoint.some_rows(key, ids.tolist(), d)


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
