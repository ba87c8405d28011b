"""Clients who leave, stall, lie or ask for too much: each gets the documented status, and nobody else notices."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable

import numpy as np

from bench.bodies import JSON_LENGTH
from bench.chaos.guests import whole
from bench.chaos.malformed import Bad, malformed
from bench.chaos.scene import Scene, bare, refused, right
from bench.chaos.wire import Broken, Link, chunked, head, request

MIB = 1 << 20


async def leaver(scene: Scene) -> None:
    """Gone within the head, within the body, before or within the answer."""
    async with scene.link("leaver") as link:
        ask = scene.rng.choice(scene.asks)
        data = whole(ask)
        keep = len(data) if scene.rng.random() < 0.5 else scene.rng.randrange(len(data))
        if not await scene.send("leaver", link, data[:keep]):
            return
        await asyncio.sleep(scene.rng.choice([0, 0.001, 0.01, 0.05]))
        scene.tally.note("leaver", "left before its answer" if keep == len(data) else "left while sending")
        link.drop()


async def staller(scene: Scene) -> None:
    """Silent within the body: 408. Silent within the head: the connection closes, with nothing to answer."""
    async with scene.link("staller") as link:
        ask = scene.rng.choice(scene.asks)
        start = head("POST", ask.path, len(ask.body) + 1, ask.headers)
        if scene.rng.random() < 0.7:
            if await scene.send("staller", link, start + ask.body):
                # A stopping server cuts bodies short that are not there yet.
                await _hear_or_end(scene, "staller", link, 408, *((503,) if scene.signalled else ()))
            return
        if await scene.send("staller", link, start[: scene.rng.randrange(1, len(start) - 3)]):
            try:
                said = await link.ended()
            except Broken as cause:
                scene.tally.add_wrong("staller", str(cause))
                return
            if said:
                scene.tally.add_wrong("staller", f"half a head was answered with {said[:200]!r}")
            else:
                scene.tally.note("staller", "closed")


async def _hear_or_end(scene: Scene, kind: str, link: Link, *statuses: int) -> None:
    """A refusal that a stopping server may leave out: nothing was accepted."""
    try:
        reply = await link.answer()
    except Broken as cause:
        if scene.signalled is None:
            scene.tally.add_lost(kind, str(cause))
        else:
            scene.tally.note(kind, "closed")
        return
    scene.tally.see(kind, reply)
    late = (503,) if scene.signalled is not None else ()
    if reply.status in (*statuses, *late):
        scene.tally.note(kind, str(reply.status))
    else:
        scene.tally.add_wrong(kind, f"status {reply.status}, expected {statuses}: {reply.body[:200]!r}")


async def deaf(scene: Scene) -> None:
    """Large answers that nobody reads: the connection is cut, unless the kernel took them all."""
    async with scene.link("deaf") as link:
        ask = max(scene.rng.choices(scene.asks, k=20), key=lambda ask: ask.shape[0])
        if not await scene.send("deaf", link, whole(ask) * 20, excused=True):
            return
        await asyncio.sleep(scene.limits.write_timeout_s * 1.5)
        scene.tally.note("deaf", "left unread")
        link.drop()


async def malformed_request(scene: Scene) -> None:
    """Bytes that contradict HTTP, the protocol or the model."""
    bad = scene.rng.choice(malformed(scene.asks))
    await _refused(scene, "malformed", bad)


async def oversize(scene: Scene) -> None:
    """More than a limit allows, in every way that there is to say so."""
    bad = scene.rng.choice(_OVERSIZE)(scene)
    await _refused(scene, "oversize", bad)


async def _refused(scene: Scene, kind: str, bad: Bad) -> None:
    async with scene.link(kind) as link:
        if not await scene.send(f"{kind}: {bad.name}", link, bad.data):
            return
        judge = refused(*bad.statuses) if bad.answer_has_body else bare(*bad.statuses)
        if not await scene.hear(f"{kind}: {bad.name}", link, judge, body=bad.answer_has_body):
            return
        ask = scene.rng.choice(scene.asks)  # the connection lives: the next request is answered as any other
        await scene.exchange(f"{kind}: next on its connection", link, whole(ask), right(ask))


def _announced(scene: Scene) -> Bad:
    return Bad("announced", head("POST", scene.asks[0].path, scene.limits.body_mib * MIB + 1), (413,))


def _sent(scene: Scene) -> Bad:
    body = bytes(scene.limits.body_mib * MIB + 1)
    return Bad("sent", request("POST", scene.asks[0].path, body, {JSON_LENGTH: "0"}), (413,))


def _in_chunks(scene: Scene) -> Bad:
    body = bytes(scene.limits.body_mib * MIB + 1)
    return Bad("chunked", chunked("POST", scene.asks[0].path, body, {JSON_LENGTH: "0"}, 1 << 16), (413,))


_BOMB = gzip.compress(bytes(64 * MIB))


def _bomb(scene: Scene) -> Bad:
    return Bad("gzip bomb", request("POST", scene.asks[0].path, _BOMB, {"Content-Encoding": "gzip"}), (413,))


def _head(scene: Scene) -> Bad:
    large = {f"X-{i}": "x" * 1000 for i in range(scene.limits.head_kib + 4)}
    return Bad("head", head("POST", scene.asks[0].path, 0, large), (431,))


def _json_part(scene: Scene) -> Bad:
    return Bad("JSON part", request("POST", scene.asks[0].path, b" " * (MIB + 1)), (413,))


def _control(scene: Scene) -> Bad:
    return Bad("control route", request("POST", "/v2/repository/index", b" " * (1 << 17)), (413,))


def _sequence(scene: Scene) -> Bad:
    ask = next(ask for ask in scene.asks if "block" in ask.model)
    path = f"/v2/models/{ask.model}/infer"
    tokens = np.zeros((3000, ask.shape[1]), np.float32).tobytes()
    return Bad("sequence", request("POST", path, tokens, {JSON_LENGTH: "0"}), (413, 400))


_OVERSIZE: tuple[Callable[[Scene], Bad], ...] = (
    *(_announced, _sent, _in_chunks, _bomb, _head, _json_part, _control, _sequence),
)
