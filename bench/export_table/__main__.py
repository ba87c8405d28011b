"""`python -m bench.export_table`: make docs/export-table.md; exit 1 if a row misses its bar or a family has no row."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from transformers.utils import logging

from bench.export_table.architectures import ARCHITECTURES, Architecture, uncovered
from bench.export_table.page import page
from bench.export_table.rows import PRECISIONS, Row, rows
from bench.export_table.sentences import SENTENCES
from bench.machine import describe_machine
from service.cpu import cpu_quota
from service.manifest import Precision

PAGE: Final = Path("docs/export-table.md")
_VERSIONS: Final = ("torch", "onnx", "onnxscript", "transformers")


def make_table(
    architectures: Sequence[Architecture],
    out: Path,
    *,
    precisions: Sequence[Precision] = PRECISIONS,
    seconds: float = 1.5,
) -> int:
    """Write the page of `architectures` to `out`, and say on standard error what misses its bar.

    Args:
        architectures: the rows' models.
        out: where the page goes.
        precisions: of each model.
        seconds: of CPU time to spend on timing one window of one model in all its precisions, about.

    Returns:
        The exit status: 1 if a row misses its bar.
    """
    torch.set_num_threads(cpu_quota())
    logging.disable_progress_bar()  # of files that are written in a moment
    began = time.monotonic()

    def progress(step: str) -> None:
        sys.stderr.write(f"{time.monotonic() - began:6.1f} s  {step}\n")

    found: list[Row] = []
    for architecture in architectures:
        with tempfile.TemporaryDirectory() as folder:
            found += rows(architecture, Path(folder), precisions=precisions, seconds=seconds, progress=progress)
    machine = {**describe_machine(cpu_quota()), **{name: version(name) for name in _VERSIONS}}
    out.write_text(page(found, machine, datetime.now(UTC).isoformat(timespec="seconds"), SENTENCES), encoding="utf-8")
    progress(f"{out} written: {len(found)} rows")
    missed = [row for row in found if row.missed]
    for row in missed:
        sys.stderr.write(f"{row.architecture}, {row.precision}: {'; '.join(row.missed)}\n")
    return 1 if missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments`, make the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[a.slug for a in ARCHITECTURES], help="these architectures")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="these precisions")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--seconds", type=float, default=1.5, help="of CPU time for the timing of each window")
    given = parser.parse_args(arguments)
    chosen = [a for a in ARCHITECTURES if given.only is None or a.slug in given.only]
    if missing := uncovered(chosen) if given.only is None else []:
        sys.stderr.write(f"no row goes through {', '.join(missing)}: give each an architecture\n")
    status = make_table(chosen, given.out, precisions=given.precision, seconds=given.seconds)
    return 1 if missing else status


if __name__ == "__main__":
    sys.exit(main())
