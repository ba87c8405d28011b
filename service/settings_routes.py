"""Settings over HTTP, for admins: what is in force, and the few that may change while the service runs. Ours, not the
protocol's.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, ValidationError

from service.admission import bounds_of
from service.errors import InvalidInput
from service.parts import Parts
from service.settings import Settings

log = logging.getLogger("tokenslab")


class Change(BaseModel):
    """Settings that may change; the others need a restart. Until the next start: the environment stays as it is."""

    model_config = ConfigDict(extra="forbid")

    max_wait_ms: float | None = None
    max_window_tokens: int | None = None
    max_chunk_ms: float | None = None
    timeout_s: float | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None


def settings_routes(parts: Parts) -> APIRouter:
    """GET and PATCH; who may, was decided before."""
    router = APIRouter(tags=["operations"])

    @router.get("/v2/settings", summary="Every setting that is in force; secrets are starred")
    async def show() -> dict[str, Any]:
        return parts.settings.model_dump(mode="json")

    @router.patch("/v2/settings", summary="Change settings until the next start")
    async def change(wanted: Annotated[Change, Body()]) -> dict[str, Any]:
        given = wanted.model_dump(exclude_none=True)
        try:
            fresh = Settings(**{**parts.settings.model_dump(), **given})
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        control, batcher = parts.control, parts.batcher
        parts.settings = fresh
        if batcher is not None:
            batcher.rebound(bounds_of(fresh))
        if wanted.max_window_tokens is not None:
            await control.resize_windows(fresh.max_window_tokens)
        logging.getLogger().setLevel(fresh.log_level.upper())
        log.info("settings changed: %s", ", ".join(f"{name} {value}" for name, value in given.items()) or "none")
        return fresh.model_dump(mode="json")

    return router
