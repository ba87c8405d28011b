"""The batch-composition certificate: each row, or sequence, alone against the same one in many windows, bit for bit.

Measures one opened file; it knows no torch (`tokenslab verify` runs without it), no graph and no bundle folder.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from export.errors import ProofError
from export.neighbours import WINDOWS, Parts, poisoned_rows, random_rows
from service.manifest import Certificate, Kind
from service.memory import Memory
from service.packing import Float32, Int64
from service.recheck import Run, difference, run_window, same_bits
from service.session import run_packed

# Drift beyond rounding: a whole-tensor int8 scale moves a token by 1e-2 and more, float32 kernels by 1e-6.
DEPENDENT: Final = 1e-3

# Not about neighbours, and no matter of degree: a variant that fails one of these is wrong.
AS_FP32: Final = "NaN and Inf give no number where fp32 gives none"
NO_NUMBERS: Final = "rows with NaN or Inf give no number"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One kind of window: how many rows were compared, and how far they moved."""

    name: str
    rows: int
    drift: float  # largest |alone - batched| over outputs that are finite both times
    relative_drift: float  # drift over the largest |alone|
    contaminated: bool  # an output is finite alone and not in the window, or the reverse
    counter_example: str | None  # None: every output has the same bits


def runner(session: ort.InferenceSession) -> Run:
    """The session as a function of tokens (n, d_in), seq_lens (s,) or None, and memory or None."""

    def run(tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None, /) -> Float32:
        return run_packed(session, tokens, seq_lens, memory)

    return run


def certify(
    session: ort.InferenceSession,
    kind: Kind,
    d_in: int,
    *,
    d_memory: int | None = None,
    seed: int,
    facts: dict[str, str],
    quantized: bool = False,
    fp32: ort.InferenceSession | None = None,
    other_threads: ort.InferenceSession | None = None,
) -> Certificate:
    """Measure `session` and state what was seen; the same seed gives the same windows.

    Args:
        d_memory: width of the memory that every sequence has; None: the model takes none.
        facts: what the result depends on besides the file (`service.session.session_facts`).
        quantized: whether a NaN or Inf could be lost on the way, so that it must be looked for.
        fp32: the float32 variant of the same module: where it gives no finite number, `session` may give none. Without
            it, a quantized `session` may give none for any row with NaN or Inf.
        other_threads: the same file with another number of threads: it must give the same bits in every window.

    Raises:
        ProofError: `session` gives plausible numbers for NaN or Inf.
    """
    found = compare(
        session,
        kind,
        d_in,
        d_memory=d_memory,
        seed=seed,
        quantized=quantized,
        fp32=fp32,
        other_threads=other_threads,
    )
    for comparison in found:
        if comparison.name in (AS_FP32, NO_NUMBERS) and comparison.counter_example is not None:
            raise ProofError(comparison.counter_example)
    return conclude(found, facts)


def conclude(comparisons: Sequence[Comparison], facts: dict[str, str]) -> Certificate:
    """The certificate that these comparisons support."""
    exact = all(c.counter_example is None for c in comparisons)
    dependent = any(c.contaminated or c.relative_drift > DEPENDENT for c in comparisons)
    return Certificate(
        kind="exact" if exact else "dependent" if dependent else "tolerance",
        max_drift=max(c.drift for c in comparisons),
        rows=sum(c.rows for c in comparisons),
        checks={c.name: c.counter_example is None for c in comparisons},
        session=facts,
        machine=machine(),
    )


def compare(
    session: ort.InferenceSession,
    kind: Kind,
    d_in: int,
    *,
    d_memory: int | None = None,
    seed: int,
    quantized: bool = False,
    fp32: ort.InferenceSession | None = None,
    other_threads: ort.InferenceSession | None = None,
) -> list[Comparison]:
    """The comparisons behind `certify`, each with its first counter-example."""
    run = runner(session)
    rng = np.random.default_rng(seed)
    drawn = Parts(kind, d_in, d_memory, rng)
    probes = drawn.probes()
    alone = [run_window(run, kind, [probe])[0] for probe in probes]
    other = None if other_threads is None else runner(other_threads)
    threaded = [] if other is None else list(zip(alone, (run_window(other, kind, [p])[0] for p in probes), strict=True))
    found = []
    for setting in drawn.settings():
        pairs = []
        for parts, places in setting.windows(probes, rng):
            outs = run_window(run, kind, parts)
            pairs += [(alone[probe], outs[place]) for probe, place in places.items()]
            if other is not None:
                threaded += zip(outs, run_window(other, kind, parts), strict=True)
        found.append(_measure(setting.name, pairs))
    if other is not None:
        found.append(_measure("another number of threads", threaded))
    if quantized or fp32 is not None:
        found += _non_finite(run, None if fp32 is None else runner(fp32), drawn)
    return found


def check_position_wise(session: ort.InferenceSession, d_in: int, *, seed: int, exact: bool = True) -> None:
    """Permuting rows must permute outputs, bit for bit, or but for rounding if not `exact`.

    Raises:
        ProofError: it does not; the message is the first counter-example.
    """
    run = runner(session)
    rng = np.random.default_rng(seed)
    for rows in WINDOWS:
        tokens = random_rows(rng, rows, d_in)
        out = run(tokens, None)
        for order in (np.arange(rows)[::-1], np.roll(np.arange(rows), 1), rng.permutation(rows)):
            permuted = run(np.ascontiguousarray(tokens[order]), None)
            if permuted.shape == out.shape and not exact and _rounded_alike(permuted, out[order]):
                continue
            if permuted.shape != out.shape or not same_bits(permuted, out[order]).all():
                raise ProofError(
                    f"not position-wise: {rows} rows permuted (seed {seed}): {_moved(order, out, permuted)}"
                )


def machine() -> str:
    """The processor and the vector extensions that ONNX Runtime picks its kernels by."""
    model, flags = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = value
    except OSError:  # not Linux: the name alone
        return model
    known = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8")
    return " ".join([model, *(flag for flag in known if flag in flags.split())])


def _measure(name: str, pairs: Sequence[tuple[Float32, Float32]]) -> Comparison:
    left, right = (np.concatenate(side) for side in zip(*pairs, strict=True))
    both = np.isfinite(left) & np.isfinite(right)
    drift = float(np.abs(left[both].astype(np.float64) - right[both]).max(initial=0.0))
    scale = float(np.abs(left[both]).max(initial=0.0))
    return Comparison(
        name=name,
        rows=len(left),
        drift=drift,
        relative_drift=drift / scale if scale else 0.0 if drift == 0 else float("inf"),
        contaminated=bool((np.isfinite(left) != np.isfinite(right)).any()),
        counter_example=next((found for pair in pairs if (found := difference(*pair)) is not None), None),
    )


def _non_finite(run: Run, fp32: Run | None, drawn: Parts) -> Iterator[Comparison]:
    parts = drawn.poisoned()
    got = np.concatenate(run_window(run, drawn.kind, parts))
    if fp32 is not None:
        expected = np.concatenate(run_window(fp32, drawn.kind, parts))
        yield _no_numbers(AS_FP32, got, ~np.isfinite(expected), lambda at: f", in fp32 {expected[at]!s}")
    poisoned = np.concatenate([poisoned_rows(part) for part in parts])[:, None]
    anywhere = _no_numbers(NO_NUMBERS, got, np.broadcast_to(poisoned, got.shape), lambda at: "")
    # A module may give numbers for such rows by design, in fp32 too: then this is no property to state.
    if fp32 is None or anywhere.counter_example is None:
        yield anywhere


def _no_numbers(
    name: str, got: Float32, where: npt.NDArray[np.bool_], instead: Callable[[tuple[int, int]], str]
) -> Comparison:
    wrong = np.argwhere(where & np.isfinite(got))
    example = None
    if len(wrong):
        row, column = map(int, wrong[0])
        example = (
            f"an input with NaN or Inf gives a plausible number: out[{row}, {column}] is {got[row, column]!s}"
            f"{instead((row, column))}"
        )
    return Comparison(name, len(got), 0.0, 0.0, example is not None, example)


def _rounded_alike(left: Float32, right: Float32) -> bool:
    scale = float(np.abs(right).max(initial=0.0))
    return bool(np.isclose(left, right, rtol=0, atol=DEPENDENT * scale, equal_nan=True).all())


def _moved(order: Int64, out: Float32, permuted: Float32) -> str:
    if permuted.shape != out.shape:
        return f"out is {out.shape} and then {permuted.shape}"
    row, column = map(int, np.argwhere(~same_bits(permuted, out[order]))[0])
    origin = int(order[row])
    before, after = out[origin, column], permuted[row, column]
    return f"input row {origin} moved to {row}: its out[{column}] was {before!s}, is {after!s}"
