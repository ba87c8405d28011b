"""The model repository over HTTP: the protocol's extension with index, load and unload."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field

from service.errors import Unsupported
from service.parts import Parts
from service.repository import Row


class _LoadParameters(BaseModel):
    model_config = ConfigDict(extra="allow")  # so that what is not spoken here is named rather than ignored

    version: int | None = Field(None, ge=1, description="Serve this version too, whatever the version policy")


class _LoadRequest(BaseModel):
    parameters: _LoadParameters = _LoadParameters()


class _UnloadParameters(BaseModel):
    model_config = ConfigDict(extra="forbid")

    unload_dependents: bool = Field(False, description="No bundle depends on another: either is the same")


class _UnloadRequest(BaseModel):
    parameters: _UnloadParameters = _UnloadParameters()


def repository_routes(parts: Parts) -> APIRouter:
    """Index for everyone, load and unload for admins; who that is, was decided before."""
    router = APIRouter(tags=["repository"])

    def _as_it_runs(row: Row) -> Row:
        reason = parts.failing(parts.repository.get(row.name, row.version)) if row.state == "READY" else None
        return row if reason is None else replace(row, state="UNAVAILABLE", reason=reason)

    @router.post("/v2/repository/index", summary="Every model, with its state and the reason")
    async def index(filters: Annotated[dict[str, Any] | None, Body()] = None) -> list[dict[str, str]]:
        rows = [_as_it_runs(row) for row in parts.repository.index()]
        if not parts.lifecycle.ready:
            reason = "draining" if parts.lifecycle.draining else ""
            rows = [replace(row, state="UNAVAILABLE", reason=reason) for row in rows]
        if filters is not None and filters.get("ready") is True:
            rows = [row for row in rows if row.state == "READY"]
        return [asdict(row) for row in rows]

    @router.post(
        "/v2/repository/models/{name}/load", summary="Serve what the bundle's folder holds now; waits until it is warm"
    )
    async def load(name: str, request: Annotated[_LoadRequest | None, Body()] = None) -> dict[str, Any]:
        parameters = (request or _LoadRequest()).parameters
        if parameters.model_extra:
            raise Unsupported(f"parameters.{min(parameters.model_extra)}: not spoken here; a bundle is its folder")
        await parts.control.load(name, parameters.version)
        return {}

    @router.post("/v2/repository/models/{name}/unload", summary="Stop serving a bundle; waits until it has drained")
    async def unload(name: str, _: Annotated[_UnloadRequest | None, Body()] = None) -> dict[str, Any]:
        await parts.control.unload(name)
        return {}

    return router
