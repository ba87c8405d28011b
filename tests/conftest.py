"""What holds for every test: its name is the same in every worker that collects it."""

from typing import Any


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Name `bytes` by their length: compressed data carry the second of their making, and pytest-xdist's workers, which
    collect apart, then disagree on what there is to run."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None
