"""What quantization does to a sentence's vector: MiniLM's states through a bundle's file against transformers' own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from demo.minilm import MiniLM, pooled
from demo.sentences import sentences
from service.cpu import cpu_quota
from service.session import open_session, run_packed

SENTENCES: Final = 64  # none is calibrated on: exports see embedded random token ids


class Sentences:
    """Real sentences as MiniLM's first layer meets them, and the vectors that torch in float32 makes of them."""

    def __init__(self) -> None:
        minilm = MiniLM()
        ids = [minilm.ids(sentence) for sentence in sentences(SENTENCES)]
        self._states = [minilm.embed(sentence) for sentence in ids]
        self._wanted = np.array([minilm.reference(sentence) for sentence in ids], np.float64)

    def cosines(self, file: Path) -> npt.NDArray[np.float64]:
        """Cosine of each sentence's vector by `file`, run as one window, with torch's: (64,)."""
        lengths = np.array([len(states) for states in self._states], np.int64)
        out = run_packed(open_session(file, "cpu", cpu_quota()), np.concatenate(self._states), lengths)
        edges = np.cumsum([0, *lengths]).tolist()
        vectors = np.array([pooled(out[start:end]) for start, end in pairwise(edges)], np.float64)
        found: npt.NDArray[np.float64] = np.einsum("sd,sd->s", vectors, self._wanted)
        return found
