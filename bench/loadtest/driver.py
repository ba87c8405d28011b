"""One process's part of a stage: sends requests in a closed or an open loop and records what becomes of each.

The loop selects with select(2): epoll's timeouts are whole milliseconds, and an open loop that is up to one late would
measure itself. select bounds a process to `MAX_CONNECTIONS`.
"""

from __future__ import annotations

import asyncio
import re
import resource
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from bench.bodies import Body
from bench.loadtest.arrivals import Times
from bench.loadtest.records import CONNECT, LOST, RECORD, TIMEOUT, Records
from bench.loadtest.target import Target

MAX_CONNECTIONS: Final = 900  # select(2) takes file descriptors below 1024
BODY_CACHE_BYTES: Final = 128 << 20
BODIES_OF_A_SIZE: Final = 4
LAG_EVERY_S: Final = 0.02
TIMING: Final = re.compile(r'queue;dur=([\d.]+), compute;dur=([\d.]+), window;desc="(\d+)"')


@dataclass(frozen=True, slots=True)
class Job:
    """What one process sends. `sizes` are tokens: with `arrivals`, of each arrival; without, those to choose from."""

    target: Target
    sizes: NDArray[np.int64]
    connections: int
    seconds: float
    timeout_s: float
    seed: int
    arrivals: Times | None = None  # None: a closed loop


@dataclass(frozen=True, slots=True)
class Part:
    """What one process saw: its requests, its own CPU share (1: one core, all the time) and its loop's lag."""

    records: Records
    cpu_share: float
    lag_p99_ms: float
    waited_for_connection: int  # requests of an open loop that found all connections busy


def drive(job: Job, started: Callable[[], None] = lambda: None) -> Part:
    """Run `job`; `started` is called when all is prepared, and the stage's time begins when it returns.

    Raises:
        ValueError: more connections than select(2) can serve.
    """
    if not 0 < job.connections <= MAX_CONNECTIONS:
        raise ValueError(f"{job.connections} connections in one process: expected 1 to {MAX_CONNECTIONS}")
    driver = _Driver(job)
    with asyncio.Runner(loop_factory=_select_loop) as runner:
        return runner.run(driver.run(started))


def _select_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


class _Bodies:
    """Requests by size: a few of each are kept, as far as memory is given; the rest are made when they are sent."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._rng = np.random.default_rng(seed)
        self._kept: dict[int, list[Body]] = {}
        self._bytes = 0

    def prepare(self, sizes: NDArray[np.int64]) -> None:
        for tokens in np.unique(sizes).tolist():
            for _ in range(BODIES_OF_A_SIZE):
                if self._bytes < BODY_CACHE_BYTES:
                    body = self._target.body(tokens, self._rng)
                    self._kept.setdefault(tokens, []).append(body)
                    self._bytes += len(body.content)

    def of(self, tokens: int, no: int) -> Body:
        kept = self._kept.get(tokens)
        return kept[no % len(kept)] if kept else self._target.body(tokens, self._rng)


class _Driver:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._bodies = _Bodies(job.target, job.seed)
        self._bodies.prepare(job.sizes)
        self._rows: list[tuple[float, float, float, int, int, float, float, int]] = []
        self._lags: list[float] = []
        self._in_flight = self._waited = 0
        self._began = 0.0

    async def run(self, started: Callable[[], None]) -> Part:
        connector = aiohttp.TCPConnector(limit=self._job.connections)
        timeout = aiohttp.ClientTimeout(total=self._job.timeout_s)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as http:
            started()
            cpu, self._began = _cpu_s(), time.perf_counter()
            lag = asyncio.create_task(self._watch_lag())
            await (self._closed(http) if self._job.arrivals is None else self._open(http, self._job.arrivals))
            cpu_share = (_cpu_s() - cpu) / self._now()
            lag.cancel()
        lags = float(np.quantile(self._lags, 0.99)) * 1e3 if self._lags else 0.0
        return Part(np.array(self._rows, RECORD), cpu_share, lags, self._waited)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _closed(self, http: aiohttp.ClientSession) -> None:
        async def keep_busy(no: int) -> None:
            chosen = np.random.default_rng([self._job.seed, no])
            while (now := self._now()) < self._job.seconds:
                await self._send(http, now, int(chosen.choice(self._job.sizes)))

        await asyncio.gather(*(keep_busy(no) for no in range(self._job.connections)))

    async def _open(self, http: aiohttp.ClientSession, arrivals: Times) -> None:
        flying: set[asyncio.Task[None]] = set()
        for at, tokens in zip(arrivals.tolist(), self._job.sizes.tolist(), strict=True):
            await asyncio.sleep(max(0.0, at - self._now()))  # late: answers are still read before the next is sent
            task = asyncio.create_task(self._send(http, at, tokens))
            flying.add(task)
            task.add_done_callback(flying.discard)
        await asyncio.gather(*flying)

    async def _send(self, http: aiohttp.ClientSession, intended: float, tokens: int) -> None:
        body = self._bodies.of(tokens, len(self._rows))
        self._waited += self._in_flight >= self._job.connections
        self._in_flight += 1
        sent = self._now()
        timing = None
        try:
            async with http.post(self._job.target.url, data=body.content, headers=body.headers) as answer:
                await answer.read()
                status, timing = answer.status, TIMING.match(answer.headers.get("Server-Timing", ""))
        except aiohttp.ClientConnectorError:
            status = CONNECT
        except TimeoutError:
            status = TIMEOUT
        except aiohttp.ClientError:
            status = LOST
        finally:
            self._in_flight -= 1
        queue, compute, window = timing.groups() if timing else ("nan", "nan", "0")
        self._rows.append((intended, sent, self._now(), status, tokens, float(queue), float(compute), int(window)))

    async def _watch_lag(self) -> None:
        while True:
            due = self._now() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lags.append(self._now() - due)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
