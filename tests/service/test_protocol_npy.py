"""The wire in npy: what comes is decoded or refused, whatever its header says."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidInput
from service.protocol import decode_npy, encode_npy
from tests.service.wire_forms import BLOCK, FFN, TOKENS


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


def test_a_header_that_is_no_literal_tells_no_address_of_ours() -> None:
    with pytest.raises(InvalidInput, match="not a readable header") as raised:
        decode_npy(BLOCK, npy_header("'<f4'", "False", "(f(), 4)"), None)
    assert "0x" not in str(raised.value)


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
