"""Work that takes a while, off the event loop: each in a thread that does not keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_thread(job: Callable[[], T], name: str) -> T:
    """Run `job` in a daemon thread and wait for it.

    `asyncio.to_thread` would do, but for its pool: the interpreter joins it, so that a long load would outlast SIGTERM.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            settle = partial(future.set_result, job())
        except BaseException as error:  # noqa: BLE001 - it is raised where the job came from
            settle = partial(future.set_exception, error)
        with suppress(RuntimeError):  # a loop that was closed meanwhile has nobody left who waits
            loop.call_soon_threadsafe(_unless_cancelled, future, settle)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future


def _unless_cancelled(future: asyncio.Future[T], settle: Callable[[], None]) -> None:
    if not future.done():
        settle()
