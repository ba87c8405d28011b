from __future__ import annotations

import shutil

import pytest

from bench.load import LoadError, OwnClient, Wrk, choose_generator, parse_wrk

# What wrk 4.1.0 printed with load.lua, against a server that answered a few requests with 429.
OUTPUT = """\
Running 2s test @ http://127.0.0.1:41321/v2/models/ffn/infer
  1 threads and 4 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.23ms    0.61ms  14.20ms   95.11%
    Req/Sec     3.31k   210.50     3.62k    80.00%
  6600 requests in 2.00s, 21.15MB read
  Non-2xx or 3xx responses: 12
Requests/sec:   3298.15
Transfer/sec:     10.57MB
RESULT {"requests":6600,"us":2001121,"p50_us":1151,"p99_us":3720,"tokens_each":31.875,\
"connect":0,"read":1,"write":0,"status":12,"timeout":0}
"""


def test_the_result_line_becomes_a_load() -> None:
    load = parse_wrk(OUTPUT)
    assert load.requests == 6588  # an answer with an error status is no result
    assert load.seconds == pytest.approx(2.001121)
    assert (load.p50_ms, load.p99_ms) == (1.151, 3.72)
    assert load.errors == {"read": 1, "status": 12}


def test_a_clean_run_has_no_errors() -> None:
    load = parse_wrk(OUTPUT.replace('"read":1', '"read":0').replace('"status":12', '"status":0'))
    assert (load.requests, load.errors) == (6600, {})


def test_output_without_a_result_is_a_fault_that_shows_it() -> None:
    with pytest.raises(LoadError, match="unable to connect"):
        parse_wrk("unable to connect to 127.0.0.1:1 Connection refused\n")


def test_wrk_is_chosen_where_it_is_installed_and_our_own_client_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/somewhere/{name}")
    assert choose_generator() == Wrk("/somewhere/wrk")
    assert choose_generator("own") == OwnClient()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert choose_generator() == OwnClient()
    assert {choose_generator().name, Wrk("").name} == {"own client (aiohttp)", "wrk"}


def test_wrk_asked_for_and_missing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(LoadError, match="install it"):
        choose_generator("wrk")


def test_an_unknown_generator_is_a_fault_that_names_the_known_ones() -> None:
    with pytest.raises(LoadError, match="auto, wrk or own"):
        choose_generator("ab")
