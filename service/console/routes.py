"""The console over HTTP: the page and its files, which anyone may read, and the events, which need a key where any is
set. None of it is in the OpenAPI document: it is the page's own business.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from service.console.assets import HEADERS, PAGE, Asset, read_assets
from service.console.events import Feed
from service.console.stream import EventStream
from service.errors import NotFound

FILES: Final = "/console/"
EVENTS: Final = "/v2/console/events"


def is_page(path: str) -> bool:
    """Whether `path` is the page or one of its files."""
    return path == "/" or path.startswith(FILES)


def console_routes(feed: Feed, write_timeout_s: float) -> APIRouter:
    """Every route of the console; `write_timeout_s` is how long a reader of events may read nothing."""
    router = APIRouter(include_in_schema=False)
    assets = read_assets()

    @router.get("/")
    async def page(request: Request) -> Response:
        return _file(assets[PAGE], request)

    @router.get(FILES + "{name}")
    async def file(name: str, request: Request) -> Response:
        if name not in assets:
            raise NotFound(f"the console has no file {name[:80]!r}")
        return _file(assets[name], request)

    @router.get(EVENTS)
    async def events() -> Response:
        return EventStream(feed, write_timeout_s)

    return router


def _file(asset: Asset, request: Request) -> Response:
    headers = {**HEADERS, "etag": asset.tag}
    if asset.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers=headers, media_type=asset.media_type)
