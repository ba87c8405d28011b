"""Which adapter takes a module: the one place where families are registered, ours and yours.

An adapter is a function `(module, options) -> Packed`. It owns the module that it is given, a copy in eval mode,
float32, on the CPU, and answers with a module on packed tokens that it has proved equal to it. The registry knows
classes by object or by dotted name, so that a family's own package is never imported for another module's sake, and it
knows nothing of weights, graphs or files.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from torch import nn

from export.adapters.position_wise import pack_position_wise
from export.errors import ExportError
from export.packed import Packed
from export.precision import exportable_copy, stored_as

# Imported before the first module is packed; each registers its own adapters.
BUILT_IN: Final = (
    "export.adapters.bert",
    "export.adapters.gpt2",
    "export.adapters.llama",
    "export.adapters.mixtral",
    "export.adapters.own_blocks",
    "export.adapters.switch",
    "export.adapters.switch_decoder",
    "export.adapters.t5",
    "export.adapters.t5_decoder",
    "export.adapters.torch_decoder",
    "export.adapters.torch_transformer",
    "export.adapters.vit",
)


@dataclass(frozen=True)
class PackOptions:
    """What an adapter is told beside the module.

    d: width of a token, where the caller gave it.
    causal: tokens attend to earlier ones only; True only for adapters registered with `accepts_causal`.
    seed: of every random input.
    """

    d: int | None = None
    causal: bool = False
    seed: int = 0


Adapt = Callable[[Any, PackOptions], Packed]
Target = type[nn.Module] | str | Callable[[nn.Module], bool]
A = TypeVar("A", bound=Adapt)


@dataclass(frozen=True)
class _Adapter:
    adapt: Adapt
    targets: tuple[Target, ...]
    priority: int
    accepts_causal: bool

    @property
    def name(self) -> str:
        return f"{self.adapt.__module__}.{getattr(self.adapt, '__qualname__', repr(self.adapt))}"

    def distance(self, module: nn.Module) -> int | None:
        """How far up the module's classes the nearest target is; 0 for a predicate; None: not mine."""
        return min((far for target in self.targets if (far := _distance(target, module)) is not None), default=None)


_adapters: dict[str, _Adapter] = {}


def register_adapter(*targets: Target, priority: int = 0, accepts_causal: bool = False) -> Callable[[A], A]:
    """Make the decorated function the adapter of `targets`.

    Where several match, the highest `priority` wins, then the class nearest to the module's own (a predicate counts as
    its own class). A tie is an error when the module is packed, never a guess. Built-in adapters have priority 0.
    A function that is registered again under its own name, as when its file is loaded twice, replaces itself.

    Args:
        targets: classes, whose subclasses match too; dotted names of such classes ("package.module.Class"), for
            packages that are not to be imported here; or functions of the module that say whether it is one.
        priority: larger goes first.
        accepts_causal: whether the adapter honours `options.causal`; if not, asking for it is refused.

    Raises:
        ExportError: there is no target, a target is none of these, or another adapter has it with this priority.
    """
    if not targets:
        raise ExportError("register_adapter: expected one or more classes, dotted class names or predicates")
    for target in targets:
        _check_target(target)

    def register(adapt: A) -> A:
        made = _Adapter(adapt, targets, priority, accepts_causal)
        for other in _adapters.values():
            shared = [target for target in targets if target in other.targets]
            if shared and other.priority == priority and other.name != made.name:
                raise ExportError(
                    f"{made.name}: {_target_name(shared[0])} already has the adapter {other.name} with priority "
                    f"{priority}: give this one another priority"
                )
        _adapters[made.name] = made
        return adapt

    return register


def pack(module: nn.Module, *, d: int | None = None, causal: bool = False, seed: int = 0) -> Packed:
    """Copy `module` and give it the packed form of its family, proved equal to it.

    A module that no adapter takes must prove to be position-wise.

    Raises:
        ExportError: it has no packed form, or two adapters claim it, or an option does not suit it.
        ProofError: the packed form computes something else.
    """
    for name in BUILT_IN:
        importlib.import_module(name)
    adapter = _find(module)
    if causal and (adapter is None or not adapter.accepts_causal):
        raise ExportError(f"causal: {type(module).__name__} has no attention that an option could make causal")
    copied = exportable_copy(module)
    if adapter is None:
        return _noting_dtypes(module, pack_position_wise(copied, d=d, seed=seed))
    packed = adapter.adapt(copied, PackOptions(d, causal, seed))
    if not isinstance(packed, Packed):
        raise ExportError(f"the adapter {adapter.name} returned {type(packed).__name__}, expected a Packed")
    if d is not None and packed.d_in != d:
        raise ExportError(f"{type(module).__name__} takes tokens of width {packed.d_in}, not {d}")
    return _noting_dtypes(module, packed)


def _noting_dtypes(module: nn.Module, packed: Packed) -> Packed:
    dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.is_floating_point())
    if not set(dtypes) - {"float32"}:
        return packed
    return replace(packed, source={**packed.source, "weights_dtype": stored_as(dtypes)})


def _find(module: nn.Module) -> _Adapter | None:
    ranked = [
        (-adapter.priority, far, adapter)
        for adapter in _adapters.values()
        if (far := adapter.distance(module)) is not None
    ]
    if not ranked:
        return None
    best = min(rank[:2] for rank in ranked)
    first, *others = (adapter for *rank, adapter in ranked if tuple(rank) == best)
    if others:
        raise ExportError(
            f"{type(module).__name__}: {first.name} and {others[0].name} both take it with priority {first.priority}: "
            "give one of them a higher one"
        )
    return first


def _distance(target: Target, module: nn.Module) -> int | None:
    if isinstance(target, type | str):
        for far, cls in enumerate(type(module).__mro__):
            if cls is target or f"{cls.__module__}.{cls.__qualname__}" == target:
                return far
        return None
    return 0 if target(module) else None


def _check_target(target: object) -> None:
    is_class = isinstance(target, type) and issubclass(target, nn.Module)
    is_name = isinstance(target, str) and all(part.isidentifier() for part in target.split(".")) and "." in target
    if not (is_class or is_name or (callable(target) and not isinstance(target, type))):
        raise ExportError(
            f"register_adapter: {target!r} is neither an nn.Module class, nor the dotted name of one, nor a predicate"
        )


def _target_name(target: Target) -> str:
    return target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"
