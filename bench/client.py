"""HTTP clients of our own: one checked request, a closed loop for a while, and waves of concurrent requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

import aiohttp

from bench.bodies import Body, Float32, read_answer
from bench.timing import Load, percentile


class AnswerError(Exception):
    """An answer that is not the one that was due."""


def post_all(url: str, bodies: Sequence[Body], connections: int, timeout_s: float) -> list[Float32]:
    """The answers (rows, d_out) to `bodies`, sent over `connections` connections at a time, in their order.

    Raises:
        AnswerError: an answer that is not 200, or not a binary tensor.
    """

    async def run() -> list[Float32]:
        async with _connect(connections, timeout_s) as http:
            return await asyncio.gather(*(_post(http, url, body) for body in bodies))

    return asyncio.run(run())


def closed_loop(
    url: str, bodies: Sequence[Body], connections: int, seconds: float, seed: int, timeout_s: float
) -> Load:
    """Keep `connections` connections busy for `seconds`; bodies are chosen at random from `seed`."""

    async def run() -> Load:
        latencies: list[float] = []
        errors: Counter[str] = Counter()
        tokens: list[int] = []
        async with _connect(connections, timeout_s) as http:
            began = time.perf_counter()
            until = began + seconds
            choices = [random.Random(f"{seed}/{i}") for i in range(connections)]
            await asyncio.gather(
                *(_keep_busy(http, url, bodies, rng, until, latencies, errors, tokens) for rng in choices)
            )
            elapsed = time.perf_counter() - began
        if not latencies:
            return Load(0, elapsed, 0.0, 0.0, dict(errors))
        p50, p99 = (percentile(latencies, q) * 1e3 for q in (0.5, 0.99))
        return Load(len(latencies), elapsed, p50, p99, dict(errors), sum(tokens))

    return asyncio.run(run())


def waves(url: str, bodies: Sequence[Body], seconds: float, timeout_s: float) -> Load:
    """Send every body at once, each on a connection of its own, wait for all answers, and again for `seconds`.

    At least one wave; the first, which opens the connections, is not counted.
    """

    async def run() -> Load:
        latencies: list[float] = []
        errors: Counter[str] = Counter()
        async with _connect(len(bodies), timeout_s) as http:
            await asyncio.gather(*(_timed(http, url, body, [], errors) for body in bodies))
            began = time.perf_counter()
            while True:
                await asyncio.gather(*(_timed(http, url, body, latencies, errors) for body in bodies))
                elapsed = time.perf_counter() - began
                if elapsed >= seconds:
                    break
        if not latencies:
            return Load(0, elapsed, 0.0, 0.0, dict(errors))
        p50, p99 = (percentile(latencies, q) * 1e3 for q in (0.5, 0.99))
        return Load(len(latencies), elapsed, p50, p99, dict(errors))

    return asyncio.run(run())


def _connect(connections: int, timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        auto_decompress=False,
    )


async def _post(http: aiohttp.ClientSession, url: str, body: Body) -> Float32:
    async with http.post(url, data=body.content, headers=body.headers) as answer:
        content = await answer.read()
        if answer.status != 200:
            raise AnswerError(f"{url}: {answer.status} {content[:500]!r}")
        try:
            return read_answer(answer.headers, content)
        except ValueError as cause:
            raise AnswerError(f"{url}: {cause}") from cause


async def _keep_busy(
    http: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[Body],
    rng: random.Random,
    until: float,
    latencies: list[float],
    errors: Counter[str],
    tokens: list[int],
) -> None:
    while time.perf_counter() < until:
        body, own = rng.choice(bodies), list[float]()
        await _timed(http, url, body, own, errors)
        latencies += own
        tokens += [body.tokens] * len(own)


async def _timed(
    http: aiohttp.ClientSession, url: str, body: Body, latencies: list[float], errors: Counter[str]
) -> None:
    """One request; what goes wrong is counted by kind, in wrk's words."""
    began = time.perf_counter()
    try:
        async with http.post(url, data=body.content, headers=body.headers) as answer:
            await answer.read()
            status = answer.status
    except aiohttp.ClientConnectorError:
        errors["connect"] += 1
    except TimeoutError:
        errors["timeout"] += 1
    except aiohttp.ClientError:
        errors["read"] += 1
    else:
        if status == 200:
            latencies.append(time.perf_counter() - began)
        else:
            errors["status"] += 1
