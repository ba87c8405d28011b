"""The compose profile `scale` for real: replicas behind the proxy, restarted one by one and killed, under load."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

from deploy.deploy_test.rolling import ANSWERS_BETWEEN, Clients
from deploy.docker_test.__main__ import HEALTHY_WITHIN_S, ask_everything, say
from deploy.docker_test.compose import Compose, DockerFault, docker

PROXY: Final = "proxy"
REPLICA: Final = "replica"
STOP_S: Final = 10  # docker-compose.yml's stop_grace_period
COUNTED: Final = (
    "import urllib.request; text = urllib.request.urlopen('http://127.0.0.1:8000/metrics').read().decode(); "
    "print(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith('tokenslab_requests_total')))"
)


class ScaleFailed(Exception):
    """The replicas behind the proxy did not do what they promise."""


def run_scale(models: Path) -> str:
    """Build, start, load, restart, kill; what was seen, in one line.

    Raises:
        ScaleFailed: a request was lost or answered wrongly, or a replica had no part in it.
        DockerFault: the engine did not do what it was asked.
    """
    compose = Compose(f"tokenslab-scale-{os.getpid()}", models, PROXY, (REPLICA, PROXY))
    try:
        compose.build()
        compose.up(HEALTHY_WITHIN_S)
        return asyncio.run(_trial(compose, models))
    except (DockerFault, ScaleFailed):
        say(compose.logs()[-6000:])
        raise
    finally:
        compose.remove()


async def _trial(compose: Compose, models: Path) -> str:
    replicas = compose.containers(REPLICA)
    asked = await ask_everything(compose.port(), models)
    clients = Clients(compose.port(), asked)
    shares: list[float] = []

    async def one_after_another() -> None:
        for replica in replicas:
            await asyncio.to_thread(docker, "restart", "--time", str(STOP_S), replica)
            await asyncio.to_thread(_wait_until_healthy, replica)
            before = await asyncio.to_thread(_answered, replica)
            while not clients.seen.lost and await asyncio.to_thread(_answered, replica) == before:
                await clients.answers(ANSWERS_BETWEEN)  # until the proxy asks it again
            say(f"  restarted {replica[:12]} under load; {clients.seen.answered} answered, none lost so far")
        shares.extend([await asyncio.to_thread(_answered, replica) for replica in replicas])
        await asyncio.to_thread(docker, "kill", "--signal", "KILL", replicas[0])
        await clients.answers(ANSWERS_BETWEEN)

    seen = await clients.during(one_after_another)
    if seen.lost:
        raise ScaleFailed(f"{len(seen.lost)} of {seen.answered} requests lost: {'; '.join(seen.lost[:5])}")
    if not all(shares):
        raise ScaleFailed(f"requests answered by each replica since its restart: {shares}")
    return f"{len(replicas)} replicas restarted one by one and one killed under load: {seen.answered} answered, 0 lost"


def _wait_until_healthy(container: str) -> None:
    until = time.monotonic() + HEALTHY_WITHIN_S
    while docker("inspect", "--format", "{{.State.Health.Status}}", container) != "healthy":
        if time.monotonic() > until:
            raise DockerFault(f"{container[:12]} is not healthy {HEALTHY_WITHIN_S} s after its restart")
        time.sleep(0.2)


def _answered(container: str) -> float:
    """Requests that this replica has answered since it started."""
    return float(docker("exec", container, "python", "-c", COUNTED))
