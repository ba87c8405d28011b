"""`python -m bench.hot_path`: what a request of one token costs the event loop's thread, and how much of it is metrics.

Socketless, in CPU time of that one thread, the least of several rounds: the figures hold beside any other load.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import typer
import uvicorn
import uvloop

from bench import echo
from bench.bodies import infer_body, random_tokens
from bench.bundles import THIN, Bundle, ensure
from bench.socketless import Links, request_bytes
from service.app import create_app
from service.metrics import Metrics
from service.server import server_config
from service.settings import Settings

CONNECTIONS: Final = 64
ROUNDS: Final = 7
WAVES: Final = 30


async def measure(bundle: Bundle, models: Path, rounds: int = ROUNDS, waves: int = WAVES) -> dict[str, float]:
    """Microseconds a request, by the way it goes; with bare uvicorn's echo of the same bytes to compare."""
    settings = Settings(models=models, threads=1)
    app = create_app(settings)
    known = request_bytes(
        f"/v2/models/{bundle.manifest.name}/infer", infer_body(random_tokens(1, bundle.manifest.d_in, seed=0))
    )
    ways = {
        "direct, a head seen before": known,
        "direct, a head to parse": _with(known, b"X-Long: " + b"x" * 2048),  # too long to be remembered
        "through ASGI": _with(known, b"Expect: nothing"),
    }
    least: dict[str, float] = {}
    async with app.api.router.lifespan_context(app.api):
        links = Links(server_config(app, settings), CONNECTIONS)
        for way, data in ways.items():
            least[way] = await _least(partial(links.cpu_us, data, waves), rounds)
        links.close()
    bare = Links(uvicorn.Config(echo.app, access_log=False, lifespan="off", log_config=None), CONNECTIONS)
    least["bare uvicorn, echo"] = await _least(partial(bare.cpu_us, known, waves), rounds)
    bare.close()
    return least


def metrics_us(rounds: int = ROUNDS, waves: int = WAVES) -> float:
    """What counting costs a request, in windows of CONNECTIONS requests of one token; microseconds."""
    metrics = Metrics().of("model")
    tokens, queued = [1] * CONNECTIONS, [0.001] * CONNECTIONS

    def count() -> float:
        began = time.thread_time()
        for _ in range(waves):
            metrics.count_window(CONNECTIONS, CONNECTIONS, 2048, 1e-5, 1e-3, 1e-4)
            metrics.count_answers(tokens, queued)
        return (time.thread_time() - began) / (waves * CONNECTIONS) * 1e6

    return min(count() for _ in range(rounds))


async def _least(measure_once: Callable[[], Awaitable[float]], rounds: int) -> float:
    return min([await measure_once() for _ in range(rounds)])


def _with(request: bytes, line: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\n" + line + b"\r\n", 1)


def main(models: Path) -> None:
    """Print the table."""
    logging.basicConfig(level="WARNING")
    least = uvloop.run(measure(ensure(THIN, models), models))
    for way, microseconds in least.items():
        typer.echo(f"{way:<28}{microseconds:7.1f} us a request")
    typer.echo(f"{'of it, metrics':<28}{metrics_us():7.1f} us a request")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/bench-models"))
