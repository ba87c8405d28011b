"""One script for a machine with a GPU: `python -m bench.gpu`. Parity and speed of the precisions for CUDA, and of
packed against padded attention; a page and a JSON file with the machine's name. Nothing is measured without CUDA.

Times are of runs whose inputs and outputs are on the device (I/O binding), synchronized: medians after a warm-up.
Parity is with the same bundle's float32 on the CPU, which its export proved equal to torch in float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from bench.bundles import Bundle, ExportFailed, Recipe, ensure
from bench.machine import describe_machine
from service.cpu import cpu_quota
from service.errors import TokenslabError
from service.session import PROVIDERS, Provider, open_session

PRECISIONS: Final = ("fp32", "fp16", "bf16", "w8", "w4")
TOKENS: Final = (1, 16, 64, 256, 1024, 4096, 16384)
LENGTHS: Final = (*(1, 3, 7, 15) * 16, 256)  # of the window of sequences: many short ones and one long
COMPARED: Final = 1024  # rows whose parity is measured; the largest windows would take minutes on the CPU
REPEATS: Final = 20

_FOR_BOTH: Final = (
    *("--provider", "cpu", "--provider", "cuda", "--allow-inexact", "--no-details"),
    *(word for precision in PRECISIONS for word in ("--precision", precision)),
)
FFN: Final = Recipe(
    "bench-gpu-ffn",
    ("random", "ffn", "--d", "768", "--d-ff", "3072", "--activation", "gelu", "--seed", "0", *_FOR_BOTH),
)
BLOCK: Final = Recipe(
    "bench-gpu-block",
    ("random", "block", "--d", "768", "--heads", "12", "--d-ff", "3072", "--layers", "2", "--seed", "0", *_FOR_BOTH),
)

Feeds = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True, slots=True)
class Row:
    """One precision of the FFN at one size of window."""

    precision: str
    tokens: int
    us_per_token: float
    relative_error: float  # over at most COMPARED rows


@dataclass(frozen=True, slots=True)
class Attention:
    """One precision of the block: the window of LENGTHS packed, and as a padded batch."""

    precision: str
    packed_ms: float
    padded_ms: float

    @property
    def gain(self) -> float:
        """Speed of packed over padded."""
        return self.padded_ms / self.packed_ms


class Bound:
    """A session whose inputs and outputs stay on its device."""

    def __init__(self, path: Path, provider: Provider) -> None:
        self._session = open_session(path, provider, cpu_quota())
        self._device = provider

    def run(self, feeds: Feeds) -> np.ndarray[Any, Any]:
        """One run; `out` on the host."""
        out: np.ndarray[Any, Any] = self._session.run(["out"], dict(feeds))[0]
        return out

    def median_s(self, feeds: Feeds, repeats: int = REPEATS) -> float:
        """Seconds of a run without copies, synchronized; the median after two to warm up."""
        binding = self._session.io_binding()
        for name, array in feeds.items():
            # Lengths are read on the host.
            place = "cpu" if array.dtype == np.int64 else self._device
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, place, 0))
        binding.bind_output("out", self._device)
        took = []
        for _ in range(repeats + 2):
            binding.synchronize_inputs()
            began = time.perf_counter()
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            took.append(time.perf_counter() - began)
        return statistics.median(took[2:])


def ffn_rows(
    files: Mapping[str, Path], reference: Path, provider: Provider, tokens: Sequence[int], repeats: int = REPEATS
) -> list[Row]:
    """Every precision in turn at each size; `reference` is the float file for the CPU."""
    rng, wanted = np.random.default_rng(0), Bound(reference, "cpu")
    d = open_session(reference, "cpu", 1).get_inputs()[0].shape[1]
    bound = {precision: Bound(path, provider) for precision, path in files.items()}
    rows = []
    for count in tokens:
        feeds = {"tokens": rng.standard_normal((count, d), dtype=np.float32)}
        right = wanted.run({"tokens": feeds["tokens"][:COMPARED]}).astype(np.float64)
        for precision, one in bound.items():
            error = float(np.linalg.norm(one.run(feeds)[:COMPARED] - right) / np.linalg.norm(right))
            rows.append(Row(precision, count, one.median_s(feeds, repeats) / count * 1e6, error))
    return rows


def attention_rows(
    files: Mapping[str, Path], provider: Provider, lengths: Sequence[int], repeats: int = REPEATS
) -> list[Attention]:
    """The same sequences packed, and each padded to the longest."""
    rng, rows = np.random.default_rng(0), []
    for precision, path in files.items():
        bound = Bound(path, provider)
        d = open_session(path, provider, 1).get_inputs()[0].shape[1]
        padded = [max(lengths)] * len(lengths)
        took = []
        for lens in (list(lengths), padded):
            tokens = rng.standard_normal((sum(lens), d), dtype=np.float32)
            took.append(bound.median_s({"tokens": tokens, "seq_lens": np.array(lens, np.int64)}, repeats) * 1e3)
        rows.append(Attention(precision, *took))
    return rows


def page(machine: Mapping[str, object], ffn: Sequence[Row], attention: Sequence[Attention]) -> str:
    """The figures as Markdown."""
    sizes = list(dict.fromkeys(row.tokens for row in ffn))
    lines = ["# On a GPU", "", ", ".join(f"{name} {value}" for name, value in machine.items()) + ".", ""]
    lines += ["FFN 768/3072, us a token (relative error to float32 on the CPU):", ""]
    lines += ["| precision | " + " | ".join(f"{size:,}" for size in sizes) + " |", "| --- " * (len(sizes) + 1) + "|"]
    for precision in dict.fromkeys(row.precision for row in ffn):
        cells = {
            row.tokens: f"{row.us_per_token:.3g} ({row.relative_error:.1e})"
            for row in ffn
            if row.precision == precision
        }
        lines.append(f"| {precision} | " + " | ".join(cells[size] for size in sizes) + " |")
    lines += ["", f"Two blocks, {len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens:", ""]
    lines += ["| precision | packed ms | padded ms | packed over padded |", "| --- | --- | --- | --- |"]
    lines += [f"| {a.precision} | {a.packed_ms:.3g} | {a.padded_ms:.3g} | {a.gain:.2f}x |" for a in attention]
    return "\n".join(lines) + "\n"


def _files(bundle: Bundle) -> dict[str, Path]:
    return {v.precision: bundle.folder / v.file for v in bundle.manifest.variants if v.provider == "cuda"}


def _gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Measure and write; 1 where there is no CUDA, or something cannot be exported or loaded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("build/bench-models"))
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="<out>.md and <out>.json")
    given = parser.parse_args()
    if PROVIDERS["cuda"] not in ort.get_available_providers():
        sys.stderr.write(
            f"bench.gpu: this ONNX Runtime has {', '.join(ort.get_available_providers())}, and no "
            f"{PROVIDERS['cuda']}: install the extra `cuda` on a machine with an NVIDIA GPU\n"
        )
        return 1
    try:
        ffn, block = ensure(FFN, given.models), ensure(BLOCK, given.models)
        machine = {"gpu": _gpu(), **describe_machine(cpu_quota())}
        rows = ffn_rows(_files(ffn), ffn.folder / "fp32-cpu.onnx", "cuda", TOKENS)
        attention = attention_rows(_files(block), "cuda", LENGTHS)
    except (ExportFailed, TokenslabError, OSError, subprocess.CalledProcessError) as fault:
        sys.stderr.write(f"bench.gpu: {fault}\n")
        return 1
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".md").write_text(page(machine, rows, attention), encoding="utf-8")
    document = {"machine": machine, "ffn": [asdict(row) for row in rows], "attention": [asdict(a) for a in attention]}
    given.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(page(machine, rows, attention))
    return 0


if __name__ == "__main__":
    sys.exit(main())
