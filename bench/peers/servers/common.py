"""What the peers' servers share: their settings, the session, and raw float32 bodies of (tokens, d).

Settings come from the environment: PEER_MODEL, PEER_D, PEER_PORT, PEER_THREADS (intra-op), PEER_WORKERS.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnxruntime as ort

PORT = int(os.environ["PEER_PORT"])
WORKERS = int(os.environ.get("PEER_WORKERS", "1"))
WINDOW_MS = 1
MAX_BATCH = 64  # requests

_D = int(os.environ["PEER_D"])


class Model:
    """The graph, and one run for many requests."""

    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = int(os.environ["PEER_THREADS"])
        # Measured: threads that spin between two runs take the cores that the front end needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(os.environ["PEER_MODEL"], options, providers=["CPUExecutionProvider"])

    def run(self, requests: list[Any]) -> list[Any]:
        """Each of (rows, d) -> each of (rows, d_out)."""
        tokens = requests[0] if len(requests) == 1 else np.concatenate(requests)
        out = self._session.run(["out"], {"tokens": tokens})[0]
        return np.split(out, np.cumsum([len(request) for request in requests])[:-1])


def decode(body: bytes) -> Any:
    """Raises ValueError unless `body` is whole rows."""
    if not body or len(body) % (4 * _D):
        raise ValueError(f"expected a multiple of {4 * _D} bytes, found {len(body)}")
    return np.frombuffer(body, "<f4").reshape(-1, _D)
