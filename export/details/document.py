"""`report.json`: what `report.md` shows in tables and plots, for programs."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.manifest import Precision, Speed
from service.session import Provider

REPORT_JSON: Final = "report.json"

StageName = Literal["QKV", "attention", "attention out", "router", "FFN1", "activation", "FFN2", "norm", "matmul"]


class _Strict(BaseModel):
    # A precision that gives NaN is a figure too; null, pydantic's default for it, could not be read back.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class StageFigures(_Strict):
    """One value of the graph, over all tokens of the run: its range in float, and what each precision makes of it."""

    layer: int | None = Field(description="null: outside the layers")
    stage: StageName
    value: str = Field(description="its name in the graph")
    weight: str | None = Field(description="of the matmul that gives it, or takes it; null for norms")
    rows: int = Field(ge=1)
    width: int = Field(ge=1)
    least: float
    greatest: float
    rms: float = Field(ge=0)
    outlier_channels: int = Field(ge=0, description="that reach OUTLIER times the rms")
    outliers: list[int] = Field(description="the first of them")
    active_share: float | None = Field(description="of an FFN's hidden units; null elsewhere")
    sqnr_db: dict[Precision, float] = Field(description="against float; of a precision whose graph has this value")


class Fused(_Strict):
    """One pattern of a file, and what ONNX Runtime made of it."""

    pattern: str
    kernels: list[str] = Field(description="any of which it should become")
    expected: int = Field(ge=1)
    found: int = Field(ge=0, description="of the expected places")
    written: bool = Field(default=False, description="the file has the kernel itself: nothing fuses, it is only kept")
    missed: list[str] = Field(default=[], description="the places that did not, by the weight's module and the node")
    share_of_time: float | None = Field(description="of a run, by the operators that did not fuse; null: all did")

    @property
    def holds(self) -> bool:
        """Whether every occurrence fused."""
        return self.found >= self.expected


class VariantDetails(_Strict):
    """Of one file."""

    precision: Precision
    provider: Provider
    fusions: list[Fused]
    fusions_not_measured: str | None = Field(description="why")
    speed: list[Speed]


class Details(_Strict):
    """The whole document."""

    schema_version: Literal[1] = 1
    tokens: int = Field(ge=0, description="that the stages were measured on")
    source: str = Field(description="where they came from")
    not_measured: str | None = Field(description="why there are no stages; null: there are")
    stages: list[StageFigures]
    variants: list[VariantDetails]
