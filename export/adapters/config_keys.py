"""What a config.json must say before anything is made of it: sizes that are sizes, heads that divide, known names.

Every fault names the file, the key, what was found and what was expected. Knows no family and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from export.checkpoint import read_json
from export.errors import SourceError

LARGEST: Final = 1 << 24  # of any size: beyond every model, and products of two still fit torch's 64 bits


class ConfigFile:
    """The values of a config.json, asked for one by one."""

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            SourceError: it is no JSON object.
        """
        self.path, self.values = path, read_json(path)

    def fault(self, key: str, expected: str) -> SourceError:
        """The error for a value that is not what was expected."""
        return SourceError(f"{self.path}: {key} is {self.values.get(key)!r}, expected {expected}")

    def size(self, key: str) -> int:
        """A positive integer."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self.fault(key, f"a positive integer{'' if _small(value) else f' up to {LARGEST}'}")
        return value

    def size_or_none(self, key: str) -> int | None:
        """A positive integer, null, or nothing at all."""
        return None if self.values.get(key) is None else self.size(key)

    def fraction(self, key: str, default: float) -> float:
        """A number between 0 and 1; `default` where there is none."""
        value = self.values.get(key, default)
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < 1:
            raise self.fault(key, "a number between 0 and 1")
        return float(value)

    def name(self, key: str, known: Collection[str], default: str | None = None) -> str | None:
        """One of `known` names; `default` where there is none."""
        if key not in self.values:
            return default
        value = self.values[key]
        if not isinstance(value, str) or value not in known:
            raise self.fault(key, f"one of {', '.join(known)}")
        return value

    def check_divides(self, part: str, whole: str) -> None:
        """Raise SourceError unless the size `part` divides the size `whole`."""
        if self.size(whole) % self.size(part):
            raise SourceError(f"{self.path}: {part} {self.values[part]} does not divide {whole} {self.values[whole]}")

    def check_count(self, key: str, found: int, what: str, where: Path) -> None:
        """Raise SourceError unless the size `key` is what was `found` in the file `where`."""
        if (said := self.size(key)) != found:
            raise SourceError(f"{self.path}: {key} is {said}, {where} has {found} {what}")

    def check_numbers(self, key: str, ignored: Collection[str]) -> None:
        """Raise SourceError unless the object `key` (or null, or nothing) has finite positive numbers, or lists, only.

        Args:
            key: of an object.
            ignored: keys in it that are something else.
        """
        values = self.values.get(key)
        if values is None:
            return
        if not isinstance(values, dict):
            raise self.fault(key, "an object")
        for inner, value in values.items():
            numbers = value if isinstance(value, list) else [value]
            if inner not in ignored and not all(_positive(number) for number in numbers):
                raise SourceError(f"{self.path}: {key}.{inner} is {value!r}, expected a positive number")


@dataclass(frozen=True)
class ConfigKeys:
    """What the keys of a family's config are called.

    sizes: positive integers that must be there; optional: those that need not; layers, activation, eps: one each;
    divides: (part, whole), where the part is there; heads: divide the width where there is no head_dim; experts, top_k:
    how many, and how many of them a token goes to.
    """

    sizes: Sequence[str]
    layers: str
    activation: str
    eps: str
    optional: Sequence[str] = ()
    divides: Sequence[tuple[str, str]] = ()
    experts: str | None = None
    top_k: str | None = None
    heads: tuple[str, str] | None = None

    def check(self, config: ConfigFile, activations: Mapping[str, Any]) -> None:
        """Raise SourceError for the first value that makes no sense by itself or beside another."""
        for key in self.sizes:
            config.size(key)
        for key in (*self.optional, *((self.experts,) if self.experts else ())):
            config.size_or_none(key)
        config.fraction(self.eps, default=1e-6)
        config.name(self.activation, activations)
        for part, whole in self.divides:
            if config.values.get(part) is not None:
                config.check_divides(part, whole)
        if self.heads is not None and config.values.get("head_dim") is None:
            config.check_divides(*self.heads)
        chosen = None if self.top_k is None else config.size_or_none(self.top_k)
        among = None if self.experts is None else config.size_or_none(self.experts)
        if chosen is not None and among is not None and chosen > among:
            raise SourceError(f"{config.path}: {self.top_k} is {chosen}, expected at most {self.experts}, {among}")


def _small(value: object) -> bool:
    return not isinstance(value, int) or value <= LARGEST


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and (isinstance(value, bool) or (math.isfinite(value) and value > 0))
