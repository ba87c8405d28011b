"""Whoever changes the models while clients ask: versions that come and go, a bundle loaded and unloaded, settings."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bench.chaos.repository import BROKEN, GUEST, Made
from bench.chaos.scene import ADMIN_KEY, Closed, Scene, refused
from bench.chaos.tally import Wrong
from bench.chaos.wire import Reply, request

POLL_S = 0.1  # the server's own, and how often the index is asked here
SETTLE_S = 30.0  # in which a version must have come, or gone


def _done(reply: Reply) -> str:
    if reply.status != 200:
        raise Wrong(f"status {reply.status}: {reply.body[:300]!r}")
    return "200"


async def polled_versions(scene: Scene, made: list[Made]) -> None:
    """Versions appear in the folder and vanish again; the index must follow."""
    staged = [one for one in made if one.manifest.version > 1]
    while scene.signalled is None:
        one = scene.rng.choice(staged)
        one.show()
        came = await _until(scene, one, ready=True)
        await asyncio.sleep(scene.rng.uniform(0, 0.5))
        one.hide()
        gone = came and await _until(scene, one, ready=False)
        if gone:
            scene.tally.note("version by polling", "came and went")


async def _until(scene: Scene, one: Made, *, ready: bool) -> bool:
    """Whether the index came to say so; False where the server stops first."""
    manifest = one.manifest
    for _ in range(int(SETTLE_S / POLL_S)):
        rows = await _index(scene)
        if rows is None or scene.signalled is not None:
            return False
        states = {
            row["state"] for row in rows if (row["name"], row["version"]) == (manifest.name, str(manifest.version))
        }
        if ("READY" in states) == ready:
            return True
        await asyncio.sleep(POLL_S)
    message = f"{manifest.name} version {manifest.version} was {'not ' if ready else ''}served after {SETTLE_S:g} s"
    scene.tally.add_wrong("version by polling", message)
    return False


async def _index(scene: Scene) -> list[dict[str, Any]] | None:
    found: list[list[dict[str, Any]]] = []

    def judge(reply: Reply) -> str:
        outcome = _done(reply)
        found.append(json.loads(reply.body))
        return outcome

    try:
        async with scene.link("index") as link:
            await scene.exchange("index", link, request("POST", "/v2/repository/index"), judge)
    except Closed:
        return None
    return found[0] if found else None


async def admin(scene: Scene, made: list[Made]) -> None:
    """Load and unload, with and without a key; a bundle that cannot be served; settings that change."""
    (broken,) = (one for one in made if one.manifest.name == BROKEN)
    guest = f"/v2/repository/models/{GUEST}"
    while scene.signalled is None:
        await asyncio.sleep(scene.rng.uniform(0, 0.2))
        match scene.rng.randrange(6):
            case 0 | 1:
                await _ask(scene, "unload", "POST", f"{guest}/unload", {}, refused_or_done(404))
                await asyncio.sleep(scene.rng.uniform(0, 0.2))
                await _ask(scene, "load", "POST", f"{guest}/load", {}, _done)
            case 2:
                broken.show()
                await _ask(
                    scene, "load of a broken bundle", "POST", f"/v2/repository/models/{BROKEN}/load", {}, refused(409)
                )
                broken.hide()
            case 3:
                await _ask(scene, "load without a key", "POST", f"{guest}/load", None, refused(401))
            case 4:
                version = {"parameters": {"version": 77}}
                await _ask(scene, "load of an unknown version", "POST", f"{guest}/load", version, refused(404))
            case _:
                change = {
                    "max_window_tokens": scene.rng.choice([64, 500, 2048]),
                    "max_wait_ms": scene.rng.choice([0, 0, 1]),
                }
                await _ask(scene, "settings", "PATCH", "/v2/settings", change, _done)


def refused_or_done(*statuses: int) -> Any:
    """200, or one of these."""

    def judge(reply: Reply) -> str:
        return "200" if reply.status == 200 else refused(*statuses)(reply)

    return judge


async def _ask(scene: Scene, kind: str, method: str, path: str, body: dict[str, Any] | None, judge: Any) -> None:
    """One request, with the admin's key unless it has no `body`; what SIGTERM cuts short is not judged."""
    headers = {"Content-Type": "application/json"} if body is None else {"X-API-Key": ADMIN_KEY}
    data = request(method, path, json.dumps(body or {}).encode(), {"Content-Type": "application/json", **headers})

    def unless_stopping(reply: Reply) -> str:
        return f"{reply.status} while stopping" if scene.signalled is not None else str(judge(reply))

    try:
        async with scene.link(kind) as link:
            await scene.exchange(kind, link, data, unless_stopping)
    except Closed:
        return
