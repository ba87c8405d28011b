"""Large JSON in another process: the same arrays and faults, a loop that stays free, and a process that may die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import DeadlineExceeded, DecoderLost, InvalidInput, RequestError, TooLarge
from service.json_decoder import JsonDecoder
from service.protocol import Decoded, Signature, decode, encode, encode_json

SIGNATURE = Signature("m", "1", 4, 4, has_sequences=True)
MOST = 1 << 23


def text(rows: int, **more: Any) -> bytes:
    tokens = np.random.default_rng().standard_normal((rows, 4), dtype=np.float32)
    entry = {"name": "tokens", "datatype": "FP32", "shape": [rows, 4], "data": tokens}
    return orjson.dumps({"inputs": [entry], "id": "q", **more}, option=orjson.OPT_SERIALIZE_NUMPY)


async def outcome(decoder: JsonDecoder, body: bytes, most: int = MOST) -> Decoded | RequestError:
    try:
        return await decoder.decode(SIGNATURE, memoryview(body), None, most)
    except RequestError as error:
        return error


def test_it_decodes_and_refuses_as_it_is_done_here() -> None:
    faults = [
        b"{",
        b"[" * 100_000,
        b'{"inputs": 1}',
        text(3, parameters={"timeout": -1}),
        text(3).replace(b"FP32", b"x"),
    ]

    async def run() -> None:
        decoder = JsonDecoder(20.0)
        for rows in (1, 7, 5000):
            body = text(rows, parameters={"timeout": 5_000_000})
            got, wanted = await outcome(decoder, body), decode(SIGNATURE, memoryview(body), None, MOST)
            assert isinstance(got, Decoded)
            np.testing.assert_array_equal(got.tokens, wanted.tokens)
            np.testing.assert_array_equal(got.seq_lens, wanted.seq_lens)
            assert (got.id, got.binary, got.timeout_s) == ("q", False, 5.0)
        for body in faults:
            with pytest.raises(InvalidInput) as wanted_fault:
                decode(SIGNATURE, memoryview(body), None, MOST)
            got = await outcome(decoder, body)
            assert (type(got), str(got)) == (InvalidInput, str(wanted_fault.value))
        assert isinstance(await outcome(decoder, text(100), most=10), TooLarge)
        await decoder.close()

    asyncio.run(run())


def test_the_event_loops_thread_spends_no_20_ms_on_4_mib_of_the_worst_text() -> None:
    async def run() -> None:
        decoder = JsonDecoder(60.0)
        await outcome(decoder, text(1))
        body = b"[" + b",".join([b"[]"] * (4 << 20 >> 1)) + b"]"
        began = time.thread_time()
        assert isinstance(await outcome(decoder, body), InvalidInput)
        assert time.thread_time() - began < 0.02
        await decoder.close()

    asyncio.run(run())


def test_a_process_that_was_killed_is_replaced_and_nobody_notices() -> None:
    async def run() -> None:
        decoder = JsonDecoder(20.0)
        for _ in range(2):
            assert isinstance(await outcome(decoder, text(2)), Decoded)
            assert decoder.pid is not None
            os.kill(decoder.pid, signal.SIGKILL)
        assert isinstance(await outcome(decoder, text(2)), Decoded)
        await decoder.close()
        await decoder.close()  # again: harmless

    asyncio.run(run())


def script(folder: Path, line: str) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("line", "fault"), [("exit 1", DecoderLost), ("exec sleep 60", DeadlineExceeded)], ids=["dies", "hangs"]
)
def test_a_process_that_dies_again_or_hangs_is_a_fault_of_that_request(
    line: str, fault: type[RequestError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        decoder = JsonDecoder(0.5 if fault is DeadlineExceeded else 20.0)
        with monkeypatch.context() as patch:
            patch.setattr("service.json_decoder.sys.executable", script(tmp_path, line))
            assert type(await outcome(decoder, text(2))) is fault
            assert decoder.pid is None
        await decoder.close()

    asyncio.run(run())


@given(st.integers(0, 40), st.integers(1, 50), st.none() | st.text())
def test_json_in_pieces_is_the_json_in_one(rows: int, values: int, id_: str | None) -> None:
    out = np.random.default_rng().standard_normal((rows, 4), dtype=np.float32)
    request = Decoded(out, None, id=id_)
    _, whole = encode(SIGNATURE, request, out)
    assert b"".join(encode_json(SIGNATURE, request, out, values)) == b"".join(whole)
    reply = orjson.loads(b"".join(whole))
    assert reply.get("id") == id_
    np.testing.assert_array_equal(np.float32(reply["outputs"][0]["data"]), out.ravel())
