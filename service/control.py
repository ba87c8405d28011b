"""Every route but infer: health, metadata, the repository index and metrics, in the Open Inference Protocol's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version as package_version
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Body, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from service.asgi import error_response
from service.errors import RequestError
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.model import Model
from service.repository import Repository

EXTENSIONS = ["binary_tensor_data", "model_repository"]


def add_control_routes(
    api: FastAPI, repository: Callable[[], Repository], lifecycle: Lifecycle, metrics: Metrics
) -> None:
    """Add the routes and the handlers that give every fault the protocol's `{"error": ...}`."""
    api.include_router(_health(repository, lifecycle))
    api.include_router(_models(repository, lifecycle))

    @api.get("/metrics", tags=["operations"], response_class=Response, summary="Prometheus metrics")
    async def scrape() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @api.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        status, headers, text = error_response(error)
        return Response(text, status, {k.decode(): v.decode() for k, v in headers})

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    @api.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 400)

    @api.exception_handler(Exception)
    async def on_fault(_: Request, __: Exception) -> Response:
        # Starlette re-raises after this answer, and the server logs the traceback.
        return JSONResponse({"error": "internal error; see the service's log"}, 500)


def _health(repository: Callable[[], Repository], lifecycle: Lifecycle) -> APIRouter:
    router = APIRouter()

    @router.get("/v2/health/live", tags=["health"], summary="The process answers")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/v2/health/ready", tags=["health"], summary="Models are warm and the service is not draining")
    async def ready() -> Response:
        return _readiness(lifecycle)

    @router.get("/v2", tags=["server"], summary="Server metadata")
    async def server() -> dict[str, Any]:
        return {"name": "tokenslab", "version": package_version("tokenslab"), "extensions": EXTENSIONS}

    @router.post("/v2/repository/index", tags=["server"], summary="Every model that is served, with its state")
    async def index(filters: Annotated[dict[str, Any] | None, Body()] = None) -> list[dict[str, str]]:
        rows = repository().index()
        if not lifecycle.ready:
            reason = "draining" if lifecycle.draining else ""
            rows = [replace(row, state="UNAVAILABLE", reason=reason) for row in rows]
        if filters is not None and filters.get("ready") is True:
            rows = [row for row in rows if row.state == "READY"]
        return [asdict(row) for row in rows]

    return router


def _models(repository: Callable[[], Repository], lifecycle: Lifecycle) -> APIRouter:
    router = APIRouter(tags=["models"])

    @router.get("/v2/models/{name}", summary="Model metadata, latest version")
    async def latest_metadata(name: str) -> Response:
        return metadata(name, None)

    @router.get("/v2/models/{name}/versions/{version}", summary="Model metadata")
    async def version_metadata(name: str, version: str) -> Response:
        return metadata(name, version)

    def metadata(name: str, version: str | None) -> Response:
        body = _metadata(name, repository().get(name, version), repository().versions(name))
        return Response(orjson.dumps(body), media_type="application/json")

    @router.get("/v2/models/{name}/ready", summary="The latest version is ready")
    async def latest_ready(name: str) -> Response:
        repository().get(name)
        return _readiness(lifecycle)

    @router.get("/v2/models/{name}/versions/{version}/ready", summary="The version is ready")
    async def version_ready(name: str, version: str) -> Response:
        repository().get(name, version)
        return _readiness(lifecycle)

    return router


def _readiness(lifecycle: Lifecycle) -> Response:
    if lifecycle.ready:
        return JSONResponse({"ready": True})
    return JSONResponse({"error": "draining" if lifecycle.draining else "starting"}, 503)


def _metadata(name: str, model: Model, versions: tuple[str, ...]) -> dict[str, Any]:
    manifest, variant = model.manifest, model.variant
    inputs = [{"name": "tokens", "datatype": "FP32", "shape": [-1, manifest.d_in]}]
    if model.has_sequences:
        inputs.append({"name": "seq_lens", "datatype": "INT64", "shape": [-1]})
    return {
        "name": name,
        "versions": list(versions),
        "platform": "onnxruntime_onnx",
        "inputs": inputs,
        "outputs": [{"name": "out", "datatype": "FP32", "shape": [-1, manifest.d_out]}],
        "parameters": {
            "kind": manifest.kind,
            "precision": variant.precision,
            "provider": variant.provider,
            "certificate": variant.certificate.model_dump(),
            "packed": model.limits.requests is None,
            "max_window_tokens": model.limits.tokens,
        },
    }
