"""The wire: every form of a request becomes the same arrays, and every fault names its field."""

from __future__ import annotations

import io
import json
import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidInput, RequestError, TooLarge, Unsupported
from service.protocol import Decoded, Signature, decode, decode_npy, encode, encode_npy

FFN = Signature("ffn", "3", 4, 4, has_sequences=False)
BLOCK = Signature("block", "1", 4, 4, has_sequences=True)
MIB = 1 << 20

TOKENS = np.arange(12, dtype=np.float32).reshape(3, 4) / np.float32(8)


def request(*inputs: dict[str, Any], **rest: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **rest}).encode()


def tokens_json(tokens: Any = TOKENS, **change: Any) -> dict[str, Any]:
    return {
        "name": "tokens",
        "datatype": "FP32",
        "shape": list(np.shape(tokens)),
        "data": np.asarray(tokens).tolist(),
        **change,
    }


def binary(tokens: np.ndarray[Any, Any] = TOKENS, lens: np.ndarray[Any, Any] | None = None) -> tuple[bytes, bytes]:
    """-> body, header length."""
    inputs = [
        {
            "name": "tokens",
            "datatype": "FP32",
            "shape": list(tokens.shape),
            "parameters": {"binary_data_size": tokens.nbytes},
        }
    ]
    tail = tokens.tobytes()
    if lens is not None:
        kind = {8: "INT64", 4: "INT32"}[lens.dtype.itemsize]
        inputs.append(
            {
                "name": "seq_lens",
                "datatype": kind,
                "shape": list(lens.shape),
                "parameters": {"binary_data_size": lens.nbytes},
            }
        )
        tail += lens.tobytes()
    head = request(*inputs, parameters={"binary_data_output": True})
    return head + tail, str(len(head)).encode()


def read(body: bytes, signature: Signature = FFN, header: bytes | None = None, max_json: int = MIB) -> Decoded:
    return decode(signature, memoryview(body), header, max_json)


def parts(value: tuple[int | None, list[Any]]) -> tuple[dict[str, Any], bytes]:
    length, chunks = value
    body = b"".join(chunks)
    return json.loads(body[:length]), body[length:] if length is not None else b""


@pytest.mark.parametrize("nested", [True, False])
def test_json_data_may_be_nested_or_flat(nested: bool) -> None:
    data = TOKENS.tolist() if nested else TOKENS.ravel().tolist()
    got = read(request(tokens_json(data=data)))
    np.testing.assert_array_equal(got.tokens, TOKENS)
    assert not got.binary


def test_binary_tokens_are_viewed_and_not_copied() -> None:
    body, header = binary()
    got = read(body, header=header)
    np.testing.assert_array_equal(got.tokens, TOKENS)
    assert not got.tokens.flags.owndata
    assert got.binary


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_sequence_lengths_travel_in_either_width(dtype: Any) -> None:
    body, header = binary(lens=np.array([1, 2], dtype))
    got = read(body, BLOCK, header)
    assert got.seq_lens is not None
    assert got.seq_lens.tolist() == [1, 2]
    assert got.seq_lens.dtype == np.int64


def test_a_block_without_lengths_takes_its_tokens_for_one_sequence() -> None:
    got = read(request(tokens_json()), BLOCK)
    assert got.seq_lens is not None
    assert got.seq_lens.tolist() == [3]


def test_sequences_of_no_tokens_vanish_and_no_tokens_at_all_are_answered_with_none() -> None:
    lens = {"name": "seq_lens", "datatype": "INT64", "shape": [4], "data": [0, 3, 0, 0]}
    got = read(request(tokens_json(), lens), BLOCK)
    assert got.seq_lens is not None
    assert got.seq_lens.tolist() == [3]
    empty = read(request(tokens_json(np.zeros((0, 4)))), BLOCK)
    assert empty.seq_lens is not None
    assert (len(empty.tokens), len(empty.seq_lens)) == (0, 0)
    reply, _ = parts(encode(BLOCK, empty, np.empty((0, 4), np.float32)))
    assert reply["outputs"] == [{"name": "out", "datatype": "FP32", "shape": [0, 4], "data": []}]


def test_a_zero_header_length_means_the_body_is_tokens_alone() -> None:
    got = read(TOKENS.tobytes(), header=b"0")
    np.testing.assert_array_equal(got.tokens, TOKENS)
    assert got.binary


def test_a_header_length_of_the_whole_body_is_plain_json() -> None:
    body = request(tokens_json(), id="")
    got = read(body, header=str(len(body)).encode())
    np.testing.assert_array_equal(got.tokens, TOKENS)
    assert got.id == ""


def test_the_id_comes_back_and_the_version_is_a_string() -> None:
    got = read(request(tokens_json(), id="a7"))
    reply, _ = parts(encode(FFN, got, TOKENS))
    assert (reply["id"], reply["model_name"], reply["model_version"]) == ("a7", "ffn", "3")
    assert "parameters" not in reply["outputs"][0], "the C++ client takes any for a sign of binary data"
    np.testing.assert_array_equal(np.float32(reply["outputs"][0]["data"]).reshape(3, 4), TOKENS)


@pytest.mark.parametrize(
    ("whole", "own", "wanted"), [(True, None, True), (True, False, False), (False, True, True), (None, None, False)]
)
def test_an_outputs_own_choice_of_binary_wins(whole: bool | None, own: bool | None, wanted: bool) -> None:
    output: dict[str, Any] = {"name": "out"}
    if own is not None:
        output["parameters"] = {"binary_data": own}
    parameters = {} if whole is None else {"binary_data_output": whole}
    got = read(request(tokens_json(), parameters=parameters, outputs=[output]))
    reply, tail = parts(encode(FFN, got, TOKENS))
    assert got.binary == wanted
    assert tail == (TOKENS.tobytes() if wanted else b"")
    assert ("data" in reply["outputs"][0]) is not wanted


@given(st.integers(0, 4), st.integers(0, 5), st.data())
def test_a_padded_batch_comes_back_in_kind_with_zeros_for_padding(batch: int, seq: int, data: st.DataObject) -> None:
    lens = np.array(data.draw(st.lists(st.integers(0, seq), min_size=batch, max_size=batch)), np.int64)
    tokens = np.random.default_rng(0).standard_normal((batch, seq, 4), dtype=np.float32)
    body, header = binary(tokens, lens)
    for signature in (FFN, BLOCK):
        got = read(body, signature, header)
        assert got.tokens.shape == (lens.sum(), 4)
        if signature is BLOCK:
            assert got.seq_lens is not None
            assert got.seq_lens.tolist() == [n for n in lens.tolist() if n]
        reply, tail = parts(encode(signature, got, got.tokens * 2))
        assert reply["outputs"][0]["shape"] == [batch, seq, 4]
        out = np.frombuffer(tail, "<f4").reshape(batch, seq, 4)
        for row, original, n in zip(out, tokens, lens, strict=True):
            np.testing.assert_array_equal(row[:n], 2 * original[:n])
            assert not row[n:].any()


def test_a_batch_without_lengths_is_full() -> None:
    body, header = binary(np.zeros((2, 3, 4), np.float32))
    got = read(body, BLOCK, header)
    assert got.seq_lens is not None
    assert got.seq_lens.tolist() == [3, 3]


def test_a_request_may_name_its_priority_and_ask_to_run_alone() -> None:
    plain, urgent = read(request(tokens_json())), read(request(tokens_json(), parameters={"priority": 1}))
    assert (plain.priority, plain.isolate, urgent.priority) == (0, False, 1)
    assert read(request(tokens_json(), parameters={"isolate": True})).isolate


def test_the_timeout_is_in_microseconds() -> None:
    assert read(request(tokens_json(), parameters={"timeout": 2500})).timeout_s == 0.0025
    assert read(request(tokens_json(), parameters={"timeout": 0})).timeout_s is None


def test_nan_and_inf_travel_as_binary_and_are_an_error_in_json() -> None:
    out = np.array([[1, np.nan, np.inf, -np.inf]], np.float32)
    body, header = binary(out)
    got = read(body, header=header)
    _, tail = parts(encode(FFN, got, got.tokens))
    assert tail == out.tobytes()
    with pytest.raises(InvalidInput, match="binary"):
        encode(FFN, read(request(tokens_json())), out)


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


def npy(array: np.ndarray[Any, Any]) -> memoryview:
    file = io.BytesIO()
    np.save(file, array)
    return memoryview(file.getvalue())


def test_npy_goes_in_and_comes_out() -> None:
    got = decode_npy(FFN, npy(TOKENS), None)
    np.testing.assert_array_equal(got.tokens, TOKENS)
    back = np.load(io.BytesIO(b"".join(encode_npy(got, TOKENS * 2))))
    np.testing.assert_array_equal(back, TOKENS * 2)
    ragged = decode_npy(BLOCK, npy(TOKENS), "1,2")
    assert ragged.seq_lens is not None
    assert ragged.seq_lens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("body", "lens", "message"),
    [
        (memoryview(b""), None, "npy: not a readable header"),
        (memoryview(b"\x93NUMPY\x09\x00" + bytes(80)), None, "npy: not a readable header"),
        (npy(TOKENS.astype(np.float64)), None, "dtype <f8, expected <f4"),
        (npy(TOKENS.astype(">f4")), None, "dtype >f4, expected <f4"),
        (npy(np.asfortranarray(TOKENS)), None, "Fortran order"),
        (npy(TOKENS)[:-1], None, "47 bytes of data"),
        (npy(TOKENS[:, :3]), None, "width 3, expected 4"),
        (npy(TOKENS), "1,x", "seq_lens: found '1,x'"),
        (npy(TOKENS), "9" * 30, "seq_lens: found"),
        (npy(np.array([{}], object)), None, r"dtype \|O, expected <f4"),
    ],
)
def test_an_npy_fault_names_its_field(body: memoryview, lens: str | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        decode_npy(BLOCK, body, lens)


def npy_header(descr: str, fortran: str, shape: str) -> memoryview:
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode().ljust(118) + b"\n"
    return memoryview(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


@given(
    st.sampled_from(["'<f4'", "'<f8'", "()", "('<f4',)", "[]", "{[]: 1}", "'O'", "\0", "'<f4'*9"]),
    st.sampled_from(["False", "True", "0", "None"]),
    st.sampled_from(
        [
            "(0,4)",
            f"(0x{'f' * 3900},4)",
            f"(-0x{'f' * 3900},4)",
            "(-1,-1,4)",
            "(-2,-2,4)",
            "(0,-5,4)",
            "(True,4)",
            "(0,10**30,4)",
            "(0," + str(10**30) + ",4)",
            "(0,4,4)",
        ]
    )
    | st.lists(st.integers(-2, 2**70), max_size=10).map(lambda dims: str(tuple(dims))),
)
def test_any_npy_header_is_decoded_or_refused(descr: str, fortran: str, shape: str) -> None:
    with suppress(InvalidInput):
        assert decode_npy(FFN, npy_header(descr, fortran, shape), None).tokens.shape[1] == 4


@given(st.binary(max_size=200).map(lambda tail: b"\x93NUMPY\x01\x00" + tail) | st.binary(max_size=200))
def test_any_npy_bytes_are_decoded_or_refused(body: bytes) -> None:
    with suppress(InvalidInput):
        assert decode_npy(FFN, memoryview(body), None).tokens.shape[1] == 4
