"""A LoRA adapter in PEFT's format, to be merged into the weights before anything is quantized.

W' = W + scaling * B A, with scaling = alpha / r, or alpha / sqrt(r) with rank stabilisation (Hu et al. 2021;
Kalajdzievski 2023). Whatever else PEFT can store (DoRA, trained biases, whole modules) is refused by name: an adapter
that is merged in part is another model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from export.checkpoint import PICKLES, Checkpoint, read_json
from export.errors import SourceError
from service.manifest import file_sha256

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_KEY: Final = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<half>[AB])\.weight")
_CONV1D: Final = "transformers.pytorch_utils.Conv1D"

# Settings that do not change what a finished adapter computes, or that are handled below. Any other one that is set is
# refused: PEFT adds kinds of LoRA faster than anyone can list them.
_HARMLESS: Final = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules"),
        *("fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
        *("lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora"),
    }
)
_PLAIN_INITS: Final = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the base weights as well


@dataclass(frozen=True, eq=False)
class LoraUpdate:
    """The change of one weight: `a` (r, in), `b` (out, r), float32."""

    a: Tensor
    b: Tensor
    scaling: float

    def merged(self, weight: Tensor, *, transposed: bool = False) -> Tensor:
        """`weight` (out, in), or (in, out) if `transposed`, plus the change, computed in float64."""
        change = self.scaling * (self.b.double() @ self.a.double())
        return (weight.double() + (change.T if transposed else change)).to(weight.dtype)


LoraUpdates = Mapping[tuple[int, str], LoraUpdate]  # (layer, part)


class Lora:
    """An adapter's updates, by the path of the module in the model it was trained on."""

    def __init__(self, folder: Path) -> None:
        """Read `adapter_config.json` and `adapter_model.safetensors`.

        Raises:
            SourceError: a file is missing, unreadable, contradicts the other, or holds another kind of adapter.
        """
        self.folder = folder
        config = read_json(folder / CONFIG)
        _check_kind(folder / CONFIG, config)
        weights = folder / WEIGHTS
        if not weights.is_file() and any((folder / f"adapter_model{suffix}").is_file() for suffix in PICKLES):
            raise SourceError(f"{folder}: the adapter is a pickle, which can run code; save it as {WEIGHTS}")
        with Checkpoint(weights) as checkpoint:
            self.updates = _read_updates(checkpoint, folder / CONFIG, config)
        targets = sorted({path.rpartition(".")[2] for path in self.updates})
        self.provenance = {
            "lora_sha256": file_sha256(weights),
            "lora_config_sha256": file_sha256(folder / CONFIG),
            "lora_r": ", ".join(map(str, sorted({len(update.a) for update in self.updates.values()}))),
            "lora_alpha": f"{config['lora_alpha']:g}{' (rank-stabilised)' if config.get('use_rslora') else ''}",
            "lora_targets": ", ".join(targets),
            "lora_weights": str(len(self.updates)),
        }

    def merge_into(self, module: nn.Module) -> None:
        """Merge every update into `module`, in place; nn.Linear and transformers' Conv1D have a weight to change.

        A module's path in the adapter ends with its path in `module`, or the other way round, and only one does.

        Raises:
            SourceError: an update belongs to no module, to several, to another kind, or to a weight that is shared.
        """
        named = {name: part for name, part in module.named_modules() if name}
        owners: dict[int, int] = {}
        for part in named.values():
            for parameter in part._parameters.values():
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        for path, update in self.updates.items():
            matches = [name for name in named if name == path] or [
                name for name in named if f".{path}".endswith(f".{name}") or f".{name}".endswith(f".{path}")
            ]
            longest = max(map(len, matches), default=0)
            matches = [name for name in matches if len(name) == longest]
            if len(matches) != 1:
                found = f"fits {' and '.join(matches)}" if matches else "is not in the module"
                raise SourceError(f"{self.folder}: it changes {path}, which {found}")
            self._merge_one(matches[0], named[matches[0]], update, owners)

    def _merge_one(self, name: str, part: nn.Module, update: LoraUpdate, owners: Mapping[int, int]) -> None:
        transposed = f"{type(part).__module__}.{type(part).__qualname__}" == _CONV1D
        weight = part._parameters.get("weight")
        if not (isinstance(part, nn.Linear) or transposed) or weight is None:
            raise SourceError(f"{self.folder}: it changes {name}, a {type(part).__name__}, expected an nn.Linear")
        shape = (len(update.b), update.a.shape[1])
        if tuple(weight.shape) != (shape[::-1] if transposed else shape):
            raise SourceError(f"{self.folder}: its change of {name} is {shape}, the weight {tuple(weight.shape)}")
        if owners[id(weight)] > 1:
            raise SourceError(f"{self.folder}: it changes {name}, whose weight another module shares")
        part.weight = nn.Parameter(update.merged(weight.detach(), transposed=transposed), requires_grad=False)


def _check_kind(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise SourceError(f"{path}: peft_type is {config.get('peft_type')!r}, expected 'LORA'")
    if config.get("bias", "none") != "none":
        raise SourceError(f"{path}: bias is {config['bias']!r}: trained biases are not merged, only 'none' is")
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise SourceError(
            f"{path}: init_lora_weights is {config['init_lora_weights']!r}, which changed the base weights as well: "
            "save it converted to plain LoRA"
        )
    for key in sorted(config.keys() - _HARMLESS):
        if config[key]:
            raise SourceError(f"{path}: {key} is {config[key]!r}: only plain LoRA can be merged")
    for key in ("r", "lora_alpha"):
        if not _is_number(config.get(key)) or config[key] <= 0:
            raise SourceError(f"{path}: {key} is {config.get(key)!r}, expected a positive number")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(_is_number(v) and v > 0 for v in pattern.values()):
            raise SourceError(f"{path}: {key} is {pattern!r}, expected an object of positive numbers")
        for regex in pattern:
            try:
                re.compile(regex)
            except re.error as cause:
                raise SourceError(f"{path}: {key}: {regex!r} is no pattern: {cause}") from cause


def _read_updates(checkpoint: Checkpoint, path: Path, config: Mapping[str, Any]) -> dict[str, LoraUpdate]:
    halves: dict[str, dict[str, Tensor]] = {}
    for key in sorted(checkpoint.keys()):
        if (match := _KEY.fullmatch(key)) is None:
            raise SourceError(f"{checkpoint.path}: {key} is not part of plain LoRA on a matmul")
        halves.setdefault(match["path"], {})[match["half"]] = checkpoint.read(key)
    if not halves:
        raise SourceError(f"{checkpoint.path}: it holds no tensors")
    updates = {}
    for name, pair in halves.items():
        if len(pair) != 2:
            raise SourceError(f"{checkpoint.path}: {name} has no lora_{'B' if 'A' in pair else 'A'}.weight")
        a, b = pair["A"], pair["B"]
        rank = _of_pattern(config.get("rank_pattern"), name, config["r"])
        if a.dim() != 2 or b.dim() != 2 or not len(a) == b.shape[1] == rank:
            raise SourceError(
                f"{checkpoint.path}: {name} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, {path.name} says "
                f"rank {rank}"
            )
        alpha = _of_pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
        updates[name] = LoraUpdate(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    return updates


def _of_pattern(pattern: Mapping[str, float] | None, name: str, default: float) -> float:
    """PEFT's rule: the first pattern that matches the end of the path."""
    return next((value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
