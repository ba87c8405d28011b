"""The peers: what each needs, how it is started, and where it answers. Each lives in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

import bench
from bench.bodies import Body, Float32, infer_body, read_answer
from bench.process import Process, free_port

_ORT: Final = "onnxruntime==1.32.0"
_NUMPY: Final = "numpy==2.4.6"
_READY: Final = ".ready"


class PeerError(Exception):
    """A peer could not be installed, or answers wrongly."""


def raw_body(tokens: Float32) -> Body:
    """The rows and nothing else."""
    return Body({"Content-Type": "application/octet-stream"}, tokens.tobytes(), len(tokens))


def raw_answer(headers: Mapping[str, str], content: bytes) -> Float32:
    """All rows in one, whose width only the request tells."""
    return np.frombuffer(content, "<f4")


def json_body(tokens: Float32) -> Body:
    """The Open Inference Protocol without its binary extension."""
    tensor = {"name": "tokens", "datatype": "FP32", "shape": list(tokens.shape), "data": tokens.ravel().tolist()}
    return Body({"Content-Type": "application/json"}, json.dumps({"inputs": [tensor]}).encode(), len(tokens))


def json_answer(headers: Mapping[str, str], content: bytes) -> Float32:
    """Rows (rows, d) of such an answer."""
    try:
        (output,) = json.loads(content)["outputs"]
        return np.array(output["data"], np.float32).reshape(output["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no answer with one output: {content[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class Wire:
    """How a peer takes rows and gives them back; `read` raises ValueError."""

    encode: Callable[[Float32], Body]
    read: Callable[[Mapping[str, str], bytes], Float32]


RAW: Final = Wire(raw_body, raw_answer)
OIP: Final = Wire(infer_body, read_answer)  # the Open Inference Protocol's binary tensors
OIP_JSON: Final = Wire(json_body, json_answer)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a server: its worker processes, and the share of the threads that each has."""

    workers: int = 1
    threads_divided_by: int = 1

    def threads(self, threads: int) -> int:
        """Of each worker, where the server has `threads`."""
        return max(1, threads // self.threads_divided_by)

    def label(self, threads: int) -> str:
        """Workers x threads of each."""
        return f"{self.workers} x {self.threads(threads)}"


@dataclass(frozen=True, slots=True)
class Peer:
    """Versions are those that were measured; the settings those that were its best, case by case.

    `ready_path` answers 200 once it serves; without one any answer will do. `numpy` is one that its own packages allow,
    `interpreter` a Python that they run on.
    """

    name: str
    requirements: tuple[str, ...]
    path: str
    settings: tuple[Setting, ...] = (Setting(),)
    ready_path: str | None = None
    wire: Wire = RAW
    numpy: str = _NUMPY
    interpreter: str = sys.executable

    def python(self, root: Path) -> Path:
        """Its interpreter, under the folder `root`."""
        return root / self.name / "bin" / "python"

    def installed(self, root: Path) -> bool:
        """Whether its environment under `root` is complete."""
        return (root / self.name / _READY).exists()

    def install(self, root: Path) -> None:
        """Make its environment from PyPI, or leave the one that is there.

        Raises:
            PeerError: with what venv or pip said.
        """
        if self.installed(root):
            return
        folder = root / self.name
        _run([self.interpreter, "-m", "venv", "--clear", str(folder)])
        packages = (_ORT, self.numpy, *self.requirements)
        _run([str(self.python(root)), "-m", "pip", "install", "--quiet", "--no-compile", *packages])
        (folder / _READY).touch()

    def server(self, root: Path, setting: Setting, model: Path, d: int, threads: int, log: Path) -> Process:
        """Its server with the ONNX file `model` of `d` columns, not started yet."""
        port = free_port(following=1)  # MLServer's gRPC takes one too
        environment = {
            "PYTHONPATH": str(Path(bench.__file__).parents[1]),
            "PEER_MODEL": str(model.absolute()),
            "PEER_D": str(d),
            "PEER_PORT": str(port),
            "PEER_WORKERS": str(setting.workers),
            "PEER_THREADS": str(setting.threads(threads)),
        }
        command = [str(self.python(root).absolute()), "-m", f"bench.peers.servers.{self.name}_server"]
        if self.ready_path is None:
            return Process(command, port, "/", log, environment)
        return Process(command, port, self.ready_path, log, environment, ready_below=300)


TWO_WORKERS: Final = (Setting(workers=2),)

# One process with all threads, and two that share them: which is better depends on the size of the requests.
ONE_OR_TWO: Final = (Setting(), Setting(workers=2, threads_divided_by=2))

PEERS: Final = (
    Peer("mosec", ("mosec==0.9.8",), "/inference", ONE_OR_TWO),
    Peer("litserve", ("litserve==0.2.19",), "/predict"),
    Peer("fastapi", ("fastapi==0.165.0", "uvicorn[standard]==0.54.0"), "/infer"),
    Peer("bentoml", ("bentoml==1.4.40", "uvloop==0.23.0", "httptools==0.9.0"), "/ffn", TWO_WORKERS, "/readyz"),
    Peer("mlserver", ("mlserver==1.7.1",), "/v2/models/ffn/infer", ready_path="/v2/models/ffn/ready", wire=OIP_JSON),
    Peer(
        "pytriton",
        ("nvidia-pytriton==0.7.0",),
        "/v2/models/ffn/infer",
        ready_path="/v2/models/ffn/ready",
        wire=OIP,
        numpy="numpy==1.26.4",
        # Its Triton brings a libpython of its own, which runs the standard library of the distribution's 3.11 alone.
        interpreter="/usr/bin/python3",
    ),
)
PEER_NAMES: Final = tuple(peer.name for peer in PEERS)


def _run(command: list[str]) -> None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"{' '.join(command)}: {error}") from error
    if finished.returncode != 0:
        raise PeerError(f"{' '.join(command)} failed:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")
