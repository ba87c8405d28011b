from __future__ import annotations

import numpy as np
import pytest

from service.manifest import Kind
from service.memory import Memory
from service.packing import Float32, Int64
from service.recheck import holds, same_bits


def double(tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None, /) -> Float32:
    return 2 * tokens


def minus_the_window(tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None, /) -> Float32:
    with np.errstate(invalid="ignore"):
        return np.asarray(tokens - tokens.mean(dtype=np.float32), np.float32)


def minus_the_sequence(tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None, /) -> Float32:
    assert seq_lens is not None
    assert seq_lens.sum() == len(tokens)
    parts = np.split(tokens, np.cumsum(seq_lens)[:-1])
    return np.concatenate([part - part.mean(dtype=np.float32) for part in parts])


@pytest.mark.parametrize("kind", ["position-wise", "sequence"])
def test_independent_parts_hold(kind: Kind) -> None:
    assert holds(double, kind, 5) is None


def test_sequences_are_compared_as_sequences() -> None:
    assert holds(minus_the_sequence, "sequence", 5) is None


@pytest.mark.parametrize(("kind", "noun"), [("position-wise", "row 0 of 16"), ("sequence", "sequence 0 of 5")])
def test_a_row_that_feels_its_neighbours_is_named(kind: Kind, noun: str) -> None:
    found = holds(minus_the_window, kind, 5)
    assert found is not None
    assert noun in found
    assert "alone and nan in the window" in found


def test_bits_are_compared_not_values() -> None:
    left = np.array([0.0, 1.0, np.nan, np.inf], np.float32)
    right = np.array([-0.0, np.nextafter(np.float32(1), np.float32(2)), -np.nan, np.inf], np.float32)
    assert same_bits(left, right).tolist() == [False, False, True, True]
