"""nvidia-pytriton: Triton's HTTP front end and dynamic batcher, with Python behind it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from bench.peers.servers.common import PORT, Model

_MAX_ROWS = 4096


def main() -> None:
    """Serve until a signal."""
    model = Model()
    width = int(os.environ["PEER_D"])

    def infer(requests: list[Any]) -> list[dict[str, Any]]:
        return [{"out": out} for out in model.run([request["tokens"] for request in requests])]

    settings = TritonConfig(
        http_address="127.0.0.1", http_port=PORT, allow_grpc=False, allow_metrics=False, exit_timeout_secs=5
    )
    with Triton(config=settings) as triton:
        triton.bind(
            "ffn",
            infer_func=infer,
            inputs=[Tensor(name="tokens", dtype=np.float32, shape=(width,))],
            outputs=[Tensor(name="out", dtype=np.float32, shape=(width,))],
            # No delay was its best: a busy model is itself the window.
            config=ModelConfig(max_batch_size=_MAX_ROWS, batcher=DynamicBatcher(max_queue_delay_microseconds=0)),
        )
        triton.serve()


if __name__ == "__main__":
    main()
