"""What each form of the int8 matmul costs: the measurement behind the functions of export/quantization/forms.py.

`python -m bench.int8_forms`: an FFN 768/3072 with GELU, every graph in one process, one thread, CPU time of the thread,
graphs interleaved, the minimum of many rounds. The floor of a precision is its two bare integer matmuls, on activations
that are integers already; the bars are fractions of it, and the exit code is 1 if one is missed. `--all` measures other
forms of the function too. Absolute times are the machine's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from rich.console import Console
from rich.table import Table

from export.quantization.forms import EIGHT_BIT, SEVEN_BIT, Form  # noqa: TID251  what is measured
from export.quantize import quantize_int8  # noqa: TID251  what export writes is measured
from service.session import open_session

Array = npt.NDArray[np.generic]

D: Final = 768
D_FF: Final = 3072
OPSET: Final = 21
ROWS: Final = (1, 64, 256, 1024, 4096)
MIN_ROUNDS: Final = 3

_CORRECTION: Final = """
  scaled = Mul (product, scale)
  offset = Mul (lowest, column_sums)
  y = Add (scaled, offset)
"""
_INTEGERS: Final = """
  q = QuantizeLinear <axis = 1, block_size: int = @inner> (above, scale)"""


@dataclass(frozen=True, slots=True)
class Other:
    """The shipped function with parts of its text replaced."""

    name: str
    replaced: Mapping[str, str]


OTHERS: Final = (
    Other(
        "zero point per row, zero in the range",
        {
            """
  above = Sub (x, lowest)
  span = ReduceMax <keepdims = 1> (above, last)
  scale = Div (span, divisor)
""": """
  highest = ReduceMax <keepdims = 1> (x, last)
  nothing = Constant <value = float {0}> ()
  least = Constant <value = float {3e-36}> ()
  top = Max (highest, least)
  bottom = Min (lowest, nothing)
  range = Sub (top, bottom)
  scale = Div (range, divisor)
""",
            _INTEGERS: """
  below = Neg (bottom)
  zero_point = QuantizeLinear <axis = 1, block_size = 1> (below, scale)
  q = QuantizeLinear <axis = 1, block_size: int = @inner> (x, scale, zero_point)""",
            _CORRECTION: """
  row_zero = Cast <to = 1> (zero_point)
  offset = Mul (row_zero, column_sums)
  centred = Sub (product, offset)
  y = Mul (centred, scale)
""",
        },
    ),
    Other(
        "guard and span in operators of their own",
        {
            """
  divisor = BatchNormalization (mean, no, steps, no, unit)
""": """
  guard = Mul (mean, no)
  highest = ReduceMax <keepdims = 1> (x, last)
  least = Constant <value = float {3e-36}> ()
""",
            """
  span = ReduceMax <keepdims = 1> (above, last)
  scale = Div (span, divisor)
""": """
  span = Sub (highest, lowest)
  range = Max (span, least, guard)
  scale = Div (range, steps)
""",
        },
    ),
    Other(
        "rank-1 Gemm onto the scaled product",
        {
            _CORRECTION: """
  scaled = Mul (product, scale)
  y = Gemm (lowest, column_sums, scaled)
"""
        },
    ),
    Other(
        "row scales squeezed for QuantizeLinear",
        {
            _INTEGERS: """
  row_scale = Squeeze (scale, last)
  q = QuantizeLinear <axis = 0> (above, row_scale)"""
        },
    ),
    Other("without the NaN guard", {"(span, divisor)": "(span, steps)"}),
    Other("without the correction (wrong)", {_CORRECTION: "\n  y = Mul (product, scale)\n"}),
)


def random_ffn(seed: int) -> ir.Model:
    """gelu(tokens W1 + b1) W2 + b2 with N(0, 1/fan_in) weights."""
    rng = np.random.default_rng(seed)
    shapes = {"w1": (D, D_FF), "b1": (D_FF,), "w2": (D_FF, D), "b2": (D,)}
    arrays = {n: (rng.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for n, s in shapes.items()}
    return _model(
        "h = MatMul (tokens, w1)\n i = Add (h, b1)\n a = Gelu (i)\n o = MatMul (a, w2)\n out = Add (o, b2)",
        f"float[tokens, {D}] tokens",
        arrays,
    )


def with_form(quantized: ir.Model, form: Other) -> ir.Model:
    """`quantized` with its function replaced by that of `form`."""
    text = EIGHT_BIT.text(OPSET)
    for old, new in form.replaced.items():
        if text.count(old) != 1:
            raise ValueError(f"form {form.name!r}: {old!r} is not once in the shipped function")
        text = text.replace(old, new)
    model = quantized.clone()
    function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    model.functions[function.identifier()] = function
    return model


def bare_gemms(quantized: ir.Model, form: Form) -> ir.Model:
    """The two integer matmuls of a graph in `form` alone, on activations that are uint8 already: its floor."""
    arrays: dict[str, Array] = {"one": np.array(1, np.float32), "zero": np.array(0, np.uint8)}
    for name in ("w1", "w2"):
        weight, scales = (quantized.graph.initializers[f"{name}.{part}"].const_value for part in ("int8", "scales"))
        assert weight is not None
        assert scales is not None
        arrays[name], arrays[f"{name}s"] = weight.numpy(), scales.numpy()
    arrays["weight_zero"] = np.array(form.zero, form.dtype)
    body = """
        inner = com.microsoft.MatMulIntegerToFloat (tokens, w1, one, w1s, zero, weight_zero)
        out = com.microsoft.MatMulIntegerToFloat (hidden, w2, one, w2s, zero, weight_zero)
    """
    return _model(body, f"uint8[tokens, {D}] tokens, uint8[tokens, {D_FF}] hidden", arrays, "float[tokens, m] inner, ")


def whole_tensor(fp32: Path, path: Path) -> ir.Model:
    """`quantize_dynamic`, int8 weights per channel: neither exact beside neighbours nor accurate, but widely used."""
    quantize_dynamic(fp32, path, weight_type=QuantType.QInt8, per_channel=True)
    return ir.load(path)


def _model(body: str, inputs: str, arrays: Mapping[str, Array], outputs: str = "") -> ir.Model:
    header = f'<ir_version: 10, opset_import: ["": {OPSET}, "com.microsoft": 1]>'
    parsed = onnx.parser.parse_model(f"{header} ffn ({inputs}) => ({outputs}float[tokens, n] out) {{ {body} }}")
    parsed.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in arrays.items())
    return ir.from_proto(onnx.shape_inference.infer_shapes(parsed))


def feeds(session: ort.InferenceSession, rows: int, rng: np.random.Generator) -> dict[str, Array]:
    """Random inputs of `rows` rows, in the types and widths that `session` takes."""
    made: dict[str, Array] = {}
    for value in session.get_inputs():
        shape = (rows, value.shape[1])
        real = rng.standard_normal(shape, dtype=np.float32)
        made[value.name] = real if value.type == "tensor(float)" else rng.integers(0, 256, shape).astype(np.uint8)
    return made


def measure(sessions: Mapping[str, ort.InferenceSession], rows: int, seconds: float) -> dict[str, float]:
    """Least CPU seconds of one run of `rows` rows for each session, taken in turns for about `seconds`."""
    rng = np.random.default_rng(rows)
    inputs = {name: feeds(session, rows, rng) for name, session in sessions.items()}
    best = dict.fromkeys(sessions, float("inf"))
    repeats = max(1, 32 // rows)
    until, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < until or rounds < MIN_ROUNDS:
        rounds += 1
        for name, session in sessions.items():
            began = time.thread_time()
            for _ in range(repeats):
                session.run(None, inputs[name])
            best[name] = min(best[name], (time.thread_time() - began) / repeats)
    return best


@dataclass(frozen=True, slots=True)
class Bar:
    """`graph` must reach `share` of the speed of `floor`."""

    graph: str
    floor: str
    share: float


DYNAMIC: Final = "quantize_dynamic, int8 weights per channel"
BARS: Final = (
    Bar("int8", "int8, bare matmuls", 0.85),
    Bar("int8-fast", "int8-fast, bare matmuls", 0.8),
    Bar("int8-fast", DYNAMIC, 0.9),
)


def graphs(folder: Path, *, others: bool) -> dict[str, ir.Model]:
    """Name of each graph to measure -> the graph; "fp32" comes first."""
    fp32 = random_ffn(seed=0)
    ir.save(fp32, folder / "float.onnx")
    models = {"fp32": fp32}
    for name, form in zip(("int8", "int8-fast"), (EIGHT_BIT, SEVEN_BIT), strict=True):
        quantized = quantize_int8(fp32, form)
        models |= {name: quantized, f"{name}, bare matmuls": bare_gemms(quantized, form)}
    models[DYNAMIC] = whole_tensor(folder / "float.onnx", folder / "dynamic.onnx")
    if others:
        models |= {f"int8: {form.name}": with_form(models["int8"], form) for form in OTHERS}
    return models


def verdicts(times: Mapping[int, Mapping[str, float]]) -> list[tuple[Bar, dict[int, float]]]:
    """Each bar, and the share of the floor's speed that was reached at each number of rows."""
    return [(bar, {rows: best[bar.floor] / best[bar.graph] for rows, best in times.items()}) for bar in BARS]


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=15, help="for each number of rows, at least")
    parser.add_argument("--all", action="store_true", help="other forms of the int8 function too")
    arguments = parser.parse_args()

    console = Console(width=120)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sessions = {}
        for index, (name, model) in enumerate(graphs(folder, others=arguments.all).items()):
            ir.save(model, folder / f"{index}.onnx")
            sessions[name] = open_session(folder / f"{index}.onnx", "cpu", threads=1)
        tokens = feeds(sessions["fp32"], 64, np.random.default_rng(1))
        reference = sessions["fp32"].run(["out"], tokens)[0].astype(np.float64)
        times = {rows: measure(sessions, rows, arguments.seconds) for rows in arguments.rows}
        table = Table("CPU time of fp32 over", "SQNR dB", *(f"{rows} rows" for rows in arguments.rows))
        table.add_row("fp32, us a row", "", *(f"{times[rows]['fp32'] / rows * 1e6:.0f}" for rows in arguments.rows))
        for name, session in sessions.items():
            if name == "fp32":
                continue
            quality = ""
            if "bare" not in name:
                noise = session.run(["out"], tokens)[0] - reference
                quality = f"{10 * np.log10((reference**2).sum() / (noise**2).sum()):.1f}"
            ratios = [f"{times[rows]['fp32'] / times[rows][name]:.3f}" for rows in arguments.rows]
            table.add_row(name, quality, *ratios)
    console.print(table)
    table = Table("share of the speed of", "bar", *(f"{rows} rows" for rows in arguments.rows))
    missed = False
    for bar, shares in verdicts(times):
        cells = [f"{share:.3f}{'' if share >= bar.share else ' MISSED'}" for share in shares.values()]
        table.add_row(f"{bar.graph} over {bar.floor}", f"{bar.share}", *cells)
        missed |= any(share < bar.share for share in shares.values())
    console.print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
