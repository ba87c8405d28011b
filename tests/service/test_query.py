"""The query of bodies without a JSON part, as the head of a request reads it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.asgi import JSON
from service.errors import InvalidInput
from service.head import NPY, OCTETS, InferHead
from service.protocol import Decoded, Signature

SIGNATURE = Signature("ffn", "1", 4, 4, has_sequences=False)
X = np.ones((3, 4), np.float32)


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, X)
    return file.getvalue()


FORMS = {"npy": ([(b"content-type", NPY)], npy()), "raw": ([(b"inference-header-content-length", b"0")], X.tobytes())}


def decoded(form: str, query: bytes) -> Decoded:
    headers, body = FORMS[form]
    return InferHead("POST", headers, query).decode(SIGNATURE, memoryview(body), 1 << 20)


@pytest.mark.parametrize("form", FORMS)
@given(timeout=st.integers(0, 10**12), priority=st.integers(0, 20), isolate=st.booleans())
def test_a_body_without_json_has_its_parameters_in_the_query(
    form: str, timeout: int, priority: int, isolate: bool
) -> None:
    query = f"timeout={timeout}&isolate={str(isolate).lower()}&priority={priority}&other=1".encode()
    got = decoded(form, query)
    assert (got.timeout_s or 0.0, got.priority, got.isolate) == (timeout / 1e6, priority, isolate)
    np.testing.assert_array_equal(got.tokens, X)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "query",
    ["priority=-1", "priority=", "timeout=1.5", "timeout=" + "9" * 19, "isolate=1", "priority=1&priority=2", "isolate"],
)
def test_a_parameter_that_is_none_is_named(form: str, query: str) -> None:
    with pytest.raises(InvalidInput, match=query.partition("=")[0]):
        decoded(form, query.encode())


@pytest.mark.parametrize("query", ["priority=1", "timeout=5", "isolate=true", "seq_lens=1,2"])
@pytest.mark.parametrize(
    "headers",
    [[(b"content-type", JSON)], [], [(b"content-type", OCTETS), (b"inference-header-content-length", b"70")]],
    ids=["json", "default", "binary"],
)
def test_beside_json_a_parameter_in_the_query_is_refused_and_not_ignored(headers: Any, query: str) -> None:
    with pytest.raises(InvalidInput, match=query.partition("=")[0]):
        InferHead("POST", headers, query.encode())
    InferHead("POST", headers, b"trace=1")


def test_a_raw_body_is_one_sequence() -> None:
    with pytest.raises(InvalidInput, match="seq_lens"):
        decoded("raw", b"seq_lens=1,2")
