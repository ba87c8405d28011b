"""A loaded variant, ready to run. Knows neither where it came from nor who asks."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnxruntime as ort

from service.manifest import Certificate, Manifest, Variant
from service.memory import Memory
from service.packing import Float32, Int64, Limits
from service.session import run_packed
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

    @property
    def has_sequences(self) -> bool:
        return self.manifest.kind == "sequence"

    @property
    def certificate(self) -> Certificate:
        return self.variant.certificate

    def run(self, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32:
        """One `session.run`; raises whatever ONNX Runtime raises."""
        out = run_packed(self.session, tokens, seq_lens, memory)
        if out.shape != (len(tokens), self.manifest.d_out):
            raise RuntimeError(f"{self.label}: out is {out.shape}, expected {(len(tokens), self.manifest.d_out)}")
        return out
