"""Requests with memory through the real batcher and engine: each gets, bit for bit, what it gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from service.batcher import Batcher
from service.engine import Engine
from service.errors import EngineFailed, QueueFull, TooLarge
from service.loading import load_repository
from service.memory import Memory
from service.metrics import Metrics
from service.model import Model
from service.packing import Float32, Int64
from service.recheck import same_bits
from service.request import Bounds
from service.settings import Settings
from tests.bundles import memory_mean, write_bundle

D, D_MEMORY, WINDOW = 4, 6, 64
BOUNDS = Bounds(queue_tokens=4096, sequence_tokens=100, timeout_s=60.0)


@dataclass
class Client:
    disconnected: bool = False


@dataclass(frozen=True, eq=False)
class Post:
    tokens: Float32
    seq_lens: Int64
    memory: Memory


def post(sequences: Sequence[tuple[int, int]], rng: np.random.Generator, spoiled: float = 1.0) -> Post:
    """A request of (tokens, memory rows) each; `spoiled`, NaN or Inf, is put into one element of each input."""
    lens, memory_lens = (np.array(column, np.int64) for column in zip(*sequences, strict=True))
    tokens = rng.standard_normal((lens.sum(), D), dtype=np.float32)
    memory = rng.standard_normal((memory_lens.sum(), D_MEMORY), dtype=np.float32)
    for rows in (tokens, memory):
        rows[rng.integers(len(rows)), 0] *= spoiled
    return Post(tokens, lens, Memory(memory, np.cumsum(memory_lens)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("models")
    write_bundle(root, "recall", memory_mean(D, D_MEMORY))
    return load_repository(Settings(models=root, threads=1, max_window_tokens=WINDOW, max_sequence_tokens=100)).get(
        "recall"
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    engine.start()
    yield engine
    assert engine.stop(10)


async def answers(engine: Engine, model: Model, posts: Sequence[Post], bounds: Bounds = BOUNDS) -> list[Float32]:
    batcher = Batcher(engine.submit, bounds, Metrics(), asyncio.get_running_loop())
    got = await asyncio.gather(*(batcher.submit(model, p.tokens, p.seq_lens, Client(), memory=p.memory) for p in posts))
    assert batcher.open_tokens == 0
    return [answer.out for answer in got]


lengths = st.tuples(st.integers(1, 30), st.integers(1, 30))
mixes = st.lists(
    st.tuples(st.lists(lengths, min_size=1, max_size=6), st.sampled_from([1.0, 1000.0, np.nan, np.inf])),
    min_size=1,
    max_size=8,
)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(mixes, st.integers(0, 2**32))
def test_any_mix_of_requests_answers_bit_for_bit_as_alone(
    engine: Engine, model: Model, mix: list[tuple[list[tuple[int, int]], float]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    posts = [post(sequences, rng, spoiled) for sequences, spoiled in mix]
    together = asyncio.run(answers(engine, model, posts))
    for one, out in zip(posts, together, strict=True):
        assert same_bits(out, model.run(one.tokens, one.seq_lens, one.memory)).all()


def test_a_request_is_refused_by_its_tokens_and_memory_together(engine: Engine, model: Model) -> None:
    rng = np.random.default_rng()
    wide = post([(10, 60)], rng)
    with pytest.raises(TooLarge, match="tokens and memory: 70 in one request, the queue holds 69"):
        asyncio.run(answers(engine, model, [wide], Bounds(69, 100, 60.0)))
    with pytest.raises(TooLarge, match="memory_seq_lens: a memory of 60 rows, the longest allowed is 59"):
        asyncio.run(answers(engine, model, [wide], Bounds(4096, 59, 60.0)))
    with pytest.raises(QueueFull, match="70 tokens wait; 70 more would exceed max_queue_tokens, 100"):
        asyncio.run(answers(engine, model, [wide, wide], Bounds(100, 100, 60.0)))


def test_a_window_that_one_memory_fails_is_run_again_and_every_other_sequence_keeps_its_own(
    engine: Engine, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng()
    posts = [post([(2, 3), (1, 4)], rng) for _ in range(5)]
    posts[2].memory.rows[0, 0] = 1e9
    run = Model.run

    def choke(model: Model, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32:
        assert memory is None or (memory.rows < 1e9).all(), "too much to remember"
        return run(model, tokens, seq_lens, memory)

    async def outcomes() -> list[Float32 | BaseException]:
        batcher = Batcher(engine.submit, BOUNDS, Metrics(), asyncio.get_running_loop())
        got = await asyncio.gather(
            *(batcher.submit(model, p.tokens, p.seq_lens, Client(), memory=p.memory) for p in posts),
            return_exceptions=True,
        )
        return [one if isinstance(one, BaseException) else one.out for one in got]

    monkeypatch.setattr(Model, "run", choke)
    got = asyncio.run(outcomes())
    assert isinstance(got[2], EngineFailed)
    for one, out in zip(posts, got, strict=True):
        if one is not posts[2]:
            assert isinstance(out, np.ndarray)
            assert same_bits(out, run(model, one.tokens, one.seq_lens, one.memory)).all()
