"""Rates and means from counts that the service keeps anyway."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.console.recent import between, quantile, read
from service.loading import load_repository
from service.metrics import SECONDS, Metrics
from service.settings import Settings
from service.statistics import Served
from tests.bundles import relu_ffn, write_bundle


def test_rates_and_means_are_those_of_the_interval(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    (model,) = load_repository(Settings(models=tmp_path, threads=1, max_window_tokens=64)).models()
    metrics = Metrics()
    metrics.rejections.labels("queue_full").inc(2)
    model.statistics.count_served(Served(7, 70, 9.0, 9.0, 9.0, 9.0), 0.0)  # before the interval: must not show
    before = read(10.0, [model], metrics)
    model.statistics.count_served(Served(4, 40, 0.008, 0.002, 0.006, 0.020), 0.0)
    model.statistics.count_window(40, 0.001, 0.002, 0.0)
    metrics.queue.labels(model.label).observe([0.0011] * 4)
    metrics.rejections.labels("queue_full").inc(3)
    sample = between(before, read(12.0, [model], metrics), 1234.0, 17)
    assert (sample["requests"], sample["tokens"], sample["windows"]) == (2.0, 20.0, 0.5)
    assert sample["latency_ms"] == pytest.approx(5.0)
    assert sample["queue_ms"] == pytest.approx(2.0)
    assert sample["compute_ms"] == pytest.approx(2.0)
    assert 1.0 < sample["queue_p99_ms"] <= 2.0, "the bucket that 1.1 ms lies in"
    assert sample["rejections"] == {"queue_full": 3}
    assert (sample["time"], sample["queue_tokens"]) == (1234.0, 17)


def test_a_quiet_interval_has_rates_of_zero_and_no_means(tmp_path: Path) -> None:
    metrics = Metrics()
    sample = between(read(0.0, [], metrics), read(2.0, [], metrics), 0.0, 0)
    assert sample["requests"] == sample["tokens"] == 0
    assert sample["latency_ms"] is sample["queue_ms"] is sample["queue_p99_ms"] is None
    assert sample["rejections"] == {}


def test_a_model_that_was_loaded_anew_counts_from_zero(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    settings = Settings(models=tmp_path, threads=1, max_window_tokens=64)
    (old,), (new,) = load_repository(settings).models(), load_repository(settings).models()
    old.statistics.count_served(Served(100, 1000, 1.0, 1.0, 1.0, 1.0), 0.0)
    new.statistics.count_served(Served(3, 30, 1.0, 1.0, 1.0, 1.0), 0.0)
    metrics = Metrics()
    sample = between(read(0.0, [old], metrics), read(1.0, [new], metrics), 0.0, 0)
    assert (sample["requests"], sample["tokens"]) == (3.0, 30.0)


@given(st.lists(st.floats(0, 29), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    counts = np.bincount(np.searchsorted(SECONDS, values), minlength=len(SECONDS) + 1).tolist()
    found = quantile(counts, SECONDS, share)
    assert found is not None
    rank = share * len(values)
    true = sorted(values)[max(0, int(np.ceil(rank)) - 1)]
    bucket = int(np.searchsorted(SECONDS, true))
    lower = 0.0 if bucket == 0 else SECONDS[bucket - 1]
    assert lower <= found <= SECONDS[bucket] * (1 + 1e-12)


def test_a_quantile_beyond_the_last_bound_is_said_to_be_it() -> None:
    assert quantile([0, 0, 5], [1.0, 2.0], 0.5) == 2.0
