"""Good requests in every form that the protocol has, each with the right answer of every version, computed beforehand
with ONNX Runtime on the version's own file: each request alone, in one run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.bodies import JSON_LENGTH, Float32, Int64, infer_body
from bench.chaos.repository import Made
from bench.chaos.tally import Wrong
from bench.chaos.wire import Reply
from service.session import open_session, run_packed

FORMS: Final = ("binary", "json", "npy", "raw")


@dataclass(frozen=True, slots=True)
class Ask:
    """One infer request: `model` is a bundle's name with a precision; `right` has the answer's bytes by version."""

    model: str
    form: str
    path: str
    headers: dict[str, str]
    body: bytes
    shape: tuple[int, int]
    right: dict[str, bytes]

    def check(self, reply: Reply) -> None:
        """Raises Wrong unless a 200 holds the bits of the version that it names."""
        try:
            version, out = _read(self.form, reply)
        except (ValueError, KeyError, IndexError, TypeError) as cause:
            raise Wrong(f"{self.path}: an answer that cannot be read: {cause!r}: {reply.body[:200]!r}") from cause
        right = self.right.get(version)
        if right is None:
            raise Wrong(f"{self.path}: answered by version {version!r}, which was not asked")
        if out.shape != self.shape or out.tobytes() != right:
            raise Wrong(f"{self.path} as {self.form}: wrong bits from version {version}, shape {out.shape}")


def make_asks(made: Iterable[Made], count: int, longest: int, threads: int, rng: np.random.Generator) -> list[Ask]:
    """`count` requests of 1 to `longest` tokens for every precision of every bundle, and their answers.

    Sessions have `threads` threads, as the server's: the certificate's own condition.
    """
    bundles: dict[str, list[Made]] = {}
    for one in made:
        bundles.setdefault(one.manifest.name, []).append(one)
    asks = []
    for name, versions in bundles.items():
        for variant in versions[0].manifest.variants:
            if variant.provider != "cpu" or variant.certificate.kind != "exact":
                continue
            sessions = {
                str(one.manifest.version): open_session(one.folder / variant.file, "cpu", threads) for one in versions
            }
            for index in range(count):
                tokens, lens = random_request(versions[0], longest, rng)
                right = {version: run_packed(session, tokens, lens) for version, session in sessions.items()}
                asks.append(_ask(f"{name}-{variant.precision}", FORMS[index % len(FORMS)], tokens, lens, right))
    return asks


def random_request(made: Made, longest: int, rng: np.random.Generator) -> tuple[Float32, Int64 | None]:
    """Tokens (rows, d_in), and for a bundle of sequences their lengths."""
    rows = int(rng.integers(1, longest, endpoint=True))
    tokens = rng.standard_normal((rows, made.manifest.d_in), dtype=np.float32)
    if made.manifest.kind != "sequence":
        return tokens, None
    cuts = np.unique(rng.integers(1, rows, 3)) if rows > 1 else np.empty(0, np.int64)
    return tokens, np.diff(cuts, prepend=0, append=rows)


def _ask(model: str, form: str, tokens: Float32, lens: Int64 | None, right: dict[str, Float32]) -> Ask:
    path = f"/v2/models/{model}/infer"
    match form:
        case "json":
            body, headers = _json(tokens, lens), {"Content-Type": "application/json"}
        case "npy":  # its answer names no version
            path = f"/v2/models/{model}/versions/1/infer"
            path += "" if lens is None else f"?seq_lens={','.join(map(str, lens))}"
            body, headers = _npy(tokens), {"Content-Type": "application/x-npy"}
            right = {"1": right["1"]}
        case "raw" if lens is None:
            body, headers = tokens.tobytes(), {JSON_LENGTH: "0"}
        case _:
            form, binary = "binary", infer_body(tokens, lens)
            body, headers = binary.content, binary.headers
    shape = next(iter(right.values())).shape
    answers = {version: out.tobytes() for version, out in right.items()}
    return Ask(model, form, path, headers, body, (shape[0], shape[1]), answers)


def _json(tokens: Float32, lens: Int64 | None) -> bytes:
    inputs: list[dict[str, Any]] = [
        {"name": "tokens", "datatype": "FP32", "shape": list(tokens.shape), "data": tokens.ravel().tolist()}
    ]
    if lens is not None:
        inputs.append({"name": "seq_lens", "datatype": "INT64", "shape": [len(lens)], "data": lens.tolist()})
    return json.dumps({"inputs": inputs}).encode()


def _npy(tokens: Float32) -> bytes:
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


def _read(form: str, reply: Reply) -> tuple[str, Float32]:
    if form == "npy":
        return "1", np.load(io.BytesIO(reply.body))
    size = int(reply.headers[JSON_LENGTH.lower()]) if form != "json" else len(reply.body)
    document = json.loads(reply.body[:size])
    (output,) = document["outputs"]
    if (output["name"], output["datatype"]) != ("out", "FP32"):
        raise ValueError(f"expected one FP32 output 'out', found {output['name']!r}")
    flat = np.array(output["data"], np.float32) if form == "json" else np.frombuffer(reply.body[size:], "<f4")
    return document["model_version"], flat.reshape(output["shape"])


def of_models(asks: Sequence[Ask], *models: str) -> list[Ask]:
    """Those for bundles of these names."""
    return [ask for ask in asks if ask.model.rsplit("-", 1)[0] in models]
