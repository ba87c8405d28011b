"""LitServe: FastAPI front ends, a worker process, dynamic batching."""

from __future__ import annotations

from typing import Annotated, Any

import litserve
from fastapi import Body, HTTPException
from fastapi.responses import Response

from bench.peers.servers.common import MAX_BATCH, PORT, WINDOW_MS, WORKERS, Model, decode


class Ffn(litserve.LitAPI):
    """The worker's half and the front end's half in one class, as LitServe wants it."""

    def setup(self, device: str) -> None:
        self._model = Model()

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> Any:
        try:
            return decode(request)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, requests: list[Any]) -> list[Any]:
        return self._model.run(requests)

    def unbatch(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def encode_response(self, output: Any) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Ffn(max_batch_size=MAX_BATCH, batch_timeout=WINDOW_MS / 1e3)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=WORKERS, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=PORT,
        num_api_servers=2,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )
