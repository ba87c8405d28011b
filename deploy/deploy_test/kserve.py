"""Our KServe resources against the fields of KServe's own models, read out of its Python package without running it."""

from __future__ import annotations

import ast
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.deploy_test.fields import Fields, field_faults
from deploy.deploy_test.packages import fetch

PACKAGE: Final = "kserve==0.21.0"
MODELS: Final = "kserve/models/"
_REQUIRED: Final = re.compile(r"Invalid value for `(\w+)`, must not be `None`")


class KServeFault(Exception):
    """A resource does not fit KServe's models, or its package has none."""


def models(wheel: Path) -> dict[str, Fields]:
    """Every model in the wheel, by its class' name."""
    found: dict[str, Fields] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(MODELS) and name.endswith(".py"):
                found.update(_classes(archive.read(name).decode()))
    if not found:
        raise KServeFault(f"{wheel.name}: no models under {MODELS}")
    return found


def _classes(source: str) -> Iterator[tuple[str, Fields]]:
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        tables = {
            target.id: ast.literal_eval(statement.value)
            for statement in node.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name) and target.id in ("openapi_types", "attribute_map")
        }
        if len(tables) == 2:
            names: dict[str, str] = tables["attribute_map"]
            # The generator refuses None for what is required, in its setter's own words.
            refused = set(re.findall(_REQUIRED, ast.get_source_segment(source, node) or ""))
            types = {names[field]: kind for field, kind in tables["openapi_types"].items()}
            yield node.name, Fields(types, frozenset(names[field] for field in refused))


def faults(document: Mapping[str, Any], known: Mapping[str, Fields]) -> list[str]:
    """What of a resource KServe does not know or misses; fields of Kubernetes' own types are not looked into."""
    group, _, version = str(document["apiVersion"]).partition("/")
    name = f"{version[:1].upper()}{version[1:]}{document['kind']}"
    if group != "serving.kserve.io" or name not in known:
        return [f"{document['apiVersion']} {document['kind']}: unknown to {PACKAGE}"]
    return list(field_faults(document, name, document["kind"], known))


def run_kserve(folder: Path) -> str:
    """Check every resource under `folder`; what was checked. Raises KServeFault and PackageMissing."""
    with tempfile.TemporaryDirectory(prefix="tokenslab-kserve-") as temporary:
        known = models(fetch(PACKAGE, Path(temporary)))
    paths = sorted(folder.glob("*.yaml"))
    wrong = [
        f"{path.name}: {fault}"
        for path in paths
        for document in yaml.safe_load_all(path.read_text())
        for fault in faults(document, known)
    ]
    if wrong or not paths:
        raise KServeFault("; ".join(wrong) or f"{folder}: no resource in it")
    return f"{len(paths)} resources fit the models of {PACKAGE}"
