"""The claim of a certificate, tried on a sample: a row alone and the same row in a window give the same bits.

Pure numpy around one callable, so that the service can try it at start and export can build on it. It knows neither
ONNX Runtime nor a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from service.manifest import Kind
from service.packing import Float32, Int64

Run = Callable[[Float32, Int64 | None], Float32]  # tokens (n, d_in), seq_lens (s,) or None -> out (n, d_out)


def run_window(run: Run, kind: Kind, parts: Sequence[Float32]) -> list[Float32]:
    """`parts`, each (n_i, d_in), packed into one window; their outputs, each (n_i, d_out)."""
    lengths = np.array([len(part) for part in parts], np.int64)
    out = run(np.concatenate(parts), lengths if kind == "sequence" else None)
    return np.split(out, np.cumsum(lengths)[:-1])


def same_bits(left: Float32, right: Float32) -> npt.NDArray[np.bool_]:
    """Elementwise equality of bits, so 0.0 differs from -0.0; every NaN equals every NaN, whatever its payload."""
    equal = left.view(np.uint32) == right.view(np.uint32)
    return np.asarray(equal | (np.isnan(left) & np.isnan(right)))


def difference(alone: Float32, batched: Float32) -> str | None:
    """None if the outputs of one part are the same bits, else the first element that differs, as text."""
    alone, batched = np.ascontiguousarray(alone), np.ascontiguousarray(batched)
    wrong = np.argwhere(~same_bits(alone, batched))
    if not len(wrong):
        return None
    row, column = map(int, wrong[0])
    return f"out[{row}, {column}] is {alone[row, column]!s} alone and {batched[row, column]!s} in the window"


def holds(run: Run, kind: Kind, d_in: int, *, rows: int = 16, seed: int = 0) -> str | None:
    """Run `rows` rows (or ragged sequences of as many) alone and in one window with outlier and NaN neighbours.

    Returns None if every output is the same bits both times, else the first counter-example as text.
    """
    rng = np.random.default_rng(seed)
    cuts = (
        np.sort(rng.choice(np.arange(1, rows), rows // 4, replace=False)) if kind == "sequence" else np.arange(1, rows)
    )
    parts = np.split(rng.standard_normal((rows, d_in), dtype=np.float32), cuts)
    loud = 1000 * rng.standard_normal((3, d_in), dtype=np.float32)
    broken = np.full((1, d_in), np.nan, np.float32)
    batched = run_window(run, kind, [loud, *parts, broken])[1:-1]
    for index, (part, inside) in enumerate(zip(parts, batched, strict=True)):
        found = difference(run_window(run, kind, [part])[0], inside)
        if found is not None:
            noun = "sequence" if kind == "sequence" else "row"
            return f"{noun} {index} of {len(parts)} ({len(part)} tokens, seed {seed}): {found}"
    return None
