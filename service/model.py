"""A loaded variant, ready to run. Knows neither where it came from nor who asks."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnxruntime as ort

from service.manifest import Certificate, Manifest, Variant
from service.packing import Float32, Int64, Limits
from service.statistics import ModelStatistics


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Model:
    """One variant, warm and ready: `tokens (rows, d_in)` [and `seq_lens (sequences,)`] -> `out (rows, d_out)`."""

    label: str  # <name>-<precision>, in metrics and logs
    version: str
    manifest: Manifest
    variant: Variant
    session: ort.InferenceSession
    slab: Float32
    limits: Limits
    statistics: ModelStatistics = field(default_factory=ModelStatistics)

    @property
    def has_sequences(self) -> bool:
        return self.manifest.kind == "sequence"

    @property
    def certificate(self) -> Certificate:
        return self.variant.certificate

    def run(self, tokens: Float32, seq_lens: Int64 | None) -> Float32:
        """One `session.run`; raises whatever ONNX Runtime raises."""
        feeds = {"tokens": tokens} if seq_lens is None else {"tokens": tokens, "seq_lens": seq_lens}
        out: Float32 = self.session.run(["out"], feeds)[0]
        if out.shape != (len(tokens), self.manifest.d_out):
            raise RuntimeError(f"{self.label}: out is {out.shape}, expected {(len(tokens), self.manifest.d_out)}")
        return out
