"""What `path/to/file.py:factory` or `package.module:factory` names. Imports neither it nor torch: a slip of the pen is
told at once, and not after torch's seconds.
"""

from __future__ import annotations

from pathlib import Path

from export.errors import SourceError


def split_target(target: str) -> tuple[Path | str, str]:
    """The file or the dotted module, and the attribute.

    Raises:
        SourceError: a part is missing, or there is no such file.
    """
    place, colon, attribute = target.rpartition(":")
    if not (place and colon and attribute):
        raise SourceError(f"{target!r}: expected path/to/file.py:factory or package.module:factory")
    if not place.endswith(".py"):
        return place, attribute
    if not Path(place).is_file():
        raise SourceError(f"{place}: no such file")
    return Path(place), attribute
