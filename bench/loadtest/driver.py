"""One process's part of a stage: sends requests in a closed or an open loop and records what becomes of each.

libcurl does the HTTP, driven by file descriptors. With that a small request costs 0.12 to 0.2 ms of a core, where
aiohttp was measured to take 0.3 to 0.45: what the client takes is missing to a server on the same machine, and its own
lateness is in every latency.
"""

from __future__ import annotations

import re
import resource
import select
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from typing import Final

import numpy as np
import pycurl
from numpy.typing import NDArray

from bench.loadtest.arrivals import Times
from bench.loadtest.contents import Contents
from bench.loadtest.records import CONNECT, LOST, NO_ANSWER, RECORD, TIMEOUT, Records
from bench.loadtest.target import Target

OK: Final = 200
LAG_EVERY_S: Final = 0.02
OTHER_FILES: Final = 32  # open files that are no connections
TIMING: Final = re.compile(rb'server-timing:\s*queue;dur=([\d.]+), compute;dur=([\d.]+), window;desc="(\d+)"', re.I)

_FAULTS: Final = {
    pycurl.E_COULDNT_CONNECT: CONNECT,
    pycurl.E_COULDNT_RESOLVE_HOST: CONNECT,
    pycurl.E_SSL_CONNECT_ERROR: CONNECT,
    pycurl.E_PEER_FAILED_VERIFICATION: CONNECT,
    pycurl.E_OPERATION_TIMEDOUT: TIMEOUT,
}
_READ: Final = select.EPOLLIN | select.EPOLLERR | select.EPOLLHUP
_INTEREST: Final = {
    pycurl.POLL_IN: select.EPOLLIN,
    pycurl.POLL_OUT: select.EPOLLOUT,
    pycurl.POLL_INOUT: select.EPOLLIN | select.EPOLLOUT,
}


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
        ValueError: no connections, or more than this process may open files for.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = files - OTHER_FILES
    if not 0 < job.connections <= most:
        raise ValueError(f"{job.connections} connections in one process: expected 1 to {most} (ulimit -n {files})")
    with _Driver(job) as driver:
        return driver.run(started)


@dataclass(slots=True, eq=False)
class _Transfer:
    """One connection's place: a handle, and the request that it has at present."""

    curl: pycurl.Curl
    headers: list[bytes]  # of the answer, a line each
    choices: Iterator[int]  # tokens of the closed loop's requests
    intended: float = 0.0
    sent: float = 0.0
    tokens: int = 0


class _Driver:
    """Waits for sockets, libcurl's timer and the next arrival, whichever is first."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._contents = Contents(job.target, job.seed)
        self._contents.prepare(job.sizes)
        self._sent = count()
        self._rows: list[tuple[float, float, float, int, int, float, float, int]] = []
        self._lags: list[float] = []
        self._late: deque[tuple[float, int]] = deque()  # arrivals that found all connections busy
        self._flying = self._waited = 0
        self._began = 0.0
        self._curl_due = float("inf")
        self._tick = LAG_EVERY_S
        self._epoll = select.epoll()
        self._watched: set[int] = set()
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._wake_in)
        self._multi.setopt(pycurl.M_MAXCONNECTS, job.connections)
        self._transfers = [self._transfer(no) for no in range(job.connections)]
        self._of = {transfer.curl: transfer for transfer in self._transfers}
        self._free = list(self._transfers)

    def __enter__(self) -> _Driver:
        return self

    def __exit__(self, *_: object) -> None:
        for transfer in self._transfers:
            transfer.curl.close()
        self._multi.close()
        self._epoll.close()

    def run(self, started: Callable[[], None]) -> Part:
        started()
        cpu, self._began = _cpu_s(), time.perf_counter()
        if self._job.arrivals is None:
            self._closed()
        else:
            self._open(self._job.arrivals)
        cpu_share = (_cpu_s() - cpu) / self._now()
        lags = float(np.quantile(self._lags, 0.99)) * 1e3 if self._lags else 0.0
        return Part(np.array(self._rows, RECORD), cpu_share, lags, self._waited)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _closed(self) -> None:
        while (now := self._now()) < self._job.seconds or self._flying:
            if now < self._job.seconds:
                while self._free:
                    transfer = self._free.pop()
                    self._send(transfer, self._now(), next(transfer.choices))
            self._wait(self._job.seconds if now < self._job.seconds else float("inf"))

    def _open(self, arrivals: Times) -> None:
        times, sizes, at = arrivals.tolist(), self._job.sizes.tolist(), 0
        while at < len(times) or self._late or self._flying:
            while at < len(times) and times[at] <= self._now():
                self._waited += not self._free
                self._late.append((times[at], sizes[at]))
                at += 1
            while self._late and self._free:
                self._send(self._free.pop(), *self._late.popleft())
            self._wait(times[at] if at < len(times) else float("inf"))

    def _wait(self, until: float) -> None:
        """Let libcurl work until something is answered, or it is `until`."""
        while not self._answered():
            now = self._now()
            if now >= until:
                return
            due = min(until, self._tick, self._curl_due)
            # select, since epoll's own timeout is in whole milliseconds, on one descriptor, since it is slow on many.
            select.select([self._epoll], [], [], max(0.0, due - now))
            events = self._epoll.poll(0)
            now = self._now()
            if now >= self._tick:
                self._lags.append(now - self._tick)
                self._tick = now + LAG_EVERY_S
            if now >= self._curl_due:
                self._curl_due = float("inf")
                self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
            for descriptor, event in events:
                what = (pycurl.CSELECT_IN if event & _READ else 0) | (
                    pycurl.CSELECT_OUT if event & select.EPOLLOUT else 0
                )
                self._multi.socket_action(descriptor, what)

    def _answered(self) -> bool:
        """Record what libcurl has done with; whether there was any."""
        done = False
        left = 1
        while left:
            left, answered, failed = self._multi.info_read()
            for curl in answered:
                self._record(curl, curl.getinfo(pycurl.RESPONSE_CODE))
            for curl, fault, _ in failed:
                self._record(curl, _FAULTS.get(fault, LOST))
            done = done or bool(answered or failed)
        return done

    def _send(self, transfer: _Transfer, intended: float, tokens: int) -> None:
        body = self._contents.of(tokens, next(self._sent))
        transfer.intended, transfer.tokens = intended, tokens
        transfer.headers.clear()
        curl = transfer.curl
        # From a function that cannot go back: else libcurl sends a request again, unseen, if its connection ends.
        curl.setopt(pycurl.READFUNCTION, BytesIO(body.content).read)
        curl.setopt(pycurl.POSTFIELDSIZE_LARGE, len(body.content))
        curl.setopt(pycurl.HTTPHEADER, body.headers)
        self._flying += 1
        transfer.sent = self._now()
        self._multi.add_handle(curl)

    def _record(self, curl: pycurl.Curl, status: int) -> None:
        now, transfer = self._now(), self._of[curl]
        if status == OK and curl.getinfo(pycurl.SIZE_DOWNLOAD_T) < self._job.target.answer_bytes:
            status = NO_ANSWER
        self._multi.remove_handle(curl)
        self._flying -= 1
        self._free.append(transfer)
        timing = next(filter(None, map(TIMING.match, transfer.headers)), None)
        queue, compute, window = timing.groups() if timing else (b"nan", b"nan", b"0")
        self._rows.append(
            (transfer.intended, transfer.sent, now, status, transfer.tokens, float(queue), float(compute), int(window))
        )

    def _transfer(self, no: int) -> _Transfer:
        curl, headers = pycurl.Curl(), list[bytes]()
        curl.setopt(pycurl.URL, self._job.target.url)
        curl.setopt(pycurl.POST, 1)
        curl.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        curl.setopt(pycurl.TIMEOUT_MS, round(self._job.timeout_s * 1e3))
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.NOPROXY, "*")
        curl.setopt(pycurl.HEADERFUNCTION, headers.append)
        curl.setopt(pycurl.WRITEFUNCTION, len)  # as many bytes as came are done with
        trusted = ssl.get_default_verify_paths()  # libcurl's own are those of the machine that it was built on
        if trusted.cafile:
            curl.setopt(pycurl.CAINFO, trusted.cafile)
        if trusted.capath:
            curl.setopt(pycurl.CAPATH, trusted.capath)
        chosen = np.random.default_rng([self._job.seed, no])
        return _Transfer(curl, headers, iter(lambda: int(chosen.choice(self._job.sizes)), -1))

    def _watch(self, event: int, descriptor: int, _multi: object, _data: object) -> None:
        if event == pycurl.POLL_REMOVE:
            self._epoll.unregister(descriptor)
            self._watched.discard(descriptor)
        elif descriptor in self._watched:
            self._epoll.modify(descriptor, _INTEREST[event])
        else:
            self._epoll.register(descriptor, _INTEREST[event])
            self._watched.add(descriptor)

    def _wake_in(self, milliseconds: int) -> None:
        self._curl_due = float("inf") if milliseconds < 0 else self._now() + milliseconds / 1e3


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
