"""The trial itself, step by step: build, start, look inside, ask, stop under load; prints what it saw."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from deploy.docker_test.answers import Question, WrongAnswer, judge, latest, questions
from deploy.docker_test.compose import ROOT, Compose, DockerFault, docker, missing_engine
from deploy.docker_test.confinement import Breach, confinement
from deploy.docker_test.http11 import Connection, Reply, Turned, head
from deploy.docker_test.stop_under_load import StopUnderLoad, Tally, infer_head
from service.errors import TokenslabError
from service.settings import Settings

HEALTHY_WITHIN_S = 120
STOP_GRACE_S = 10.0  # docker-compose.yml's
LENGTHS = [3, 1, 17, 8]


class Failed(Exception):
    """The container did not do what it promises."""


def main() -> int:
    """Run the trial; 0 if all of it held."""
    parser = argparse.ArgumentParser(prog="python -m deploy.docker_test", description=__doc__)
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="model repository to mount")
    models: Path = parser.parse_args().models
    missing = missing_engine()
    if missing is not None:
        say(f"docker-test: NOT RUN, no Docker engine with compose answers: {missing}")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `finally` removes the container
    compose = Compose(f"tokenslab-test-{os.getpid()}", models)
    try:
        trial(compose, models)
    except (Breach, DockerFault, Failed, Turned, WrongAnswer, TokenslabError) as fault:
        say(f"docker-test: FAILED: {fault}")
        return 1
    finally:
        compose.remove()
    say("docker-test: passed")
    return 0


def trial(compose: Compose, models: Path) -> None:
    """Everything between the engine's answer and the clean-up."""
    began = time.monotonic()
    size = compose.build()
    say(f"built in {time.monotonic() - began:.1f} s: {size / 1e6:.0f} MB with its base")
    began = time.monotonic()
    try:
        compose.up(HEALTHY_WITHIN_S)
    except DockerFault:
        say(compose.logs())
        raise
    say(f"healthy {time.monotonic() - began:.1f} s after `up`, published on 127.0.0.1:{compose.port()}")
    for fact in confinement(compose):
        say(f"  {fact}")
    asked = asyncio.run(ask_everything(compose.port(), models))
    drain_delay_s: float = Settings.model_fields["drain_delay_s"].default
    container = compose.container()
    took: list[float] = []

    def stop() -> None:
        began = time.monotonic()
        docker("stop", container)
        took.append(time.monotonic() - began)

    async def loaded() -> Tally:
        return await StopUnderLoad(compose.port(), asked, drain_delay_s).run(stop)

    tally = asyncio.run(loaded())
    report(tally, took[0], compose)


async def ask_everything(port: int, models: Path) -> list[tuple[Question, bytes]]:
    """Metadata and one right answer of every model; each question with the exact bytes of its answer."""
    connection = await Connection.open(port)
    rng = np.random.default_rng()
    index = {entry["name"] for entry in await control(connection, "POST", "/v2/repository/index")}
    server = await control(connection, "GET", "/v2")
    say(f"server {server['name']} {server['version']}; models {', '.join(sorted(index))}")
    asked: list[tuple[Question, bytes]] = []
    for folder, manifest in latest(models):
        metadata = await control(connection, "GET", f"/v2/models/{manifest.name}")
        shapes = {tensor["name"]: tensor["shape"] for tensor in metadata["inputs"] + metadata["outputs"]}
        if shapes["tokens"] != [-1, manifest.d_in] or shapes["out"] != [-1, manifest.d_out]:
            raise Failed(f"metadata of {manifest.name}: {shapes}, the manifest says {manifest.d_in}, {manifest.d_out}")
        for question in questions(folder, manifest, rng, LENGTHS):
            if question.model not in index:
                raise Failed(f"{question.model} is not in the repository index: {sorted(index)}")
            reply = await connection.exchange(infer_head(question), question.body)
            if reply.status != 200:
                raise Failed(f"{question.model}: status {reply.status}, {reply.body[:200]!r}")
            split = reply.json_length
            verdict = judge(question, reply.body[:split], reply.body[split:])
            say(f"  {question.model}: {len(question.right)} tokens, {verdict} with ONNX Runtime on the same file")
            asked.append((question, reply.body))
    await connection.close()
    if not asked:
        raise Failed(f"{models}: no bundle to ask")
    return asked


async def control(connection: Connection, method: str, path: str) -> Any:
    """The JSON of a control route."""
    reply: Reply = await connection.exchange(head(method, path))
    if reply.status != 200:
        raise Failed(f"{method} {path}: status {reply.status}, {reply.body[:200]!r}")
    return json.loads(reply.body)


def report(tally: Tally, took_s: float, compose: Compose) -> None:
    """Print the tally and what Docker says of the container's end; raises Failed."""
    state = compose.state()
    say(
        f"docker stop under load: took {took_s:.1f} s, exit code {state['ExitCode']}; accepted {tally.accepted}, "
        f"answered {tally.answered} ({tally.answered_after_stop} after the stop), lost {len(tally.lost)}; "
        f"{tally.slow_answered} of them with the body completed after the listener closed; "
        f"{tally.turned_away} met the closed listener"
    )
    for what in tally.lost[:10]:
        say(f"  lost: {what}")
    if tally.lost or not tally.answered_after_stop or not tally.slow_answered:
        say(compose.logs()[-4000:])
        raise Failed("docker stop lost requests, or answered none after it")
    if state["ExitCode"] != 0 or state["OOMKilled"]:
        say(compose.logs()[-4000:])
        raise Failed(f"the container ended with {state['ExitCode']} (OOMKilled {state['OOMKilled']})")
    if took_s >= STOP_GRACE_S:
        raise Failed(f"the stop took {took_s:.1f} s, Docker's patience is {STOP_GRACE_S:.0f} s")


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
