"""A loaded variant, ready to run. Knows neither where it came from nor who asks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnxruntime as ort

from service.arena import ArenaUse
from service.manifest import Certificate, Manifest, Variant
from service.memory import Memory
from service.packing import Float32, Int64, Limits
from service.process_memory import return_free_memory
from service.request import Timing
from service.session import run_packed, shrinking
from service.statistics import ModelStatistics


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Model:
    """One variant, warm and ready: `tokens (rows, d_in)` [, `seq_lens` [, memory]] -> `out (rows, d_out)`."""

    label: str  # <name>-<precision>, in metrics and logs
    version: str
    manifest: Manifest
    variant: Variant
    session: ort.InferenceSession
    slab: Float32
    limits: Limits
    memory_slab: Float32 | None = None  # (capacity, d_memory), where the model takes a memory
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    arena: ArenaUse = field(default_factory=ArenaUse)
    memory_bytes: int = 0  # weights and arena, as measured while it was loaded, and the slabs
    timings: tuple[Timing, ...] = ()  # of its warm-up

    @property
    def has_sequences(self) -> bool:
        return self.manifest.kind == "sequence"

    @property
    def certificate(self) -> Certificate:
        return self.variant.certificate

    def run(self, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32:
        """One `session.run`; raises whatever ONNX Runtime raises."""
        out = run_packed(self.session, tokens, seq_lens, memory)
        rows = len(tokens) if memory is None else len(tokens) + len(memory.rows)
        self.arena.note(rows, 0 if seq_lens is None else int(seq_lens.max(initial=0)))
        if out.shape != (len(tokens), self.manifest.d_out):
            raise RuntimeError(f"{self.label}: out is {out.shape}, expected {(len(tokens), self.manifest.d_out)}")
        return out

    def with_window(self, tokens: int) -> Model:
        """The same model, session and statistics, with windows of at most `tokens`."""
        slab = np.empty((tokens, self.slab.shape[1]), np.float32)
        memory = None if self.memory_slab is None else np.empty((tokens, self.memory_slab.shape[1]), np.float32)
        return replace(self, slab=slab, memory_slab=memory, limits=replace(self.limits, tokens=tokens))

    def try_out(self) -> None:
        """One token through the model; raises as `run` does."""
        self.run(*self._one_token())

    def shrink(self) -> None:
        """Give back what the arena has grown by for larger windows, and all else that is free; as `run`, one at a time.

        Takes a run of one row, and 1 to 10 ms.
        """
        run_packed(self.session, *self._one_token(), shrinking(self.session))
        return_free_memory()

    def _one_token(self) -> tuple[Float32, Int64 | None, Memory | None]:
        tokens = np.zeros((1, self.manifest.d_in), np.float32)
        lens = np.ones(1, np.int64) if self.has_sequences else None
        width = self.manifest.d_memory
        memory = None if width is None else Memory(np.zeros((1, width), np.float32), np.ones(1, np.int64))
        return tokens, lens, memory
