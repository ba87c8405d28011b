from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.loadtest.sizes import InputFileError, Sizes, read_trace


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 1 << 31))
def test_uniform_sizes_stay_within_their_bounds_and_come_again_with_the_seed(low: int, more: int, seed: int) -> None:
    sizes = Sizes.parse(f"uniform:{low}..{low + more}")
    drawn = sizes.draw(50, seed)
    assert ((drawn >= low) & (drawn <= low + more)).all()
    assert np.array_equal(drawn, sizes.draw(50, seed))
    assert sizes.mean == pytest.approx(low + more / 2)
    assert sizes.largest == low + more


def test_zipf_halves_with_rank_at_exponent_one_and_a_fixed_size_is_fixed() -> None:
    zipf = Sizes.parse("zipf:1:64")
    assert zipf.weights[0] / zipf.weights[1] == pytest.approx(2)
    assert zipf.weights.sum() == pytest.approx(1)
    assert set(Sizes.parse("7").draw(5, 0)) == {7}


def test_a_file_gives_its_own_sizes_as_often_as_it_has_them(tmp_path: Path) -> None:
    (tmp_path / "sizes").write_text("3\n3\n\n9\n")
    sizes = Sizes.parse(f"file:{tmp_path / 'sizes'}")
    assert dict(zip(sizes.values, sizes.weights, strict=True)) == pytest.approx({3: 2 / 3, 9: 1 / 3})


@pytest.mark.parametrize("text", ["", "0", "uniform:5..2", "zipf:1:0", "normal:3", "-1", "1.5"])
def test_anything_else_is_refused_with_the_forms_that_are_known(text: str) -> None:
    with pytest.raises(ValueError, match="zipf:"):
        Sizes.parse(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2\n", "no column 'at_s'"),
        ("at_s,tokens\n0,x\n", "line 2: 'x'"),
        ("at_s,tokens\n", "no sizes"),
        ("at_s,tokens\n0,1\nnan,2\n", "line 3"),
        ("at_s,tokens\n0,0\n", "below one"),
    ],
)
def test_a_trace_that_is_none_is_refused_with_its_line(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(content)
    with pytest.raises(InputFileError, match=said):
        read_trace(tmp_path / "trace.csv")


def test_a_trace_starts_at_its_first_request_and_can_run_faster(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("tokens,client,at_s\n5,a,101.0\n2,b,100.0\n")
    trace = read_trace(tmp_path / "trace.csv").faster(2)
    assert trace.times.tolist() == [0.0, 0.5]
    assert trace.tokens.tolist() == [2, 5]
