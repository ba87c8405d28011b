"""A request of 50,000 tokens and small ones beside it, over HTTP: who waited for what, by the windows' own records."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort

from tests.e2e.conftest import D
from tests.e2e.server import serving

LARGE = 50_000
CHUNK_MS = 10.0
FLAGS = ("--threads", "1", "--max-chunk-ms", str(CHUNK_MS), "--max-queue-tokens", "100000", "--max-body-mib", "32")


def test_small_requests_wait_for_at_most_one_chunk_more_beside_a_50_000_token_request(models: Path) -> None:
    rng = np.random.default_rng()
    large = rng.standard_normal((LARGE, D), dtype=np.float32)
    small = rng.standard_normal((1, D), dtype=np.float32)
    with serving(models, *FLAGS, program="tests.e2e.window_records", PYTHONUNBUFFERED="1") as server:
        with ThreadPoolExecutor(1) as others:
            answer = others.submit(server.infer, "ffn", large)
            asked = 0
            while not answer.done():
                alone = server.infer("ffn", small)
                asked += 1
        whole = answer.result()
        server.logged(f"request: {LARGE} ")
        records = [line.split()[1:] for line in list(server.log) if line.startswith("request: ")]
        windows = [line.split()[1:] for line in list(server.log) if line.startswith("window: ")]

    (taken,) = [int(count) for rows, count in records if rows == str(LARGE)]
    assert taken > 2, "it was cut"
    waited = [int(count) for rows, count in records if rows == "1"]
    assert len(waited) == asked
    # Besides the window that ran when it came, which is not counted: its own, and at most one chunk before that.
    assert max(waited) <= 2, waited
    # Of what runs before it, nothing is predicted to take longer than a chunk; a small request beside it adds a little.
    with_chunks = [float(predicted) for _, predicted, chunks in windows if int(chunks)]
    assert max(with_chunks) <= 1.5 * CHUNK_MS, with_chunks
    assert any(int(requests) > 1 and int(chunks) for requests, _, chunks in windows), "nobody met the large one"

    session = ort.InferenceSession(models / "ffn" / "1" / "fp32.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(whole, session.run(["out"], {"tokens": large})[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(alone, session.run(["out"], {"tokens": small})[0], rtol=1e-4, atol=1e-5)
