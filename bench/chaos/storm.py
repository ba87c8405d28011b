"""All clients at once against one server for a while, and SIGTERM in the middle of it."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import numpy as np

from bench.chaos import guests, intruders, swaps
from bench.chaos.asks import make_asks, of_models
from bench.chaos.repository import BROKEN, GUEST, Made, make_repository
from bench.chaos.scene import Closed, Limits, Scene
from bench.chaos.tally import Tally
from bench.process import Process, ServerError
from bench.server import serve_command

VERSIONS: Final = 3  # of every bundle
THREADS: Final = 1  # of the server's engine, and of the sessions that answer beforehand
LONGEST: Final = 400  # tokens of the largest request
EXIT_S: Final = 60.0  # from SIGTERM: the drain limit is 30 s

KINDS: Final[dict[Callable[[Scene], Awaitable[None]], int]] = {
    guests.steady: 8,
    guests.guest: 4,
    guests.in_chunks: 4,
    guests.pipelined: 4,
    guests.slow_sender: 3,
    guests.slow_reader: 3,
    guests.with_parameters: 4,
    intruders.leaver: 6,
    intruders.staller: 2,
    intruders.deaf: 1,
    intruders.malformed_request: 8,
    intruders.oversize: 4,
}


def storm(models: Path, folder: Path, seconds: float, clients: int, asks: int, seed: int) -> Tally:
    """The tally of `clients` clients for `seconds`, with `asks` requests for each model and precision to choose from.

    `models` has the bundles; `folder`, an empty one, gets the repository that is served, and the server's log.

    Raises:
        ServerError: the server did not start.
        BundleError: a bundle is not sound.
    """
    root, log, limits = folder / "models", folder / "server.log", Limits()
    made = make_repository(models, root, VERSIONS)
    names = {one.manifest.name for one in made}
    every = make_asks(
        (one for one in made if one.manifest.name != BROKEN), asks, LONGEST, THREADS, np.random.default_rng(seed)
    )
    flags = ("--versions", "all", "--poll-s", str(swaps.POLL_S))
    command, port = serve_command(root, THREADS, *flags)
    with Process(command, port, "/v2/health/ready", log, limits.environment) as server:
        good, strangers = of_models(every, *(names - {GUEST, BROKEN})), of_models(every, GUEST)
        scene = Scene(port, limits, good, strangers, random.Random(seed))
        asyncio.run(_play(scene, server, seconds, clients, made))
        _look_back(scene.tally, server, log)
    return scene.tally


async def _play(scene: Scene, server: Process, seconds: float, clients: int, made: list[Made]) -> None:
    shown = [one for one in made if one.manifest.name not in (GUEST, BROKEN)]
    async with asyncio.TaskGroup() as crowd:
        for _ in range(clients):
            crowd.create_task(_visit(scene))
        crowd.create_task(swaps.polled_versions(scene, shown))
        crowd.create_task(swaps.admin(scene, made))
        await asyncio.sleep(seconds)
        scene.signalled = time.monotonic()
        server.signal(signal.SIGTERM)


async def _visit(scene: Scene) -> None:
    kinds, weights = list(KINDS), list(KINDS.values())
    while True:
        (kind,) = scene.rng.choices(kinds, weights)
        try:
            await kind(scene)
        except Closed:
            return  # the listener is closed: nobody is taken any more


def _look_back(tally: Tally, server: Process, log: Path) -> None:
    """How the server ended, and what its log says that no client saw."""
    try:
        code = server.wait(EXIT_S)
    except ServerError as error:
        tally.add_lost("SIGTERM", str(error))
        return
    if code == 0:
        tally.note("SIGTERM", "exit 0")
    else:
        tally.add_lost("SIGTERM", f"exit {code}")
    text = log.read_text(errors="replace")
    if "Traceback" in text:
        tally.fives.append(f"the server's log has a traceback: {text[text.index('Traceback') :][:3000]}")
