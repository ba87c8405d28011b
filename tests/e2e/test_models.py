"""Models that change while requests run: none fails, and each is answered by the version that its answer names."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import numpy as np

from service.session import open_session
from tests.bundles import relu_ffn, write_bundle
from tests.e2e.server import Array, Server, answer, binary, eventually, out_of, serving

D = 16


def put(root: Path, version: int) -> Path:
    return write_bundle(root, "ffn", relu_ffn(D, 4 * D, seed=version), version=version)


def expected(folder: Path, tokens: Array) -> bytes:
    session = open_session(folder / "fp32.onnx", "cpu", 1)
    out: bytes = session.run(["out"], {"tokens": tokens})[0].tobytes()
    return out


def exceeds(tally: Counter[str], key: str, count: int) -> bool:
    return tally[key] > count


def hammer(server: Server, tokens: Array, right: dict[str, bytes], tally: Counter[str], stop: threading.Event) -> None:
    body, headers = binary(tokens)
    link = server.connect()
    while not stop.is_set():
        tally[one(link, body, headers, right)] += 1
    link.close()


def one(link: HTTPConnection, body: bytes, headers: dict[str, str], right: dict[str, bytes]) -> str:
    link.request("POST", "/v2/models/ffn/infer", body, headers)
    status, got, data = answer(link.getresponse())
    if status != 200:
        return f"status {status}: {data!r}"
    version = json.loads(data[: int(got["inference-header-content-length"])])["model_version"]
    return f"version {version}" if out_of(got, data).tobytes() == right[version] else f"wrong bits from {version}"


def test_versions_are_swapped_under_load_without_one_failed_or_wrong_answer(tmp_path: Path) -> None:
    versions = [1, 2, 3, 4]
    rng = np.random.default_rng()
    tokens = [rng.standard_normal((rows, D), dtype=np.float32) for rows in (1, 7, 40)]
    folders = {version: put(tmp_path / ".exported", version) for version in versions}
    rights = [{str(v): expected(folder, part) for v, folder in folders.items()} for part in tokens]
    (tmp_path / "ffn").mkdir()
    os.rename(folders[1], tmp_path / "ffn" / "1")
    with serving(tmp_path, "--poll-s", "0.05", "--threads", "1", "--max-window-tokens", "64") as server:
        tally: Counter[str] = Counter()
        stop = threading.Event()
        threads = [
            threading.Thread(target=hammer, args=(server, part, right, tally, stop))
            for part, right in zip(tokens, rights, strict=True)
        ]
        for thread in threads:
            thread.start()
        for version in versions[1:]:
            os.rename(folders[version], tmp_path / "ffn" / str(version))
            key = f"version {version}"
            assert eventually(partial(exceeds, tally, key, tally[key] + 5)), tally
        stop.set()
        for thread in threads:
            thread.join()
        assert set(tally) == {f"version {version}" for version in versions}
        index = json.loads(server.ask("/v2/repository/index", b"")[2])
        assert {(row["name"], row["version"], row["state"]) for row in index} == {
            ("ffn", "4", "READY"),
            ("ffn-fp32", "4", "READY"),
        }
        assert server.metric("tokenslab_queue_tokens") == 0
