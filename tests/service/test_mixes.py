"""Random mixes of requests through the real batcher and engine: every answer is, bit for bit, the one it gets alone.

All models at once, so that they take turns; small and large, urgent and not, of several clients, some alone in their
windows, some leaving, with budgets and chunks so small that nearly everything is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from service.batcher import Batcher
from service.engine import Engine
from service.loading import load_repository
from service.metrics import Metrics
from service.model import Model
from service.packing import Float32, Int64
from service.recheck import same_bits
from service.request import Answer, Bounds, ClientGone
from service.settings import Settings

DEMO = Path(__file__).parents[2] / "models"
NAMES = ("demo-ffn-fp32", "demo-ffn-int8", "demo-block-fp32", "demo-block-int8")
D = 64
LOUD = (1.0, 1.0, 30.0, 1000.0, np.nan, np.inf)


@dataclass
class Client:
    disconnected: bool = False


@dataclass(frozen=True)
class Ask:
    """`lens`: of its sequences, or rows in one for position-wise models."""

    model: str
    lens: tuple[int, ...]
    loud: float
    priority: int
    client_id: str
    isolate: bool
    leaves: bool
    pause: bool  # the loop turns before it comes


asks = st.builds(
    Ask,
    st.sampled_from(NAMES),
    st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple),
    st.sampled_from(LOUD),
    st.integers(0, 3),
    st.sampled_from(("", "a", "b")),
    st.sampled_from((False, False, False, True)),
    st.sampled_from((False, False, False, False, True)),
    st.booleans(),
)


@pytest.fixture(scope="module")
def served() -> dict[str, Model]:
    repository = load_repository(Settings(models=DEMO, threads=1, max_window_tokens=96, max_sequence_tokens=64))
    return {name: repository.get(name) for name in NAMES}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    engine.start()
    yield engine
    assert engine.stop(10)


def inputs(ask: Ask, seed: int) -> tuple[Float32, Int64 | None]:
    rng = np.random.default_rng(seed)
    tokens = rng.standard_normal((sum(ask.lens), D), dtype=np.float32)
    tokens[rng.integers(len(tokens))] *= ask.loud
    return tokens, np.array(ask.lens, np.int64) if "block" in ask.model else None


async def answers(engine: Engine, served: dict[str, Model], mix: list[Ask], seed: int) -> list[Answer | BaseException]:
    # A fifth of a millisecond is a few tokens: whatever is larger than two such chunks is cut.
    bounds = Bounds(100_000, 64, 60.0, levels=3, default_level=2, aging=3, chunk_s=2e-4)
    batcher = Batcher(engine.submit, bounds, Metrics(), asyncio.get_running_loop())
    tasks = []
    for i, ask in enumerate(mix):
        client = Client(disconnected=ask.leaves)
        tokens, lens = inputs(ask, seed + i)
        submitted = batcher.submit(
            *(served[ask.model], tokens, lens, client),
            priority=ask.priority,
            isolate=ask.isolate,
            client_id=ask.client_id,
        )
        tasks.append(asyncio.create_task(submitted))
        if ask.pause:
            await asyncio.sleep(0)
    got = await asyncio.gather(*tasks, return_exceptions=True)
    assert batcher.open_tokens == 0
    return got


@hypothesis_settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(asks, min_size=1, max_size=24), st.integers(0, 2**31))
def test_an_answer_does_not_depend_on_who_else_asks(
    engine: Engine, served: dict[str, Model], mix: list[Ask], seed: int
) -> None:
    together = asyncio.run(answers(engine, served, mix, seed))
    for i, (ask, answer) in enumerate(zip(mix, together, strict=True)):
        if isinstance(answer, ClientGone):
            assert ask.leaves
            continue
        assert isinstance(answer, Answer)
        alone = served[ask.model].run(*inputs(ask, seed + i))
        assert same_bits(alone, np.ascontiguousarray(answer.out)).all()


def test_a_large_request_is_cut_into_many_windows_and_put_together_bit_for_bit(
    engine: Engine, served: dict[str, Model]
) -> None:
    seed = int(np.random.default_rng().integers(2**31))
    for name in NAMES:
        large = Ask(name, (37,) * 60, 30.0, 0, "", isolate=False, leaves=False, pause=True)
        small = Ask(name, (3,), 1.0, 0, "", isolate=False, leaves=False, pause=True)
        first, *others = asyncio.run(answers(engine, served, [large, *[small] * 9], seed))
        assert isinstance(first, Answer)
        assert first.window_tokens <= 96
        assert same_bits(served[name].run(*inputs(large, seed)), first.out).all()
        for i, answer in enumerate(others, 1):
            assert isinstance(answer, Answer)
            assert same_bits(served[name].run(*inputs(small, seed + i)), np.ascontiguousarray(answer.out)).all()
