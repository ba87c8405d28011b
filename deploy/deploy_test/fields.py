"""A resource against the types that its owner publishes: unknown, missing and ill-typed fields, each by its place.

A field that a custom resource's owner does not know is dropped by the API server in silence; here it is a fault. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_ITEMS: Final = re.compile(r"(?:list\[|dict\(str, )(\w+)[\])]")
_PLAIN: Final = {"str": str, "int": int, "bool": bool}


@dataclass(frozen=True, slots=True)
class Fields:
    """Of one model: the type of each field by its name in YAML, and those that must be there.

    A type is another model's name, `str`, `int`, `bool`, or one of these in `list[...]` or `dict(str, ...)`; what is
    none of them is not looked into.
    """

    types: Mapping[str, str]
    required: frozenset[str]


def field_faults(value: Any, kind: str, where: str, known: Mapping[str, Fields]) -> Iterator[str]:
    """What of `value`, at the place `where`, does not fit `kind`."""
    items = _ITEMS.fullmatch(kind)
    if items:
        pairs = enumerate(value) if isinstance(value, list) else value.items()
        for key, item in pairs:
            yield from field_faults(item, items.group(1), f"{where}[{key}]", known)
    elif kind in known:
        fields = known[kind]
        for name, inner in value.items():
            if name not in fields.types:
                yield f"{where}.{name}: {kind} has no such field"
            else:
                yield from field_faults(inner, fields.types[name], f"{where}.{name}", known)
        for name in sorted(fields.required - set(value)):
            yield f"{where}.{name}: {kind} needs it"
    elif kind in _PLAIN and type(value) is not _PLAIN[kind]:
        yield f"{where}: {value!r} is not of type {kind}"
