"""The page's files, read once: plain HTML, CSS and ES modules, and uPlot for the charts. No secret is in them."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final, NamedTuple

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
PAGE: Final = "index.html"

# The page loads nothing but its own files and talks to nobody but this service, whatever a model's name may contain.
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a new version of the service is seen at once; the tag spares the bytes
}


class Asset(NamedTuple):
    """One file as it is sent."""

    body: bytes
    media_type: str
    tag: str


def read_assets() -> dict[str, Asset]:
    """Every file of the page by its name."""
    static = files("service.console") / "static"
    found = {}
    for folder in (static, static / "vendor"):
        for file in folder.iterdir():
            media_type = _TYPES.get(file.name.rpartition(".")[2])
            if file.is_file() and media_type is not None:
                body = file.read_bytes()
                found[file.name] = Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return found
