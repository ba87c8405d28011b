"""The in-process limit: the same ONNX file, with the service's own session options, and no service around it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from bench.bodies import Float32, Int64, random_tokens
from service.manifest import Manifest, Precision
from service.session import open_session

WARM_RUNS = 3


class InProcess:
    """One variant of the bundle in `folder`, in this process, on `threads` threads.

    Between two runs its threads sleep (service.session turns spinning off), so it may stay open while a server is
    measured.
    """

    def __init__(self, folder: Path, manifest: Manifest, precision: Precision, threads: int) -> None:
        variant = next(v for v in manifest.variants if (v.provider, v.precision) == ("cpu", precision))
        self._session = open_session(folder / variant.file, variant.provider, threads)
        self._has_sequences = manifest.kind == "sequence"
        self.d_in = manifest.d_in

    def run(self, tokens: Float32, seq_lens: Int64 | None = None) -> Float32:
        """`tokens` (rows, d_in) -> out (rows, d_out); without `seq_lens` (sequences,) the rows are one sequence."""
        feeds: dict[str, Float32 | Int64] = {"tokens": tokens}
        if self._has_sequences:
            feeds["seq_lens"] = np.array([len(tokens)], np.int64) if seq_lens is None else seq_lens
        out: Float32 = self._session.run(["out"], feeds)[0]
        return out

    def tokens_per_s(self, rows: int, seconds: float) -> float:
        """Tokens/s of runs of `rows` random rows, one after another for `seconds`, after a warm-up."""
        return self.runs_per_s(random_tokens(rows, self.d_in, seed=rows), None, seconds) * rows

    def runs_per_s(self, tokens: Float32, seq_lens: Int64 | None, seconds: float, warm_runs: int = WARM_RUNS) -> float:
        """Runs/s of one window, for `seconds` and at least once, after a warm-up."""
        for _ in range(warm_runs):
            self.run(tokens, seq_lens)
        began = time.perf_counter()
        runs = 0
        while True:
            self.run(tokens, seq_lens)
            runs += 1
            elapsed = time.perf_counter() - began
            if elapsed >= seconds:
                return runs / elapsed
