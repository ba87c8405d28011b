"""Every block of code and every command that a page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "models/README.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))),
)
SHELL = ("", "sh")  # of a block's language
LANGUAGES = (*SHELL, "text", "python", "lua", "js")

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    (tokenslab .*)$", re.MULTILINE)
_INLINE = re.compile(r"`((?:tokenslab|make|python -m) [^`]+)`")


def blocks(page: str) -> list[str]:
    """What `page` would have its reader type or keep in a file, in its order: each command of a shell block, continued
    lines joined; of any other language `<language>: <first line>`.
    """
    text = (ROOT / page).read_text()
    return [*_blocks(text), *_INDENTED.findall(_FENCED.sub("", text))]


def _blocks(text: str) -> Iterator[str]:
    for language, block in _FENCED.findall(text):
        assert language in LANGUAGES, language
        if language in SHELL:
            yield from _of_shell(block)
        elif language != "text":
            yield f"{language}: {block.splitlines()[0]}"


def inline(page: str) -> list[str]:
    """Commands of this project within the sentences of `page`."""
    prose = _FENCED.sub("", (ROOT / page).read_text())
    return list(dict.fromkeys(" ".join(found.split()) for found in _INLINE.findall(prose)))


def shell(page: str, beginning: str) -> str:
    """The one command of `page`'s shell blocks that begins so."""
    (found,) = {block for block in blocks(page) if block.startswith(beginning)}
    return found


def _of_shell(block: str) -> Iterator[str]:
    """A command goes on after a backslash, and while a quotation is open."""
    pending = ""
    for line in block.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip() + " "
        elif pending.count("'") % 2:
            pending += " "
        else:
            yield " ".join(pending.split())
            pending = ""
    assert not pending, pending
