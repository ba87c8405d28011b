"""A histogram counted in bulk says what the client library's own says of the same values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.bulk_histogram import BulkHistogram

BOUNDS = (0.25, 0.5, 1.0, 8.0)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.lists(st.floats(-1, 20) | st.sampled_from([*BOUNDS, float("inf")]), max_size=9)
        ),
        max_size=6,
    )
)
def test_it_is_exposed_as_the_librarys_own_is(windows: list[tuple[str, list[float]]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("waits", "How long", "model", BOUNDS)
    ours.register(bulk)
    one = Histogram("waits", "How long", ["model"], buckets=BOUNDS, registry=theirs)
    for model, values in windows:
        bulk.labels(model).observe(values)
        one.labels(model)
        for value in values:
            one.labels(model).observe(value)
    assert samples(ours) == pytest.approx(samples(theirs))


def test_its_name_is_taken_like_any_other() -> None:
    registry = CollectorRegistry()
    registry.register(BulkHistogram("waits", "How long", "model", BOUNDS))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(BulkHistogram("waits", "How long", "model", BOUNDS))
