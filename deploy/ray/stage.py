"""One stage of a pipeline: a bundle's model with the service's batcher and engine, asked through a handle.

Requests of everybody who asks this replica share its windows. It knows neither the wire nor the stages beside it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from service.admission import bounds_of
from service.app import ENGINE_STOP_S
from service.batcher import Batcher
from service.engine import Engine
from service.errors import BundleError, RequestError
from service.loading import load_bundle
from service.metrics import Metrics
from service.packing import Float32, Int64
from service.request import Answer
from service.settings import Settings
from service.versions import scan_bundle


@dataclass(frozen=True, slots=True)
class Ask:
    """Tokens (rows, d_in) of one request, on their way through a stage; what the batcher is told with them."""

    tokens: Float32
    seq_lens: Int64 | None
    timeout_s: float
    priority: int
    isolate: bool


class _Unseen:
    """A client behind a handle: when it leaves, Ray cancels the call, and so the await."""

    disconnected = False


class Stage:
    """Made within a running event loop, which is its batcher's."""

    def __init__(self, settings: Settings, name: str, version: int) -> None:
        """Load `name`, `version` from `settings.models`, warm it up and start the engine.

        Raises:
            BundleError: it cannot be served; the message names the file and why.
        """
        found = scan_bundle(settings.models / name).get(version)
        if found is None:
            raise BundleError(f"{settings.models / name / str(version)}: no such version")
        self._models = load_bundle(found, settings).models
        self._engine = Engine()
        self._batcher = Batcher(self._engine.submit, bounds_of(settings), Metrics(), asyncio.get_running_loop())
        self._engine.start()

    async def infer(self, model: str, ask: Ask) -> Answer | RequestError:
        """The rows of `ask` through `model`, in a window with others'; a fault of the request is returned.

        Returned and not raised: Ray would wrap it, its text would hold a traceback, and its status would be lost.
        """
        try:
            return await self._batcher.submit(
                *(self._models[model], ask.tokens, ask.seq_lens, _Unseen(), ask.timeout_s),
                priority=ask.priority,
                isolate=ask.isolate,
            )
        except RequestError as refused:
            return refused.with_traceback(None)

    def check_health(self) -> None:
        """Raise if the engine hangs: Ray then replaces the replica."""
        wrong = self._batcher.hanging()
        if wrong is not None:
            raise RuntimeError(wrong)

    async def close(self) -> None:
        """End the engine; what was to be answered is."""
        await asyncio.to_thread(self._engine.stop, ENGINE_STOP_S)
