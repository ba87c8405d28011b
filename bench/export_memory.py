"""The peak memory of an export, over all its processes, as a multiple of the weights: `python -m bench.export_memory`.

A stack of random blocks is exported by the command line in a process of its own, which is sampled with its children.
RSS counts the pages of mapped files too. The default, 15 blocks of 2048/8192, is 3 GB of float32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from service.manifest import read_manifest

SAMPLE_S = 0.02


@dataclass
class Peak:
    """Largest RSS of a process and its children, in bytes: at all, and in each step of the export."""

    rss: int = 0
    by_step: dict[str, int] = field(default_factory=dict)

    def take(self, root: psutil.Process, step: str) -> None:
        """One sample; a process that ends meanwhile counts nothing."""
        rss = 0
        for process in [root, *root.children(recursive=True)]:
            try:
                rss += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.rss = max(self.rss, rss)
        self.by_step[step] = max(self.by_step.get(step, 0), rss)

    def table(self, weights: int) -> str:
        """The peaks as multiples of `weights` bytes."""
        lines = [f"weights {weights / 1e9:.2f} GB in float32; peak {self.rss / 1e9:.2f} GB = {self.rss / weights:.2f}x"]
        return "\n".join([*lines, *(f"  {rss / weights:5.2f}x  {step}" for step, rss in self.by_step.items())])


def measure(command: list[str]) -> Peak:
    """Run `command`, whose lines on stderr name its steps, and sample it to its end.

    Raises:
        RuntimeError: it failed.
    """
    peak, said = Peak(), ["start"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as child:
        assert child.stderr is not None
        reader = threading.Thread(target=lambda lines: said.extend(line.strip() for line in lines), args=[child.stderr])
        reader.start()
        root = psutil.Process(child.pid)
        while child.poll() is None:
            try:
                peak.take(root, said[-1])
            except psutil.NoSuchProcess:
                break
            time.sleep(SAMPLE_S)
        reader.join()
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n" + "\n".join(said[-20:]))
    return peak


def main() -> None:
    """Export a random stack, print the peaks, and exit 1 if the largest is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--d-ff", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--precision", action="append", choices=["fp32", "int8"])
    parser.add_argument("--bar", type=float, default=2.5, help="largest multiple of the weights that is allowed")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as models:
        command = [sys.executable, "-m", "tokenslab", "export", "random", "block", "--name", "large"]
        command += ["--models", models, "--d", str(asked.d), "--heads", str(asked.heads), "--d-ff", str(asked.d_ff)]
        command += ["--layers", str(asked.layers), "--external-data"]
        command += [word for precision in asked.precision or [] for word in ("--precision", precision)]
        peak = measure(command)
        weights = 4 * read_manifest(Path(models) / "large" / "1").parameters
    sys.stdout.write(peak.table(weights) + "\n")
    sys.exit(peak.rss > asked.bar * weights)


if __name__ == "__main__":
    main()
