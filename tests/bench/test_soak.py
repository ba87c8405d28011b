"""The soak's own parts, and a short soak of a real, small server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.server import Server
from bench.soak import BLOCKS, Soak, _split, soak
from service.manifest import read_manifest
from tests.bundles import sequence_mean, write_bundle


@given(st.integers(1, 500), st.integers(0, 1 << 32))
def test_a_requests_sequences_add_up_to_its_rows(rows: int, seed: int) -> None:
    lens = _split(rows, np.random.default_rng(seed))
    assert lens.sum() == rows
    assert lens.min() >= 1


def test_growth_is_that_of_the_largest_over_the_first() -> None:
    assert Soak((100, 99, 107, 101)).growth == pytest.approx(0.07)
    assert Soak((100, 90)).growth == 0


def test_a_short_soak_measures_every_block_and_finds_memory_flat(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, "mean", sequence_mean(16))
    with Server(tmp_path, 1, tmp_path / "log") as server:
        done = soak(server, "mean", read_manifest(folder), requests=600, longest=60, connections=8)
    assert len(done.rss) == BLOCKS + 1
    assert done.growth < 0.25, done.rss
