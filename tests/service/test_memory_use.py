"""Memory: a budget that refuses, arenas that shrink, and what a model is said to take. RSS is the measure."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.arena import SMALL, ArenaUse
from service.errors import BundleError, LoadFailed
from service.loading import KEPT, load_bundle, load_repository
from service.model import Model
from service.model_control import ModelControl
from service.repository import Repository
from service.settings import MIB, Settings
from service.shrinking import shrink_outgrown
from tests.bundles import relu_ffn, write_bundle

D, WIDE = 64, 16_384  # 8 MiB of weights; an activation of a window of 1,024 rows is 64 MiB


def load(root: Path, **settings: Any) -> Repository:
    return load_repository(Settings(models=root, threads=1, max_window_tokens=16, **settings))


def test_a_model_is_said_to_take_its_weights_twice_and_its_slab(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, WIDE))
    repository = load(tmp_path)
    model = repository.get("ffn")
    least = KEPT * model.variant.bytes + model.slab.nbytes
    assert least <= model.memory_bytes < 2 * least
    assert repository.memory_bytes() == model.memory_bytes, "two names, one model"


def test_a_repository_beyond_the_budget_does_not_start(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, WIDE))
    with pytest.raises(BundleError, match=r"fp32\.onnx: needs \d+\.\d MiB, 0\.0 MiB are taken .* max_memory_mib is 20"):
        load(tmp_path, max_memory_mib=20)


def test_a_load_beyond_the_budget_is_refused_and_what_is_served_stays(tmp_path: Path) -> None:
    async def story() -> None:
        write_bundle(tmp_path, "ffn", relu_ffn(D, WIDE))
        settings = Settings(models=tmp_path, threads=1, max_window_tokens=16, max_memory_mib=40)
        repository = load_repository(settings)

        async def retire(_: Model) -> None:
            return

        control = ModelControl(
            repository, settings, lambda found: load_bundle(found, settings, in_use=repository.memory_bytes), retire
        )
        write_bundle(tmp_path, "other", relu_ffn(D, WIDE))
        with pytest.raises(LoadFailed, match="max_memory_mib is 40"):
            await control.load("other")
        assert [name for name, _ in repository] == ["ffn", "ffn-fp32"]
        await control.unload("ffn")
        gc.collect()
        assert repository.memory_bytes() == 0
        await control.load("other")
        assert [name for name, _ in repository] == ["other", "other-fp32"]

    asyncio.run(story())


def at_once(job: Callable[[], None]) -> None:
    job()


PROGRAM = """
import asyncio, sys
from pathlib import Path
import numpy as np
from service.loading import load_repository
from service.process_memory import resident_bytes
from service.settings import Settings
from service.shrinking import shrink_outgrown

repository = load_repository(Settings(models=Path(sys.argv[1]), threads=1, max_window_tokens=16))
model = repository.get("ffn")
rss = [resident_bytes()]
def run(rows):
    out = model.run(np.ones((rows, 64), np.float32), None)
    rss.append(resident_bytes())
    return out
def look():
    asyncio.run(shrink_outgrown(repository, lambda job: job()))
    rss.append(resident_bytes())
before = run(300)
run(1024)
look()
after = run(300)
look()
assert (before == after).all()
print(*rss)
"""


def test_the_arena_that_a_large_window_grew_shrinks_once_such_windows_no_longer_come(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, WIDE))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded, _, large, looked, _, shrunk = map(int, done.stdout.split())
    assert large - loaded > 60 * MIB
    assert looked - loaded > 60 * MIB, "it was just needed"
    assert shrunk - loaded < 24 * MIB, (loaded, large, shrunk)


def test_a_shrink_that_fails_is_logged_and_keeps_nobody_else_from_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Callable[[], None]) -> None:
        raise RuntimeError("boom")

    write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    repository = load(tmp_path)
    repository.get("ffn").run(np.ones((2 * SMALL, 8), np.float32), None)
    for _ in range(2):
        asyncio.run(shrink_outgrown(repository, fail))
    assert "its arena did not shrink" in caplog.text


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 5000), st.integers(0, 2000)))))
def test_an_arena_has_outgrown_only_what_has_not_come_since_the_last_look(events: list[tuple[int, int] | None]) -> None:
    use, held, recent = ArenaUse(), 0, 0
    for event in events:
        if event is None:
            wanted = held > SMALL and held > 2 * recent
            assert use.outgrown() == wanted
            held, recent = (recent if wanted else held), 0
        else:
            use.note(*event)
            size = event[0] + event[1] ** 2 // 256
            held, recent = max(held, size), max(recent, size)


def test_attention_counts_by_the_square_of_its_longest_sequence() -> None:
    use = ArenaUse()
    use.note(2048, 2048)
    assert use.held == 2048 + 2048 * 8
