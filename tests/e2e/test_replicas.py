"""Several processes behind one port: they answer alike, one that dies is replaced, and stopping loses nothing."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import psutil

from tests.bundles import relu_ffn, write_bundle
from tests.e2e.server import Server, end, eventually, serving, start

D = 8


def replicas(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children() if "--replica" in child.cmdline()]


def own_ports(server: Server) -> list[int]:
    found = re.search(r"alone on port ([\d, ]+)", "".join(server.log))
    assert found is not None
    return [int(port) for port in found[1].split(",")]


def test_replicas_answer_alike_one_that_dies_is_replaced_and_sigterm_drains_them_all(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, 2 * D))
    tokens = np.random.default_rng().standard_normal((5, D), dtype=np.float32)
    flags = ("--threads", "1", "--replicas", "2", "--drain-delay", "0.1")
    with serving(tmp_path, *flags) as server:
        right = server.infer("ffn", tokens)
        ports = own_ports(server)
        assert len(ports) == 2
        for port in ports:
            alone = Server(server.process, port)
            np.testing.assert_array_equal(alone.infer("ffn", tokens), right)
            assert alone.metric("tokenslab_requests_total") >= 1, "its own, whoever answered the others"
        before = {child.pid for child in replicas(server)}
        assert len(before) == 2
        victim = replicas(server)[0]
        victim.send_signal(signal.SIGKILL)
        victim.wait(20)
        for _ in range(20):
            np.testing.assert_array_equal(server.infer("ffn", tokens), right)
        assert eventually(lambda: len({child.pid for child in replicas(server)} - {victim.pid}) == 2)
        for port in ports:
            np.testing.assert_array_equal(Server(server.process, port).infer("ffn", tokens), right)
        children = replicas(server)
        server.signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_replicas_do_not_outlive_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, 2 * D))
    with serving(tmp_path, "--threads", "1", "--replicas", "2", "--drain-delay", "0") as server:
        server.infer("ffn", np.ones((1, D), np.float32))
        children = replicas(server)
        for port in own_ports(server):
            Server(server.process, port).ask("/v2/health/ready")
        server.process.kill()
        assert eventually(lambda: not any(child.is_running() for child in children))


def test_a_bundle_that_cannot_be_served_stops_them_all_with_its_reason(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, "ffn", relu_ffn(D, 2 * D))
    (folder / "fp32.onnx").write_bytes(b"broken")
    server = start(tmp_path, "--replicas", "2")
    try:
        output, _ = server.process.communicate(timeout=60)
        assert server.process.returncode == 1
        assert "fp32.onnx: its SHA-256 is" in output
        assert "Traceback" not in output
    finally:
        end(server)


def test_a_stop_told_to_every_process_of_the_group_is_one_stop(tmp_path: Path) -> None:
    """As systemd does it: each replica has SIGTERM twice, from there and from its supervisor."""
    write_bundle(tmp_path, "ffn", relu_ffn(D, 2 * D))
    with serving(tmp_path, "--threads", "1", "--replicas", "2", "--drain-delay", "5") as server:
        ports = own_ports(server)
        for port in ports:
            Server(server.process, port).ask("/v2/health/ready")
        for child in replicas(server):
            child.send_signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        assert eventually(lambda: Server(server.process, ports[0]).ask("/v2/health/ready")[0] == 503, 4)
        for port in ports:
            assert len(Server(server.process, port).infer("ffn", np.ones((2, D), np.float32))) == 2
        assert server.wait(30) == 0


def test_a_second_signal_stops_every_replica_at_once(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, 2 * D))
    with serving(tmp_path, "--threads", "1", "--replicas", "2", "--drain-delay", "600") as server:
        for port in own_ports(server):
            Server(server.process, port).ask("/v2/health/ready")
        children = replicas(server)
        server.signal(signal.SIGTERM)
        server.logged("serving for 600.0 s")
        server.signal(signal.SIGTERM)
        assert server.wait(30) == 128 + signal.SIGTERM
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_a_stop_while_a_replica_loads_is_no_failure(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, 2 * D))
    with serving(tmp_path, "--threads", "1", "--replicas", "2", "--drain-delay", "0") as server:
        server.signal(signal.SIGTERM)  # they have only been started
        assert server.wait(30) == 0
