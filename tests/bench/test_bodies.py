from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.bodies import JSON_LENGTH, Body, infer_body, random_tokens, read_answer, write_bodies
from service.protocol import Decoded, Signature, decode, encode

MAX_JSON = 1 << 20


def service_reads(body: Body, signature: Signature) -> Decoded:
    return decode(signature, memoryview(body.content), body.headers[JSON_LENGTH].encode(), MAX_JSON)


@given(rows=st.integers(1, 40), d=st.integers(1, 20), seed=st.integers(0, 1 << 32))
def test_the_service_reads_the_tokens_that_were_written(rows: int, d: int, seed: int) -> None:
    tokens = random_tokens(rows, d, seed)
    body = infer_body(tokens)
    read = service_reads(body, Signature("m", "1", d, d, has_sequences=False))
    assert body.tokens == rows
    assert read.binary
    assert read.seq_lens is None
    np.testing.assert_array_equal(read.tokens, tokens)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_the_service_reads_the_sequence_lengths_that_were_written(lengths: list[int]) -> None:
    tokens = random_tokens(sum(lengths), 3, seed=0)
    read = service_reads(infer_body(tokens, np.array(lengths)), Signature("m", "1", 3, 3, has_sequences=True))
    assert read.seq_lens is not None
    assert read.seq_lens.tolist() == lengths
    np.testing.assert_array_equal(read.tokens, tokens)


@given(rows=st.integers(1, 40), d=st.integers(1, 20), seed=st.integers(0, 1 << 32))
def test_what_the_service_writes_is_read_back_bit_for_bit(rows: int, d: int, seed: int) -> None:
    signature = Signature("m", "1", 4, d, has_sequences=False)
    request = service_reads(infer_body(random_tokens(rows, 4, seed)), signature)
    out = random_tokens(rows, d, seed + 1)
    out[0, 0] = np.nan  # travels in binary
    length, parts = encode(signature, request, out)
    answer = read_answer({JSON_LENGTH: str(length)}, b"".join(parts))
    assert answer.shape == out.shape
    assert answer.tobytes() == out.tobytes()


def test_a_json_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=JSON_LENGTH):
        read_answer({}, b'{"error": "no"}')


def test_an_answer_of_another_output_is_refused() -> None:
    head = b'{"outputs": [{"name": "hidden", "datatype": "FP32", "shape": [1, 1]}]}'
    with pytest.raises(ValueError, match="hidden"):
        read_answer({JSON_LENGTH: str(len(head))}, head + bytes(4))


def test_seeds_make_the_tokens() -> None:
    assert (random_tokens(3, 4, 1) == random_tokens(3, 4, 1)).all()
    assert not (random_tokens(3, 4, 1) == random_tokens(3, 4, 2)).any()


def test_bodies_on_disk_hold_the_same_bytes_and_headers(tmp_path: Path) -> None:
    bodies = [infer_body(random_tokens(rows, 4, rows)) for rows in (1, 5)]
    write_bodies(bodies, tmp_path / "bodies")
    for i, body in enumerate(bodies):
        assert (tmp_path / f"bodies/{i}.body").read_bytes() == body.content
        lines = (tmp_path / f"bodies/{i}.headers").read_text().splitlines()
        assert dict(line.split(": ") for line in lines) == body.headers
