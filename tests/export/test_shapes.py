"""Shapes that could break a file are tried on true ones and found on files that each break one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from export.shapes import LARGEST, LONG, MANY, Inputs, Tried, shapes, torture
from service.manifest import CertificateKind
from service.memory import Memory
from service.packing import Float32, Int64
from service.recheck import Run

ROWS = Inputs("position-wise", 4, 4, None, None)
SEQUENCES = Inputs("sequence", 4, 4, None, None)
DECODER = Inputs("sequence", 4, 4, 3, None)


def sums(tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32:
    """Each token and the sum of its own sequence, and of its memory."""
    if seq_lens is None:
        return tokens + np.float32(1)
    assert (seq_lens > 0).all(), "a file never sees a sequence of no tokens"
    parts = np.split(tokens, np.cumsum(seq_lens)[:-1])
    out = [part + part.sum(axis=0) for part in parts]
    if memory is not None:
        assert (memory.seq_lens > 0).all()
        seen = np.split(memory.rows, memory.ends[:-1])
        out = [part + rows.sum() for part, rows in zip(out, seen, strict=True)]
    return np.concatenate(out).astype(np.float32)


def failures(run: Run, inputs: Inputs, kind: CertificateKind = "exact") -> dict[str, str]:
    tried = torture(run, inputs, kind, seed=int(np.random.default_rng().integers(1000)))
    return {t.shape.name: t.counter_example for t in tried if t.counter_example is not None}


@pytest.mark.parametrize("inputs", [ROWS, SEQUENCES, DECODER], ids=["rows", "sequences", "decoder"])
def test_a_true_model_passes_every_shape(inputs: Inputs) -> None:
    tried: list[Tried] = list(torture(sums, inputs, "exact", seed=0))
    assert [t.counter_example for t in tried] == [None] * len(tried)
    names = " ".join(t.shape.name for t in tried)
    assert "1 token" in names
    assert "prime" in names
    assert ("no tokens beside others" in names) is (inputs.kind == "sequence")
    assert ("memory of no rows are refused" in names) is (inputs.d_memory is not None)
    assert max(t.shape.tokens for t in tried) == LARGEST


def breaks(when: Callable[[Float32, Int64 | None], bool], how: Callable[[Float32], Float32]) -> Run:
    def run(tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None, /) -> Float32:
        out = sums(tokens, seq_lens, memory)
        return how(out) if when(tokens, seq_lens) else out

    return run


def nudged(out: Float32) -> Float32:
    return np.nextafter(out, np.float32(9)).astype(np.float32)


def longer(tokens: Float32, seq_lens: Int64 | None) -> bool:
    return seq_lens is not None and int(seq_lens.max()) >= LONG


def many(tokens: Float32, seq_lens: Int64 | None) -> bool:
    return seq_lens is not None and len(seq_lens) == MANY


def test_the_shape_that_breaks_is_named_with_what_it_did() -> None:
    found = failures(breaks(longer, lambda out: out * np.float32(np.nan)), SEQUENCES)
    assert set(found) == {"one long sequence", "the largest window"}
    assert "is not finite" in found["one long sequence"]
    assert (
        "(511, 4), expected (512, 4)"
        in failures(breaks(many, lambda out: out[1:]), SEQUENCES)["many sequences of one token"]
    )
    found = failures(breaks(lambda tokens, _: len(tokens) == 61, nudged), ROWS)
    assert set(found) == {"a prime number of tokens, 61"}
    assert "alone and" in found["a prime number of tokens, 61"]


def test_the_last_bit_matters_to_an_exact_certificate_alone() -> None:
    assert failures(breaks(many, nudged), SEQUENCES, "exact")
    assert not failures(breaks(many, nudged), SEQUENCES, "tolerance")
    assert failures(breaks(many, lambda out: out * np.float32(1.1)), SEQUENCES, "tolerance")
    assert not failures(breaks(many, lambda out: out * np.float32(1.1)), SEQUENCES, "dependent")


def test_a_run_that_raises_is_a_counter_example_in_one_line() -> None:
    def run(tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None, /) -> Float32:
        if len(tokens) == 1:
            raise RuntimeError("Non-zero status code\nwhile running a node")
        return sums(tokens, seq_lens, memory)

    assert failures(run, replace(ROWS, d_out=4))["1 token"] == (
        "it does not run: Non-zero status code while running a node"
    )


def test_no_sequence_is_longer_than_the_model_takes() -> None:
    for most in (1, 30, 64):
        tried = list(shapes(replace(SEQUENCES, max_sequence_tokens=most)))
        assert max(max(shape.seq_lens) for shape in tried if "no tokens" not in shape.name) <= most
        assert {shape.tokens for shape in tried if shape.name == "the largest window"} == {LARGEST}
