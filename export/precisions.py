"""What each precision is: one table, precision -> provider, transform and bar. A new precision is a row here.

A transform turns the float graph into candidates: the graph it would like best, and, step by step, the ones that spend
more time to be closer to it. `export.variants` takes the first that holds the error budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import onnx_ir as ir

from export.lowering.registry import Provider
from export.quantization.calibration import Activations
from export.quantization.forms import EIGHT_BIT, SEVEN_BIT, Form
from export.quantize import Quantizer
from service.manifest import Precision, WeightMatmul


class Candidates(Protocol):
    """Graphs of one precision, from the fastest (step 0) to the most accurate (the last step)."""

    @property
    def last(self) -> int:
        """The number of the last step."""

    def build(self, step: int) -> ir.Model:
        """The graph, intents not yet lowered; the float graph stays as it is."""

    def matmuls(self, step: int) -> list[WeightMatmul]:
        """What became of each weight matmul; none if nothing was quantized."""


@dataclass(frozen=True)
class Calibrated:
    """Activations of the float graph's matmuls.

    trusted: they come from tokens that the user says the model meets.
    """

    activations: Activations
    trusted: bool


Transform = Callable[[ir.Model, Calibrated | None], Candidates]


@dataclass(frozen=True)
class AsItIs:
    """The float graph."""

    model: ir.Model
    last: int = 0

    def build(self, step: int) -> ir.Model:
        """A copy."""
        return self.model.clone()

    def matmuls(self, step: int) -> list[WeightMatmul]:
        """None was quantized."""
        return []


class Integer:
    """Integer matmuls in the first of `forms`; at each step the worst one so far takes the next form (None: float)."""

    def __init__(self, model: ir.Model, calibrated: Calibrated | None, forms: Sequence[Form | None]) -> None:
        first = forms[0]
        assert first is not None
        self._quantizer = Quantizer(
            model,
            first,
            None if calibrated is None else calibrated.activations,
            feedback=calibrated is not None and calibrated.trusted,
        )
        self._forms = forms

    @property
    def last(self) -> int:
        """All matmuls in the last form."""
        return (len(self._forms) - 1) * len(self._quantizer.weights)

    def build(self, step: int) -> ir.Model:
        """See `Candidates`."""
        return self._quantizer.build(self._instead(step))

    def matmuls(self, step: int) -> list[WeightMatmul]:
        """See `Candidates`."""
        return self._quantizer.matmuls(self._instead(step))

    def _instead(self, step: int) -> Mapping[str, Form | None]:
        if step == 0:
            return {}
        measured = {matmul.weight: matmul.sqnr_db for matmul in self._quantizer.matmuls()}
        worst_first = sorted(measured, key=lambda weight: _or_infinite(measured[weight]))
        rung, further = divmod(step, len(worst_first))
        instead = dict.fromkeys(worst_first, self._forms[rung])
        return instead | dict.fromkeys(worst_first[:further], self._forms[min(rung + 1, len(self._forms) - 1)])


def _or_infinite(sqnr_db: float | None) -> float:
    return float("inf") if sqnr_db is None else sqnr_db


def integer(*forms: Form | None) -> Transform:
    """Matmuls in the first form, and in the next ones where the error budget asks for it."""
    return lambda model, calibrated: Integer(model, calibrated, forms)


@dataclass(frozen=True)
class Recipe:
    """How a precision is made.

    provider: that runs it.
    transform: of the float graph.
    calibrated: whether the transform chooses by activations.
    sqnr_db: what its output must hold against torch; None: float32's bar on the relative error.
    """

    provider: Provider
    transform: Transform
    calibrated: bool = False
    sqnr_db: float | None = None


INT8_SQNR_DB: Final = 20.0  # below this the noise is a tenth of the signal: the weights do not suit 8 bits

RECIPES: Final[Mapping[Precision, Recipe]] = {
    "fp32": Recipe("cpu", lambda model, _: AsItIs(model)),
    "int8": Recipe("cpu", integer(EIGHT_BIT, None), calibrated=True, sqnr_db=INT8_SQNR_DB),
    "int8-fast": Recipe("cpu", integer(SEVEN_BIT, EIGHT_BIT, None), calibrated=True, sqnr_db=INT8_SQNR_DB),
}
