"""The name of a request, in its answer and in every log line about it: the client's own if sane, else made here."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from itertools import count
from typing import Final

HEADER: Final = b"x-request-id"

# Set while a request is handled in a task of its own, so that the log's formatter finds it.
current: ContextVar[str] = ContextVar("request_id", default="")

_SANE: Final = re.compile(rb"[A-Za-z0-9._:@/+=,-]{1,128}")
_START: Final = secrets.token_hex(6).encode()
_numbers: Final = count(1)


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The id that these headers (names in lower case) bring, or one that no other request of any process has."""
    for name, value in headers:
        if name == HEADER and _SANE.fullmatch(value):
            return value
    return b"%s-%x" % (_START, next(_numbers))
