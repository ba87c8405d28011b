"""Answers that their clients read slowly: who waits for one, and when it is cut off."""

from __future__ import annotations

import asyncio
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl


class SlowReader(Protocol):
    """A client that an answer is being written to."""

    @property
    def transport(self) -> asyncio.Transport: ...
    @property
    def flow(self) -> FlowControl: ...
    @property
    def disconnected(self) -> bool: ...


async def written(client: SlowReader, timeout_s: float) -> bool:
    """Wait until the client has read its answer but for a small rest.

    False once it has read nothing for `timeout_s`, or when the service stops first: then it is cut off.
    """
    while client.flow.write_paused and not client.disconnected:
        before = client.transport.get_write_buffer_size()
        try:
            async with asyncio.timeout(timeout_s):
                await client.flow.drain()
        except TimeoutError:
            if client.transport.get_write_buffer_size() >= before:
                client.transport.abort()
                return False
        except asyncio.CancelledError:  # by the server, whose drain limit is over: nothing to clean up but this
            client.transport.abort()
            return False
    return True
