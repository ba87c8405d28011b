"""Whether a model can still be asked: requests that fail alone raise the suspicion, its warm-up input decides.

A request can be to blame for its own failure, so no number of failed requests alone makes a model unready: the model
is tried with an input that has worked before. Pure; whoever owns it has the clock and runs the trials.
"""

from __future__ import annotations

from typing import Final

SUSPICION: Final = 3  # requests that fail alone, one after another, with no window between that ran


class Health:
    """Of one model: well; or to be tried now (`trial_due`); or failing, with the `reason`, until a trial runs."""

    __slots__ = ("failures", "reason", "trial_due")

    def __init__(self) -> None:
        self.failures = 0
        self.reason: str | None = None
        self.trial_due = False

    def ran(self) -> None:
        """A window of the model ran."""
        self.failures = 0

    def failed_alone(self) -> None:
        """A window failed that held one request."""
        self.failures += 1
        if self.failures >= SUSPICION and self.reason is None:
            self.trial_due = True

    def tried(self, error: BaseException | None) -> None:
        """The warm-up input ran, or failed with `error`."""
        self.trial_due = False
        self.failures = 0
        self.reason = None if error is None else f"its warm-up input fails too: {type(error).__name__}: {error}"
