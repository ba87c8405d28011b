"""The table of precisions, and the error budget that decides what each matmul becomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from export.adapters.random_weights import random_ffn, random_stack
from export.errors import ExportError, ProofError
from export.pipeline import Options, export_module
from export.precisions import RECIPES, Ladder
from export.quantization.forms import EIGHT_BIT, SEVEN_BIT
from export.quantize import Quantizer, count_quantized_matmuls
from service.loading import load_repository
from service.manifest import REPORT, Precision, Variant, read_manifest
from service.settings import Settings
from tests.export.hand_built import random_ffn as ffn_graph


def only(folder: Path, precision: str) -> Variant:
    return next(v for v in read_manifest(folder).variants if v.precision == precision)


def worst_db(variant: Variant) -> float:
    return min(row.sqnr_db for row in variant.parity)


def test_every_precision_of_a_manifest_has_a_recipe() -> None:
    assert set(RECIPES) == set(get_args(Precision))


def test_each_step_makes_one_matmul_more_exact() -> None:
    candidates = Ladder(Quantizer(ffn_graph(8, 16, 0), SEVEN_BIT), (SEVEN_BIT, EIGHT_BIT, None))
    forms = [[matmul.form for matmul in candidates.matmuls(step)] for step in range(candidates.last + 1)]
    assert forms == [
        ["uint8 x int8", "uint8 x int8"],
        ["uint8 x uint8", "uint8 x int8"],
        ["uint8 x uint8", "uint8 x uint8"],
        ["float32", "uint8 x uint8"],
        ["float32", "float32"],
    ]
    assert [count_quantized_matmuls(candidates.build(step)) for step in range(5)] == [2, 2, 2, 1, 0]


def test_all_precisions_of_a_block_are_exact_and_say_what_they_were_calibrated_on(tmp_path: Path) -> None:
    stack = random_stack(16, 2, 32, place="pre", seed=1)
    precisions: tuple[Precision, ...] = ("fp32", "int8", "int8-fast")
    folder = export_module(stack, Options("block", tmp_path, precisions=precisions))
    fp32, int8, fast = read_manifest(folder).variants
    assert {v.certificate.kind for v in (fp32, int8, fast)} == {"exact"}
    assert fast.file == "int8-fast-cpu.onnx"
    assert (fp32.calibration, fp32.matmuls) == (None, [])
    for variant, form in ((int8, "uint8 x uint8"), (fast, "uint8 x int8")):
        assert variant.calibration == "synthetic: N(0, 1), 1,024 tokens"
        assert [matmul.form for matmul in variant.matmuls] == [form] * 4
        assert all(matmul.sqnr_db is not None and matmul.sqnr_db > 25 for matmul in variant.matmuls)
        assert not any(matmul.smoothing_place == "multiply" for matmul in variant.matmuls[:2])
    assert worst_db(int8) > worst_db(fast) > 25
    report = (folder / REPORT).read_text()
    assert "export with --calibrate" in report
    assert "| int8-fast: weight | form |" in report


def test_the_user_s_own_tokens_calibrate(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).standard_normal((600, 16), dtype=np.float32)
    tokens[:, 3] *= 50
    np.save(tmp_path / "tokens.npy", tokens)
    steps: list[str] = []
    options = Options("ffn", tmp_path, precisions=("int8-fast",), calibrate=tmp_path / "tokens.npy")
    folder = export_module(random_ffn(16, 32), options, progress=steps.append)
    fast = only(folder, "int8-fast")
    assert fast.calibration is not None
    assert fast.calibration.startswith("tokens.npy (SHA-256 ")
    assert fast.matmuls[0].smoothing_place == "multiply"
    assert not any("WARNING" in step for step in steps)
    assert "export with --calibrate" not in (folder / REPORT).read_text()
    assert not list(folder.glob("calibration*"))


def test_the_worst_matmuls_get_more_bits_and_then_stay_float_until_the_budget_holds(tmp_path: Path) -> None:
    module = random_ffn(32, 64, seed=2)
    reached: dict[float | None, list[str]] = {}
    budgets: tuple[float | None, ...] = (None, 38.0, 44.0)
    for version, budget in enumerate(budgets, start=1):
        steps: list[str] = []
        options = Options("ffn", tmp_path, version=version, precisions=("int8-fast",), min_sqnr=budget)
        folder = export_module(module, options, progress=steps.append)
        fast = only(folder, "int8-fast")
        reached[budget] = [matmul.form for matmul in fast.matmuls]
        assert worst_db(fast) >= (budget or 0)
        assert fast.float_matmuls == reached[budget].count("float32")
        for matmul in fast.matmuls:
            named = f"stay float to hold the error budget: {matmul.weight}" in (folder / REPORT).read_text()
            assert named == (matmul.form == "float32") == any(matmul.weight in step for step in steps)
    assert reached[None] == ["uint8 x int8"] * 2
    assert "uint8 x uint8" in reached[38.0]
    assert reached[44.0].count("float32") == 1


def test_a_precision_s_own_bar_is_held_with_more_bits_but_not_in_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = RECIPES["int8-fast"]
    module, options = random_ffn(32, 64, seed=2), Options("ffn", tmp_path, precisions=("int8-fast",))
    monkeypatch.setitem(RECIPES, "int8-fast", replace(fast, sqnr_db=38.0))  # more than 7 bits hold
    variant = only(export_module(module, options), "int8-fast")
    assert worst_db(variant) >= 38
    assert "uint8 x uint8" in {matmul.form for matmul in variant.matmuls} <= {"uint8 x uint8", "uint8 x int8"}
    monkeypatch.setitem(RECIPES, "int8-fast", replace(fast, sqnr_db=44.0))  # more than 8 bits do
    with pytest.raises(ProofError, match=r"int8-fast: SQNR .* required 44 dB"):
        export_module(module, replace(options, version=2))


def test_no_matmul_beside_4_bit_weights_rounds_its_activations(tmp_path: Path) -> None:
    """A last bit that a neighbour moves could be a step of the rounding: no tolerance any more."""
    stack = random_stack(32, 2, 64, place="pre", seed=3)
    options = Options("x", tmp_path, precisions=("w4",), min_sqnr=30, allow_inexact=True)
    folder = export_module(stack, options)
    variant = only(folder, "w4")
    assert {"4-bit weights", "8-bit weights"} <= {matmul.form for matmul in variant.matmuls}
    assert variant.certificate.kind in ("exact", "tolerance")
    functions = ir.load(folder / variant.file).functions.values()
    levels = [n.attributes["accuracy_level"].as_int() for f in functions for n in f if n.op_type == "MatMulNBits"]
    assert levels == [0, 0]


def test_a_budget_that_only_float_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match="int8: every weight matmul would have to stay float to hold 90 dB"):
        export_module(random_ffn(8, 16), Options("ffn", tmp_path, min_sqnr=90))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_sqnr": -3.0}, "min_sqnr -3.0: expected a positive"),
        ({"min_sqnr": float("nan")}, "min_sqnr nan: expected a positive"),
        ({"calibrate": Path("nowhere.npy")}, "nowhere.npy: not a readable"),
        ({"calibrate": Path("x.npy"), "precisions": ("fp32",)}, "x.npy: none of fp32 is calibrated"),
        ({"name": "x-int8-fast"}, "ends in '-int8-fast'"),
        (
            {"precisions": ("int8-static",)},
            "int8-static is calibrated on tokens that the model meets",
        ),
        ({"precisions": ("w4",), "weight_method": "gptq"}, "w4 with gptq is calibrated on tokens that the model meets"),
        ({"precisions": ("w8",), "calibrate": Path("x.npy")}, "x.npy: none of w8 is calibrated"),
    ],
)
def test_options_that_cannot_be_met_leave_nothing(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_module(nn.Linear(4, 4), Options(**({"name": "x", "models": tmp_path} | options)))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_static_and_weight_only_precisions_are_certified_and_served(tmp_path: Path) -> None:
    stack = random_stack(16, 2, 32, place="pre", seed=1)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(2).standard_normal((8, 40, 16), dtype=np.float32))
    precisions: tuple[Precision, ...] = ("int8-static", "w8", "w4")
    models = tmp_path / "models"
    options = Options(
        "x", models, precisions=precisions, calibrate=tmp_path / "tokens.npy", weight_method="gptq", allow_inexact=True
    )
    folder = export_module(stack, options)
    kinds = {v.precision: v.certificate.kind for v in read_manifest(folder).variants}
    assert (kinds["int8-static"], kinds["w8"]) == ("exact", "exact")
    assert kinds["w4"] in ("exact", "tolerance")  # as measured
    for variant in read_manifest(folder).variants:
        assert (variant.quantized_matmuls, variant.float_matmuls) == (4, 0)
        assert variant.calibration is not None
        assert variant.calibration.startswith("tokens.npy")
    assert "least SQNR in dB: int8-static 15, w8 20, w4 12" in (folder / REPORT).read_text()

    tokens, lengths = np.random.default_rng(3).standard_normal((9, 16), dtype=np.float32), np.array([4, 5])
    for accepted in (frozenset[str](), frozenset({"x"})):
        served = load_repository(Settings(models=models, threads=1, max_window_tokens=64, pack_tolerance=accepted))
        for precision in precisions:
            model = served.get(f"x-{precision}")
            assert model.run(tokens, lengths).shape == (9, 16)
            packs = kinds[precision] == "exact" or "x" in accepted
            assert model.limits.requests == (None if packs else 1)


def test_4_bits_are_not_written_unless_drift_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match=r"w4: .*(certificate is 'tolerance'|not position-wise)"):
        export_module(random_ffn(64, 256), Options("x", tmp_path, precisions=("w4",)))
    assert list(tmp_path.iterdir()) == []


def test_4_bits_fall_back_to_8_and_to_float_within_the_budget(tmp_path: Path) -> None:
    options = Options("x", tmp_path, precisions=("w4",), min_sqnr=20.8, allow_inexact=True)
    variant = only(export_module(random_ffn(48, 64), options), "w4")
    assert worst_db(variant) >= 20.8
    assert {matmul.form for matmul in variant.matmuls} == {"4-bit weights", "8-bit weights"}
