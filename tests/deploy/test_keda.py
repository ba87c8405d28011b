"""The check of KEDA's resources, on a package of a few lines made like the one that has its types."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy.deploy_test.fields import Fields
from deploy.deploy_test.keda import MODELS, KedaFault, faults, models
from tests.deploy.manifests import kinds

SOURCE = '''
from elsewhere import nothing


class Target(BaseModel):
    class Builder(BaseModelBuilder):
        name: str

    api_version: Annotated[Optional[str], Field(alias="apiVersion")] = None
    name: str
    """The name."""


class TriggerModel(BaseModel):
    metadata: Dict[str, str]
    metric_type: Annotated[Optional[str], Field(alias="metricType")] = None
    type: str


class ScaledObjectSpec(BaseModel):
    cooldown_period: Annotated[Optional[int], Field(alias="cooldownPeriod")] = None
    max_replica_count: Annotated[Optional[int], Field(alias="maxReplicaCount")] = None
    min_replica_count: Annotated[Optional[int], Field(alias="minReplicaCount")] = None
    scale_target_ref: Annotated[Target, Field(alias="scaleTargetRef")]
    triggers: List[TriggerModel]


class ScaledObject(Resource):
    api_version: Annotated[Optional[Literal["keda.sh/v1alpha1"]], Field(alias="apiVersion")] = "keda.sh/v1alpha1"
    kind: Optional[Literal["ScaledObject"]] = "ScaledObject"
    metadata: Optional[apimachinery.ObjectMeta] = None
    spec: ScaledObjectSpec
'''


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Fields]:
    wheel = tmp_path / "keda.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MODELS, SOURCE)
    return models(wheel)


@pytest.fixture
def ours() -> dict[str, Any]:
    ((_, document),) = kinds("ScaledObject")
    return document


def test_our_resource_has_no_fault(known: dict[str, Fields], ours: dict[str, Any]) -> None:
    assert faults(ours, known) == []


def test_unknown_missing_and_ill_typed_fields_are_named_by_their_place(
    known: dict[str, Fields], ours: dict[str, Any]
) -> None:
    spec = ours["spec"]
    spec["maxReplicas"] = spec.pop("maxReplicaCount")
    del spec["scaleTargetRef"]["name"]
    spec["triggers"][0]["metadata"]["threshold"] = 0.05  # without the quotes that KEDA wants
    assert sorted(faults(ours, known)) == [
        "ScaledObject.spec.maxReplicas: ScaledObjectSpec has no such field",
        "ScaledObject.spec.scaleTargetRef.name: Target needs it",
        "ScaledObject.spec.triggers[0].metadata[threshold]: 0.05 is not of type str",
    ]


def test_another_version_or_kind_is_a_fault(known: dict[str, Fields], ours: dict[str, Any]) -> None:
    assert "unknown" in faults({**ours, "apiVersion": "keda.sh/v2"}, known)[0]
    assert "unknown" in faults({**ours, "kind": "ScaledThing"}, known)[0]


def test_a_package_without_types_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("cloudcoil/__init__.py", "")
    with pytest.raises(KedaFault, match=r"no cloudcoil/models/keda"):
        models(tmp_path / "empty.whl")
