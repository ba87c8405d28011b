from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.certify import AS_FP32, NO_NUMBERS, certify, check_position_wise, compare
from export.errors import ProofError
from export.quantize import quantize_int8
from service.manifest import Certificate, Kind
from service.session import open_session, session_facts
from tests.bundles import memory_mean
from tests.export.hand_built import Arrays, graph, opened, random_ffn

FACTS = session_facts(1)
LARGE = "among random neighbours, 2048 rows"
LARGE_SEQUENCES = "among random neighbours, about 2048 tokens in sequences of up to 512"

# out = tokens - mean of its own sequence
PER_SEQUENCE = """
    parts = SplitToSequence <axis = 0> (tokens, seq_lens)
    mapped = SequenceMap <body = b (float[l, d] t) => (float[l, d] c) {
      ax = Constant <value_ints = [0]> ()
      m = ReduceMean (t, ax)
      c = Sub (t, m)
    }> (parts)
    out = ConcatFromSequence <axis = 0> (mapped)
"""
SEQUENCES = "float[tokens, d] tokens, int64[sequences] seq_lens"


def certificate(session: ort.InferenceSession, kind: Kind = "position-wise", d_in: int = 16) -> Certificate:
    return certify(session, kind, d_in, seed=0, facts=FACTS)


def failed(found: Certificate) -> set[str]:
    return {name for name, held in found.checks.items() if not held}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_ffn_is_exact(tmp_path: Path, precision: str) -> None:
    model = random_ffn(64, 256, 3)
    fp32 = opened(model, tmp_path / "fp32.onnx")
    session = fp32 if precision == "fp32" else opened(quantize_int8(model), tmp_path / "int8.onnx")
    two = opened(model if precision == "fp32" else quantize_int8(model), tmp_path / "two.onnx", threads=2)
    quantized = precision == "int8"
    found = certify(
        session, "position-wise", 64, seed=1, facts=FACTS, quantized=quantized, fp32=fp32, other_threads=two
    )
    assert found.kind == "exact"
    assert found.max_drift == 0
    assert all(found.checks.values())
    assert found.rows >= 9 * 24
    assert {"another number of threads", LARGE, AS_FP32, NO_NUMBERS} <= set(found.checks)
    assert found.session == FACTS
    assert Certificate.model_validate_json(found.model_dump_json()) == found


def test_one_scale_over_the_whole_tensor_is_dependent(tmp_path: Path) -> None:
    """What `quantize_dynamic` makes of a MatMul."""
    rng = np.random.default_rng(0)
    body = """
        q, s, z = DynamicQuantizeLinear (tokens)
        i = MatMulInteger (q, w, z)
        f = Cast <to = 1> (i)
        out = Mul (f, s)
    """
    session = opened(graph(body, {"w": rng.integers(0, 255, (16, 8)).astype(np.uint8)}), tmp_path / "m.onnx")
    found = certificate(session)
    assert found.kind == "dependent"
    assert found.max_drift > 0
    assert "beside rows 1000x larger" in failed(found)
    first = next(c.counter_example for c in compare(session, "position-wise", 16, seed=0) if c.counter_example)
    assert "alone and" in first


def test_a_drift_of_rounding_size_is_tolerance_with_the_drift_stated(tmp_path: Path) -> None:
    body = "n = Shape <start = 0, end = 1> (tokens)\n f = Cast <to = 1> (n)\n e = Mul (f, tiny)\n out = Add (tokens, e)"
    found = certificate(opened(graph(body, {"tiny": np.array(1e-7, np.float32)}), tmp_path / "m.onnx"))
    assert found.kind == "tolerance"
    assert 1e-6 < found.max_drift < 1e-3


# out = tokens, and a little more in windows of more than `limit` tokens
CHANGES_WITH_SIZE = """
    n = Shape <start = 0, end = 1> (tokens)
    large = Greater (n, limit)
    step = Cast <to = 1> (large)
    little = Mul (step, tiny)
    out = Add (tokens, little)
"""


def changes_above(limit: int, path: Path, inputs: str = "float[tokens, d] tokens") -> ort.InferenceSession:
    body = CHANGES_WITH_SIZE
    if "seq_lens" in inputs:
        body = body.replace("n = Shape <start = 0, end = 1> (tokens)", "n = ReduceSum (seq_lens)")
    arrays: Arrays = {"limit": np.array([limit], np.int64), "tiny": np.array(1e-6, np.float32)}
    return opened(graph(body, arrays, inputs=inputs), path)


def test_kernels_that_change_only_in_large_windows_are_seen(tmp_path: Path) -> None:
    found = certificate(changes_above(1024, tmp_path / "rows.onnx"))
    assert found.kind == "tolerance"
    assert failed(found) == {LARGE}
    session = changes_above(1500, tmp_path / "sequences.onnx", SEQUENCES)
    assert failed(certificate(session, "sequence")) == {LARGE_SEQUENCES}


@pytest.mark.parametrize("limit", [63, 1024])
def test_windows_that_differ_with_another_number_of_threads_are_seen(tmp_path: Path, limit: int) -> None:
    one = opened(graph("out = Add (tokens, zero)", {"zero": np.array(0, np.float32)}), tmp_path / "one.onnx")
    other = changes_above(limit, tmp_path / "other.onnx")  # rows alone are the same
    found = certify(one, "position-wise", 16, seed=0, facts=FACTS, other_threads=other)
    assert found.kind == "tolerance"
    assert failed(found) == {"another number of threads"}


def test_nan_that_spreads_to_a_neighbour_is_dependent(tmp_path: Path) -> None:
    body = "m = ReduceMean <keepdims = 1> (tokens)\n z = Mul (m, zero)\n out = Add (tokens, z)"
    found = certificate(opened(graph(body, {"zero": np.array(0, np.float32)}), tmp_path / "m.onnx"))
    assert found.kind == "dependent"
    assert failed(found) == {"beside rows with NaN", "beside rows with Inf"}
    assert found.max_drift == 0


def test_numbers_where_fp32_gives_none_are_refused(tmp_path: Path) -> None:
    fp32 = opened(graph("out = Add (tokens, tokens)", {}), tmp_path / "fp32.onnx")
    body = "bad = IsNaN (tokens)\n clean = Where (bad, zero, tokens)\n out = Add (clean, clean)"
    hides = opened(graph(body, {"zero": np.array(0, np.float32)}), tmp_path / "hides.onnx")
    with pytest.raises(ProofError, match=r"plausible number: out\[\d+, \d+\] is 0.0, in fp32 nan"):
        certify(hides, "position-wise", 16, seed=0, facts=FACTS, fp32=fp32)


HIDES_NAN = "bad = IsNaN (tokens)\n clean = Where (bad, zero, tokens)\n out = Add (clean, clean)"


def test_numbers_for_nan_are_refused_without_an_fp32_file_too(tmp_path: Path) -> None:
    hides = opened(graph(HIDES_NAN, {"zero": np.array(0, np.float32)}), tmp_path / "hides.onnx")
    with pytest.raises(ProofError, match=r"plausible number: out\[\d+, \d+\] is [-\d.]+$"):
        certify(hides, "position-wise", 16, seed=0, facts=FACTS, quantized=True)
    assert not {AS_FP32, NO_NUMBERS} & set(certificate(hides).checks)


def test_numbers_for_nan_that_fp32_gives_too_are_by_design(tmp_path: Path) -> None:
    hides = opened(graph(HIDES_NAN, {"zero": np.array(0, np.float32)}), tmp_path / "hides.onnx")
    found = certify(hides, "position-wise", 16, seed=0, facts=FACTS, quantized=True, fp32=hides)
    assert found.checks[AS_FP32]
    assert NO_NUMBERS not in found.checks


def test_sequences_that_see_only_themselves_are_exact(tmp_path: Path) -> None:
    found = certificate(opened(graph(PER_SEQUENCE, {}, inputs=SEQUENCES), tmp_path / "m.onnx"), "sequence")
    assert found.kind == "exact"
    assert "one long sequence beside many short" in found.checks


@pytest.mark.parametrize(
    "body",
    [
        "ax = Constant <value_ints = [0]> ()\n m = ReduceMean (tokens, ax)\n c = Sub (tokens, m)",  # over the window
        "c = CumSum (tokens, axis)",  # positions counted from the start of the window
    ],
)
def test_sequences_that_ignore_their_borders_are_dependent(tmp_path: Path, body: str) -> None:
    uses = "n = ReduceSum (seq_lens)\n f = Cast <to = 1> (n)\n z = Mul (f, zero)\n out = Add (c, z)"
    arrays: Arrays = {"zero": np.array(0, np.float32), "axis": np.array(0, np.int64)}
    found = certificate(opened(graph(f"{body}\n{uses}", arrays, inputs=SEQUENCES), tmp_path / "m.onnx"), "sequence")
    assert found.kind == "dependent"
    assert not any(found.checks.values())


def test_the_same_seed_gives_the_same_certificate(tmp_path: Path) -> None:
    session = opened(random_ffn(16, 32, 0), tmp_path / "m.onnx")
    assert certificate(session) == certificate(session)


def test_rows_of_an_ffn_permuted_permute_its_outputs(tmp_path: Path) -> None:
    model = random_ffn(64, 256, 4)
    for index, candidate in enumerate((model, quantize_int8(model))):
        check_position_wise(opened(candidate, tmp_path / f"{index}.onnx"), 64, seed=0)


def test_a_row_that_knows_its_place_is_a_counter_example(tmp_path: Path) -> None:
    session = opened(graph("out = CumSum (tokens, axis)", {"axis": np.array(0, np.int64)}), tmp_path / "m.onnx")
    with pytest.raises(ProofError, match=r"not position-wise: 2 rows permuted \(seed 0\): input row 1 moved to 0"):
        check_position_wise(session, 16, seed=0)


def test_it_needs_neither_torch_nor_onnx() -> None:
    code = "import sys, export.certify; assert not {'torch', 'onnx', 'onnx_ir'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("coupled", ["", "tokens", "memory"])
def test_sequences_that_feel_a_neighbours_memory_are_found(tmp_path: Path, coupled: str) -> None:
    path = tmp_path / "recall.onnx"
    onnx.save(memory_mean(4, 6, coupled=coupled), path)
    found = certify(open_session(path, "cpu", 1), "sequence", 4, d_memory=6, seed=0, facts=FACTS)
    assert found.kind == ("dependent" if coupled else "exact")
    assert found.checks["beside sequences with NaN"] is not bool(coupled)
