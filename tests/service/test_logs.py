"""The log's forms, and the ids that its lines carry."""

from __future__ import annotations

import json
import logging
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.logs import _AboutRequest, formatter
from service.request_id import HEADER, current, request_id


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("tokenslab.x", logging.INFO, __file__, 1, message, arguments, None)
    made.__dict__.update(extra)
    assert _AboutRequest().filter(made)
    return made


@given(st.text())
def test_a_json_line_is_one_line_and_says_what_was_logged(text: str) -> None:
    line = formatter("json").format(record("%s", text, request_id="r-1"))
    assert "\n" not in line
    said = json.loads(line)
    assert datetime.fromisoformat(said.pop("timestamp")).tzinfo is not None
    assert said == {"level": "INFO", "logger": "tokenslab.x", "message": text, "request_id": "r-1"}


def test_a_traceback_stays_on_the_line() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
    said = json.loads(formatter("json").format(made))
    assert "ValueError: boom" in said["exc_info"]
    assert "request_id" not in said, "nothing was about a request"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_within_a_request_has_its_id(form: str) -> None:
    token = current.set("abc")
    try:
        assert "abc" in formatter("json" if form == "json" else "text").format(record("hello"))
    finally:
        current.reset(token)


@given(st.binary(max_size=200))
def test_a_clients_id_is_taken_if_it_is_sane_and_harms_no_header_or_log_otherwise(value: bytes) -> None:
    found = request_id([(b"host", b"x"), (HEADER, value)])
    assert found.decode("ascii").isprintable()
    assert 1 <= len(found) <= 128
    assert b" " not in found


def test_ids_that_are_made_differ() -> None:
    assert len({request_id([]) for _ in range(1000)}) == 1000
    assert request_id([(HEADER, b"8b1f-7/a")]) == b"8b1f-7/a"
    assert request_id([(HEADER, b"a\r\nb: c")]) != b"a\r\nb: c"
