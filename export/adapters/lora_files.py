"""A LoRA adapter against a checkpoint of transformers: which change belongs to which place of which tensor.

An adapter names modules as those of the model it was trained on: transformers' own, or with an expert to a module, as
Mixtral is released and as transformers once had it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from export.adapters.transformers_families import Family, Pieces, Place, Shape, as_named
from export.errors import SourceError
from export.lora import Lora, LoraUpdate


@dataclass(frozen=True, eq=False)
class _Target:
    """A matmul's weight (out, in), or (in, out) if `transposed`: the module's tensor `name` at `place`."""

    name: str
    place: Place
    shape: Shape
    transposed: bool


class FileUpdates:
    """The changes of the layers that were asked for, by the module's tensor."""

    def __init__(
        self, lora: Lora | None, family: Family, model: nn.Module, chosen: range, keys: Collection[str]
    ) -> None:
        """Find the place of every change.

        Args:
            lora: the adapter; without one there are no changes.
            family: of the model.
            model: transformers' module, whole; it needs no values.
            chosen: layers that are read.
            keys: names of the checkpoint's tensors; an adapter may change the model's other stack too, if it is there.

        Raises:
            SourceError: a change belongs to no matmul of a layer, or has another shape; or no chosen layer is changed.
        """
        self._by_tensor: dict[str, list[tuple[_Target, LoraUpdate]]] = {}
        self.provenance: Mapping[str, str] = {}
        if lora is None:
            return
        targets = dict(_targets(family, model))
        seen: dict[str, str] = {}
        for path, update in lora.updates.items():
            names = [path.removeprefix(prefix) for prefix in family.prefixes if path.startswith(prefix)]
            name = next((name for name in names if name in targets), None)
            if name is None:
                if f"{path}.weight" in keys and any(re.match(family.beside, name) for name in names):
                    continue
                leaves = sorted({target.rpartition(".")[2] for target in targets})
                raise SourceError(
                    f"{lora.folder}: it changes {path}, which is no matmul of {family.layers}.<i> here; those are "
                    f"{', '.join(leaves)}"
                )
            if name in seen:
                raise SourceError(f"{lora.folder}: it changes {seen[name]} and {path}, which are one")
            seen[name] = path
            target = targets[name]
            shape = (len(update.b), update.a.shape[1])
            if target.shape != (shape[::-1] if target.transposed else shape):
                raise SourceError(f"{lora.folder}: its change of {path} is {shape}, the weight {target.shape}")
            if int(target.name.removeprefix(f"{family.layers}.").partition(".")[0]) in chosen:
                self._by_tensor.setdefault(target.name, []).append((target, update))
        merged = sum(map(len, self._by_tensor.values()))
        if not merged:
            raise SourceError(f"{lora.folder}: it changes nothing in layers {chosen.start}:{chosen.stop}")
        self.provenance = {**lora.provenance, "lora_merged": str(merged)}

    def merge_into(self, name: str, tensor: Tensor) -> Tensor:
        """The module's tensor `name` with its changes, one weight of it at a time; `tensor` itself may change."""
        for target, update in self._by_tensor.get(name, ()):
            if not target.place:
                return update.merged(tensor, transposed=target.transposed)
            tensor[target.place] = update.merged(tensor[target.place], transposed=target.transposed)
        return tensor


def _targets(family: Family, model: nn.Module) -> Iterator[tuple[str, _Target]]:
    """Each matmul's weight in a layer, by the names that its module has or had."""
    spellings: list[Pieces] = [as_named] if family.released is None else [as_named, family.released[1]]
    for name, tensor in model.state_dict().items():
        if not name.startswith(f"{family.layers}."):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Embedding):
            continue
        whole = torch.empty(tensor.shape, device="meta")
        for pieces in spellings:
            for piece, place in pieces(name, tuple(tensor.shape)):
                shape = tuple(whole[place].shape)
                if len(shape) == 2 and piece.endswith(".weight"):
                    transposed = type(owner).__name__ == "Conv1D"
                    yield piece.removesuffix(".weight"), _Target(name, place, shape, transposed)
