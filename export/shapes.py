"""Shape torture: windows whose shape alone could break a file, each run as the service would run it.

Every answer must have a row for each token and be finite, and the parts that are followed must be what they are alone.
Tokens are N(0, 1): values that provoke belong to `export.neighbours`. Measures one opened file; it knows no torch, no
graph and no bundle folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from export.certify import DEPENDENT
from export.neighbours import random_rows
from service.errors import InvalidInput
from service.manifest import CertificateKind, Kind, Manifest
from service.memory import Memory
from service.packing import Float32, Int64
from service.protocol.arrange import Signature, arrange
from service.protocol.memory import arrange_memory
from service.recheck import Run, difference

PRIMES: Final = (2, 3, 5, 7, 11, 13, 17, 31, 61, 127)
LONG: Final = 1021  # tokens of the one long sequence; a prime too
MANY: Final = 512  # sequences of one token
LARGEST: Final = 2048  # tokens of the largest window: the service's default budget
_MIDDLING: Final = 37  # tokens of most sequences of the largest window
_FOLLOWED: Final = 3  # parts of each window that are run alone as well


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a window of the model is made of; see `service.manifest.Manifest`."""

    kind: Kind
    d_in: int
    d_out: int
    d_memory: int | None
    max_sequence_tokens: int | None

    @classmethod
    def of(cls, manifest: Manifest) -> Inputs:
        """The part of `manifest` that this module reads."""
        m = manifest
        return cls(m.kind, m.d_in, m.d_out, m.d_memory, m.max_sequence_tokens)

    @property
    def signature(self) -> Signature:
        """As the service's door sees it."""
        return Signature("", "", self.d_in, self.d_out, self.kind == "sequence", self.d_memory)


@dataclass(frozen=True, slots=True)
class Shape:
    """One window: tokens of each sequence, zeros among them or not; for position-wise models only their sum counts."""

    name: str
    seq_lens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Rows of the window."""
        return sum(self.seq_lens)


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of one shape."""

    shape: Shape
    counter_example: str | None  # None: it held


def shapes(inputs: Inputs) -> Iterator[Shape]:
    """Every shape for the model's kind, none with a sequence longer than it can take."""
    most = inputs.max_sequence_tokens or LARGEST
    if inputs.kind == "position-wise":
        yield Shape("1 token", (1,))
        yield from (Shape(f"a prime number of tokens, {tokens}", (tokens,)) for tokens in (*PRIMES, LONG))
        yield Shape("the largest window", (LARGEST,))
        return

    def at_most(*lens: int) -> tuple[int, ...]:
        return tuple(min(length, most) for length in lens)

    longest, middling = at_most(LONG, _MIDDLING)
    whole, left = divmod(LARGEST - longest, middling)
    yield Shape("1 token", (1,))
    yield Shape("sequences of prime lengths", at_most(*PRIMES))
    yield Shape("one long sequence", (longest,))
    yield Shape("many sequences of one token", (1,) * MANY)
    yield Shape("the largest window", (longest, *(middling,) * whole, *(1,) * left))
    yield Shape("sequences of no tokens beside others", at_most(0, 5, 0, 0, 1, 3, 0))


def torture(run: Run, inputs: Inputs, certificate: CertificateKind, seed: int) -> Iterator[Tried]:
    """Try every shape, and that tokens without a memory are refused where the model takes one.

    What a followed part gives alone must be the same bits if the certificate is exact, and within rounding if it claims
    a tolerance; one that runs requests alone is held to shape and finiteness.
    """
    rng = np.random.default_rng(seed)
    for shape in shapes(inputs):
        try:
            found = _try(run, inputs, certificate, shape, rng)
        except Exception as cause:  # noqa: BLE001 - whatever a shape provokes is its counter-example
            found = f"it does not run: {' '.join(str(cause).split())}"
        yield Tried(shape, found)
    if inputs.d_memory is not None:
        yield _hungry(inputs, rng)


def _try(run: Run, inputs: Inputs, certificate: CertificateKind, shape: Shape, rng: np.random.Generator) -> str | None:
    tokens = random_rows(rng, shape.tokens, inputs.d_in)
    sequences = inputs.kind == "sequence"
    lens = np.array(shape.seq_lens, np.int64)
    memory, memory_lens = None, None
    if inputs.d_memory is not None:
        memory_lens = np.where(lens > 0, rng.permutation(np.maximum(1, lens)), 0)
        memory = random_rows(rng, int(memory_lens.sum()), inputs.d_memory)
    out = _answer(run, inputs, tokens, lens if sequences else None, memory, memory_lens)
    if out.shape != (shape.tokens, inputs.d_out):
        return f"out is {out.shape}, expected {(shape.tokens, inputs.d_out)}"
    if not np.isfinite(out).all():
        return f"out[{int(np.argwhere(~np.isfinite(out))[0][0])}] is not finite for tokens that are"
    parts = lens if sequences else np.ones(shape.tokens, np.int64)
    ends = np.cumsum(parts)
    memory_ends = None if memory_lens is None else np.cumsum(memory_lens)
    for at in _followed(parts, rng):
        rows = slice(int(ends[at] - parts[at]), int(ends[at]))
        own, own_lens = None, None
        if memory is not None and memory_lens is not None and memory_ends is not None:
            own = memory[memory_ends[at] - memory_lens[at] : memory_ends[at]]
            own_lens = memory_lens[at : at + 1]
        alone = _answer(run, inputs, tokens[rows], parts[at : at + 1] if sequences else None, own, own_lens)
        if (found := _differs(certificate, alone, out[rows])) is not None:
            return f"{'sequence' if sequences else 'row'} {at} of {len(parts)} ({int(parts[at])} tokens): {found}"
    return None


def _answer(
    run: Run, inputs: Inputs, tokens: Float32, lens: Int64 | None, memory: Float32 | None, memory_lens: Int64 | None
) -> Float32:
    """One request by the service's own rules: what it drops before a file sees it is dropped here."""
    arranged: Memory | None = None
    if memory is not None:
        arranged = arrange_memory(memory, memory_lens, list(tokens.shape), lens)
    decoded = arrange(inputs.signature, tokens, list(tokens.shape), lens)
    return run(decoded.tokens, decoded.seq_lens, arranged)


def _followed(parts: Int64, rng: np.random.Generator) -> list[int]:
    """The longest part and some others that have tokens."""
    some = np.flatnonzero(parts > 0)
    chosen = rng.permutation(some)[: _FOLLOWED - 1].tolist()
    return sorted({int(parts.argmax()), *chosen})


def _differs(certificate: CertificateKind, alone: Float32, batched: Float32) -> str | None:
    found = difference(alone, batched)
    if found is None or certificate == "dependent":
        return None
    drift = float(np.abs(alone - batched).max()) / max(float(np.abs(alone).max()), float(np.finfo(np.float32).tiny))
    return found if certificate == "exact" or drift > DEPENDENT else None


def _hungry(inputs: Inputs, rng: np.random.Generator) -> Tried:
    """Tokens beside a memory of no rows: the service must refuse them, for attention over nothing has no answer."""
    shape = Shape("tokens with a memory of no rows are refused", (2, 3))
    lens: Sequence[int] = shape.seq_lens
    assert inputs.d_memory is not None
    rows = random_rows(rng, 4, inputs.d_memory)
    try:
        arrange_memory(rows, np.array([4, 0], np.int64), [shape.tokens, inputs.d_in], np.array(lens, np.int64))
    except InvalidInput:
        return Tried(shape, None)
    return Tried(shape, "a sequence of 3 tokens with nothing to attend to was accepted")
