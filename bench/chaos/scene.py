"""The server that clients meet, what it promised them, and when it stops: whether a request counts as accepted."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from bench.chaos.asks import Ask
from bench.chaos.tally import Tally, Wrong
from bench.chaos.wire import Broken, Link, Reply

Judge = Callable[[Reply], str]  # the outcome's name; raises Wrong

ADMIN_KEY: Final = "chaos-chaos-chaos"


class Closed(Exception):
    """The listener takes nobody any more, as it should not."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's settings that clients run into."""

    body_mib: int = 2
    head_kib: int = 16
    body_timeout_s: float = 1.0
    head_timeout_s: float = 3.0
    write_timeout_s: float = 1.0
    drain_delay_s: float = 1.0

    @property
    def environment(self) -> dict[str, str]:
        """As the server reads them."""
        given = {
            "MAX_BODY_MIB": self.body_mib,
            "MAX_BODIES_MIB": 64,
            "MAX_JSON_MIB": 1,
            "MAX_HEAD_KIB": self.head_kib,
            "BODY_TIMEOUT_S": self.body_timeout_s,
            "HEAD_TIMEOUT_S": self.head_timeout_s,
            "WRITE_TIMEOUT_S": self.write_timeout_s,
            "DRAIN_DELAY_S": self.drain_delay_s,
            "DRAIN_LIMIT_S": 30,
            "ADMIN_KEYS": f"chaos:{ADMIN_KEY}",
        }
        return {f"TOKENSLAB_{name}": str(value) for name, value in given.items()}


@dataclass
class Scene:
    """What all clients share. `guests` are requests for a bundle that comes and goes."""

    port: int
    limits: Limits
    asks: list[Ask]
    guests: list[Ask]
    rng: random.Random
    tally: Tally = field(default_factory=Tally)
    signalled: float | None = None  # when SIGTERM was sent

    @property
    def closing(self) -> float | None:
        """The listener is open until then at least: the server counts its delay from the signal's arrival."""
        return None if self.signalled is None else self.signalled + self.limits.drain_delay_s

    def accepted(self, link: Link) -> bool:
        """Whether the request just sent over `link` must be answered.

        It was handed to the kernel whole before the listener closed, over a connection that the service had taken: one
        that had been answered before, or was made before SIGTERM. (The kernel completes connections that the listener
        has not taken yet, and resets them when it closes; the drain delay is there for those.)
        """
        if self.signalled is None or self.closing is None:
            return True
        return link.sent < self.closing and (link.answered or link.opened < self.signalled)

    @asynccontextmanager
    async def link(self, kind: str) -> AsyncGenerator[Link]:
        """A connection, closed afterwards; raises Closed once the listener may be, counts it as lost before that."""
        try:
            link = await Link.open(self.port)
        except OSError as cause:
            if self.closing is None or time.monotonic() < self.closing:
                self.tally.add_lost(kind, f"no connection: {cause}")
            raise Closed from cause
        try:
            yield link
        finally:
            await link.close()

    async def send(self, kind: str, link: Link, data: bytes, *, excused: bool = False) -> bool:
        """Send what should be taken whole; False, and counted, if it was not. `excused`: the server may cut it off."""
        try:
            await link.send(data)
        except Broken as cause:
            self._broken(kind, str(cause), lost=self.signalled is None and not excused)
            return False
        return True

    async def hear(self, kind: str, link: Link, judge: Judge, *, pause_s: float = 0.0, body: bool = True) -> bool:
        """Judge the next answer and count it; True if another request may follow on this connection."""
        try:
            reply = await link.answer(pause_s=pause_s, body=body)
        except Broken as cause:
            self._broken(kind, str(cause), lost=self.accepted(link))
            return False
        self.tally.see(kind, reply)
        try:
            self.tally.note(kind, judge(reply))
        except Wrong as wrong:
            self.tally.add_wrong(kind, str(wrong))
        return not reply.closes

    async def exchange(self, kind: str, link: Link, data: bytes, judge: Judge) -> bool:
        """Send a whole request and judge its answer; True if another may follow on this connection."""
        return await self.send(kind, link, data) and await self.hear(kind, link, judge)

    def _broken(self, kind: str, message: str, *, lost: bool) -> None:
        if lost:
            self.tally.add_lost(kind, message)
        else:
            self.tally.note(kind, "not accepted")


def right(ask: Ask, *others: int) -> Judge:
    """200 with the right bits; 429 with Retry-After; or one of `others`, each in the one form of a fault."""

    def judge(reply: Reply) -> str:
        if reply.status == 200:
            ask.check(reply)
            return "right"
        return refused(*others)(reply)

    return judge


def refused(*statuses: int) -> Judge:
    """One of these statuses, or 429 with Retry-After (the room for bodies is full), as `{"error": ...}`."""

    def judge(reply: Reply) -> str:
        if reply.status not in (*statuses, 429):
            raise Wrong(f"status {reply.status}, expected {statuses or 200}: {reply.body[:300]!r}")
        if reply.status == 429 and not reply.headers.get("retry-after", "").isdigit():
            raise Wrong("429 without Retry-After")
        try:
            text = json.loads(reply.body)["error"]
        except (ValueError, KeyError, TypeError) as cause:
            raise Wrong(f"{reply.status} that is no error document: {reply.body[:300]!r}") from cause
        if not (isinstance(text, str) and text):
            raise Wrong(f"{reply.status} that says nothing: {reply.body[:300]!r}")
        return str(reply.status)

    return judge


def bare(*statuses: int) -> Judge:
    """One of these statuses, without a body: what HEAD is answered."""

    def judge(reply: Reply) -> str:
        if reply.status not in statuses or reply.body:
            raise Wrong(f"status {reply.status}, expected {statuses} and no body: {reply.body[:300]!r}")
        return str(reply.status)

    return judge
