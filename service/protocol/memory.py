"""The memory of a request: one per sequence, in the form its tokens came in -> `Memory`. Knows no bytes."""

from __future__ import annotations

import numpy as np

from service.errors import InvalidInput
from service.memory import Memory
from service.packing import Float32, Int64, drop_padding
from service.protocol.arrange import check_lengths


def arrange_memory(memory: Float32, memory_lens: Int64 | None, shape: list[int], seq_lens: Int64 | None) -> Memory:
    """Memory and its lengths as they were sent -> packed rows, without those of empty sequences.

    Args:
        memory: (m, d_memory) beside packed tokens, (batch, mem, d_memory) beside a batch.
        memory_lens: (sequences,), rows of each; None: all of `mem` in a batch, all of `m` for one sequence.
        shape: of `tokens`, of the same rank.
        seq_lens: of `tokens`, as sent and checked.

    Raises:
        InvalidInput: the lengths do not fit the memory or the sequences, or tokens have nothing to attend to.
    """
    batch = memory.ndim == 3
    if seq_lens is None:
        seq_lens = np.full(shape[0], shape[1], np.int64) if batch else np.array([shape[0]], np.int64)
    if batch and len(memory) != len(seq_lens):
        raise InvalidInput(f"memory: a batch of {len(memory)}, tokens has a batch of {len(seq_lens)}")
    most = memory.shape[-2]
    lens = _lengths(memory_lens, len(seq_lens), most, batch=batch)
    if not batch and (total := int(lens.sum())) != most:
        raise InvalidInput(f"memory_seq_lens: they add up to {total}, memory has {most} rows")
    hungry = np.flatnonzero((lens == 0) & (seq_lens > 0))
    if len(hungry):
        at = int(hungry[0])
        raise InvalidInput(
            f"memory_seq_lens[{at}]: found 0, expected at least 1: the {int(seq_lens[at])} tokens of that sequence "
            "would have nothing to attend to"
        )
    kept = np.where(seq_lens > 0, lens, 0)
    if batch:
        rows = drop_padding(memory, kept)
    else:
        rows = memory if kept.sum() == most else memory[np.repeat(seq_lens > 0, lens)]
    return Memory(rows, np.cumsum(kept[seq_lens > 0]))


def _lengths(lens: Int64 | None, sequences: int, most: int, *, batch: bool) -> Int64:
    if lens is None:
        if not batch and sequences != 1:
            raise InvalidInput(f"memory_seq_lens: missing, expected {sequences} entries, one for each sequence")
        return np.full(sequences, most, np.int64)
    if len(lens) != sequences:
        raise InvalidInput(f"memory_seq_lens: {len(lens)} entries for {sequences} sequences")
    check_lengths(lens, most, "memory_seq_lens")
    return lens
