"""The benchmark's own parts against a real, small server: start, hold, load, check, stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import numpy as np
import psutil
import pytest

from bench.bodies import infer_body, random_tokens
from bench.cases import Case
from bench.client import AnswerError, closed_loop, post_all, waves
from bench.limit import InProcess
from bench.load import OwnClient, Wrk, choose_generator
from bench.measure import Bench, check_answers
from bench.process import ServerError, free_port
from bench.server import Server
from service.manifest import Manifest, read_manifest
from tests.bundles import relu_ffn, sequence_mean, write_bundle

D = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_bundle(root, "ffn", relu_ffn(D, 32))
    write_bundle(root, "means", sequence_mean(D))
    return root


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server, None, None]:
    with Server(models, 1, tmp_path_factory.mktemp("logs") / "server.log") as running:
        yield running


def opened(models: Path, name: str) -> tuple[InProcess, Manifest]:
    folder = models / name / "1"
    manifest = read_manifest(folder)
    return InProcess(folder, manifest, "fp32", 1), manifest


def test_answers_come_back_in_the_order_of_the_requests_and_equal_the_file_in_process(
    server: Server, models: Path
) -> None:
    limit, _ = opened(models, "ffn")
    sent = [random_tokens(rows, D, seed=rows) for rows in (3, 1, 20, 7)]
    answers = post_all(server.infer_url("ffn"), [infer_body(x) for x in sent], 4, 10)
    for tokens, answer in zip(sent, answers, strict=True):
        assert answer.tobytes() == limit.run(tokens).tobytes()


def test_replicas_are_all_ready_before_it_starts_and_are_counted_and_held_together(
    models: Path, tmp_path: Path
) -> None:
    with Server(models, 2, tmp_path / "log", replicas=2) as both:
        before = both.counts()["tokenslab_requests_total"]
        # A connection each: whichever replica takes it, the sum sees it.
        for no in range(8):
            post_all(both.infer_url("ffn"), [infer_body(random_tokens(1, D, seed=no))], 1, 10)
        assert both.counts()["tokenslab_requests_total"] - before == 8
        children = psutil.Process(both.pid).children()
        with both.held():
            assert [child.status() for child in children] == [psutil.STATUS_STOPPED] * len(children)
        assert len(children) >= 2


def test_the_check_passes_on_the_served_file_and_fails_on_another(server: Server, models: Path, tmp_path: Path) -> None:
    assert check_answers(server, "ffn-fp32", opened(models, "ffn")[0]) == 64
    write_bundle(tmp_path, "ffn", relu_ffn(D, 32, seed=1))
    with pytest.raises(AnswerError, match="not what the file gives"):
        check_answers(server, "ffn-fp32", opened(tmp_path, "ffn")[0])


def test_sequences_are_checked_each_alone(server: Server, models: Path) -> None:
    block, _ = opened(models, "means")
    tokens = random_tokens(9, D, seed=0)
    lengths = np.array([4, 5], np.int64)
    (answer,) = post_all(server.infer_url("means"), [infer_body(tokens, lengths)], 1, 10)
    assert answer.tobytes() == b"".join(block.run(part).tobytes() for part in (tokens[:4], tokens[4:]))


def test_an_error_is_told_with_its_status_and_text(server: Server) -> None:
    with pytest.raises(AnswerError, match=r"400 .*width 5"):
        post_all(server.infer_url("ffn"), [infer_body(random_tokens(1, 5, 0))], 1, 10)


def test_the_closed_loop_counts_answers_and_errors_apart(server: Server) -> None:
    good, bad = infer_body(random_tokens(2, D, 0)), infer_body(random_tokens(2, D + 1, 0))
    before = server.counts()["tokenslab_requests_total"]
    load = closed_loop(server.infer_url("ffn"), [good], 4, 0.2, seed=1, timeout_s=5)
    assert load.errors == {}
    assert load.requests == server.counts()["tokenslab_requests_total"] - before > 0
    assert 0 < load.p50_ms <= load.p99_ms
    assert load.seconds >= 0.2
    load = closed_loop(server.infer_url("ffn"), [good, bad], 4, 0.2, seed=1, timeout_s=5)
    assert load.errors["status"] > 0
    assert load.requests > 0


def test_a_server_that_is_not_there_gives_errors_and_no_requests() -> None:
    load = waves(f"http://127.0.0.1:{free_port()}/", [infer_body(random_tokens(1, D, 0))], 0.0, 5)
    assert (load.requests, load.errors) == (0, {"connect": 2})


def test_a_wave_sends_every_body_once(server: Server) -> None:
    bodies = [infer_body(random_tokens(rows, D, rows)) for rows in (1, 2, 3)]
    before = server.counts()
    load = waves(server.infer_url("ffn"), bodies, 0.0, 5)
    after = server.counts()
    assert (load.requests, load.errors) == (3, {})
    assert after["tokenslab_tokens_total"] - before["tokenslab_tokens_total"] == 12  # a warm wave, and the timed one


@pytest.mark.parametrize("generator", [OwnClient(), choose_generator()], ids=["own", "default"])
def test_a_measurement_is_whole_and_valid_whoever_makes_the_load(
    generator: OwnClient | Wrk, server: Server, models: Path
) -> None:
    case = Case("2x3", tokens=2, connections=3)
    bench = Bench(generator, seconds=1, repeats=0, limit_s=0.1)
    row = bench.measure(case, server, "ffn-fp32", opened(models, "ffn")[0], "fp32", 0)
    assert row.valid
    assert (row.case, row.tries) == ("2x3", 1)
    assert row.tokens_per_s == pytest.approx(row.load.requests / row.load.seconds * 2)
    assert row.ratio == pytest.approx(row.tokens_per_s / ((row.limit_before + row.limit_after) / 2))
    assert 2 <= row.window_tokens <= 6


def test_a_held_server_is_stopped_and_goes_on_afterwards(server: Server) -> None:
    with server.held():
        assert psutil.Process(server.pid).status() == psutil.STATUS_STOPPED
    assert post_all(server.infer_url("ffn"), [infer_body(random_tokens(1, D, 0))], 1, 10)[0].shape == (1, D)


def test_a_server_ends_with_its_context_even_held(models: Path, tmp_path: Path) -> None:
    with Server(models, 1, tmp_path / "log") as short:
        pid = short.pid
        assert os.getsid(pid) == pid  # a terminal's signals do not reach it: we stop it
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)
    short.stop()  # again: harmless


def test_a_server_that_cannot_start_is_a_fault_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"exited 1: .*not a folder"), Server(tmp_path / "nothing", 1, tmp_path / "l"):
        pass
