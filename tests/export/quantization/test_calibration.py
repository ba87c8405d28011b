"""Calibration tokens: what is read, what is refused, and that activations are the float graph's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from export.adapters.registry import pack
from export.errors import ExportError
from export.quantization import calibration
from export.quantization.calibration import MAX_TOKENS, Activations, read_calibration, spread, synthetic_calibration
from tests.export.hand_built import random_ffn


def test_rows_of_a_position_wise_module_are_read_in_any_float_type(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).standard_normal((30, 4))
    np.save(tmp_path / "tokens.npy", tokens)
    found = read_calibration(tmp_path / "tokens.npy", "position-wise", 4)
    assert not found.synthetic
    assert found.source.startswith("tokens.npy (SHA-256 ")
    assert [list(feeds) for feeds in found.feeds] == [["tokens"]]
    assert (found.feeds[0]["tokens"] == tokens.astype(np.float32)).all()
    assert found.feeds[0]["tokens"].dtype == np.float32


def test_sequences_are_never_cut_and_no_more_are_used_than_pay(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 60)
    tokens = np.random.default_rng(2).standard_normal((lengths.sum(), 4), dtype=np.float32)
    np.savez(tmp_path / "tokens.npz", tokens=tokens, seq_lens=lengths)
    feeds = read_calibration(tmp_path / "tokens.npz", "sequence", 4).feeds
    used = np.concatenate([run["seq_lens"] for run in feeds])
    assert (used == lengths[: len(used)]).all()
    assert used.sum() <= MAX_TOKENS < used.sum() + lengths[len(used)]
    assert all(run["seq_lens"].sum() == len(run["tokens"]) for run in feeds)
    assert (np.concatenate([run["tokens"] for run in feeds]) == tokens[: used.sum()]).all()


def test_a_batch_is_as_many_sequences(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.ones((3, 5, 4), np.float32))
    (feeds,) = read_calibration(tmp_path / "tokens.npy", "sequence", 4).feeds
    assert feeds["tokens"].shape == (15, 4)
    assert feeds["seq_lens"].tolist() == [5, 5, 5]


def test_one_sequence_longer_than_all_that_is_used_is_used(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.ones((1, MAX_TOKENS + 5, 2), np.float32))
    (feeds,) = read_calibration(tmp_path / "tokens.npy", "sequence", 2).feeds
    assert feeds["seq_lens"].tolist() == [MAX_TOKENS + 5]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"rows": np.ones((2, 4), np.float32)}, "no array 'tokens', found rows"),
        (
            {"tokens": np.ones((2, 5), np.float32), "seq_lens": np.array([2])},
            r"\(2, 5\), expected floats \(n, 4\)",
        ),
        ({"tokens": np.ones((2, 4), np.int32), "seq_lens": np.array([2])}, r"int32 \(2, 4\), expected floats"),
        ({"tokens": np.ones((0, 4), np.float32), "seq_lens": np.array([0])}, "n >= 1"),
        ({"tokens": np.full((2, 4), np.nan, np.float32), "seq_lens": np.array([2])}, "NaN or infinite"),
        ({"tokens": np.full((2, 4), 1e300), "seq_lens": np.array([2])}, "NaN or infinite"),
        ({"tokens": np.ones((2, 4), np.float32)}, "where sequences begin is not stated"),
        ({"tokens": np.ones((2, 4), np.float32), "seq_lens": np.ones(2)}, "where sequences begin is not stated"),
        ({"tokens": np.ones((2, 4), np.float32), "seq_lens": np.array([3])}, "seq_lens sum to 3 of 2 rows of tokens"),
        ({"tokens": np.ones((2, 4), np.float32), "seq_lens": np.array([2, 0])}, "each is at least 1"),
    ],
)
def test_a_file_that_is_no_use_is_refused_by_name(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ExportError, match=rf"bad\.npz: .*{message}"):
        read_calibration(tmp_path / "bad.npz", "sequence", 4)


@pytest.mark.parametrize("content", [b"", b"no array", None])
def test_what_is_not_an_array_file_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "bad.npy").write_bytes(content)
    with pytest.raises(ExportError, match=r"bad\.npy: not a readable \.npy or \.npz file"):
        read_calibration(tmp_path / "bad.npy", "position-wise", 4)


def test_activations_are_those_of_the_float_graph_however_few_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_KEPT_BYTES", 1)
    model = random_ffn(8, 16, 0)
    feeds = synthetic_calibration(pack(nn.Linear(8, 8)), seed=0).feeds
    rows = [feeds[0]["tokens"][:10], feeds[0]["tokens"][10:17]]
    found = Activations(model, {"tokens": 8, "a": 16}, [{"tokens": part} for part in rows], tmp_path / "f.onnx")
    assert (found.rows("tokens") == np.concatenate(rows)).all()
    assert found.rows("a").shape == (17, 16)
    assert (found.rows("tokens") == np.concatenate(rows)).all()
    assert found.rows_beside("a") is None
    assert not (tmp_path / "f.onnx").exists()


def test_rows_beside_are_given_apart(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((12, 8), dtype=np.float32)
    here, beside = [{"tokens": rows[:5]}], [{"tokens": rows[5:9]}, {"tokens": rows[9:]}]
    found = Activations(random_ffn(8, 16, 0), {"tokens": 8, "a": 16}, here, tmp_path / "f.onnx", beside)
    assert (found.rows("tokens") == rows[:5]).all()
    other = found.rows_beside("tokens")
    assert other is not None
    assert (other == rows[5:]).all()
    assert found.rows("a").shape == (5, 16)


def test_spread_takes_rows_from_everywhere() -> None:
    rows = np.arange(1000, dtype=np.float32)[:, None]
    taken = spread(rows, 100)[:, 0]
    assert len(taken) == 100
    assert taken[-1] >= 900
    assert len(spread(rows, 5000)) == 1000


def test_synthetic_tokens_say_so_and_are_not_those_of_parity() -> None:
    found = synthetic_calibration(pack(nn.TransformerEncoderLayer(4, 1, 8)), seed=3)
    assert found.synthetic
    assert found.source == "synthetic: N(0, 1), 1,024 tokens"
    assert found.feeds[0]["seq_lens"].sum() == len(found.feeds[0]["tokens"]) == 1024
    assert not np.isin(found.feeds[0]["tokens"], np.random.default_rng(3).standard_normal((1024, 4), np.float32)).any()


def test_every_sequence_brings_its_own_memory(tmp_path: Path) -> None:
    lengths, memory_lengths = (np.random.default_rng(seed).integers(1, 200, 60) for seed in (4, 5))
    rng = np.random.default_rng(6)
    tokens, memory = (rng.standard_normal((n.sum(), 4), dtype=np.float32) for n in (lengths, memory_lengths))
    arrays: dict[str, Any] = {"tokens": tokens, "seq_lens": lengths, "memory": memory}
    np.savez(tmp_path / "tokens.npz", **arrays, memory_seq_lens=memory_lengths)
    feeds = read_calibration(tmp_path / "tokens.npz", "sequence", 4, 4).feeds
    assert len(feeds) > 1
    used = np.concatenate([run["memory_seq_lens"] for run in feeds])
    assert (used == memory_lengths[: len(used)]).all()
    assert len(used) == sum(len(run["seq_lens"]) for run in feeds)
    assert (np.concatenate([run["memory"] for run in feeds]) == memory[: used.sum()]).all()
    np.savez(tmp_path / "few.npz", **arrays, memory_seq_lens=np.array([len(memory)]))
    with pytest.raises(ExportError, match="1 memories for 60 sequences"):
        read_calibration(tmp_path / "few.npz", "sequence", 4, 4)
    np.savez(tmp_path / "none.npz", tokens=tokens, seq_lens=lengths)
    with pytest.raises(ExportError, match="no array 'memory', found seq_lens, tokens"):
        read_calibration(tmp_path / "none.npz", "sequence", 4, 4)
