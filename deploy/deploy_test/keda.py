"""Our ScaledObject against KEDA's own custom resource definition, as a package generated from it has its types.

The package (cloudcoil's) is read and not run: its classes are pydantic's, one for each type of the definition.
"""

from __future__ import annotations

import ast
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.deploy_test.fields import Fields, field_faults
from deploy.deploy_test.packages import fetch

PACKAGE: Final = "cloudcoil.models.keda==2.16.1.0"  # of KEDA 2.16; later ones are for later Pythons
MODELS: Final = "cloudcoil/models/keda/v1alpha1.py"
API: Final = "keda.sh/v1alpha1"


class KedaFault(Exception):
    """A resource does not fit KEDA's types, or the package has none."""


def models(wheel: Path) -> dict[str, Fields]:
    """Every class in the wheel with fields, by its name. Raises KedaFault."""
    with zipfile.ZipFile(wheel) as archive:
        if MODELS not in archive.namelist():
            raise KedaFault(f"{wheel.name}: no {MODELS}")
        tree = ast.parse(archive.read(MODELS).decode())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: fields for node in classes if (fields := _fields(node)).types}


def _fields(node: ast.ClassDef) -> Fields:
    types, required = {}, set()
    for statement in node.body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        name, annotation = statement.target.id, statement.annotation
        if _generic(annotation) == "Annotated":
            annotation, alias = _arguments(annotation)
            assert isinstance(alias, ast.Call)
            names = [word.value.value for word in alias.keywords if isinstance(word.value, ast.Constant)]
            name = str(names[0]) if names else name
        types[name] = _kind(annotation)
        if statement.value is None:
            required.add(name)
    return Fields(types, frozenset(required))


def _generic(annotation: ast.expr) -> str:
    return ast.unparse(annotation.value) if isinstance(annotation, ast.Subscript) else ""


def _arguments(annotation: ast.expr) -> list[ast.expr]:
    assert isinstance(annotation, ast.Subscript)
    inner = annotation.slice
    return inner.elts if isinstance(inner, ast.Tuple) else [inner]


def _kind(annotation: ast.expr) -> str:
    """An annotation in the words of `Fields`."""
    match _generic(annotation):
        case "Optional":
            return _kind(_arguments(annotation)[0])
        case "List":
            return f"list[{_kind(_arguments(annotation)[0])}]"
        case "Dict":
            return f"dict(str, {_kind(_arguments(annotation)[1])})"
        case _:
            return ast.unparse(annotation)


def faults(document: Mapping[str, Any], known: Mapping[str, Fields]) -> list[str]:
    """What of a resource KEDA does not know, misses or has of another type."""
    kind = str(document["kind"])
    if document["apiVersion"] != API or kind not in known:
        return [f"{document['apiVersion']} {kind}: unknown to {PACKAGE}"]
    return list(field_faults(document, kind, kind, known))


def run_keda(folder: Path) -> str:
    """Check every resource of KEDA under `folder`; what was checked. Raises KedaFault and PackageMissing."""
    with tempfile.TemporaryDirectory(prefix="tokenslab-keda-") as temporary:
        known = models(fetch(PACKAGE, Path(temporary)))
    found = [
        (path.name, document)
        for path in sorted(folder.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] != "Component"  # kustomize's own
    ]
    wrong = [f"{name}: {fault}" for name, document in found for fault in faults(document, known)]
    if wrong or not found:
        raise KedaFault("; ".join(wrong) or f"{folder}: no resource in it")
    return f"{len(found)} resource fits the types of {PACKAGE}"
