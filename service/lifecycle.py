"""What the server and the application tell one another about starting and stopping."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lifecycle:
    """`ready` from warm-up to the signal to stop; `draining` from then on, while requests are still served."""

    started: bool = False
    draining: bool = False

    @property
    def ready(self) -> bool:
        return self.started and not self.draining
