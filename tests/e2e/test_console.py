"""The console over HTTP: who gets the page and its events, what they say, and that a stream holds up no stop."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.console.events import SUBSCRIBERS
from tests.bundles import relu_ffn, write_bundle
from tests.e2e.server import Server, serving

D = 8
ALICE, ROOT = "alice-" + "a" * 16, "root-" + "r" * 16
EVENTS = "/v2/console/events"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_bundle(folder, "ffn", relu_ffn(D, 2 * D))
    return folder


@pytest.fixture(scope="module")
def open_server(root: Path) -> Iterator[Server]:
    with serving(root, "--threads", "1") as server:
        yield server


@contextmanager
def events(server: Server, key: str | None = None) -> Iterator[HTTPResponse]:
    link: HTTPConnection
    with closing(server.connect()) as link:
        link.request("GET", EVENTS, headers={} if key is None else {"X-API-Key": key})
        yield link.getresponse()


def next_event(stream: HTTPResponse) -> tuple[str, Any]:
    name = stream.readline().decode().removeprefix("event: ").strip()
    data = json.loads(stream.readline().decode().removeprefix("data: "))
    assert stream.readline() == b"\n"
    return name, data


def until(stream: HTTPResponse, wanted: str) -> Any:
    while True:
        name, data = next_event(stream)
        if name == wanted:
            return data


def test_the_page_and_its_files_come_with_a_policy_that_lets_nothing_else_in(open_server: Server) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/console/main.js", "text/javascript"),
        ("/console/uPlot.min.css", "text/css"),
    ):
        status, headers, body = open_server.ask(path)
        assert (status, bool(body)) == (200, True)
        assert headers["content-type"].startswith(kind)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert open_server.ask(path, headers={"If-None-Match": headers["etag"]})[0] == 304


@pytest.mark.parametrize("path", ["/console/nothing.js", "/console/LICENSE", "/console/..%2fevents.py", "/console/"])
def test_no_other_file_is_there(open_server: Server, path: str) -> None:
    assert open_server.ask(path)[0] == 404


def test_whoever_looks_is_told_of_models_and_of_the_window_that_a_request_ran_in(open_server: Server) -> None:
    with events(open_server) as stream:
        assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream")
        assert until(stream, "hello")["threads"] == 1
        models = until(stream, "models")
        assert {row["name"] for row in models} == {"ffn", "ffn-fp32"}
        assert models[0]["state"] == "READY"
        assert models[0]["model"]["certificate"]["kind"] == "exact"
        assert (models[0]["model"]["d_in"], models[0]["model"]["precision"]) == (D, "fp32")
        open_server.infer("ffn", np.zeros((5, D), np.float32))
        (window,) = until(stream, "windows")["windows"]
        assert (window["requests"], window["tokens"], window["blocks"]) == (1, 5, [5])
        assert 0 <= window["queue_ms"] < 20_000
        assert 0 < window["compute_ms"] < 20_000
        while (sample := until(stream, "sample"))["requests"] == 0:  # it ran between two samples
            pass
        assert sample["tokens"] == pytest.approx(5 * sample["requests"])


def test_a_stream_that_its_reader_has_left_frees_its_place(open_server: Server) -> None:
    with ExitStack() as streams:
        for _ in range(SUBSCRIBERS):
            assert streams.enter_context(events(open_server)).status == 200
        with events(open_server) as refused:
            assert refused.status == 503
            assert "streams of the console are open" in json.loads(refused.read())["error"]
    until_s = time.monotonic() + 20
    while True:
        with events(open_server) as stream:
            if stream.status == 200:
                break
        assert time.monotonic() < until_s


def test_the_console_can_be_off(root: Path) -> None:
    with serving(root, "--threads", "1", "--no-console") as server:
        for path in ("/", "/console/main.js", EVENTS):
            assert server.ask(path)[0] == 404


def test_with_keys_the_page_is_open_and_the_events_are_an_admins(root: Path) -> None:
    keys = {"TOKENSLAB_API_KEYS": f"alice:{ALICE}", "TOKENSLAB_ADMIN_KEYS": f"root:{ROOT}"}
    with serving(root, "--threads", "1", **keys) as server:
        assert server.ask("/")[0] == 200
        for key, status in ((None, 401), ("x" * 20, 401), (ALICE, 403), (ROOT, 200)):
            with events(server, key) as stream:
                assert stream.status == status


def test_without_admins_a_clients_key_opens_the_events(root: Path) -> None:
    with serving(root, "--threads", "1", TOKENSLAB_API_KEYS=f"alice:{ALICE}") as server:
        for key, status in ((None, 401), (ALICE, 200)):
            with events(server, key) as stream:
                assert stream.status == status


def test_sigterm_ends_the_streams_well_before_the_drain_limit(root: Path) -> None:
    with (
        serving(root, "--threads", "1", "--drain-delay", "0.5", "--drain-limit", "60") as server,
        events(server) as stream,
    ):
        until(stream, "hello")
        server.signal(signal.SIGTERM)
        until(stream, "bye")
        assert stream.read() == b"", "the answer ends as an answer should"
        assert server.wait() == 0
    assert not [line for line in server.log if "Traceback" in line]
