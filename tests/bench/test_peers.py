"""The contest's arithmetic and its command; a peer of a few lines stands in for the real ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import bench.cli
from bench.bodies import JSON_LENGTH
from bench.limit import InProcess
from bench.peers.contest import Contest, Entry, _check, _Contestant
from bench.peers.peer import OIP, OIP_JSON, PEERS, RAW, Peer, PeerError, Setting, Wire
from bench.peers.verdict import GOALS, lines
from bench.timing import Load
from service.manifest import read_manifest
from tests.bundles import relu_ffn, write_bundle

D = 8


def entry(server: str, case: str, share: float, no: int = 0, setting: str = "", errors: int = 0) -> Entry:
    load = Load(100, 1.0, 1.0, 1.0, {"status": errors} if errors else {}, 100.0)
    return Entry(server, setting, case, "fp32", no, share * 1e4, 1e4, share, load, 100.0, 0.0, 0.0, disturbed=False)


def test_the_goals_are_those_that_were_set() -> None:
    assert [(case, goal.share, goal.over_rival) for case, goal in GOALS.items()] == [
        ("1x64", 0.52, 1.1),
        ("16x32", 0.88, 1.1),
        ("mixed", 0.90, 1.1),
        ("128x8", 0.93, 1.05),
    ]


def test_the_median_counts_against_the_limit_and_against_mosecs_better_setting() -> None:
    ours = [entry("tokenslab", "1x64", share, no) for no, share in enumerate([0.5, 0.55, 0.7])]
    mosec = [entry("mosec", "1x64", share, setting=setting) for setting, share in [("1 x 2", 0.4), ("2 x 1", 0.45)]]
    (line,) = lines([*ours, *mosec])
    assert (line.share.median, line.passes) == (0.55, True)
    assert line.over_rival == pytest.approx(0.55 / 0.45)
    (line,) = lines([*ours, *mosec, entry("mosec", "1x64", 0.6, setting="3 x 1")])
    assert not line.passes


def test_the_service_too_counts_in_its_better_setting_and_an_error_in_either_fails_the_line() -> None:
    ours = [entry("tokenslab", "mixed", share, setting=name) for name, share in [("1 x 2", 0.8), ("2 x 1", 0.995)]]
    (line,) = lines([*ours, entry("mosec", "mixed", 0.9, setting="1 x 2")])
    assert (line.setting, line.share.median, line.passes) == ("2 x 1", 0.995, True)
    assert {label: share.median for label, share in line.others.items()} == {"tokenslab 1 x 2": 0.8, "mosec 1 x 2": 0.9}
    (line,) = lines([*ours, entry("tokenslab", "mixed", 0.8, no=1, setting="1 x 2", errors=1)])
    assert not line.passes


def test_without_mosec_the_share_alone_decides_and_an_error_of_ours_fails_the_line() -> None:
    assert [line.passes for line in lines([entry("tokenslab", "mixed", 0.91)])] == [True]
    assert [line.passes for line in lines([entry("tokenslab", "mixed", 0.89)])] == [False]
    assert [line.passes for line in lines([entry("tokenslab", "mixed", 0.91, errors=1)])] == [False]


@pytest.mark.parametrize(("share", "code"), [(0.53, 0), (0.51, 1)])
def test_a_missed_goal_fails_the_check_and_is_written_down(
    share: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = typer.Typer()
    bench.cli.register(app)
    monkeypatch.setattr(Contest, "run", lambda _: [entry("tokenslab", "1x64", share)])
    out = tmp_path / "new" / "peers.json"
    command = ["bench", "peers", "--environments", str(tmp_path), "--load", "own", "--check", "--out", str(out)]
    finished = CliRunner().invoke(app, command)
    assert finished.exit_code == code, finished.output
    written = json.loads(out.read_text())
    assert [figure["passes"] for figure in written["figures"]] == [code == 0]
    assert len(written["rounds"]) == 1


def test_a_peer_that_does_not_exist_is_refused_by_name() -> None:
    app = typer.Typer()
    bench.cli.register(app)
    finished = CliRunner().invoke(app, ["bench", "peers", "--install", "nobody"])
    assert (finished.exit_code, "mosec" in finished.output) == (2, True)


def test_a_server_of_a_peers_kind_is_started_checked_and_held(tmp_path: Path) -> None:
    """With this interpreter, which has all that the FastAPI peer needs."""
    folder = write_bundle(tmp_path, "ffn", relu_ffn(D, D))
    peer = next(peer for peer in PEERS if peer.name == "fastapi")
    (tmp_path / "environments" / peer.name / "bin").mkdir(parents=True)
    script = peer.python(tmp_path / "environments")
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link would lose this environment's packages
    script.chmod(0o755)
    limit = InProcess(folder, read_manifest(folder), "fp32", 1)
    process = peer.server(tmp_path / "environments", Setting(), folder / "fp32.onnx", D, 1, tmp_path / "log")
    with process:
        one = _Contestant(peer.name, "1 x 1", process, peer.path, peer.wire)
        _check(one, limit)
        with process.held():
            assert process.cpu_s() > 0
        _check(one, limit)
        other = write_bundle(tmp_path, "other", relu_ffn(D, D, seed=1))
        with pytest.raises(PeerError, match="not what the file gives"):
            _check(one, InProcess(other, read_manifest(other), "fp32", 1))


@pytest.mark.parametrize("wire", [RAW, OIP, OIP_JSON], ids=["raw", "binary", "json"])
def test_rows_come_back_as_they_went_in_every_form_that_peers_speak(wire: Wire) -> None:
    tokens = np.random.default_rng().standard_normal((3, D), dtype=np.float32)
    body = wire.encode(tokens)
    assert body.tokens == 3
    # What an echo of the input as the output would say: raw rows, or a document with another word for each.
    content = body.content.replace(b"inputs", b"outputs").replace(b'"tokens"', b'"out"')
    headers = dict(body.headers)
    if JSON_LENGTH in headers:
        headers[JSON_LENGTH] = str(int(headers[JSON_LENGTH]) + len(content) - len(body.content))
    np.testing.assert_array_equal(wire.read(headers, content).reshape(tokens.shape), tokens)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"outputs": []}', b'{"outputs": [{"data": [1]}]}', b"\xff"], ids=repr
)
def test_an_answer_that_is_none_cannot_be_read(content: bytes) -> None:
    with pytest.raises(ValueError, match="no answer with one output"):
        OIP_JSON.read({}, content)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_server_of_its_own_and_pinned_packages(peer: Peer) -> None:
    assert (Path(bench.cli.__file__).parent / "peers" / "servers" / f"{peer.name}_server.py").is_file()
    assert all("==" in package for package in (*peer.requirements, peer.numpy))


def test_a_peer_is_ready_when_its_own_path_says_so_and_not_when_its_port_does(tmp_path: Path) -> None:
    code = """
import http.server, os, time
began = time.monotonic()
class Slow(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if time.monotonic() < began + 0.3 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["PEER_PORT"])), Slow).serve_forever()
"""
    root = tmp_path / "environments"
    ready = Peer("any", (), "/", ready_path="/ready").server(root, Setting(), tmp_path, D, 1, tmp_path / "log")
    ready._command = [sys.executable, "-c", code]
    with ready:
        assert ready._get("/ready", ready.port)[0] == 200


def test_an_environment_that_cannot_be_made_is_a_fault_with_pips_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PeerError, match="venv"):
        Peer("any", (), "/").install(tmp_path / "file")
    with pytest.raises(PeerError, match="/no/python -m venv"):
        Peer("any", (), "/", interpreter="/no/python").install(tmp_path / "environments")
