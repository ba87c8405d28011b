"""The door: who is let in, and until when the answer must be there. It counts tokens; it neither queues nor runs."""

from __future__ import annotations

from typing import Final

from service.errors import DeadlineUnreachable, InvalidInput, QueueFull, TooLarge
from service.request import Bounds, Request, Work
from service.scheduling.window import load
from service.settings import Settings

# A request is refused only if it would be late even were the engine so much faster than predicted.
OPTIMISM: Final = 0.75
# A prediction that no window has confirmed for so long refuses nobody: what it keeps out could never correct it.
STALE_S: Final = 1.0


def bounds_of(settings: Settings) -> Bounds:
    """What the settings say of admission and scheduling."""
    return Bounds(
        queue_tokens=settings.max_queue_tokens,
        sequence_tokens=settings.max_sequence_tokens,
        timeout_s=settings.timeout_s,
        max_wait_s=settings.max_wait_ms / 1e3,
        level_tokens=settings.max_priority_tokens,
        levels=settings.priority_levels,
        default_level=settings.default_priority,
        aging=settings.aging_windows,
        chunk_s=settings.max_chunk_ms / 1e3,
        hang_s=settings.hang_limit_s,
    )


class Admission:
    """Bounds on what is accepted and not yet answered: in all, and by priority level."""

    def __init__(self, bounds: Bounds) -> None:
        self.rebound(bounds)
        self._levels = [0] * bounds.levels
        self.open_tokens = 0

    def rebound(self, bounds: Bounds) -> None:
        """Admit by `bounds` from now on; what was admitted stays."""
        self._bounds = bounds
        self._level_bounds = bounds.level_tokens or (bounds.queue_tokens,) * bounds.levels

    def level(self, priority: int) -> int:
        """The level that a request's `priority` names: 1 is the highest, 0 the default one."""
        if priority > self._bounds.levels:
            raise InvalidInput(f"parameters.priority: found {priority}, expected 0 to {self._bounds.levels}")
        return priority or self._bounds.default_level

    def check(self, work: Work, level: int, longest: int | None = None) -> None:
        """Raise TooLarge for what could never be admitted, QueueFull for what cannot be now.

        `longest` is the longest sequence that the model itself can take; None: any.
        """
        bounds, load = self._bounds, work.load
        most, taken = self._level_bounds[level - 1], self._levels[level - 1]
        if self.open_tokens + load <= bounds.queue_tokens and taken + load <= most and not work.longest:
            return  # the usual case: rows without sequences, for which there is room
        what = "tokens and memory" if work.longest_memory else "tokens"
        if load > bounds.queue_tokens:
            raise TooLarge(f"{what}: {load} in one request, the queue holds {bounds.queue_tokens} (max_queue_tokens)")
        if work.longest > bounds.sequence_tokens:
            raise TooLarge(
                f"seq_lens: a sequence of {work.longest} tokens, the longest allowed is {bounds.sequence_tokens} "
                "(max_sequence_tokens)"
            )
        if longest is not None and work.longest > longest:
            raise TooLarge(f"seq_lens: a sequence of {work.longest} tokens, the longest this model takes is {longest}")
        if work.longest_memory > bounds.sequence_tokens:
            raise TooLarge(
                f"memory_seq_lens: a memory of {work.longest_memory} rows, the longest allowed is "
                f"{bounds.sequence_tokens} (max_sequence_tokens)"
            )
        if self.open_tokens + load > bounds.queue_tokens:
            raise QueueFull(
                f"{self.open_tokens} tokens wait; {load} more would exceed max_queue_tokens, {bounds.queue_tokens}"
            )
        if load > most:
            raise TooLarge(f"{what}: {load} in one request, priority {level} holds {most} (max_priority_tokens)")
        if taken + load > most:
            raise QueueFull(
                f"{taken} tokens of priority {level} wait; {load} more would exceed max_priority_tokens, {most}"
            )

    def deadline(self, now: float, timeout_s: float | None) -> float:
        """When the answer is late: the service's own timeout, or a shorter one."""
        longest = self._bounds.timeout_s
        return now + (longest if timeout_s is None else min(timeout_s, longest))

    def count(self, level: int, tokens: int) -> None:
        """So many more, or less, are open."""
        self.open_tokens += tokens
        self._levels[level - 1] += tokens


def unreachable(request: Request, now: float, busy_s: float) -> DeadlineUnreachable | None:
    """Why `request` cannot be answered in time any more, if so: for `busy_s` the engine is not free for it."""
    lane = request.lane
    needed = OPTIMISM * (busy_s + lane.cost.seconds(*load(request, request.rows)))
    if now + needed <= request.deadline or lane.learned_at < now - STALE_S:
        return None
    return DeadlineUnreachable(
        f"timeout: {max(0.0, request.deadline - now):.6f} s are left, it would take {needed:.6f} s or more"
    )
