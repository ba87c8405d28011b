"""One small server for all that needs a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.server import Server
from tests.bundles import relu_ffn, sequence_mean, write_bundle

D = 16


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_bundle(root, "ffn", relu_ffn(D, 32))
    write_bundle(root, "means", sequence_mean(D))
    return root


@pytest.fixture(scope="package")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(models, 1, tmp_path_factory.mktemp("logs") / "server.log") as running:
        yield running
