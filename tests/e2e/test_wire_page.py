"""docs/wire.md: its routes, errors, limits and commands are the service's."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from service import errors
from service.errors import RequestError
from service.settings import Settings
from tests.e2e.server import Server, binary, out_of, serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/wire.md").read_text()
COMMANDS = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.DOTALL)


def section(title: str) -> str:
    found: str = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return found


def cells(title: str) -> list[list[str]]:
    """The rows of a section's first table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def kinds(of: type[RequestError]) -> Iterator[type[RequestError]]:
    for kind in of.__subclasses__():
        if kind.__module__ != errors.__name__:
            continue  # of another way to serve, which this page is not about
        yield kind
        yield from kinds(kind)


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones((2, 64), np.float32))
    return file.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(ROOT / "models", "--threads", "1") as running:
        yield running


def test_the_table_of_errors_is_that_of_the_code() -> None:
    found = {
        (status, reason.strip("`"), retry, closes == "yes") for status, reason, _, retry, closes in cells("Errors")
    }
    wanted = {
        (str(kind.status), kind.reason, str(kind.retry_after_s or ""), kind.close) for kind in kinds(RequestError)
    }
    assert found == wanted
    assert len(cells("Errors")) == len(wanted)
    assert cells("Errors") == sorted(cells("Errors"), key=lambda row: row[0]), "in the order of their status"


def test_every_limit_of_the_page_is_a_setting_and_every_status_an_error() -> None:
    statuses = {str(kind.status) for kind in kinds(RequestError)}
    for what, setting, status in cells("Limits"):
        assert setting.strip("`") in Settings.model_fields, what
        assert status in statuses, what


def test_the_routes_of_the_page_are_those_of_the_service(server: Server) -> None:
    paths = json.loads(server.ask("/openapi.json")[2])["paths"]
    served = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    named = {(method, path.strip("`")) for method, path, _ in cells("Routes")}
    versioned = {
        (method, path.replace("{name}", "{name}/versions/{version}"))
        for method, path in named
        if path.startswith("/v2/models/{name}")
    }
    assert named | versioned == served


def test_every_parameter_of_the_page_is_taken_in_the_query_or_in_json(server: Server) -> None:
    """A wrong value is refused by name, so each is read; an unknown name is not."""
    tokens = {"name": "tokens", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}
    for name in [row[0].strip("`") for row in cells("Parameters")]:
        body, form = json.dumps({"inputs": [tokens], "parameters": {name: "wrong"}}).encode(), "application/json"
        path = "/v2/models/demo-block/infer"
        if name == "seq_lens":
            path, body, form = f"{path}?seq_lens=wrong", npy(), "application/x-npy"
        status, _, data = server.ask(path, body, {"Content-Type": form})
        assert status == 400, (name, data)
        assert name in data.decode()


def test_each_form_of_body_is_answered_as_the_page_says(server: Server) -> None:
    path = "/v2/models/demo-ffn/infer"
    status, headers, data = server.ask(path, npy(), {"Content-Type": "application/x-npy"})
    assert (status, headers["content-type"]) == (200, "application/x-npy")
    assert np.load(io.BytesIO(data)).shape == (2, 64)
    raw = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "0"}
    status, headers, data = server.ask(path, bytes(2 * 64 * 4), raw)
    assert status == 200, data
    assert out_of(headers, data).shape == (2, 64)
    tokens = {"name": "tokens", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}
    body, headers = binary(np.ones((1, 64), np.float32), binary_data_output=False)
    status, headers, data = server.ask(path, body, headers)
    assert (status, headers["content-type"]) == (200, "application/json")
    status, headers, data = server.ask(path, json.dumps({"inputs": [tokens]}).encode())
    assert (status, headers["content-type"]) == (200, "application/json")
    assert len(json.loads(data)["outputs"][0]["data"]) == 64


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_each_command_of_the_page_is_answered(server: Server, tmp_path: Path, number: int) -> None:
    language, text = COMMANDS[number]
    here = text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    command = ["bash", "-ec", here] if language == "sh" else [sys.executable, "-c", here]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (text, done.stdout, done.stderr)
    if language == "python":
        assert done.stdout == "(5, 64)\n"
