"""Tensors of a checkpoint: whole, in shards, or pickled and trusted; what contradicts itself is refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from export.checkpoint import Checkpoint
from export.errors import SourceError
from service.manifest import file_sha256

INDEX = "model.safetensors.index.json"


def shards(folder: Path) -> dict[str, Tensor]:
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(4), "c": torch.randn(2, 2).half()}
    save_file({"a": tensors["a"]}, folder / "model-1.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, folder / "model-2.safetensors")
    write_index(folder, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"})
    return tensors


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("place", ["", INDEX])
def test_shards_read_as_one(tmp_path: Path, place: str) -> None:
    tensors = shards(tmp_path)
    with Checkpoint(tmp_path / place) as checkpoint:
        assert sorted(checkpoint.keys()) == ["a", "b", "c"]
        for key, tensor in tensors.items():
            assert torch.equal(checkpoint.read(key, tuple(tensor.shape)), tensor.float())
        assert checkpoint.shape("a") == (3, 2)
        assert torch.equal(checkpoint.some_rows("a", [2, 0], 2), tensors["a"][[2, 0]])
        facts = checkpoint.provenance()
    assert facts["weights"] == "model-1.safetensors, model-2.safetensors"
    assert facts["weights_sha256"].split(", ")[1] == file_sha256(tmp_path / "model-2.safetensors")
    assert facts["weights_index_sha256"] == file_sha256(tmp_path / INDEX)
    assert facts["weights_dtype"] == "float16 (1), float32 (2), widened to float32"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "weight_map is missing"),
        ({"a": 1}, "weight_map is missing"),
        ({"a": "../model-1.safetensors"}, "expected a file of its own folder"),
        ({"a": "model-3.safetensors"}, r"model-3\.safetensors: no such file"),
        ({"a": "model-1.bin"}, "a pickle can run any code"),
        ({"a": "model-1.safetensors", "b": "model-1.safetensors"}, r"b is not in model-1\.safetensors"),
        ({"b": "model-2.safetensors"}, r"does not list c, which is in model-2\.safetensors"),
    ],
)
def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path, weight_map: Any, message: str) -> None:
    shards(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(SourceError, match=message):
        Checkpoint(tmp_path)


def test_an_empty_folder_and_an_absent_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)
    shards(tmp_path)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(SourceError, match="it has no tensor d"):
        checkpoint.read("d")


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_pickle_is_read_only_if_trusted(tmp_path: Path, wrapped: bool) -> None:
    tensors = {"a": torch.randn(3, 2)}
    torch.save({"state_dict": tensors, "step": 3} if wrapped else tensors, tmp_path / "w.bin")
    with pytest.raises(SourceError, match=r"a pickle can run any code .* --trust-pickle"):
        Checkpoint(tmp_path / "w.bin")
    with Checkpoint(tmp_path / "w.bin", trust_pickle=True) as checkpoint:
        assert torch.equal(checkpoint.read("a"), tensors["a"])
        assert checkpoint.shape("a") == (3, 2)
        assert torch.equal(checkpoint.some_rows("a", [0], 2), tensors["a"][:1])


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"a": 1}, "expected a state dict"),
        ([torch.zeros(1)], "expected a state dict"),
        ({"a": torch.zeros(2, device="meta")}, "a is on meta"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "a is on cpu, torch.sparse_coo"),
    ],
)
def test_a_trusted_pickle_must_be_a_state_dict(tmp_path: Path, saved: Any, message: str) -> None:
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(SourceError, match=message):
        Checkpoint(tmp_path / "w.pt", trust_pickle=True)


def test_a_trusted_pickle_runs_nothing_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.pt").write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(SourceError, match="does not load as weights alone"):
        Checkpoint(Path("w.pt"), trust_pickle=True)
    assert not Path("ran").exists()
