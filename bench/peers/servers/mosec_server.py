"""mosec: a front end in Rust, worker processes in Python, dynamic batching."""

from __future__ import annotations

import sys
from typing import Any

from mosec import Server, ValidationError, Worker

from bench.peers.servers.common import MAX_BATCH, PORT, WINDOW_MS, WORKERS, Model, decode


class Ffn(Worker):
    """One worker process."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self._model = Model()

    def deserialize(self, data: bytes) -> Any:
        try:
            return decode(data)
        except ValueError as error:
            raise ValidationError(str(error)) from error

    def forward(self, data: list[Any]) -> list[Any]:
        return self._model.run(data)

    def serialize(self, data: Any) -> bytes:
        encoded: bytes = data.tobytes()
        return encoded


if __name__ == "__main__":
    sys.argv[1:] = ["--port", str(PORT), "--address", "127.0.0.1", "--log-level", "warning", "--timeout", "30000"]
    server = Server()
    server.append_worker(Ffn, num=WORKERS, max_batch_size=MAX_BATCH, max_wait_time=WINDOW_MS)
    server.run()
