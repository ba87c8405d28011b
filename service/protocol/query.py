"""What the query of an infer request may say: the parameters of bodies that have no JSON part to hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final, TypeVar
from urllib.parse import parse_qs

from service.errors import InvalidInput
from service.protocol.arrange import show

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Query:
    """As in `parameters`: `timeout` in microseconds (0: the service's own), `priority` (0: the default); `seq_lens` as
    it was written.
    """

    seq_lens: str | None = None
    timeout: int = 0
    priority: int = 0
    isolate: bool = False


NOTHING: Final = Query()
NAMES: Final = tuple(field.name for field in fields(Query))


def read_query(query: bytes) -> Query:
    """The parameters of these names; others are not ours, and ignored as unknown `parameters` are.

    Raises:
        InvalidInput: one is given twice, or is not of its form.
    """
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True)

    def one(name: str, form: Callable[[str, str], T], default: T) -> T:
        values = given.get(name, [])
        if len(values) > 1:
            raise InvalidInput(f"{name}: {len(values)} times in the query, expected once")
        return form(name, values[0]) if values else default

    return Query(
        one("seq_lens", _text, None),
        one("timeout", _whole, 0),
        one("priority", _whole, 0),
        one("isolate", _flag, False),
    )


def _text(_: str, value: str) -> str | None:
    return value


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or len(value) > 18:
        raise InvalidInput(f"{name}: found {show(value)} in the query, expected a whole number >= 0")
    return int(value)


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidInput(f"{name}: found {show(value)} in the query, expected true or false")
    return value == "true"
