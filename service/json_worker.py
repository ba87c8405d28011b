"""`python -m service.json_worker`: the process that decodes large JSON, one body after another. Knows no socket.

Requests come on standard input, answers go to standard output; it ends with its parent, whose pipe then closes.

Frames: SIZES, then as many bytes each. A request is what to decode, pickled, and the body; an answer is the Decoded or
the error to raise, pickled. Both ends are this package: nothing that a client sends is unpickled.
"""

from __future__ import annotations

import pickle
import signal
import sys
from dataclasses import dataclass
from struct import Struct
from typing import BinaryIO, Final

from service.errors import RequestError
from service.protocol import Decoded, Signature, decode

REQUEST_SIZES: Final = Struct("<QQ")  # of the Task and the body
ANSWER_SIZE: Final = Struct("<Q")


@dataclass(frozen=True, slots=True)
class Task:
    """The arguments of `protocol.decode` beside the body."""

    signature: Signature
    header_length: bytes | None
    max_json: int


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Decode until `requests` ends."""
    while sizes := requests.read(REQUEST_SIZES.size):
        task_size, body_size = REQUEST_SIZES.unpack(sizes)
        task: Task = pickle.loads(requests.read(task_size))  # noqa: S301 - from our parent
        answer = pickle.dumps(_decode(task, memoryview(requests.read(body_size))), pickle.HIGHEST_PROTOCOL)
        answers.write(ANSWER_SIZE.pack(len(answer)))
        answers.write(answer)
        answers.flush()


def _decode(task: Task, body: memoryview) -> Decoded | RequestError:
    try:
        return decode(task.signature, body, task.header_length, task.max_json)
    except RequestError as error:
        return error.with_traceback(None)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal, or systemd, sends it to all; the parent decides
        signal.signal(number, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
