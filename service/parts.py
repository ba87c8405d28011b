"""What the routes are made of: the parts of one application, some of which exist only while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Response
from fastapi.responses import JSONResponse

from service.errors import NotReady
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.model_control import ModelControl
from service.repository import Repository
from service.settings import Settings


@dataclass(slots=True)
class Parts:
    """`repository` and `control` are None until everything is loaded."""

    settings: Settings
    lifecycle: Lifecycle
    metrics: Metrics
    loaded: Repository | None = None
    running: ModelControl | None = None

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


def readiness(lifecycle: Lifecycle) -> Response:
    """Ready, or the protocol's 503."""
    if lifecycle.ready:
        return JSONResponse({"ready": True})
    return JSONResponse({"error": "draining" if lifecycle.draining else "starting"}, 503)
