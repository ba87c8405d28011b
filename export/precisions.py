"""What each precision is: one table, precision -> provider, transform and bar. A new precision is a row here.

A transform turns the float graph into candidates: the graph it would like best, and, step by step, the ones that spend
more time to be closer to it. `export.budget` takes the first that holds the error budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, Protocol

import onnx_ir as ir

from export.half import Half, HalfPrecision
from export.lowering.registry import Provider
from export.quantization.block_forms import BlockForm, WeightMethod
from export.quantization.calibration import Activations
from export.quantization.calls import F, MatmulQuantizer
from export.quantization.forms import EIGHT_BIT, SEVEN_BIT, Form
from export.quantization.static import CalibrationMethod, StaticQuantizer
from export.quantization.static_form import STATIC
from export.quantization.weight_only import WeightOnly
from export.quantize import Quantizer
from service.manifest import Precision, WeightMatmul


class Candidates(Protocol):
    """Graphs of one precision, from the fastest (step 0) to the most accurate (the last step)."""

    @property
    def last(self) -> int:
        """The number of the last step."""

    @property
    def last_quantized(self) -> int:
        """The number of the last step at which no matmul has become float again."""

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


@dataclass(frozen=True)
class Choices:
    """What an export was asked for that a transform heeds."""

    calibrated: Calibrated | None = None
    calibration_method: CalibrationMethod = "minmax"
    weight_method: WeightMethod = "rtn"


Transform = Callable[[ir.Model, Choices], Candidates]


@dataclass(frozen=True)
class AsItIs:
    """The float graph."""

    model: ir.Model
    last: int = 0
    last_quantized: int = 0

    def build(self, step: int) -> ir.Model:
        """A copy."""
        return self.model.clone()

    def matmuls(self, step: int) -> list[WeightMatmul]:
        """None was quantized."""
        return []


class Ladder(Generic[F]):
    """Matmuls in the first of `forms`; at each step the worst one so far takes the next form (None: float)."""

    def __init__(self, quantizer: MatmulQuantizer[F], forms: Sequence[F | None]) -> None:
        self._quantizer = quantizer
        self._forms = forms

    @property
    def last(self) -> int:
        """All matmuls in the last form."""
        return (len(self._forms) - 1) * len(self._quantizer.weights)

    @property
    def last_quantized(self) -> int:
        """All matmuls in the last form that is not float."""
        return (sum(form is not None for form in self._forms) - 1) * len(self._quantizer.weights)

    def build(self, step: int) -> ir.Model:
        """See `Candidates`."""
        return self._quantizer.build(self._instead(step))

    def matmuls(self, step: int) -> list[WeightMatmul]:
        """See `Candidates`."""
        return self._quantizer.matmuls(self._instead(step))

    def _instead(self, step: int) -> Mapping[str, F | None]:
        if step == 0:
            return {}
        measured = {matmul.weight: matmul.sqnr_db for matmul in self._quantizer.matmuls()}
        worst_first = sorted(measured, key=lambda weight: _or_infinite(measured[weight]))
        rung, further = divmod(step, len(worst_first))
        instead = dict.fromkeys(worst_first, self._forms[rung])
        return instead | dict.fromkeys(worst_first[:further], self._forms[min(rung + 1, len(self._forms) - 1)])


def _or_infinite(sqnr_db: float | None) -> float:
    return float("inf") if sqnr_db is None else sqnr_db


def integer(first: Form, *closer: Form | None) -> Transform:
    """Matmuls in the first form, and in the next ones where the error budget asks for it."""

    def transform(model: ir.Model, choices: Choices) -> Candidates:
        calibrated = choices.calibrated
        activations = None if calibrated is None else calibrated.activations
        feedback = calibrated is not None and calibrated.trusted
        return Ladder(Quantizer(model, first, activations, feedback=feedback), (first, *closer))

    return transform


def weight_only(precision: Precision, first: BlockForm, *closer: BlockForm | None) -> Transform:
    """The same for weights alone."""

    def transform(model: ir.Model, choices: Choices) -> Candidates:
        activations = None if choices.calibrated is None else choices.calibrated.activations
        quantizer = WeightOnly(model, first, precision, choices.weight_method, activations)
        return Ladder(quantizer, (first, *closer))

    return transform


def _static(model: ir.Model, choices: Choices) -> Candidates:
    assert choices.calibrated is not None
    quantizer = StaticQuantizer(model, choices.calibrated.activations, choices.calibration_method)
    return Ladder(quantizer, (STATIC, None))


def half(precision: HalfPrecision) -> Transform:
    """Matmuls and what lies between them in half, but for what float16 could not hold."""

    def transform(model: ir.Model, choices: Choices) -> Candidates:
        return Half(model, precision, None if choices.calibrated is None else choices.calibrated.activations)

    return transform


@dataclass(frozen=True)
class Recipe:
    """How a precision is made.

    providers: that run it.
    transform: of the float graph.
    calibration: what the transform chooses by: nothing; activations, synthetic ones if need be ("any"); those of the
        user's own tokens ("own"), or these with GPTQ alone ("gptq").
    sqnr_db: what its output must hold against torch; None: float32's bar on the relative error.
    """

    providers: tuple[Provider, ...]
    transform: Transform
    calibration: Literal["none", "any", "own", "gptq"] = "none"
    sqnr_db: float | None = None

    def is_calibrated(self, weight_method: WeightMethod) -> bool:
        """Whether activations are measured for it."""
        return self.calibration in ("any", "own") or self.needs_own_tokens(weight_method)

    def needs_own_tokens(self, weight_method: WeightMethod) -> bool:
        """Whether synthetic tokens make little sense: it clips what lies beyond their range, or is fitted to them."""
        return self.calibration == "own" or (self.calibration == "gptq" and weight_method == "gptq")


# Below int8's bar the noise is a tenth of the signal: the weights do not suit 8 bits. A fixed range clips what the
# calibration has not seen. The CPU's kernel for 8-bit weights rounds activations to 8 bits too, so w8 is held to the
# same; 4 bits keep 22 dB of one matmul.
INT8_SQNR_DB: Final = 20.0
STATIC_SQNR_DB: Final = 15.0
W8_SQNR_DB: Final = 20.0
W4_SQNR_DB: Final = 12.0
# Roundings to 11 and 8 significant bits: about 74 and 56 dB each, and a layer has a dozen.
FP16_SQNR_DB: Final = 50.0
BF16_SQNR_DB: Final = 30.0

# Level 4 is the exact one for 8 bits, and level 0 unpacks all weights in each run. 4 bits are exact at neither, and
# level 0 is as accurate, faster beyond a few rows, and keeps NaN. Beside them 8 bits must not round activations either:
# a last bit that a neighbour moves can be a whole step of such a rounding, and a tolerance is one no more.
_W8: Final = BlockForm(8, level=4)
_W4: Final = BlockForm(4, level=0)
_W8_BESIDE_W4: Final = BlockForm(8, level=0)

UNSUITED: Final[Mapping[Provider, Mapping[str, str]]] = {
    "cpu": {
        "fp16": "the CPU provider has few float16 kernels and casts to float32 around the rest: slower than fp32",
        "bf16": "the CPU provider has no bfloat16 matmul",
    },
    "cuda": {
        "int8": "integer matmuls have no fast kernel on CUDA",
        "int8-fast": "integer matmuls have no fast kernel on CUDA",
        "int8-static": "QDQ runs in float on CUDA, between roundings: slower than fp32",
    },
}

RECIPES: Final[Mapping[Precision, Recipe]] = {
    "fp32": Recipe(("cpu", "cuda"), lambda model, _: AsItIs(model)),
    "fp16": Recipe(("cuda",), half("fp16"), "any", FP16_SQNR_DB),
    "bf16": Recipe(("cuda",), half("bf16"), sqnr_db=BF16_SQNR_DB),
    "int8": Recipe(("cpu",), integer(EIGHT_BIT, None), "any", INT8_SQNR_DB),
    "int8-fast": Recipe(("cpu",), integer(SEVEN_BIT, EIGHT_BIT, None), "any", INT8_SQNR_DB),
    "int8-static": Recipe(("cpu",), _static, "own", STATIC_SQNR_DB),
    "w8": Recipe(("cpu", "cuda"), weight_only("w8", _W8, None), "gptq", W8_SQNR_DB),
    "w4": Recipe(("cpu", "cuda"), weight_only("w4", _W4, _W8_BESIDE_W4, None), "gptq", W4_SQNR_DB),
}


def unsuited(precision: Precision, provider: Provider) -> str | None:
    """Why `precision` is not made for `provider`; None: it is."""
    return None if provider in RECIPES[precision].providers else UNSUITED[provider][precision]


def bars_db(min_sqnr: float | None) -> Mapping[Precision, float]:
    """The SQNR in dB that each precision must hold, where it has such a bar, or `min_sqnr` where that is more."""
    return {name: max(recipe.sqnr_db, min_sqnr or 0) for name, recipe in RECIPES.items() if recipe.sqnr_db is not None}
