"""Clients who ask for what they may: at once or slowly, in one piece or many, in all forms."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable

from bench.bodies import JSON_LENGTH
from bench.chaos.asks import Ask
from bench.chaos.scene import Scene, refused, right
from bench.chaos.wire import Link, chunked, head, request

_PIECES = 8


def whole(ask: Ask) -> bytes:
    """Its bytes on the wire."""
    return request("POST", ask.path, ask.body, ask.headers)


async def steady(scene: Scene) -> None:
    """Requests one after another on a kept-alive connection."""
    async with scene.link("steady") as link:
        for _ in range(scene.rng.randint(1, 30)):
            ask = scene.rng.choice(scene.asks)
            if not await scene.exchange("steady", link, whole(ask), right(ask)):
                return


async def guest(scene: Scene) -> None:
    """A request for the bundle that comes and goes: its answer, or 404."""
    async with scene.link("guest") as link:
        ask = scene.rng.choice(scene.guests)
        await scene.exchange("guest", link, whole(ask), right(ask, 404))


async def in_chunks(scene: Scene) -> None:
    """A body of no stated length, or a compressed one."""
    async with scene.link("chunked, gzip") as link:
        ask = scene.rng.choice(scene.asks)
        if scene.rng.random() < 0.5:
            data = chunked("POST", ask.path, ask.body, ask.headers, scene.rng.randint(1, 5000))
        else:
            data = request("POST", ask.path, gzip.compress(ask.body, 1), {**ask.headers, "Content-Encoding": "gzip"})
        await scene.exchange("chunked, gzip", link, data, right(ask))


async def pipelined(scene: Scene) -> None:
    """Good and bad requests in one write; the answers come in their order."""
    async with scene.link("pipelined") as link:
        asks = scene.rng.choices(scene.asks, k=scene.rng.randint(2, 6))
        judges, parts = [right(ask) for ask in asks], [whole(ask) for ask in asks]
        at = scene.rng.randrange(len(asks))
        parts[at], judges[at] = (
            request("POST", asks[at].path, b"{]", {"Content-Type": "application/json"}),
            refused(400),
        )
        if not await scene.send("pipelined", link, b"".join(parts)):
            return
        for judge in judges:
            if not await scene.hear("pipelined", link, judge):
                return


async def slow_sender(scene: Scene) -> None:
    """A body in pieces with pauses that the server allows; 408 only if this client fell behind its own plan."""
    async with scene.link("slow sender") as link:
        ask, patience = scene.rng.choice(scene.asks), scene.limits.body_timeout_s
        began = time.monotonic()

        def late() -> bool:
            return time.monotonic() - began > patience * 0.8

        if not await _trickle(scene, link, ask, scene.rng.uniform(0, patience / 2 / _PIECES), late):
            return
        await scene.hear("slow sender", link, right(ask, *((408,) if late() else ())))


async def _trickle(scene: Scene, link: Link, ask: Ask, pause_s: float, late: Callable[[], bool]) -> bool:
    data = head("POST", ask.path, len(ask.body), ask.headers) + ask.body
    size = len(data) // _PIECES + 1
    for at in range(0, len(data), size):
        if not await scene.send("slow sender", link, data[at : at + size], excused=late()):
            return False
        await asyncio.sleep(pause_s)
    return True


async def slow_reader(scene: Scene) -> None:
    """An answer taken in small pieces, with pauses."""
    async with scene.link("slow reader") as link:
        ask = max(scene.rng.choices(scene.asks, k=8), key=lambda ask: ask.shape[0])
        if await scene.send("slow reader", link, whole(ask)):
            await scene.hear("slow reader", link, right(ask), pause_s=scene.rng.uniform(0, 0.05))


async def with_parameters(scene: Scene) -> None:
    """Requests with a priority, alone in their window, or with a deadline so near that 504 is as right."""
    binary = [ask for ask in scene.asks if ask.form == "binary"]
    async with scene.link("parameters") as link:
        for _ in range(scene.rng.randint(1, 5)):
            ask = scene.rng.choice(binary)
            name, value, *others = scene.rng.choice(
                [("priority", 1), ("priority", 3), ("isolate", True), ("timeout", 1, 504), ("timeout", 2000, 504)]
            )
            size = int(ask.headers[JSON_LENGTH])
            document = json.loads(ask.body[:size])
            document["parameters"][str(name)] = value
            text = json.dumps(document).encode()
            data = request("POST", ask.path, text + ask.body[size:], {**ask.headers, JSON_LENGTH: str(len(text))})
            if not await scene.exchange("parameters", link, data, right(ask, *map(int, others))):
                return
