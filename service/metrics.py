"""What the service counts, in Prometheus' terms. One registry per application; counted per window, not per request.

Times are seconds, sizes tokens. `model` is `<name>-<precision>`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import generate_latest

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
        self.queue = Histogram(
            "tokenslab_queue_seconds",
            "From a complete request to its first window",
            model,
            buckets=SECONDS,
            registry=registry,
        )
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
        self.queue_tokens = Gauge("tokenslab_queue_tokens", "Tokens accepted, not yet answered", registry=registry)
        self.body_bytes = Gauge("tokenslab_body_bytes", "Bytes of bodies and slow answers in flight", registry=registry)
        self.connections = Gauge("tokenslab_connections", "Open connections", registry=registry)
        self.ready = Gauge("tokenslab_ready", "1 while requests are welcome", registry=registry)

    def count_answers(self, model: str, tokens: list[int], queue_s: list[float]) -> None:
        """Requests that one window answered: the tokens of each, and how long each queued."""
        self.requests.labels(model).inc(len(tokens))
        self.tokens.labels(model).inc(sum(tokens))
        queue = self.queue.labels(model)
        for seconds in queue_s:
            queue.observe(seconds)

    def count_window(self, model: str, requests: int, tokens: int, compute_s: float) -> None:
        """One window run."""
        self.windows.labels(model).inc()
        self.window_tokens.labels(model).observe(tokens)
        self.window_requests.labels(model).observe(requests)
        self.compute.labels(model).observe(compute_s)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
