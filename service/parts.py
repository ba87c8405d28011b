"""What the routes are made of: the parts of one application, some of which exist only while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Response
from fastapi.responses import JSONResponse

from service.batcher import Batcher
from service.errors import NotReady
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.model import Model
from service.model_control import ModelControl
from service.repository import Repository
from service.settings import Settings


@dataclass(slots=True)
class Parts:
    """`repository`, `control` and `batcher` are None until everything is loaded."""

    settings: Settings
    lifecycle: Lifecycle
    metrics: Metrics
    loaded: Repository | None = None
    running: ModelControl | None = None
    batcher: Batcher | None = None

    @property
    def repository(self) -> Repository:
        """What is served; raises NotReady while it is being loaded."""
        if self.loaded is None:
            raise NotReady("the service is starting")
        return self.loaded

    @property
    def control(self) -> ModelControl:
        """Who may change what is served; raises NotReady before and after."""
        if self.running is None:
            raise NotReady("the service is starting or stopping")
        return self.running

    def failing(self, model: Model) -> str | None:
        """Why `model` does not run at present; None if it does, as far as is known."""
        return None if self.batcher is None else self.batcher.failing(model)

    def hanging(self) -> str | None:
        """What is wrong with the engine, if a window runs for much longer than it should."""
        return None if self.batcher is None else self.batcher.hanging()


def readiness(lifecycle: Lifecycle) -> Response:
    """Ready, or the protocol's 503."""
    if lifecycle.ready:
        return JSONResponse({"ready": True})
    return JSONResponse({"error": "draining" if lifecycle.draining else "starting"}, 503)
