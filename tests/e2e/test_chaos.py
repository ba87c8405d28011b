"""A short `make chaos`: everything that clients may do to a server, at once, while its models change."""

from __future__ import annotations

import secrets
from pathlib import Path

from bench.chaos.storm import storm

MODELS = Path(__file__).parents[2] / "models"


def test_what_is_accepted_is_answered_right_and_everyone_else_as_documented(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    tally = storm(MODELS, tmp_path, seconds=5, clients=16, asks=8, seed=seed)
    assert tally.verdict == "wrong 0, lost 0, 500s 0", (seed, tally.wrong, tally.lost, tally.fives)
    assert tally.outcomes["SIGTERM", "exit 0"] == 1
    assert tally.outcomes["steady", "right"] > 0
