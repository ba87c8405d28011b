"""ASGI's types, and the one form in which every fault is answered: `{"error": ...}` with its status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import orjson

from service.body import RequestBody
from service.errors import MethodNotAllowed, RequestError, Unauthorized, UnsupportedEncoding

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON: Final = b"application/json"


def peer_of(scope: Scope) -> str | None:
    """The address at the other end of the connection, where the server knows it."""
    client = scope.get("client")
    return client[0] if client else None


async def refuse(error: RequestError, body: RequestBody, send: Send) -> None:
    """Write the error first; an unread body then costs a bounded discard and the connection."""
    status, headers, text = error_response(error)
    unread = not body.complete
    if unread or error.close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if not unread:
        await send({"type": "http.response.body", "body": text})
        return
    await send({"type": "http.response.body", "body": text, "more_body": True})
    if not error.close:
        await body.discard()
    await send({"type": "http.response.body", "body": b""})


def error_response(error: RequestError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of a fault."""
    text = orjson.dumps({"error": str(error)})
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(text))]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", b"POST"))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, UnsupportedEncoding):
        headers.append((b"accept-encoding", b"gzip, deflate, identity"))
    return error.status, headers, text
