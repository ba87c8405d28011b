"""`python -m bench.mixes`: random mixes of requests over HTTP, and each answer the bits that its request gets alone.

For every bundle and precision whose certificate is `exact`: a mix is 2 to 8 requests of random lengths, sent at once to
a server that waits a moment for them to share a window, and compared with ONNX Runtime run on the same file.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from bench.bodies import infer_body, read_answer
from bench.chaos.asks import random_request
from bench.chaos.repository import Made
from bench.chaos.wire import Link, request
from bench.server import Server
from service.manifest import MANIFEST, Variant, read_manifest
from service.session import open_session, run_packed

LARGEST_MIX: Final = 8


@dataclass(frozen=True, slots=True)
class Mixed:
    """What came of the mixes for one model: requests sent, windows they ran in, and those answered with other bits."""

    model: str
    requests: int
    windows: int
    wrong: int


def mixes(models: Path, folder: Path, count: int, longest: int, threads: int, seed: int) -> list[Mixed]:
    """`count` mixes for each `exact` variant of version 1 of every bundle in `models`; the server's log is in `folder`.

    Raises:
        ServerError: the server did not start.
        Broken: a request was not answered.
        ValueError: an answer is none, or not 200.
    """
    with Server(models, threads, folder / "server.log", "--max-wait-ms", "1") as server:
        results: list[Mixed] = []
        for path in sorted(models.glob(f"*/1/{MANIFEST}")):
            made = Made(models, read_manifest(path.parent))
            for variant in made.manifest.variants:
                if (variant.provider, variant.certificate.kind) == ("cpu", "exact"):
                    rng = np.random.default_rng([seed, len(results)])
                    before = server.counts()["tokenslab_windows_total"]
                    sent, wrong = asyncio.run(_mix(server.port, made, variant, count, longest, threads, rng))
                    windows = int(server.counts()["tokenslab_windows_total"] - before)
                    results.append(Mixed(f"{made.manifest.name}-{variant.precision}", sent, windows, wrong))
    return results


async def _mix(
    port: int, made: Made, variant: Variant, count: int, longest: int, threads: int, rng: np.random.Generator
) -> tuple[int, int]:
    session = open_session(made.folder / variant.file, "cpu", threads)
    path = f"/v2/models/{made.manifest.name}-{variant.precision}/infer"
    links = [await Link.open(port) for _ in range(LARGEST_MIX)]
    sent = wrong = 0
    for _ in range(count):
        asks = [random_request(made, longest, rng) for _ in range(rng.integers(2, LARGEST_MIX, endpoint=True))]
        right = [run_packed(session, *ask) for ask in asks]
        for link, ask in zip(links, asks, strict=False):
            body = infer_body(*ask)
            await link.send(request("POST", path, body.content, body.headers))
        for link, out in zip(links, right, strict=False):
            reply = await link.answer()
            if reply.status != 200:
                raise ValueError(f"{path}: {reply.status} {reply.body[:300]!r}")
            named = {name.title(): value for name, value in reply.headers.items()}
            wrong += read_answer(named, reply.body).tobytes() != out.tobytes()
        sent += len(asks)
    for link in links:
        await link.close()
    return sent, wrong


def main() -> int:
    """Mix, report, and return 1 if a bit was wrong."""
    parser = argparse.ArgumentParser("python -m bench.mixes", description="Random mixes over HTTP, bit for bit")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--mixes", type=int, default=10_000, help="for each model and precision")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the largest request")
    parser.add_argument("--threads", type=int, default=1, help="of the engine, here and there")
    parser.add_argument("--seed", type=int, default=None, help="[default: a new one each time]")
    given = parser.parse_args()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="tokenslab-mixes-") as folder:
        done = mixes(given.models, Path(folder), given.mixes, given.longest, given.threads, seed)
    for one in done:
        console.print(
            f"{one.model}: {one.requests} requests in {one.windows} windows, wrong {one.wrong}", highlight=False
        )
    wrong = sum(one.wrong for one in done)
    console.print(f"{given.mixes} mixes each, seed {seed}: wrong {wrong}", highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
