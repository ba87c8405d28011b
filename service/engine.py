"""The engine: one thread that runs windows on ONNX Runtime, one after another. It knows no client and no event loop.

A window goes in by `submit`; when it has run, its callback is called *on the engine's thread* with the window itself,
whose `out` or `error` is then set.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from service.memory import Memory, pack_memory
from service.packing import Float32, Int64, pack

log = logging.getLogger("tokenslab.engine")

T = TypeVar("T")


class Runnable(Protocol):
    """A loaded model, as the engine sees it."""

    @property
    def slab(self) -> Float32:
        """(capacity, d_in), written anew for every window."""

    @property
    def memory_slab(self) -> Float32 | None:
        """(capacity, d_memory), likewise; None: the model takes no memory."""

    def run(self, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32:
        """(rows, d_in) and, for sequences, their lengths and memory -> (rows, d_out)."""

    def try_out(self) -> None:
        """Run an input that has worked before; raises as `run` does."""


@dataclass(slots=True, eq=False)
class Window:
    """Requests' rows that run together, and what became of them. Times are `time.perf_counter()` seconds.

    A window without parts tries the model out.
    """

    model: Runnable
    parts: list[Float32]
    seq_lens: Int64 | None
    rows: int
    done: Callable[[Window], None]
    started: float = 0.0
    packed: float = 0.0
    finished: float = 0.0
    out: Float32 | None = None
    error: BaseException | None = field(default=None)
    memory: list[Memory] | None = None  # of each part, where the model takes one
    memory_rows: int = 0


class EngineStopped(Exception):
    """There is no engine to run on any more."""


class _Job:
    """Something else than a window that wants the engine's thread."""

    def __init__(self, job: Callable[[], T], future: Future[T]) -> None:
        self._job: Callable[[], Any] = job
        self._future: Future[Any] = future

    def run(self) -> None:
        try:
            self._future.set_result(self._job())
        except BaseException as error:  # noqa: BLE001 - it is raised where the job came from
            self._future.set_exception(error)


class Engine:
    """Owns the thread. Started and stopped by the application's lifespan."""

    def __init__(self) -> None:
        self._windows: queue.SimpleQueue[Window | _Job | None] = queue.SimpleQueue()
        self._open = threading.Lock()  # nothing may be queued behind the word to stop and be waited for
        self._stopped = False
        # A daemon: a run that hangs must not outlive a second signal.
        self._thread = threading.Thread(target=self._work, name="tokenslab-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Finish what was submitted, then end the thread; False if it is still running after `timeout_s`."""
        with self._open:
            self._stopped = True
            self._windows.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, window: Window) -> None:
        """Hand over a window; any thread."""
        self._windows.put(window)

    def between(self, job: Callable[[], T]) -> T:
        """Run `job` on the engine's thread, between two windows, and wait for it; from a thread of its own.

        A model that is loaded beside others warms up so: no window ever shares the cores with it.

        Raises:
            EngineStopped: the engine is not there any more; otherwise whatever `job` raises.
        """
        future: Future[T] = Future()
        with self._open:
            if self._stopped:
                raise EngineStopped("the engine has stopped")
            self._windows.put(_Job(job, future))
        return future.result()

    def _work(self) -> None:
        while (window := self._windows.get()) is not None:
            if isinstance(window, _Job):
                window.run()
                continue
            window.started = time.perf_counter()
            try:
                window.out = self._run(window)
            except BaseException as error:  # noqa: BLE001 - whatever the run raises fails this window, not the engine
                window.error = error
            window.finished = time.perf_counter()
            window.parts, window.memory = [], None  # the bodies are no longer needed
            window.done(window)
            del window

    @staticmethod
    def _run(window: Window) -> Float32 | None:
        model, memory = window.model, None
        if not window.parts:
            model.try_out()
            return None
        tokens = pack(window.parts, model.slab)
        if window.memory is not None:
            assert model.memory_slab is not None
            memory = pack_memory(window.memory, model.memory_slab)
        window.packed = time.perf_counter()
        out = model.run(tokens, window.seq_lens, memory)
        if out.dtype != np.float32 or len(out) != window.rows:
            raise RuntimeError(f"the model returned {out.dtype} {out.shape} for {window.rows} rows")
        return out
