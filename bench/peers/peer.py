"""The peers: what each needs, how it is started, and where it answers. Each lives in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import bench
from bench.bodies import Body, Float32
from bench.process import Process, free_port

_ORT: Final = ("numpy==2.4.6", "onnxruntime==1.32.0")
_READY: Final = ".ready"


class PeerError(Exception):
    """A peer could not be installed, or answers wrongly."""


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
    """Versions are those that were measured; the settings those that were its best, case by case."""

    name: str
    requirements: tuple[str, ...]
    path: str
    settings: tuple[Setting, ...] = (Setting(),)

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
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(self.python(root)), "-m", "pip", "install", "--quiet", "--no-compile", *_ORT, *self.requirements])
        (folder / _READY).touch()

    def server(self, root: Path, setting: Setting, model: Path, d: int, threads: int, log: Path) -> Process:
        """Its server with the ONNX file `model` of `d` columns, not started yet."""
        port = free_port()
        environment = {
            "PYTHONPATH": str(Path(bench.__file__).parents[1]),
            "PEER_MODEL": str(model.absolute()),
            "PEER_D": str(d),
            "PEER_PORT": str(port),
            "PEER_WORKERS": str(setting.workers),
            "PEER_THREADS": str(setting.threads(threads)),
        }
        command = [str(self.python(root).absolute()), "-m", f"bench.peers.servers.{self.name}_server"]
        return Process(command, port, "/", log, environment)


# One process with all threads, and two that share them: which is better depends on the size of the requests.
ONE_OR_TWO: Final = (Setting(), Setting(workers=2, threads_divided_by=2))

PEERS: Final = (
    Peer("mosec", ("mosec==0.9.8",), "/inference", ONE_OR_TWO),
    Peer("litserve", ("litserve==0.2.19",), "/predict"),
    Peer("fastapi", ("fastapi==0.165.0", "uvicorn[standard]==0.54.0"), "/infer"),
)
PEER_NAMES: Final = tuple(peer.name for peer in PEERS)


def raw_body(tokens: Float32) -> Body:
    """A peer's request: the rows and nothing else."""
    return Body({"Content-Type": "application/octet-stream"}, tokens.tobytes(), len(tokens))


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise PeerError(f"{' '.join(command)} failed:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")
