"""`python -m bench.mixes`: random mixes of requests over HTTP, and each answer the bits that its request gets alone.

For every bundle and precision whose certificate is `exact`: a mix is 2 to 8 requests of random lengths, sent at once,
while the server's engine is busy with the mix before it: they share windows, and some windows have parts of two mixes.
What is due is what ONNX Runtime gives for the request alone, run on the same file. A request is drawn, encoded and run
alone once, and then meets other neighbours in every mix that it is in; after POOL_MIXES mixes there are new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from rich.console import Console

from bench.bodies import infer_body, read_answer
from bench.chaos.asks import random_request
from bench.chaos.repository import Made
from bench.chaos.wire import Link, request
from bench.server import Server
from service.manifest import MANIFEST, Variant, read_manifest
from service.session import open_session, run_packed

LARGEST_MIX: Final = 8
ABREAST: Final = 2  # mixes in flight: one is run while the other is read and checked
POOL: Final = 200  # requests to choose from
POOL_MIXES: Final = 500  # with 2 to 8 of 200 in a mix, each is in a dozen of them
REPORT_EVERY: Final = 1000  # mixes


@dataclass(frozen=True, slots=True)
class Mixed:
    """What came of the mixes for one model: requests sent, windows they ran in, those answered with other bits; seconds
    that all took, and CPU seconds of server and client.
    """

    model: str
    mixes: int
    requests: int
    windows: int
    wrong: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Ask:
    """A request as it is sent, and the bytes of `out` that are due."""

    sent: bytes
    right: bytes


@dataclass(slots=True)
class _Counts:
    mixes: int = 0
    requests: int = 0
    wrong: int = 0


def mixes(
    models: Path,
    folder: Path,
    count: int,
    longest: int,
    threads: int,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Mixed]:
    """`count` mixes for each `exact` variant of version 1 of every bundle in `models`; the server's log is in `folder`.

    Raises:
        ServerError: the server did not start.
        ExceptionGroup: of Broken, where a request was not answered, or ValueError, where an answer is none or not 200.
    """
    with Server(models, threads, folder / "server.log", "--max-wait-ms", "0") as server:
        results: list[Mixed] = []
        for path in sorted(models.glob(f"*/1/{MANIFEST}")):
            made = Made(models, read_manifest(path.parent))
            for variant in made.manifest.variants:
                if (variant.provider, variant.certificate.kind) == ("cpu", "exact"):
                    rng = np.random.default_rng([seed, len(results)])
                    results.append(_measured(server, made, variant, count, longest, threads, rng, progress))
    return results


def _measured(
    server: Server,
    made: Made,
    variant: Variant,
    count: int,
    longest: int,
    threads: int,
    rng: np.random.Generator,
    progress: Callable[[str], None],
) -> Mixed:
    model = f"{made.manifest.name}-{variant.precision}"
    session = open_session(made.folder / variant.file, "cpu", threads)
    windows, cpu_s, began = server.counts()["tokenslab_windows_total"], _cpu_s(server), time.monotonic()
    counts = _Counts()

    def note() -> None:
        if counts.mixes % REPORT_EVERY == 0:
            took = time.monotonic() - began
            progress(f"{model}: {counts.mixes} of {count} mixes in {took:.0f} s, wrong {counts.wrong}")

    asyncio.run(_mix(server.port, model, _draw(made, session, model, count, longest, rng), counts, note))
    return Mixed(
        model,
        counts.mixes,
        counts.requests,
        int(server.counts()["tokenslab_windows_total"] - windows),
        counts.wrong,
        time.monotonic() - began,
        _cpu_s(server) - cpu_s,
    )


def _cpu_s(server: Server) -> float:
    return server.cpu_s() + time.process_time()


def _draw(
    made: Made, session: ort.InferenceSession, model: str, count: int, longest: int, rng: np.random.Generator
) -> Iterator[list[_Ask]]:
    """`count` mixes, from pools of requests that are run alone here."""
    path = f"/v2/models/{model}/infer"
    for no in range(count):
        if no % POOL_MIXES == 0:
            pool = []
            for _ in range(POOL):
                tokens, lens = random_request(made, longest, rng)
                body = infer_body(tokens, lens)
                sent = request("POST", path, body.content, body.headers)
                pool.append(_Ask(sent, run_packed(session, tokens, lens).tobytes()))
        yield [pool[i] for i in rng.integers(0, POOL, rng.integers(2, LARGEST_MIX, endpoint=True))]


async def _mix(port: int, model: str, drawn: Iterator[list[_Ask]], counts: _Counts, note: Callable[[], None]) -> None:
    """Send every mix of `drawn`, ABREAST of them at a time, and count what comes; `note` is called after each."""

    async def send_and_check() -> None:
        links = [await Link.open(port) for _ in range(LARGEST_MIX)]
        for asks in drawn:
            taken = links[: len(asks)]
            for link, ask in zip(taken, asks, strict=True):
                await link.send(ask.sent)
            for link, ask in zip(taken, asks, strict=True):
                counts.wrong += await _answer(link, model) != ask.right
            counts.mixes += 1
            counts.requests += len(asks)
            note()
        for link in links:
            await link.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(ABREAST):
            group.create_task(send_and_check())


async def _answer(link: Link, model: str) -> bytes:
    reply = await link.answer()
    if reply.status != 200:
        raise ValueError(f"{model}: {reply.status} {reply.body[:300]!r}")
    return read_answer({name.title(): value for name, value in reply.headers.items()}, reply.body).tobytes()


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

        def progress(text: str) -> None:
            console.print(text, highlight=False)

        done = mixes(given.models, Path(folder), given.mixes, given.longest, given.threads, seed, progress)
    for one in done:
        per_mix = f"{one.seconds / one.mixes * 1e3:.2f} ms a mix, {one.cpu_s / one.mixes * 1e3:.2f} ms of CPU"
        console.print(
            f"{one.model}: {one.requests} requests in {one.windows} windows, {per_mix}, wrong {one.wrong}",
            highlight=False,
        )
    wrong = sum(one.wrong for one in done)
    console.print(f"{given.mixes} mixes each, seed {seed}: wrong {wrong}", highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
