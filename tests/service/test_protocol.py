"""The wire: every form of a request becomes the same arrays, and an answer comes back in kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidInput
from service.protocol import encode
from tests.service.wire_forms import BLOCK, FFN, TOKENS, binary, parts, read, request, tokens_json


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
