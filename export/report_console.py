"""Where readable reports are printed: the terminal's width, or one that keeps tables whole in a log or a pipe."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console

_PIPE_WIDTH: Final = 140  # rich would take 80, and wrap every row of a table


def console() -> Console:
    """A console on standard output as it is now; brackets in a name or a path are text, not markup."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
