"""The Kubernetes files, as documents with their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"


def documents(folder: Path = KUBERNETES) -> list[tuple[Path, dict[str, Any]]]:
    """Every document below `folder`."""
    return [
        (path, document)
        for path in sorted(folder.rglob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if document is not None
    ]


def kinds(kind: str) -> list[tuple[Path, dict[str, Any]]]:
    """Those of one kind."""
    return [(path, document) for path, document in documents() if document["kind"] == kind]
