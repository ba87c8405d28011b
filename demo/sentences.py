"""Real English sentences that are on every machine with Python: the reference topics of `help()`."""

from __future__ import annotations

import re
from pydoc_data.topics import topics
from typing import Final

_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_PROSE: Final = re.compile(r"[A-Z][A-Za-z0-9 ,;:'()\"-]+[.!?]")
WORDS: Final = range(4, 61)


def sentences(count: int) -> list[str]:
    """`count` different sentences of 4 to 60 words, spread evenly over the text, in its order."""
    found: dict[str, None] = {}
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            for sentence in _SENTENCE.split(" ".join(paragraph.split())):
                if _PROSE.fullmatch(sentence) and len(sentence.split()) in WORDS:
                    found[sentence] = None
    if len(found) < count:
        raise ValueError(f"Python's topics hold {len(found)} sentences, {count} were asked for")
    every = list(found)
    return [every[i * len(every) // count] for i in range(count)]
