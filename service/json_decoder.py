"""Large JSON, decoded in a process of its own: orjson holds the interpreter's lock, so a thread would not do.

The process starts with the first such body, decodes one after another, and is replaced when it ends or takes too long.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from typing import Final

from service.errors import DeadlineExceeded, DecoderLost, RequestError
from service.json_worker import ANSWER_SIZE, REQUEST_SIZES, Task
from service.protocol import Decoded, Signature

log = logging.getLogger("tokenslab.json")

# What may be parsed on the event loop: the worst text found takes 0.12 s a MiB, on a busy machine more than twice that.
INLINE_JSON: Final = 1 << 16


class JsonDecoder:
    """Owns the process."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._killed: list[asyncio.subprocess.Process] = []  # and not waited for

    @property
    def pid(self) -> int | None:
        """Of the process, None while there is none."""
        return None if self._process is None else self._process.pid

    async def decode(
        self, signature: Signature, body: memoryview, header_length: bytes | None, max_json: int
    ) -> Decoded:
        """`protocol.decode` elsewhere.

        Raises:
            RequestError: what `protocol.decode` raises.
            DeadlineExceeded: it took, with those before it, longer than the service's timeout.
            DecoderLost: the process ended while it decoded, and the one that replaced it too.
        """
        task = Task(signature, header_length, max_json)
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                try:
                    outcome = await self._ask(task, body)
                except OSError as error:
                    log.warning("the JSON process ended while it decoded (%s); trying once more", error)
                    outcome = await self._ask(task, body)
        except TimeoutError:
            raise DeadlineExceeded(f"timeout: JSON not decoded within {self._timeout_s:g} s") from None
        except OSError as cause:
            raise DecoderLost("the process that decodes JSON ended twice on this body; a retry may help") from cause
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """End the process, if there is one."""
        self._kill()
        while self._killed:
            await self._killed.pop().wait()

    async def _ask(self, task: Task, body: memoryview) -> Decoded | RequestError:
        """One exchange; whatever interrupts it ends the process, since its pipes are then in the middle of a frame."""
        try:
            process = self._process or await self._start()
            requests, answers = process.stdin, process.stdout
            assert requests is not None, "started with a pipe"
            assert answers is not None, "started with a pipe"
            head = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
            requests.write(REQUEST_SIZES.pack(len(head), len(body)) + head)
            requests.write(body)
            await requests.drain()
            (size,) = ANSWER_SIZE.unpack(await answers.readexactly(ANSWER_SIZE.size))
            answer: Decoded | RequestError = pickle.loads(await answers.readexactly(size))  # noqa: S301 - our own
        except asyncio.IncompleteReadError:
            self._kill()
            raise ConnectionError("its answer broke off") from None
        except BaseException:
            self._kill()
            raise
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.json_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        log.info("JSON over %d KiB is decoded by process %d", INLINE_JSON >> 10, self._process.pid)
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        self._killed = [one for one in self._killed if one.returncode is None] + [process]
