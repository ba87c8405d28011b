"""The second packed input of models with cross-attention: one memory per sequence. Pure; knows no queue and no wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.packing import Float32, Int64, pack


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What the tokens of each sequence attend to, sequence after sequence: every one has at least one row."""

    rows: Float32  # (m, d_memory)
    ends: Int64  # (sequences,): where each sequence's memory ends, in rows; the last is m

    @property
    def seq_lens(self) -> Int64:
        """Rows of each sequence's memory, int64 (sequences,)."""
        return np.diff(self.ends, prepend=0)

    def sequences(self, first: int, stop: int) -> Memory:
        """The memory of sequences `first:stop`; its rows are a view."""
        start = int(self.ends[first - 1]) if first else 0
        ends = self.ends[first:stop] - start
        return Memory(self.rows[start : start + int(ends[-1]) if len(ends) else start], ends)


def piece_memory(memory: Memory, ends: Int64, start: int, stop: int) -> Memory:
    """The memory of the sequences within rows `start:stop` of a request whose sequences end at `ends`."""
    if stop - start == ends[-1]:
        return memory
    first, last = np.searchsorted(ends, (start, stop), side="right")
    return memory.sequences(int(first), int(last))


def pack_memory(parts: Sequence[Memory], slab: Float32) -> Memory:
    """Copy the rows of `parts` one after another into `slab` (capacity, d_memory), as `pack` does with tokens."""
    rows = pack([part.rows for part in parts], slab)
    starts = np.cumsum([0, *(len(part.rows) for part in parts)])
    return Memory(rows, np.concatenate([part.ends + start for part, start in zip(parts, starts, strict=False)]))
