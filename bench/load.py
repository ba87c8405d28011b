"""Closed-loop load on one URL: wrk where it is installed, else a client of our own. It knows no server process.

Both keep `connections` connections busy, each with one request at a time, and count what was answered.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.bodies import Body, write_bodies
from bench.client import closed_loop
from bench.timing import Load

SCRIPT = Path(__file__).with_name("load.lua")
TIMEOUT_S = 10


class LoadError(Exception):
    """The load generator itself failed: nothing was measured."""


class Generator(Protocol):
    """A load generator."""

    @property
    def name(self) -> str: ...

    def run(self, url: str, bodies: list[Body], connections: int, seconds: int, seed: int) -> Load:
        """POST `bodies`, chosen at random from `seed`, over `connections` connections for `seconds`."""


@dataclass(frozen=True, slots=True)
class Wrk:
    """wrk, one thread: it costs the service's cores less than any client in Python."""

    path: str

    @property
    def name(self) -> str:
        return "wrk"

    def run(self, url: str, bodies: list[Body], connections: int, seconds: int, seed: int) -> Load:
        with tempfile.TemporaryDirectory(prefix="tokenslab-bench-") as temporary:
            folder = Path(temporary) / "bodies"
            write_bodies(bodies, folder)
            command = [self.path, "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", f"{TIMEOUT_S}s"]
            finished = subprocess.run(
                [*command, "-s", str(SCRIPT), url],
                env={**os.environ, "BODIES": str(folder), "COUNT": str(len(bodies)), "SEED": str(seed)},
                capture_output=True,
                text=True,
                timeout=seconds + 3 * TIMEOUT_S,
                check=False,
            )
        if finished.returncode != 0:
            raise LoadError(f"wrk exited {finished.returncode}: {finished.stdout}{finished.stderr}")
        return parse_wrk(finished.stdout)


@dataclass(frozen=True, slots=True)
class OwnClient:
    """A client on asyncio: it takes more CPU from the service than wrk does, so its figures are lower."""

    @property
    def name(self) -> str:
        return "own client (aiohttp)"

    def run(self, url: str, bodies: list[Body], connections: int, seconds: int, seed: int) -> Load:
        return closed_loop(url, bodies, connections, seconds, seed, TIMEOUT_S)


def parse_wrk(output: str) -> Load:
    """The line that load.lua ends with -> Load.

    Raises:
        LoadError: there is none.
    """
    found = re.search(r"^RESULT (\{.*\})$", output, re.MULTILINE)
    if found is None:
        raise LoadError(f"wrk printed no result:\n{output}")
    result = json.loads(found.group(1))
    errors = {kind: result[kind] for kind in ("connect", "read", "write", "status", "timeout") if result[kind]}
    # wrk counts an answer with an error status among the requests, and a request that timed out only if it ends.
    answered = result["requests"] - result["status"]
    # What was sent, less what was in flight at the end, is what was answered; of each of both there are as many tokens.
    tokens = answered * result["tokens_each"]
    return Load(answered, result["us"] / 1e6, result["p50_us"] / 1e3, result["p99_us"] / 1e3, errors, tokens)


def choose_generator(wanted: str = "auto") -> Generator:
    """`wrk`, `own`, or `auto`: wrk if it is on the path.

    Raises:
        LoadError: wrk was asked for and is not there, or the word is none of these.
    """
    path = shutil.which("wrk")
    if wanted == "own" or (wanted == "auto" and path is None):
        return OwnClient()
    if wanted not in ("auto", "wrk"):
        raise LoadError(f"load generator {wanted!r}: expected auto, wrk or own")
    if path is None:
        raise LoadError("wrk is not on the path: install it (Debian: apt install wrk) or choose another generator")
    return Wrk(path)
