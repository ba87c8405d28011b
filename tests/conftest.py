"""What holds for every test: the same name in every worker that collects it, and no clock that makes it fail."""

from typing import Any

from hypothesis import settings

# Examples that load or run a model take as long as the machine makes them; pytest-timeout ends what hangs.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Name `bytes` by their length: compressed data carry the second of their making, and pytest-xdist's workers, which
    collect apart, then disagree on what there is to run."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) else None
