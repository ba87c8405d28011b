"""A few of the mixes that `make mixes` sends in thousands."""

from __future__ import annotations

import secrets
from pathlib import Path

from bench.mixes import mixes

MODELS = Path(__file__).parents[2] / "models"


def test_random_mixes_over_http_give_each_request_the_bits_that_it_gets_alone(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    done = mixes(MODELS, tmp_path, count=75, longest=48, threads=1, seed=seed)
    assert {one.model for one in done} >= {"demo-ffn-fp32", "demo-ffn-int8", "demo-block-fp32", "demo-block-int8"}
    assert not sum(one.wrong for one in done), (seed, done)
    assert all(0 < one.windows < one.requests for one in done), "nothing shared a window"
