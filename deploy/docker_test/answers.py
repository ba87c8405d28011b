"""Infer requests with fresh random tokens, and the right answers from ONNX Runtime in this process. Knows no Docker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from service.cpu import cpu_quota
from service.manifest import Manifest, Variant, read_manifest
from service.session import open_session

Float32 = npt.NDArray[np.float32]
CLOSE = 1e-5  # ||out - right|| / ||right||, between processors whose kernels add in another order


class WrongAnswer(Exception):
    """The service's output is not what the bundle computes."""


@dataclass(frozen=True, slots=True)
class Question:
    """One infer request: the model's name, the JSON part's length, the whole body; `right` (rows, d_out)."""

    model: str
    json_length: int
    body: bytes
    right: Float32


def latest(models: Path) -> list[tuple[Path, Manifest]]:
    """The latest bundle of each name in a repository: folder and manifest."""
    names = sorted(path for path in models.iterdir() if path.is_dir() and not path.name.startswith("."))
    folders = [max(name.glob("[0-9]*"), key=lambda version: int(version.name)) for name in names]
    return [(folder, read_manifest(folder)) for folder in folders]


def questions(folder: Path, manifest: Manifest, rng: np.random.Generator, lengths: list[int]) -> list[Question]:
    """One question per CPU variant: sequences of `lengths` tokens, or as many rows."""
    seq_lens = np.array(lengths, np.int64)
    tokens = rng.standard_normal((int(seq_lens.sum()), manifest.d_in), dtype=np.float32)
    feeds: dict[str, npt.NDArray[np.generic]] = {"tokens": tokens}
    if manifest.kind == "sequence":
        feeds["seq_lens"] = seq_lens
    head = _head(feeds)
    body = head + b"".join(array.tobytes() for array in feeds.values())
    return [
        Question(f"{manifest.name}-{variant.precision}", len(head), body, _right(folder, variant, feeds))
        for variant in manifest.variants
        if variant.provider == "cpu"
    ]


def judge(question: Question, header: bytes, body: bytes) -> str:
    """How the output in an answer (JSON part, binary part) compares with the right one. Raises WrongAnswer."""
    output = json.loads(header)["outputs"][0]
    if output["name"] != "out" or output["shape"] != list(question.right.shape):
        raise WrongAnswer(
            f"{question.model}: output {output['name']} {output['shape']}, not out {question.right.shape}"
        )
    out = np.frombuffer(body, np.float32).reshape(question.right.shape)
    if out.tobytes() == question.right.tobytes():
        return "bit-equal"
    error = float(np.linalg.norm(out - question.right) / np.linalg.norm(question.right))
    if not error <= CLOSE:
        raise WrongAnswer(f"{question.model}: relative error {error:.2e}, more than {CLOSE}")
    return f"close, relative error {error:.1e}"


def _right(folder: Path, variant: Variant, feeds: dict[str, npt.NDArray[np.generic]]) -> Float32:
    out: Float32 = open_session(folder / variant.file, "cpu", cpu_quota()).run(["out"], feeds)[0]
    return out


def _head(feeds: dict[str, npt.NDArray[np.generic]]) -> bytes:
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": "FP32" if array.dtype == np.float32 else "INT64",
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in feeds.items()
    ]
    return json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
