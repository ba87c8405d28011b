"""Whether the client itself was the limit: then its figures say nothing about the server. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.loadtest.driver import Part
from bench.loadtest.records import Summary

CPU_SHARE: Final = 0.9
LAG_MS: Final = 20.0
SEND_DELAY_MS: Final = 5.0


def saturation(summary: Summary, parts: Sequence[Part]) -> tuple[str, ...]:
    """Reasons to distrust the figures, in words; none if the client had time to spare."""
    reasons = []
    busiest, lag = max(p.cpu_share for p in parts), max(p.lag_p99_ms for p in parts)
    waited = sum(p.waited_for_connection for p in parts)
    if busiest > CPU_SHARE:
        reasons.append(f"a client process used {busiest:.0%} of a core: more --processes")
    if lag > LAG_MS:
        reasons.append(f"the client's event loop was {lag:.0f} ms late (p99): more --processes, or idle cores")
    if summary.open_loop and summary.send_delay_p99_ms > SEND_DELAY_MS:
        reasons.append(f"requests were sent {summary.send_delay_p99_ms:.0f} ms late (p99); latency counts that")
    if summary.open_loop and waited:
        reasons.append(f"{waited} requests found all connections busy: more --connections, or a lower rate")
    return tuple(reasons)
