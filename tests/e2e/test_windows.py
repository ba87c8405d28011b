"""Windows over HTTP: packed, bounded, and bit for bit what each request gets alone, whoever its neighbours are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import D
from tests.e2e.server import Array, Server, binary, serving

DEMO = Path(__file__).parents[2] / "models"


def neighbours(rng: np.random.Generator, d: int, count: int) -> list[Array]:
    """Ragged requests, many with a row that is 1000x larger, NaN or Inf."""
    requests = []
    for i in range(count):
        x = rng.standard_normal((int(rng.integers(1, 40)), d), dtype=np.float32)
        x[int(rng.integers(len(x)))] *= [1, 30, 1000, np.nan, np.inf][i % 5]
        requests.append(x)
    return requests


@pytest.fixture(scope="module")
def demo() -> object:
    with serving(DEMO, "--max-wait-ms", "5") as server:
        yield server


@pytest.mark.parametrize("model", ["demo-ffn-fp32", "demo-ffn-int8", "demo-block-fp32", "demo-block-int8"])
def test_an_answer_is_bit_identical_to_the_request_alone(demo: Server, model: str) -> None:
    rng = np.random.default_rng()
    requests = neighbours(rng, 64, 60)
    alone = [demo.infer(model, x) for x in requests]
    before = demo.metric("tokenslab_windows_total", model=model)
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda x: demo.infer(model, x), requests))
    assert demo.metric("tokenslab_windows_total", model=model) - before < len(requests), "nothing was packed"
    for one, other in zip(alone, together, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("model", ["demo-ffn-fp32", "demo-ffn-int8"])
def test_rows_permuted_are_answers_permuted(demo: Server, model: str) -> None:
    rng = np.random.default_rng()
    x = rng.standard_normal((50, 64), dtype=np.float32)
    order = rng.permutation(50)
    assert demo.infer(model, x)[order].tobytes() == demo.infer(model, x[order]).tobytes()


@pytest.mark.parametrize("model", ["demo-block-fp32", "demo-block-int8"])
def test_sequences_of_one_request_equal_each_alone(demo: Server, model: str) -> None:
    lens = [1, 7, 31, 2, 64]
    x = np.random.default_rng().standard_normal((sum(lens), 64), dtype=np.float32)
    alone = [demo.infer(model, part) for part in np.split(x, np.cumsum(lens)[:-1])]
    assert demo.infer(model, x, lens).tobytes() == np.concatenate(alone).tobytes()


def test_a_request_larger_than_a_window_is_cut_and_put_together_bit_for_bit(models: Path) -> None:
    x = np.random.default_rng().standard_normal((1000, D), dtype=np.float32)
    with serving(models) as whole, serving(models, "--max-window-tokens", "96") as cut:
        assert whole.infer("ffn", x).tobytes() == cut.infer("ffn", x).tobytes()
        assert cut.metric("tokenslab_windows_total", model="ffn-fp32") == 11
        lens = [300, 1, 99, 200, 400]
        assert whole.infer("mean", x, lens).tobytes() == cut.infer("mean", x, lens).tobytes()


def test_windows_off_runs_one_request_at_a_time(models: Path) -> None:
    requests = [np.ones((2, D), np.float32)] * 40
    with serving(models, "--no-windows") as server, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda x: server.infer("ffn", x), requests))
        assert server.metric("tokenslab_windows_total", model="ffn-fp32") == 40


def test_bodies_together_are_bounded_and_a_refusal_is_a_429(models: Path) -> None:
    with serving(models, "--max-body-mib", "1", "--max-bodies-mib", "1.5") as server:
        head = f"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 20}\r\n\r\n".encode()
        body, headers = binary(np.zeros((2500, D), np.float32))
        with server.raw(head + bytes(1_000_000)):  # and the rest never comes
            while server.metric("tokenslab_body_bytes") < 1_000_000:
                pass
            status, _, data = server.ask("/v2/models/ffn/infer", body, headers)
            assert (status, b"max_bodies_mib" in data) == (429, True)
            assert server.infer("ffn", np.zeros((1, D), np.float32)).shape == (1, D)
        while server.metric("tokenslab_body_bytes"):
            pass  # until the connection is seen to be gone
        assert server.ask("/v2/models/ffn/infer", body, headers)[0] == 200


def test_a_full_queue_is_a_429_with_retry_after_and_a_request_beyond_it_a_413(models: Path) -> None:
    with serving(models, "--max-queue-tokens", "2000", "--max-window-tokens", "500") as server:
        body, headers = binary(np.zeros((1000, D), np.float32))

        def post(_: int) -> tuple[int, dict[str, str], bytes]:
            return server.ask("/v2/models/slow/infer", body, headers)

        with ThreadPoolExecutor(12) as pool:
            got = list(pool.map(post, range(12)))
        refused = [headers for status, headers, _ in got if status == 429]
        assert {status for status, _, _ in got} == {200, 429}
        assert all(int(headers["retry-after"]) >= 1 for headers in refused)
        assert server.metric("tokenslab_rejections_total", reason="queue_full") == len(refused)
        body, headers = binary(np.zeros((2001, D), np.float32))
        assert server.ask("/v2/models/ffn/infer", body, headers)[0] == 413
        assert server.metric("tokenslab_queue_tokens") == 0


def test_a_request_of_many_megabytes_is_cut_and_small_ones_beside_it_are_answered_right_meanwhile() -> None:
    rng = np.random.default_rng()
    model, huge = "demo-ffn-fp32", rng.standard_normal((40_000, 64), dtype=np.float32)
    with serving(DEMO, "--max-chunk-ms", "1") as server, ThreadPoolExecutor(5) as pool:
        small = [rng.standard_normal((n, 64), dtype=np.float32) for n in (1, 2, 5, 9)]
        alone = [server.infer(model, x) for x in small]
        some = rng.integers(0, len(huge), 20).tolist()
        rows = [server.infer(model, huge[i : i + 1]) for i in some]
        running = pool.submit(server.infer, model, huge)

        def beside(x: Array) -> list[Array]:
            answers = [server.infer(model, x)]
            while not running.done():
                answers.append(server.infer(model, x))
            return answers

        for answers, wanted in zip(pool.map(beside, small), alone, strict=True):
            assert {a.tobytes() for a in answers} == {wanted.tobytes()}
        out = running.result()
        assert out.shape == huge.shape
        for i, row in zip(some, rows, strict=True):
            assert out[i : i + 1].tobytes() == row.tobytes()
        assert server.metric("tokenslab_chunks_total", model=model) >= 3
        assert server.metric("tokenslab_queue_tokens") == 0
        assert server.metric("tokenslab_body_bytes") == 0
