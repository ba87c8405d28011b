"""What making a variant leaves behind."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export import budget, certify, variants
from export.adapters.registry import pack
from export.errors import ProofError
from export.graph import to_graph
from export.parity import reference_cases
from export.pipeline import Options
from export.quantize import Quantizer
from export.weights_file import SCRATCH, move_out
from service import session


class Stopped(Exception):
    """What nobody in the export expects."""


def with_loud_hidden_units() -> nn.Module:
    """An FFN that int8 has smoothed: its weights are then others than the float graph's."""
    up, down = nn.Linear(64, 128), nn.Linear(128, 64)
    loudness = torch.logspace(-1, 1, 128)
    with torch.no_grad():
        up.weight *= loudness[:, None]
        down.weight /= loudness
    return nn.Sequential(up, nn.ReLU(), down)


@pytest.mark.parametrize("end", ["kept", "refused", "stopped"])
def test_nothing_but_files_is_left_of_a_precision_however_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its session and its integers are the weights once more, and its scratch file is as large."""
    held = list[weakref.ref[Any]]()
    refused = dict[str, str]()
    seen = list[tuple[set[str], bool]]()
    opened, encode, certified = session.open_session, Quantizer.encode, certify.certify

    def open_watched(*arguments: Any) -> Any:
        made = opened(*arguments)
        held.append(weakref.ref(made))
        return made

    def encode_watched(self: Quantizer, *arguments: Any) -> Any:
        encoded = encode(self, *arguments)
        held.append(weakref.ref(encoded.parts["int8"]))
        return encoded

    def certify_watched(*arguments: Any, quantized: bool, **others: Any) -> Any:
        if quantized:
            seen.append((found(), all(each() is not None for each in held[-3:])))
            if end != "kept":
                raise ProofError("refused") if end == "refused" else Stopped
        return certified(*arguments, quantized=quantized, **others)

    def found() -> set[str]:
        return {path.name for path in tmp_path.iterdir()} - {"fp32-cpu.onnx", "fp32-cpu.onnx.data"}

    def progress(step: str) -> None:
        if step.startswith("int8-fast for"):
            seen.append((found(), any(each() is not None for each in held)))
            raise Stopped

    monkeypatch.setattr(budget, "open_session", open_watched)
    monkeypatch.setattr(variants, "open_session", open_watched)
    monkeypatch.setattr(Quantizer, "encode", encode_watched)
    monkeypatch.setattr(variants, "certify", certify_watched)
    packed = pack(with_loud_hidden_units())
    graph = to_graph(packed.module, packed.kind, packed.d_in, packed.d_memory)
    cases = reference_cases(packed, seed=0)
    move_out(graph, tmp_path / "fp32-cpu.onnx")
    options = Options("x", tmp_path, precisions=("int8", "int8-fast"), external_above=0)
    with pytest.raises(Stopped) as stopped:  # which is held, as whoever prints a traceback holds it
        variants.make_variants(graph, packed, options, cases, tmp_path, progress, refused)
    own = {"int8-cpu.onnx", "int8-cpu.onnx.data"}
    assert seen[0] == ({*own, f"{SCRATCH}.data"}, True)
    if end != "stopped":
        assert seen[1] == (own if end == "kept" else set(), False)
        assert refused == ({} if end == "kept" else {"int8": "refused"})
    assert stopped.value is not None
    assert found() == (own if end == "kept" else set())
    assert [each() for each in held if each() is not None] == []
