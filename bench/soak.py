"""`python -m bench.soak`: requests of random shapes, and the server's RSS while they run. Flat is the claim.

Memory of inference servers is known to grow with each new input shape; here no two blocks of requests share shapes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from rich.console import Console

from bench.bodies import Int64, infer_body
from bench.client import post_all
from bench.server import Server
from service.cpu import cpu_quota
from service.manifest import Manifest, read_manifest

MIB: Final = 1 << 20
BAR: Final = 0.05  # how far RSS may grow after warm-up
BLOCKS: Final = 20


@dataclass(frozen=True, slots=True)
class Soak:
    """RSS in bytes after the warm-up, and after each block of requests; its first block is the reference."""

    rss: tuple[int, ...]

    @property
    def growth(self) -> float:
        """The largest RSS after the warm-up over the first one, less 1."""
        return max(self.rss) / self.rss[0] - 1


def soak(server: Server, model: str, manifest: Manifest, requests: int, longest: int, connections: int) -> Soak:
    """Warm up with a tenth as many requests, then send `requests` in blocks, each of 1 to `longest` tokens."""
    rng = np.random.default_rng()
    process, url = psutil.Process(server.pid), server.infer_url(model)
    _send(url, manifest, max(1, requests // 10), longest, connections, rng)
    rss = [process.memory_info().rss]
    for _ in range(BLOCKS):
        _send(url, manifest, requests // BLOCKS, longest, connections, rng)
        rss.append(process.memory_info().rss)
    return Soak(tuple(rss))


def _send(
    url: str, manifest: Manifest, requests: int, longest: int, connections: int, rng: np.random.Generator
) -> None:
    """Every answer is checked for its shape and finite values."""
    bodies, rows = [], rng.integers(1, longest, requests, endpoint=True)
    for count in rows:
        lens = _split(int(count), rng) if manifest.kind == "sequence" else None
        bodies.append(infer_body(rng.standard_normal((int(count), manifest.d_in), dtype=np.float32), lens))
    for count, out in zip(rows, post_all(url, bodies, connections, timeout_s=60), strict=True):
        if out.shape != (count, manifest.d_out) or not np.isfinite(out).all():
            raise SystemExit(f"a request of {count} rows was answered with {out.shape}, finite or not")


def _split(rows: int, rng: np.random.Generator) -> Int64:
    """`rows` as the lengths of one or more sequences."""
    cuts = np.unique(rng.integers(1, rows, 4)) if rows > 1 else np.empty(0, np.int64)
    return np.diff(cuts, prepend=0, append=rows)


def main() -> None:
    """Soak, print RSS block by block, and exit 1 if it grew by more than the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--model", default="demo-block", help="name of a bundle, its version 1")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--longest", type=int, default=300, help="tokens of the largest request")
    parser.add_argument("--connections", type=int, default=16)
    arguments = parser.parse_args()
    console = Console(width=120)
    manifest = read_manifest(arguments.models / arguments.model / "1")
    with (
        tempfile.TemporaryDirectory(prefix="tokenslab-soak-") as logs,
        Server(arguments.models, cpu_quota(), Path(logs) / "server.log") as server,
    ):
        done = soak(server, arguments.model, manifest, arguments.requests, arguments.longest, arguments.connections)
    console.print("RSS, MiB: " + " ".join(f"{rss / MIB:.1f}" for rss in done.rss), highlight=False)
    console.print(
        f"{arguments.requests} requests of 1 to {arguments.longest} tokens: RSS grew by {done.growth:.1%} at most "
        f"(bar: {BAR:.0%})",
        highlight=False,
    )
    if done.growth > BAR:
        sys.exit(1)


if __name__ == "__main__":
    main()
