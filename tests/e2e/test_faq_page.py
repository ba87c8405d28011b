"""docs/faq.md: the errors that it quotes, met by doing what brings them about."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import Server, binary, serving

ROOT = Path(__file__).parents[2]
QUOTES = re.findall(r"^> (.+)$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)
LIMITS = ("--max-queue-tokens", "500", "--max-sequence-tokens", "50")
# Each of these needs a state that another test makes; tests/test_documents.py finds its text in the code.
ELSEWHERE = {
    "… tokens wait; … more would exceed max_queue_tokens, …": "a full queue: tests/service/test_batcher_refusals.py",
    "timeout: … s are left, it would take … s or more": "a window under way: tests/service/test_scheduling.py",
    "… its certificate says exact, but not on this machine: …": "another processor: tests/service/test_repository.py",
    "provider … needs …; this ONNX Runtime has …": "a bundle for CUDA: tests/service/test_session.py",
}
JSON = {"Content-Type": "application/json"}


def rows(count: int, width: int = 64, seq_lens: list[int] | None = None, **parameters: Any) -> Any:
    return binary(np.ones((count, width), np.float32), seq_lens, **parameters)


REQUESTS: dict[str, tuple[str, Any]] = {
    "tokens: shape … has width …, expected …": ("demo-ffn", rows(2, 65)),
    "seq_lens: they add up to …, tokens has … rows": ("demo-block", rows(3, seq_lens=[1, 1])),
    "Content-Type: found …, expected application/json, application/octet-stream or application/x-npy": (
        "demo-ffn",
        (b"x", {"Content-Type": "application/x-www-form-urlencoded"}),
    ),
    "Inference-Header-Content-Length: missing; binary tensors need it (0: the body is `tokens` alone)": (
        "demo-ffn",
        (b"x", {"Content-Type": "application/octet-stream"}),
    ),
    "out: NaN or Inf has no form in JSON; ask for binary tensors (binary_data_output)": (
        "demo-ffn",
        binary(np.full((1, 64), np.nan, np.float32), binary_data_output=False),
    ),
    "…: … in one request, the queue holds … (max_queue_tokens)": ("demo-ffn", rows(501)),
    "seq_lens: a sequence of … tokens, the longest allowed is … (max_sequence_tokens)": ("demo-block", rows(51)),
}
NETS = "from torch import nn\n\n\ndef factory():\n    return nn.Conv1d(8, 8, 3, padding=1)\n"
COMMANDS: dict[str, tuple[str, ...]] = {
    "… no bundle in it (looked for <name>/<version>/…)": ("serve", "--models", "empty"),
    "…: a bundle, not a model repository; did you mean …?": ("serve", "--models", "models/demo-ffn"),
    "… exists: pass --version for another, or --overwrite": (
        *("export", "random", "ffn", "--name", "demo-ffn", "--d", "8", "--d-ff", "8", "--models", "models"),
    ),
    "… is not position-wise: …": (*("export", "module", "nets.py:factory", "--name", "conv", "--models", "models"),),
}


def form(quote: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(piece.strip()) for piece in quote.split("…")), re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(ROOT / "models", "--threads", "1", *LIMITS) as running:
        yield running


def test_every_quote_of_the_page_is_met_here_or_has_its_reason() -> None:
    assert len(QUOTES) == len(set(QUOTES))
    assert set(QUOTES) == {*REQUESTS, *COMMANDS, *ELSEWHERE}
    for reason in ELSEWHERE.values():
        assert (ROOT / reason.split(": ")[1]).exists(), reason


@pytest.mark.parametrize("quote", REQUESTS)
def test_the_service_answers_with_the_quoted_error(server: Server, quote: str) -> None:
    model, (body, headers) = REQUESTS[quote]
    status, _, data = server.ask(f"/v2/models/{model}/infer", body, headers)
    assert 400 <= status < 500
    assert form(quote).match(json.loads(data)["error"])


@pytest.mark.parametrize("quote", COMMANDS)
def test_the_command_line_ends_with_the_quoted_error(tmp_path: Path, quote: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nets.py").write_text(NETS)
    shutil.copytree(ROOT / "models/demo-ffn", tmp_path / "models/demo-ffn")
    done = subprocess.run(
        [sys.executable, "-m", "tokenslab", *COMMANDS[quote]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert form(quote).search(re.sub(r"\s+", " ", done.stderr + done.stdout))
