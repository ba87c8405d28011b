"""The models that every server of these tests offers, all of 64 columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bundles import relu_ffn, sequence_mean, write_bundle
from tests.e2e.server import Server, serving

D = 64


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_bundle(root, "ffn", relu_ffn(D, 4 * D))
    write_bundle(root, "mean", sequence_mean(D))
    write_bundle(root, "slow", relu_ffn(D, 40_000))
    return root


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    with serving(models, "--max-body-mib", "4", "--body-timeout", "0.5") as running:
        yield running
