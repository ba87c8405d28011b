"""`docker stop` while clients send: every request that the service accepted gets its right answer.

Busy clients keep connections alive and reconnect where an answer says `Connection: close`; slow clients have half a
body on the way when the stop comes and send the rest after the listener has closed.

A request is lost if its whole body left and no right answer came, with one exception: a fresh connection, opened no
more than `MARGIN_S` before the listener was due to close, that ends without a byte. Docker's proxy and the kernel's
backlog complete such connections in the place of a listener that is gone, so the service never had the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice

from deploy.docker_test.answers import Question
from deploy.docker_test.http11 import Connection, Reply, Turned, head

BUSY, SLOW = 16, 4  # clients
ANSWERS_BEFORE_STOP = 400
MARGIN_S = 0.1
LIMIT_S = 60.0  # for the whole trial


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    answered: int = 0  # 200 with the right bytes
    answered_after_stop: int = 0
    slow_answered: int = 0  # of which the second half of the body left after the listener had closed
    turned_away: int = 0  # met a closed listener
    lost: list[str] = field(default_factory=list)  # what happened to each

    @property
    def accepted(self) -> int:
        """Requests that the service had in full."""
        return self.answered + len(self.lost)


def infer_head(question: Question) -> bytes:
    """The request line and headers for a question."""
    return head(
        "POST",
        f"/v2/models/{question.model}/infer",
        len(question.body),
        Content_Type="application/octet-stream",
        Inference_Header_Content_Length=str(question.json_length),
    )


class StopUnderLoad:
    """One trial: `asked` is each question with the exact body of its answer; `drain_delay_s` the service's own."""

    def __init__(self, port: int, asked: list[tuple[Question, bytes]], drain_delay_s: float) -> None:
        self._port = port
        self._asked = asked
        self._drain_delay_s = drain_delay_s
        self._tally = Tally()
        self._stopped_at: float | None = None
        self._busy = asyncio.Event()
        self._listener_gone = asyncio.Event()

    async def run(self, stop: Callable[[], object]) -> Tally:
        """Load the service, call `stop` in a thread once it is busy, and return when every client has ended."""
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as clients:
            for index in range(BUSY):
                clients.create_task(self._busy_client(index))
            await self._busy.wait()
            for index in range(SLOW):
                clients.create_task(self._slow_client(index))
            self._stopped_at = asyncio.get_running_loop().time()
            await asyncio.to_thread(stop)
        return self._tally

    async def _busy_client(self, index: int) -> None:
        """Ask one question after another until there is no answer any more."""
        connection: Connection | None = None
        for question, right in islice(cycle(self._asked), index, None):
            opened = asyncio.get_running_loop().time()
            connection = connection or await self._connect(opened)
            if connection is None:
                return
            reply = await self._ask(connection, opened, question, right)
            if reply is None:
                return
            if reply.closes:
                await connection.close()
                connection = None

    async def _slow_client(self, index: int) -> None:
        """Ask one question whose body is complete only after the listener has closed."""
        question, right = self._asked[index % len(self._asked)]
        opened = asyncio.get_running_loop().time()
        connection = await self._connect(opened)
        if connection is not None:
            reply = await self._ask(connection, opened, question, right, late=self._listener_gone)
            self._tally.slow_answered += reply is not None and _is_right(reply, right)
            await connection.close()

    async def _connect(self, opened: float) -> Connection | None:
        try:
            return await Connection.open(self._port)
        except OSError as refused:
            if self._may_have_met_no_listener(opened):
                self._turned_away()
            else:
                self._lost(f"connection refused while the listener should be open: {refused}")
            return None

    async def _ask(
        self, connection: Connection, opened: float, question: Question, right: bytes, late: asyncio.Event | None = None
    ) -> Reply | None:
        """The answer, counted; None where there was none and the connection is closed."""
        try:
            reply = await connection.exchange(infer_head(question), question.body, late)
        except Turned as turned:
            if connection.used or turned.heard or not self._may_have_met_no_listener(opened):
                self._lost(f"{question.model}: {turned} (sent: {turned.sent}, heard: {turned.heard})")
            else:
                self._turned_away()
            await connection.close()
            return None
        if _is_right(reply, right):
            self._tally.answered += 1
            self._tally.answered_after_stop += self._stopped_at is not None
            if self._tally.answered >= ANSWERS_BEFORE_STOP:
                self._busy.set()
        else:
            self._lost(f"{question.model}: status {reply.status}, {reply.body[:200]!r}")
        return reply

    def _may_have_met_no_listener(self, opened: float) -> bool:
        return self._stopped_at is not None and opened >= self._stopped_at + self._drain_delay_s - MARGIN_S

    def _lost(self, what: str) -> None:
        self._tally.lost.append(what)
        self._busy.set()  # no reason to wait for more
        self._listener_gone.set()

    def _turned_away(self) -> None:
        self._tally.turned_away += 1
        self._listener_gone.set()


def _is_right(reply: Reply, right: bytes) -> bool:
    return reply.status == 200 and reply.body == right
