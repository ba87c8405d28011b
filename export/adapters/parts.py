"""What packing one part after another has in common for every family: whose fault it is when one is not as expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from export.errors import ExportError, first_line


@contextmanager
def packing(name: str, part: object) -> Iterator[None]:
    """Inside, what is missed in `part` is its fault: it, or something in it, was replaced by something else.

    Args:
        name: of the part, for the message, `layer 3` for example.
        part: what is being packed.

    Raises:
        ExportError: names the part, and what was missed in it.
    """
    try:
        yield
    except (AttributeError, IndexError, TypeError, ValueError) as cause:
        raise ExportError(f"{name} ({type(part).__name__}) has no packed form: {first_line(cause)}") from cause
