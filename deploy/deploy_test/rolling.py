"""Clients that never stop asking, while replicas behind a proxy are restarted and killed. Knows no Docker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import cycle, islice

from deploy.docker_test.answers import Question
from deploy.docker_test.http11 import Connection, Turned
from deploy.docker_test.stop_under_load import infer_head

CLIENTS = 8
ANSWERS_BETWEEN = 200  # of all clients, between two things that are done to the replicas
LIMIT_S = 180.0


@dataclass(slots=True)
class Seen:
    """What the clients saw."""

    answered: int = 0
    lost: list[str] = field(default_factory=list)  # everything that was not the right answer, in words


class Clients:
    """`CLIENTS` connections to `port`, each with one request at a time; `asked` has the exact body of every answer."""

    def __init__(self, port: int, asked: list[tuple[Question, bytes]]) -> None:
        self._port = port
        self._asked = asked
        self._stopped = False
        self._answer = asyncio.Event()
        self.seen = Seen()

    async def during(self, work: Callable[[], Awaitable[None]]) -> Seen:
        """Ask from before `work` begins until after it has ended."""
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as clients:
            for index in range(CLIENTS):
                clients.create_task(self._ask_on(index))
            await self.answers(ANSWERS_BETWEEN)
            await work()
            await self.answers(ANSWERS_BETWEEN)
            self._stopped = True
        return self.seen

    async def answers(self, count: int) -> None:
        """Return when `count` more requests have been answered, or one is lost."""
        until = self.seen.answered + count
        while self.seen.answered < until and not self.seen.lost:
            self._answer.clear()
            await self._answer.wait()

    async def _ask_on(self, index: int) -> None:
        connection: Connection | None = None
        for question, right in islice(cycle(self._asked), index, None):
            if self._stopped:
                break
            try:
                connection = connection or await Connection.open(self._port)
                reply = await connection.exchange(infer_head(question), question.body)
            except (OSError, Turned) as fault:
                self._lose(f"{question.model}: {type(fault).__name__}: {fault}")
                return
            if reply.status != 200 or reply.body != right:
                self._lose(f"{question.model}: status {reply.status}, {reply.body[:200]!r}")
                return
            self.seen.answered += 1
            self._answer.set()
            if reply.closes:
                await connection.close()
                connection = None
        if connection is not None:
            await connection.close()

    def _lose(self, what: str) -> None:
        self.seen.lost.append(what)
        self._answer.set()
