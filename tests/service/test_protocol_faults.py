"""The wire: every fault names its field, and nothing is worth more than its bytes."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidInput, RequestError, TooLarge, Unsupported
from service.protocol import Signature, encode
from tests.service.wire_forms import BLOCK, FFN, TOKENS, binary, parts, read, request, tokens_json


def wrong(**change: Any) -> bytes:
    return request(tokens_json(**change))


def seq_lens(**change: Any) -> bytes:
    return request(tokens_json(), {"name": "seq_lens", "datatype": "INT64", "shape": [2], "data": [1, 2]} | change)


FAULTS: list[tuple[Signature, bytes, str]] = [
    (FFN, b"", "JSON: "),
    (FFN, b"{", "JSON: "),
    (FFN, b"[" * 5000, "JSON: "),
    (FFN, b'{"a":' * 5000 + b"1" + b"}" * 5000, "JSON: "),
    (FFN, b"[]", "JSON: found a list, expected an object"),
    (FFN, b"{}", "inputs: found None"),
    (FFN, b'{"inputs": 3}', "inputs: found 3"),
    (FFN, b'{"inputs": [1]}', r"inputs\[0\]: found a number, expected an object"),
    (FFN, request(), "inputs: found"),
    (FFN, request({"name": "seq_lens", "datatype": "INT64", "shape": [0], "data": []}), "'tokens' is missing"),
    (FFN, request(tokens_json(), tokens_json()), "'tokens' appears twice"),
    (FFN, wrong(name="x"), r"inputs\[0\].name: found 'x', expected 'tokens' or 'seq_lens'"),
    (FFN, wrong(name=["tokens"]), r"inputs\[0\].name: found \['tokens'\]"),
    (FFN, wrong(shape=[3, 5]), r"tokens: shape \[3, 5\] has width 5, expected 4"),
    (FFN, wrong(shape=[12]), "rank 1, expected"),
    (FFN, wrong(shape=[1, 1, 3, 4]), "rank 4, expected"),
    (FFN, wrong(shape=[2, 4]), "needs 8|not nested"),
    (FFN, wrong(shape=[-1, 4]), r"shape: found \[-1, 4\]"),
    (FFN, wrong(shape=[3.0, 4]), r"shape: found \[3.0, 4\]"),
    (FFN, wrong(shape=[True, 4]), r"shape: found \[True, 4\]"),
    (FFN, wrong(shape="3,4"), r"shape: found '3,4'"),
    (FFN, wrong(shape=[2**62, 4]), "more than any body can hold"),
    (FFN, wrong(shape=[2**32, 2**32, 4]), "more than any body can hold"),
    (FFN, wrong(datatype="FP64"), "datatype 'FP64', expected 'FP32'"),
    (FFN, wrong(datatype=3), "datatype: found 3"),
    (FFN, wrong(data="abc"), "data is a string, expected a list of numbers"),
    (FFN, wrong(data=["1"] * 12), "data holds a string, expected numbers"),
    (FFN, wrong(data=[1.0] * 11 + ["2"]), "data holds a string, expected numbers"),
    (FFN, wrong(data=[True] * 12), "data holds true or false, expected numbers"),
    (FFN, wrong(data=[None] * 12), "data holds null, expected numbers"),
    (FFN, wrong(data=[[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4]]), "not nested as shape"),
    (FFN, wrong(data=[[1, 2, 3, 4], 5, [1, 2, 3, 4]]), "not nested as shape"),
    (FFN, wrong(data=[[[1]] * 4] * 3), "data holds a list, expected numbers"),
    (FFN, wrong(data=[1] * 11), "11 values, shape .* needs 12"),
    (FFN, wrong(data=[1e39] * 12), "FP32 cannot represent"),
    (FFN, wrong(data=[0] * 11 + [0.5, 1]), "13 values"),
    (FFN, wrong(parameters={"binary_data_size": 4}), "both 'data' and parameters.binary_data_size"),
    (FFN, request({"name": "tokens", "datatype": "FP32", "shape": [3, 4]}), "neither 'data' nor|neither"),
    (FFN, wrong(parameters=[]), r"inputs\[0\].parameters: found a list"),
    (FFN, wrong(parameters={"shared_memory_region": "a"}), "shared memory"),
    (FFN, seq_lens(), "position-wise and takes none"),
    (BLOCK, seq_lens(data=[1, 3]), r"add up to 4, tokens has 3 rows"),
    (BLOCK, seq_lens(data=[4, -1]), r"seq_lens\[0\]: found 4, expected 0 to 3"),
    (BLOCK, seq_lens(data=[-1, 2]), r"seq_lens\[0\]: found -1, expected 0 to 3"),
    (BLOCK, seq_lens(data=[2**62, 2**62]), r"seq_lens\[0\]: found"),
    (BLOCK, seq_lens(data=[2**63, 0]), "beyond INT64"),
    (BLOCK, seq_lens(data=[1.0, 2.0]), "data holds a fraction, expected whole numbers"),
    (BLOCK, seq_lens(shape=[1, 2]), r"rank 2, expected \[sequences\]"),
    (BLOCK, seq_lens(datatype="FP32"), "expected 'INT64' or 'INT32'"),
    (BLOCK, request(tokens_json(), id=7), "id: found a number, expected a string"),
    (FFN, request(tokens_json(), parameters={"timeout": -1}), "parameters.timeout: found -1"),
    (FFN, request(tokens_json(), parameters={"timeout": "1"}), "parameters.timeout: found '1'"),
    (FFN, request(tokens_json(), parameters={"triton_x": 1}), "triton_"),
    (FFN, request(tokens_json(), parameters={"priority": -1}), "parameters.priority: found -1"),
    (FFN, request(tokens_json(), parameters={"priority": True}), "parameters.priority: found True"),
    (FFN, request(tokens_json(), parameters={"isolate": 1}), "parameters.isolate: found 1"),
    (FFN, request(tokens_json(), parameters={"sequence_id": 2}), "sequence"),
    (FFN, request(tokens_json(), parameters={"binary_data_output": "yes"}), "binary_data_output: found 'yes'"),
    (FFN, request(tokens_json(), outputs=[{"name": "y"}]), r"outputs\[0\].name: found 'y', expected 'out'"),
    (FFN, request(tokens_json(), outputs=[{"name": "out"}] * 2), "outputs: 2 entries"),
    (FFN, request(tokens_json(), outputs={}), "outputs: found an object"),
    (FFN, request(tokens_json(), outputs=[{"name": "out", "parameters": {"classification": 3}}]), "classification"),
]


@pytest.mark.parametrize(
    ("signature", "body", "message"), FAULTS, ids=[f"{i}-{m[:40]}" for i, (_, _, m) in enumerate(FAULTS)]
)
def test_a_fault_names_its_field(signature: Signature, body: bytes, message: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=message):
        read(body, signature)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [900, 990, 1000, 1010, 1020])
@pytest.mark.parametrize("field", ["name", "shape", "datatype", "data", "inputs", "outputs", "id", "parameters"])
def test_deep_json_is_a_fault_in_every_field(depth: int, field: str) -> None:
    deep = b"[" * depth + b"1" + b"]" * depth
    if field in ("inputs", "outputs", "id", "parameters"):
        body = request(tokens_json(), **{field: 7}).replace(f'"{field}": 7'.encode(), f'"{field}": '.encode() + deep)
        body = body if field != "inputs" else b'{"inputs": ' + deep + b"}"
    else:
        body = request(tokens_json(**{field: 7})).replace(f'"{field}": 7'.encode(), f'"{field}": '.encode() + deep)
    with pytest.raises(InvalidInput):
        read(body)


@pytest.mark.parametrize("shape", [[0, 2**26, 4], [0, 2**33, 4], [2**62, 0, 4], [0, 2**62, 4], [0, 2**63, 4]])
@pytest.mark.parametrize("padded", [True, False])
def test_an_empty_batch_costs_nothing_however_long_it_says_it_is(shape: list[int], padded: bool) -> None:
    inputs = [{"name": "tokens", "datatype": "FP32", "shape": shape, "data": []}]
    if padded:
        inputs.append({"name": "seq_lens", "datatype": "INT64", "shape": [0], "data": []})
    tracemalloc.start()
    for signature in (FFN, BLOCK):
        with suppress(InvalidInput, TooLarge):
            got = read(request(*inputs, parameters={"binary_data_output": True}), signature)
            reply, _ = parts(encode(signature, got, np.empty((0, 4), np.float32)))
            assert reply["outputs"][0]["shape"] == shape
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_an_answer_too_large_for_json_is_refused_before_it_is_computed() -> None:
    head = request(
        {"name": "tokens", "datatype": "FP32", "shape": [30_000, 4], "parameters": {"binary_data_size": 480_000}}
    )
    with pytest.raises(TooLarge, match="ask for binary_data_output"):
        read(head + bytes(480_000), header=str(len(head)).encode())


def test_a_known_head_is_bound_to_each_bodys_own_bytes() -> None:
    for tokens in (TOKENS, TOKENS + 1, TOKENS[::-1].copy()):
        body, header = binary(tokens)
        np.testing.assert_array_equal(read(body, header=header).tokens, tokens)
        with pytest.raises(InvalidInput, match="binary_data_size"):
            read(body[:-1], header=header)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body, n: (body[:-1], n), "binary_data_size 48, but only 47 bytes follow the JSON"),
        (lambda body, n: (body + b"\0", n), "1 bytes after the last tensor"),
        (lambda body, n: (body, str(len(body) + 1).encode()), "Inference-Header-Content-Length"),
        (lambda body, n: (body, b"-1"), "Inference-Header-Content-Length: found"),
        (lambda body, n: (body, b"9" * 30), "Inference-Header-Content-Length: found"),
        (lambda body, n: (body, b"\xb2"), "Inference-Header-Content-Length: found"),
        (lambda body, n: (body, b""), "Inference-Header-Content-Length: found"),
        (lambda body, n: (body, str(int(n) - 1).encode()), "JSON: "),
    ],
)
def test_binary_sizes_must_agree_with_the_body(change: Any, message: str) -> None:
    body, header = change(*binary())
    with pytest.raises(InvalidInput, match=message):
        read(body, header=header)


def test_a_binary_size_that_contradicts_the_shape_is_refused() -> None:
    body, header = binary()
    with pytest.raises(InvalidInput, match=r"binary_data_size 48, shape \[2, 4\] of FP32 needs 32 bytes"):
        read(body.replace(b"[3, 4]", b"[2, 4]"), header=header)


def test_json_over_its_own_limit_is_too_large() -> None:
    with pytest.raises(TooLarge, match="max_json_mib"):
        read(request(tokens_json()), max_json=50)


@given(st.binary(max_size=300), st.none() | st.integers(0, 320).map(lambda n: str(n).encode()))
def test_any_bytes_are_decoded_or_refused(body: bytes, header: bytes | None) -> None:
    for signature in (FFN, BLOCK):
        with suppress(RequestError):
            assert read(body, signature, header).tokens.shape[1] == 4


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
keys = st.sampled_from(["name", "datatype", "shape", "data", "parameters"])
entries = st.dictionaries(
    keys, json_values | st.sampled_from(["tokens", "seq_lens", "FP32", "INT64", [1, 4], [0.5] * 4, [1]]), max_size=5
)
documents = st.fixed_dictionaries(
    {"inputs": st.lists(entries, max_size=3) | json_values},
    optional={"parameters": json_values, "outputs": json_values, "id": json_values},
)


@given(documents)
def test_any_json_document_is_decoded_or_refused(document: dict[str, Any]) -> None:
    with suppress(RequestError):
        assert read(json.dumps(document).encode(), BLOCK).tokens.shape[1] == 4
