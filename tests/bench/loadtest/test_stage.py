"""Load on a real, small server: closed and open loop, binary and JSON, one process and two."""

from __future__ import annotations

import numpy as np
import pytest

from bench.loadtest.arrivals import arrivals
from bench.loadtest.driver import Job, drive
from bench.loadtest.stage import Stage, jobs_of, run_stage
from bench.loadtest.target import TargetError, discover
from bench.process import free_port
from bench.server import Server


@pytest.mark.parametrize("model", ["ffn", "means"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_names_and_shapes_come_from_the_metadata(server: Server, model: str, binary: bool) -> None:
    target = discover(server.url, model, binary=binary)
    assert [each.name for each in target.inputs] == (["tokens"] if model == "ffn" else ["tokens", "seq_lens"])
    assert target.outputs == ("out",)
    part = drive(Job(target, np.array([1, 7]), 2, 0.1, 5, seed=0))
    assert set(part.records["status"]) == {200}
    assert set(part.records["tokens"]) == {1, 7}


def test_an_open_loop_sends_what_was_meant_to_be_sent_and_counts_from_then(server: Server) -> None:
    times = arrivals("poisson", 200, 0.3, seed=int(np.random.default_rng().integers(1 << 31)))
    sizes = np.arange(1, len(times) + 1)
    before = server.counts()["tokenslab_tokens_total"]
    sent = drive(Job(discover(server.url, "ffn"), sizes, 50, 0.3, 5, 0, times)).records
    assert sorted(sent["intended"]) == pytest.approx(times)
    assert sorted(sent["tokens"]) == list(sizes)
    assert server.counts()["tokenslab_tokens_total"] - before == sizes.sum() + 1  # and the one that discovery asks
    assert (sent["sent"] >= sent["intended"]).all()
    assert (sent["done"] > sent["sent"]).all()
    assert (sent["window_tokens"] >= sent["tokens"]).all()
    assert (sent["compute_ms"] > 0).all()


def test_two_processes_are_one_closed_loop(server: Server) -> None:
    stage = Stage(np.array([2]), 3, 0.4, 0.1, processes=2)
    before = server.counts()["tokenslab_requests_total"]
    measured = run_stage(discover(server.url, "ffn"), stage)
    counted = server.counts()["tokenslab_requests_total"] - before
    assert 0 < measured.summary.requests < counted
    assert measured.summary.tokens_per_s == pytest.approx(2 * measured.summary.requests_per_s)
    assert not measured.summary.open_loop
    assert measured.summary.errors == {}


def test_a_server_that_is_gone_is_counted_and_not_raised(server: Server) -> None:
    target = discover(server.url, "ffn")
    gone = type(target)(f"http://127.0.0.1:{free_port()}/", target.inputs, target.outputs)
    measured = run_stage(gone, Stage(np.ones(3, np.int64), 1, 0.1, 0.0, np.array([0.0, 0.01, 0.02])))
    assert measured.summary.latency is None
    assert measured.summary.errors == {"connect": 3}


@pytest.mark.parametrize(("url", "model"), [("", "absent"), ("http://127.0.0.1:1", "ffn"), ("ftp://x", "ffn")])
def test_what_cannot_be_tested_is_said_before_any_load(server: Server, url: str, model: str) -> None:
    with pytest.raises(TargetError, match=r"404|refused|http://"):
        discover(url or server.url, model)


def test_connections_and_arrivals_are_shared_out_whole(server: Server) -> None:
    times = np.arange(7, dtype=np.float64)
    jobs = jobs_of(discover(server.url, "ffn"), Stage(np.arange(7), 5, 9, 1, times, processes=3))
    assert sum(job.connections for job in jobs) == 5
    assert sorted(size for job in jobs for size in job.sizes) == list(range(7))
    assert all(np.array_equal(job.arrivals if job.arrivals is not None else [], job.sizes) for job in jobs)
    with pytest.raises(ValueError, match="each needs one"):
        jobs_of(discover(server.url, "ffn"), Stage(np.arange(7), 2, 9, 1, processes=3))
