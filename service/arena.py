"""How large the windows were that a session's arena has grown for. Sizes are in rows, or what weighs as much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# An attention matrix of len x len weighs about as much as len^2 / 256 rows (12 heads at d 768: 1/512, 4 at 64: 1/128).
SQUARES_A_ROW: Final = 256
# Below it an arena is not worth a shrink.
SMALL: Final = 256


@dataclass(slots=True)
class ArenaUse:
    """Raised by every window, and looked at every so often."""

    held: int = 0  # the largest window since the arena last shrank
    recent: int = 0  # the largest since it was last looked at

    def note(self, rows: int, longest: int) -> None:
        """A window of `rows` ran, whose longest sequence had `longest` tokens (0: none had attention)."""
        size = rows + longest * longest // SQUARES_A_ROW
        if size > self.recent:
            self.recent = size
            self.held = max(self.held, size)

    def outgrown(self) -> bool:
        """Whether the arena has grown for windows of more than twice the size of any since the last look."""
        outgrown = self.held > SMALL and self.held > 2 * self.recent
        if outgrown:
            self.held = self.recent
        self.recent = 0
        return outgrown
