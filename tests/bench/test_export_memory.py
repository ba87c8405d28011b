"""The memory bench sees the processes of an export and knows its steps."""

from __future__ import annotations

import sys

import pytest

from bench.export_memory import measure

CHILD = "import subprocess, sys; x = bytearray(80_000_000); x[::4096] = b'1' * len(x[::4096]); "
CHILD += "print('grown', file=sys.stderr, flush=True); import time; time.sleep(0.5)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"


def test_children_count_and_steps_are_named() -> None:
    peak = measure([sys.executable, "-c", PARENT])
    assert peak.rss > 80_000_000
    assert peak.by_step["grown"] == peak.rss
    assert peak.table(40_000_000).splitlines()[-1].endswith("x  grown")


def test_a_failure_is_shown_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="nothing to export"):
        measure([sys.executable, "-c", "import sys; sys.exit('nothing to export')"])
