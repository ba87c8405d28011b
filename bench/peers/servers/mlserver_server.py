"""MLServer: adaptive batching of the Open Inference Protocol's tensors, as JSON over REST.

Its REST has no binary tensors; its gRPC has, which load generators for HTTP/1.1 do not speak.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from mlserver import MLModel
from mlserver.cli.main import root
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

from bench.peers.servers.common import MAX_BATCH, PORT, Model


class Ffn(MLModel):
    """The custom runtime."""

    async def load(self) -> bool:
        self._model = Model()
        return True

    async def predict(self, payload: Any) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        (out,) = await asyncio.to_thread(self._model.run, [rows])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("out", out)])


SETTINGS = {
    "host": "127.0.0.1",
    "http_port": PORT,
    "grpc_port": PORT + 1,
    "parallel_workers": 0,
    "metrics_endpoint": None,
    "debug": False,
}
# Its window counts requests, and waits for so many or so long; 5 ms was its best.
MODEL = {
    "name": "ffn",
    "implementation": "bench.peers.servers.mlserver_server.Ffn",
    "max_batch_size": MAX_BATCH,
    "max_batch_time": 0.005,
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tokenslab-mlserver-") as folder:
        for name, settings in (("settings.json", SETTINGS), ("model-settings.json", MODEL)):
            (Path(folder) / name).write_text(json.dumps(settings))
        root(["start", folder])
