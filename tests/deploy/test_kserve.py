"""The check of KServe's resources, on a package of a few lines made like its own."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from deploy.deploy_test.fields import Fields
from deploy.deploy_test.kserve import KServeFault, faults, models
from tests.deploy.manifests import kinds

SOURCE = """
class V1alpha1ServingRuntime(object):
    openapi_types = {"api_version": "str", "kind": "str", "spec": "V1alpha1Spec"}
    attribute_map = {"api_version": "apiVersion", "kind": "kind", "spec": "spec"}


class V1alpha1Spec(object):
    openapi_types = {"containers": "list[V1Container]", "model_formats": "list[V1alpha1Format]"}
    attribute_map = {"containers": "containers", "model_formats": "modelFormats"}

    @containers.setter
    def containers(self, containers):
        if containers is None:
            raise ValueError("Invalid value for `containers`, must not be `None`")
"""
FORMAT = """
class V1alpha1Format(object):
    openapi_types = {"name": "str"}
    attribute_map = {"name": "name"}
"""


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Fields]:
    wheel = tmp_path / "kserve.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kserve/models/runtime.py", SOURCE)
        archive.writestr("kserve/models/format.py", FORMAT)
        archive.writestr("kserve/other.py", "raise SystemExit")
    return models(wheel)


def runtime(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "serving.kserve.io/v1alpha1", "kind": "ServingRuntime", "spec": spec}


def test_a_resource_that_fits_has_no_fault(known: dict[str, Fields]) -> None:
    assert faults(runtime(containers=[{"anything": 1}], modelFormats=[{"name": "x"}]), known) == []


def test_unknown_and_missing_fields_are_named_by_their_place(known: dict[str, Fields]) -> None:
    wrong = faults(runtime(modelFormats=[{"name": "x"}, {"nmae": "y"}], multi=1), known)
    assert wrong == [
        "ServingRuntime.spec.modelFormats[1].nmae: V1alpha1Format has no such field",
        "ServingRuntime.spec.multi: V1alpha1Spec has no such field",
        "ServingRuntime.spec.containers: V1alpha1Spec needs it",
    ]


def test_a_kind_that_is_not_kserves_is_a_fault(known: dict[str, Fields]) -> None:
    assert "unknown" in faults({"apiVersion": "v1", "kind": "ServingRuntime"}, known)[0]


def test_a_package_without_models_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("kserve/__init__.py", "")
    with pytest.raises(KServeFault, match="no models"):
        models(tmp_path / "empty.whl")


def test_the_containers_of_our_runtime_are_valid_in_a_pod() -> None:
    ((_, document),) = kinds("ServingRuntime")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "tokenslab"},
        "spec": {"containers": document["spec"]["containers"]},
    }
    kubernetes_validate.validate(pod, "1.37", strict=True)
