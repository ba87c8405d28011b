"""The arithmetic of the wire against the processor, and the measurement it rests on, on bundles made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench import bandwidth
from bench.break_even import (
    GATED,
    PLAIN,
    Costs,
    break_even_d_ff,
    ffn_flops,
    hidden_units_of_stack,
    wire_bits,
)
from bench.bundles import FFN, THIN
from service.manifest import MANIFEST, Manifest
from tests.bundles import relu_ffn, write_bundle

RATES = st.floats(1e-2, 1e6)


def test_a_token_in_and_out_is_eight_bytes_a_column_and_four_flops_a_weight_column() -> None:
    assert wire_bits(768, 768) == 8 * 8 * 768
    assert ffn_flops(768, 3072) == 4 * 768 * 3072
    assert ffn_flops(768, 3072, GATED) == 6 * 768 * 3072


@given(RATES, RATES, st.integers(1, 1 << 16), st.sampled_from([PLAIN, GATED]))
def test_at_the_break_even_width_both_take_as_long_whatever_d_is(g: float, b: float, d: int, matrices: int) -> None:
    d_ff = break_even_d_ff(g, b, matrices)
    compute_s = 2 * matrices * d * d_ff / (g * 1e9)
    wire_s = wire_bits(d, d) / (b * 1e9)
    assert math.isclose(compute_s, wire_s, rel_tol=1e-9)


def test_the_page_may_say_sixteen_times_gflops_over_gbits() -> None:
    assert break_even_d_ff(35, 10) == 16 * 35 / 10
    assert break_even_d_ff(35, 10, GATED) == pytest.approx(16 * 35 / 10 * 2 / 3)


def test_rates_that_are_none_are_refused() -> None:
    for rates in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="rates must be positive"):
            break_even_d_ff(*rates)


@given(st.integers(1, 4096), st.integers(1, 16384), st.integers(1, 96), st.sampled_from([PLAIN, GATED]))
def test_a_stack_counts_as_the_ffn_that_has_its_weights(d: int, d_ff: int, layers: int, matrices: int) -> None:
    weights = layers * (4 * d * d + matrices * d * d_ff)
    assert math.isclose(matrices * d * hidden_units_of_stack(d, d_ff, layers, matrices), weights, rel_tol=1e-12)


def test_costs_become_rates_and_shares() -> None:
    costs = Costs(carry_us=10, compute_us=90)
    assert costs.share_of_compute == pytest.approx(0.9)
    assert costs.carried_gbit_s(100, 100) == pytest.approx(6400 / 10e-6 / 1e9)
    assert costs.gflop_s(9_000_000) == pytest.approx(100)


def test_the_command_measures_and_prints_the_table(tmp_path: Path) -> None:
    write_bundle(tmp_path, THIN.name, relu_ffn(16, 1))
    path = write_bundle(tmp_path, FFN.name, relu_ffn(16, 64)) / MANIFEST
    manifest = Manifest.model_validate_json(path.read_bytes())
    path.write_text(manifest.model_copy(update={"architecture": {"d_ff": 64}}).model_dump_json())
    out = tmp_path / "figures.json"
    arguments = ["--models", str(tmp_path), "--rounds", "1", "--seconds", "1", "--load", "own", "--out", str(out)]
    app = typer.Typer()
    app.command()(bandwidth.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["1 Gbit/s", "10 Gbit/s", "100 Gbit/s"]
    figures = json.loads(out.read_text())
    assert (figures["d"], figures["d_ff"]) == (16, 64)
    assert figures["costs"]["carry_us"] > 0
    assert figures["costs"]["compute_us"] > 0
    broken = CliRunner().invoke(app, [*arguments, "--load", "none"])
    assert broken.exit_code == 1
