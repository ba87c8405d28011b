"""The count of lost requests, tried against small servers that stop well and badly."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import numpy as np
import pytest

from deploy.docker_test.answers import Question, WrongAnswer, judge
from deploy.docker_test.stop_under_load import SLOW, StopUnderLoad, Tally

DRAIN_DELAY_S = 0.4
RIGHT = b"the right answer"
QUESTION = Question("m", 2, b"{}" + bytes(64), np.zeros((1, 16), np.float32))


class TinyServer:
    """Answers every POST; on `stop` it says `Connection: close`, and closes its listener after `delay_s`."""

    def __init__(self, delay_s: float, answer: bytes = RIGHT, *, cuts_connections: bool = False) -> None:
        self._delay_s = delay_s
        self._answer = answer
        self._cuts_connections = cuts_connections
        self._stopping = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> int:
        self._loop = asyncio.get_running_loop()
        # By hand: a connection that asyncio accepts just before it is told to close is never served nor closed.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        port: int = self._listener.getsockname()[1]
        return port

    def stop(self) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._begin_stop)

    async def join(self) -> None:
        """Wait until every connection has ended."""
        await asyncio.gather(*self._tasks)

    def _begin_stop(self) -> None:
        self._stopping = True
        self._loop.call_later(self._delay_s, self._close)

    def _close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._cuts_connections:
            for writer in self._writers:
                writer.transport.abort()

    def _accept(self) -> None:
        with suppress(BlockingIOError):  # no more of them
            while True:
                accepted, _ = self._listener.accept()
                self._tasks.add(self._loop.create_task(self._serve(accepted)))

    async def _serve(self, accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted)
        self._writers.add(writer)
        try:
            while await self._answer_one(reader, writer):
                pass
        except (OSError, EOFError):
            return  # the client has gone, or `_close` cut it off
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(QUESTION.body))
        closing = self._stopping
        connection = "close" if closing else "keep-alive"
        length = len(self._answer)
        writer.write(f"HTTP/1.1 200 OK\r\nConnection: {connection}\r\nContent-Length: {length}\r\n\r\n".encode())
        writer.write(self._answer)
        await writer.drain()
        return not closing


def trial(server: TinyServer) -> Tally:
    async def run() -> Tally:
        port = server.start()
        tally = await StopUnderLoad(port, [(QUESTION, RIGHT)], DRAIN_DELAY_S).run(server.stop)
        await server.join()
        return tally

    return asyncio.run(run())


def test_a_server_that_drains_loses_nothing_and_answers_bodies_completed_after_its_listener_closed() -> None:
    tally = trial(TinyServer(DRAIN_DELAY_S))
    assert tally.lost == []
    assert tally.slow_answered == SLOW
    assert tally.answered_after_stop > SLOW
    assert tally.turned_away > 0
    assert tally.accepted == tally.answered


def test_a_listener_that_closes_before_the_drain_delay_is_over_counts_as_loss() -> None:
    assert trial(TinyServer(0.0)).lost


def test_requests_whose_connection_is_cut_are_lost() -> None:
    tally = trial(TinyServer(DRAIN_DELAY_S, cuts_connections=True))
    assert len(tally.lost) >= SLOW
    assert tally.slow_answered == 0


def test_an_answer_with_other_bytes_is_lost() -> None:
    tally = trial(TinyServer(DRAIN_DELAY_S, answer=b"another one"))
    assert tally.answered == 0
    assert "another one" in tally.lost[0]


def answer_of(out: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> tuple[bytes, bytes]:
    shape = list(out.shape)
    return f'{{"outputs": [{{"name": "out", "shape": {shape}}}]}}'.encode(), out.tobytes()


def test_judge_tells_the_same_bits_from_close_ones_and_refuses_others() -> None:
    right = np.random.default_rng().standard_normal((3, 8), dtype=np.float32)
    question = Question("m", 0, b"", right)
    assert judge(question, *answer_of(right)) == "bit-equal"
    assert judge(question, *answer_of(np.nextafter(right, np.float32(9)))).startswith("close")
    for wrong in (right[::-1].copy(), right * np.float32(1.001), np.full_like(right, np.nan), right[:2]):
        with pytest.raises(WrongAnswer):
            judge(question, *answer_of(wrong))
