"""The application's routes but infer: health, server metadata and metrics here, models and the repository beside it;
and the one form of every fault.
"""

from __future__ import annotations

from importlib.metadata import version as package_version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from service.asgi import error_response
from service.errors import InternalFault, InvalidInput, MethodNotAllowed, NotFound, RequestError
from service.model_routes import model_routes
from service.parts import Parts, readiness
from service.repository_routes import repository_routes
from service.settings_routes import settings_routes

EXTENSIONS = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "statistics",
]


def add_control_routes(api: FastAPI, parts: Parts) -> None:
    """Add the routes and the handlers that give every fault the protocol's `{"error": ...}`."""
    api.include_router(_health(parts))
    api.include_router(model_routes(parts))
    api.include_router(repository_routes(parts))
    api.include_router(settings_routes(parts))
    metrics = parts.metrics

    @api.get("/metrics", tags=["operations"], response_class=Response, summary="Prometheus metrics")
    async def scrape() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @api.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        metrics.rejections.labels(error.reason).inc()
        status, headers, text = error_response(error)
        return Response(text, status, {k.decode(): v.decode() for k, v in headers})

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        reason = {404: NotFound.reason, 405: MethodNotAllowed.reason}.get(error.status_code, InvalidInput.reason)
        metrics.rejections.labels(reason).inc()
        allowed = (error.headers or {}).get("Allow")
        hint = f"; it takes {allowed}" if allowed else "; /docs has the paths" if error.status_code == 404 else ""
        detail = f"{request.method} {request.url.path}: {error.detail}{hint}"
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    @api.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        metrics.rejections.labels(InvalidInput.reason).inc()
        first = error.errors()[0]
        return JSONResponse({"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}, 400)

    @api.exception_handler(Exception)
    async def on_fault(_: Request, __: Exception) -> Response:
        metrics.rejections.labels(InternalFault.reason).inc()
        # Starlette re-raises after this answer, and the server logs the traceback.
        return JSONResponse({"error": "internal error; see the service's log"}, 500)


def _health(parts: Parts) -> APIRouter:
    lifecycle, router = parts.lifecycle, APIRouter()

    # Load balancers and monitors ask with HEAD too; the server sends no body then.
    @router.head("/v2/health/live", include_in_schema=False)
    @router.get("/v2/health/live", tags=["health"], summary="The process answers, and its engine does not hang")
    async def live() -> Response:
        wrong = parts.hanging()
        return JSONResponse({"live": True}) if wrong is None else JSONResponse({"error": wrong}, 503)

    @router.head("/v2/health/ready", include_in_schema=False)
    @router.get("/v2/health/ready", tags=["health"], summary="Models are warm and the service is not draining")
    async def ready() -> Response:
        return readiness(lifecycle)

    @router.get("/v2", tags=["server"], summary="Server metadata")
    async def server() -> dict[str, Any]:
        return {"name": "tokenslab", "version": package_version("tokenslab"), "extensions": EXTENSIONS}

    return router
