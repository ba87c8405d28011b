"""Models in Prometheus' terms, read from the repository when it is scraped: nothing is counted, nothing goes stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.process_memory import resident_bytes
from service.repository import Repository, State

STATES: Final[tuple[State, ...]] = get_args(State)


class ModelCollector(Collector):
    """`tokenslab_model_state`, `tokenslab_model_memory_bytes` and `tokenslab_resident_bytes`."""

    def __init__(self, repository: Callable[[], Repository | None]) -> None:
        self._repository = repository

    def describe(self) -> Iterator[Metric]:
        """The names, without asking the repository."""
        return iter((_states(), _memory(), _resident()))

    def collect(self) -> Iterator[Metric]:
        """What is there now; each name and version has a 1 at its state."""
        states, memory, resident = _states(), _memory(), _resident()
        repository = self._repository()
        if repository is not None:
            for row in repository.index():
                for state in STATES:
                    states.add_metric([row.name, row.version, state], float(row.state == state))
            for model in repository.models():
                memory.add_metric([model.label, model.version], model.memory_bytes)
        size = resident_bytes()
        if size is not None:
            resident.add_metric([], size)
        return iter((states, memory, resident))


def _states() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "tokenslab_model_state", "1 at the state that the model is in", labels=["model", "version", "state"]
    )


def _memory() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "tokenslab_model_memory_bytes",
        "Weights, arena and slabs, as measured when it was loaded",
        labels=["model", "version"],
    )


def _resident() -> GaugeMetricFamily:
    return GaugeMetricFamily("tokenslab_resident_bytes", "RSS of the process", labels=[])
