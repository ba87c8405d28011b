"""What the service counts, in Prometheus' terms. One registry per application; counted per window, not per request.

Times are seconds, sizes tokens. `model` is `<name>-<precision>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest

from service.bulk_histogram import BulkHistogram

# Half-octaves from 0.25 ms to 30 s: a window of a small FFN takes under 1 ms, one of a stack seconds.
SECONDS = (
    0.00025,
    0.0005,
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1.0,
    2.0,
    4.0,
    8.0,
    30.0,
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FILL = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters. The gauges are set to functions by whoever knows, and read when scraped."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        model = ["model"]
        self.requests = Counter("tokenslab_requests", "Requests answered with a result", model, registry=registry)
        self.tokens = Counter("tokenslab_tokens", "Tokens of those requests", model, registry=registry)
        self.windows = Counter("tokenslab_windows", "Windows run", model, registry=registry)
        self.window_tokens = Histogram(
            "tokenslab_window_tokens", "Tokens per window", model, buckets=TOKENS, registry=registry
        )
        self.window_requests = Histogram(
            "tokenslab_window_requests", "Requests per window", model, buckets=REQUESTS, registry=registry
        )
        self.queue = BulkHistogram(
            "tokenslab_queue_seconds", "From a complete request to its first window", "model", SECONDS
        )
        registry.register(self.queue)
        self.compute = Histogram(
            "tokenslab_compute_seconds", "Run time of a window", model, buckets=SECONDS, registry=registry
        )
        self.rejections = Counter(
            "tokenslab_rejections", "Requests answered with an error", ["reason"], registry=registry
        )
        self.disconnects = Counter(
            "tokenslab_disconnects",
            "Clients gone while their body came (body) or their tokens waited (queue), or cut off unreading (reply)",
            ["stage"],
            registry=registry,
        )
        self.unheard = Counter(
            "tokenslab_unheard_connections",
            "Connections that a stopping service closed although their client had sent more; none of that was run",
            registry=registry,
        )
        self.window_fill = Histogram(
            "tokenslab_window_fill", "Tokens of a window over its budget", model, buckets=FILL, registry=registry
        )
        self.padding = Counter(
            "tokenslab_padding_tokens", "Padding of batches, dropped before the window", model, registry=registry
        )
        self.chunks = Counter("tokenslab_chunks", "Parts of requests that were cut", model, registry=registry)
        self.retries = Counter("tokenslab_retries", "Halves of failed windows, run again", model, registry=registry)
        self.outcomes = Counter(
            "tokenslab_outcome_tokens",
            "Tokens of accepted requests by what became of them: answered, late, failed, gone (their client left)",
            ["model", "outcome"],
            registry=registry,
        )
        self.stages = Counter(
            "tokenslab_stage_seconds",
            "Time of windows in each stage: input (packing), infer (the model's run), output (giving out the rows)",
            ["model", "stage"],
            registry=registry,
        )
        priority = ["priority"]
        self.waiting_requests = Gauge(
            "tokenslab_waiting_requests", "Requests not yet wholly in a window", priority, registry=registry
        )
        self.waiting_tokens = Gauge(
            "tokenslab_waiting_tokens", "Tokens not yet in a window", priority, registry=registry
        )
        self.waiting_seconds = Gauge(
            "tokenslab_waiting_seconds", "Age of the oldest of them", priority, registry=registry
        )
        self.failing = Gauge("tokenslab_model_failing", "1 while a model fails its trials", model, registry=registry)
        self.queue_tokens = Gauge("tokenslab_queue_tokens", "Tokens accepted, not yet answered", registry=registry)
        self.body_bytes = Gauge("tokenslab_body_bytes", "Bytes of bodies and slow answers in flight", registry=registry)
        self.connections = Gauge("tokenslab_connections", "Open connections", registry=registry)
        self.hanging = Gauge(
            "tokenslab_engine_hanging", "1 while a window runs for longer than hang_limit_s lets it", registry=registry
        )
        self.ready = Gauge("tokenslab_ready", "1 while requests are welcome", registry=registry)

    def of(self, model: str) -> ModelMetrics:
        """The counters of one model: finding them by its label anew would cost a microsecond each."""
        return ModelMetrics(self, model)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class ModelMetrics:
    """What is counted of one model; raised once a window."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._requests = metrics.requests.labels(model)
        self._tokens = metrics.tokens.labels(model)
        self._queue = metrics.queue.labels(model)
        self._windows = metrics.windows.labels(model)
        self._window_tokens = metrics.window_tokens.labels(model)
        self._window_requests = metrics.window_requests.labels(model)
        self._window_fill = metrics.window_fill.labels(model)
        self._compute = metrics.compute.labels(model)
        self._input_s = metrics.stages.labels(model, "input")
        self._infer_s = metrics.stages.labels(model, "infer")
        self._output_s = metrics.stages.labels(model, "output")
        self._answered = metrics.outcomes.labels(model, "answered")
        self._outcomes = {name: metrics.outcomes.labels(model, name) for name in ("late", "failed", "gone")}
        self.chunks = metrics.chunks.labels(model)
        self.retries = metrics.retries.labels(model)
        self.failing = metrics.failing.labels(model)

    def count_answers(self, tokens: Sequence[int], queue_s: Sequence[float]) -> int:
        """Requests that one window answered: the tokens of each, and how long each queued; returns all tokens."""
        total = sum(tokens)
        self._requests.inc(len(tokens))
        self._tokens.inc(total)
        self._answered.inc(total)
        self._queue.observe(queue_s)
        return total

    def count_loss(self, outcome: str, tokens: int) -> None:
        """A request that was accepted, and got no result: late, failed or gone."""
        self._outcomes[outcome].inc(tokens)

    def count_window(
        self, requests: int, tokens: int, budget: int, input_s: float, infer_s: float, output_s: float
    ) -> None:
        """One window run, of so many of the tokens that it may hold, and the time of its stages."""
        self._windows.inc()
        self._window_tokens.observe(tokens)
        self._window_requests.observe(requests)
        self._window_fill.observe(tokens / budget)
        self._compute.observe(input_s + infer_s)
        self._input_s.inc(input_s)
        self._infer_s.inc(infer_s)
        self._output_s.inc(output_s)
