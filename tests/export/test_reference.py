"""The reference file: what is kept of the cases, and what an unreadable one is called."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from export.reference import Case, write_reference


def test_the_reference_keeps_what_fits_into_a_mebibyte_and_at_least_one(tmp_path: Path) -> None:
    cases = [Case(np.ones((n, 512), np.float32), (n,), np.full((n, 512), 1 / 3)) for n in (1, 2, 64, 257)]
    assert write_reference(tmp_path / "reference.npz", cases[::-1]) == 3
    assert (tmp_path / "reference.npz").stat().st_size < 1 << 20
    with np.load(tmp_path / "reference.npz", allow_pickle=False) as arrays:
        assert set(arrays) == {f"{name}_{i}" for name in ("tokens", "seq_lens", "out") for i in range(3)}
        assert [arrays[f"seq_lens_{i}"].tolist() for i in range(3)] == [[1], [2], [64]]
        assert {arrays["tokens_0"].dtype, arrays["out_0"].dtype} == {np.dtype(np.float32)}
    wide = [Case(np.ones((3, 1 << 18), np.float32), (3,), np.ones((3, 4)))]
    assert write_reference(tmp_path / "reference.npz", wide) == 1
