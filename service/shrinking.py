"""Arenas that large windows grew give the memory back once such windows no longer come, whatever else runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from service.background import in_thread
from service.engine import EngineStopped
from service.repository import Repository

log = logging.getLogger("tokenslab.repository")

Between = Callable[[Callable[[], None]], None]


async def shrink_arenas(repository: Repository, between: Between, seconds: float) -> None:
    """Look at every model each `seconds`, for ever; `between` runs a job where the engine has a gap for it."""
    while True:
        await asyncio.sleep(seconds)
        await shrink_outgrown(repository, between)


async def shrink_outgrown(repository: Repository, between: Between) -> None:
    """Shrink the arenas that have been larger than needed since the last look."""
    for model in repository.models():
        if not model.arena.outgrown():
            continue
        try:
            await in_thread(partial(between, model.shrink), "tokenslab-shrink")
        except EngineStopped:
            return
        except Exception:
            log.exception("%s: its arena did not shrink", model.label)
