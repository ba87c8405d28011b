"""`serve run` with each of our configuration files, on a Ray of its own that has this machine's cores and no more.

Run by `make ray-test`, like its neighbour.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest
import yaml

from bench.process import free_port
from tests.deploy.ray_cluster.load import load, questions

# Ray starts a dozen processes, on cores that are shared.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[3]
STARTED_WITHIN_S = 240.0
ENDED_WITHIN_S = 30.0


@pytest.mark.parametrize(
    ("file", "models", "name"),
    [("service.yaml", ROOT / "models", "demo-block"), ("pipeline.yaml", ROOT / "build" / "ray-models", "stack")],
    ids=["service", "pipeline"],
)
def test_serve_run_serves_each_configuration_file_on_one_node(
    tmp_path: Path, file: str, models: Path, name: str
) -> None:
    text = (ROOT / "deploy" / "ray" / file).read_text()
    assert "/srv/models" in text
    port = free_port()
    written = yaml.safe_load(text.replace("/srv/models", str(models)))
    written["http_options"] = {"host": "127.0.0.1", "port": port}
    (tmp_path / file).write_text(yaml.safe_dump(written))
    with serve_run(tmp_path / file, port), load(port, questions(models, name, ["fp32", "int8"], 5)) as tally:
        tally.wait_for(40, limit_s=60)
    assert (tally.wrong, tally.failed, tally.gave_up) == ([], [], [])


@contextmanager
def serve_run(file: Path, port: int) -> Iterator[None]:
    """The command, from ready to ended with every process that it started."""
    # A path to a socket has at most 107 bytes: pytest's own folders are too long.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "RAY_ADDRESS": "local", "RAY_TMPDIR": folder}
        command = [str(Path(sys.executable).parent / "serve"), "run", str(file)]
        with (file.parent / "log").open("w+") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                _wait_until_ready(process, port, file.parent / "log")
                yield
            finally:
                _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + STARTED_WITHIN_S
    while True:
        with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=10) as answer:
            assert answer.status == 200
            return
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < ends, log.read_text()[-4000:]
        time.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    _, alive = psutil.wait_procs([psutil.Process(process.pid), *started], timeout=ENDED_WITHIN_S)
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
