"""The table is made from runs, and a row that misses its bar fails it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.export_table.__main__ import make_table
from bench.export_table.architectures import ARCHITECTURES, Architecture, uncovered
from bench.export_table.rows import PRECISIONS, rows
from export.adapters.random_weights import random_ffn
from export.adapters.registry import pack
from export.errors import ExportError
from export.packed import Packed
from export.pipeline import Options
from export.quantize import quantize_int8
from service.manifest import Precision
from tests.export.hand_built import random_ffn as hand_built_ffn
from tests.export.hand_built import write_bundle

TINY = Architecture("a tiny FFN", "tiny", "own_blocks", lambda _folder: pack(random_ffn(16, 32)), windows=(8,))
PRECISION_PAIR: tuple[Precision, ...] = ("fp32", "int8")


def table(page: Path) -> list[list[str]]:
    """The cells of the page's rows."""
    lines = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip("| ") for cell in line] for line in lines[2:]]


def test_a_row_that_misses_its_bar_is_marked_and_the_exit_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    # Two matmuls of 16 by 32 are next to nothing of its time: int8 misses the bar that fp32 does not have.
    slow = replace(TINY, held_to_floor=True)
    assert make_table([slow], page, precisions=PRECISION_PAIR, seconds=0.01) == 1
    found = table(page)
    assert [row[:2] for row in found] == [[TINY.name, precision] for precision in PRECISION_PAIR]
    assert found[0][-1] == "holds"
    assert "of the floor's speed at 8 tokens, required 0.85" in found[1][-1]
    assert "a tiny FFN, int8: 0." in capsys.readouterr().err
    for _, _, parity, sqnr, _, certificate, _, speed, _ in found:
        assert 0 < float(parity) < 0.1
        assert float(sqnr) > 20
        assert certificate == "exact"
        assert float(speed.removesuffix(" (8)")) > 0
    assert "Rows: 2; that miss their bar: 1." in page.read_text()
    assert "onnxruntime 1." in page.read_text()


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Precision]]:
    """Exports that take no time: bundles by hand, and a refusal of int8 where "refused" is in the name."""
    asked: list[Sequence[Precision]] = []

    def export(_packed: Packed, options: Options, **_facts: object) -> Path:
        asked.append(options.precisions)
        if "refused" in options.name and "int8" in options.precisions:
            raise ExportError("int8: SQNR 3.0 dB, required 20 dB")
        model = hand_built_ffn(16, 64, 0)
        models = {"fp32": model, "int8": quantize_int8(model)}
        return write_bundle(tmp_path / f"{len(asked)}", {p: models[p] for p in options.precisions}, d=16)

    monkeypatch.setattr("bench.export_table.rows.export_packed", export)
    return asked


def test_a_table_whose_rows_all_hold_exits_0(tmp_path: Path, exported: list[Sequence[Precision]]) -> None:
    page = tmp_path / "page.md"
    assert make_table([TINY, TINY], page, precisions=PRECISION_PAIR, seconds=0.01) == 0
    assert [row[-1] for row in table(page)] == ["holds"] * 4
    assert len(exported) == 2


def test_a_precision_that_the_export_refuses_is_a_row_with_the_reason_and_harms_no_other(
    tmp_path: Path, exported: list[Sequence[Precision]]
) -> None:
    refused = replace(TINY, slug="refused")
    fp32, int8 = rows(refused, tmp_path, precisions=PRECISION_PAIR, seconds=0.01, progress=lambda _step: None)
    assert exported == [PRECISION_PAIR, ("fp32",), ("int8",), ("int8",)]  # the last within an error budget
    assert fp32.variant is not None
    assert fp32.missed == []
    assert (int8.variant, int8.missed) == (None, ["int8: SQNR 3.0 dB, required 20 dB"])


def test_every_family_has_a_row_and_every_precision_a_column() -> None:
    assert uncovered(ARCHITECTURES) == []
    assert uncovered(ARCHITECTURES[:1])
    assert set(PRECISIONS) >= {"fp32", "int8"}
    assert len({a.slug for a in ARCHITECTURES}) == len(ARCHITECTURES)
