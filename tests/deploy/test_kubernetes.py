"""The Kubernetes files against the schemas of Kubernetes itself, their paths, and the service's own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from service.settings import Settings
from tests.deploy.manifests import KUBERNETES, documents, kinds

OWN = ("Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount")
ELSEWHERE = ("InferenceService", "ScaledObject", "ServingRuntime", "Kustomization", "Component")  # not Kubernetes' own
PATCHES = ("gpu.yaml",)
VERSION = "1.37"
CLOSING_S = 1.5  # what the settings page adds to delay and limit


def drains(pod: dict[str, Any]) -> tuple[float, float]:
    """Seconds until the service has surely ended, and those that it is given."""
    (container,) = pod["containers"]
    fields = Settings.model_fields
    ends = fields["drain_delay_s"].default + fields["drain_limit_s"].default + CLOSING_S
    return container["lifecycle"]["preStop"]["sleep"]["seconds"] + ends, pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("kind", OWN)
def test_each_resource_fits_its_schema_with_no_field_that_is_not_in_it(kind: str) -> None:
    found = [(path, document) for path, document in kinds(kind) if path.name not in PATCHES]
    assert found
    for path, document in found:
        kubernetes_validate.validate(document, VERSION, strict=True)
        assert document["metadata"]["name"] == "tokenslab", path


def test_the_schemas_refuse_a_field_that_does_not_exist() -> None:
    ((_, deployment),) = [(path, found) for path, found in kinds("Deployment") if path.name not in PATCHES]
    deployment["spec"]["template"]["spec"]["containers"][0]["readOnly"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSION, strict=True)


def test_a_patch_becomes_valid_once_it_is_merged() -> None:
    """Strategic merge as the patch uses it: objects by key, the container by its name."""
    base = next(document for path, document in kinds("Deployment") if path.name not in PATCHES)
    patch = next(document for path, document in kinds("Deployment") if path.name in PATCHES)
    merged = merge(base, patch)
    kubernetes_validate.validate(merged, VERSION, strict=True)
    (container,) = merged["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["serve", "--provider", "cuda"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["readinessProbe"], "what the patch does not name stays"


def merge(base: Any, patch: Any) -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        return {key: merge(base.get(key), patch[key]) if key in patch else base[key] for key in {**base, **patch}}
    if isinstance(base, list) and base and isinstance(base[0], dict) and "name" in base[0]:
        named = {item["name"]: item for item in base}
        return [*({**named, **{item["name"]: merge(named.get(item["name"]), item) for item in patch}}.values())]
    return patch


def test_every_kind_is_known_and_every_path_of_a_kustomization_is_there() -> None:
    assert {document["kind"] for _, document in documents()} == {*OWN, *ELSEWHERE}
    named: set[Path] = set()
    for path, document in documents():
        if path.name == "kustomization.yaml":
            entries = [*document.get("resources", []), *document.get("components", [])]
            entries += [patch["path"] for patch in document.get("patches", [])]
            for entry in entries:
                target = (path.parent / entry).resolve()
                assert target.exists(), f"{path}: {entry}"
                named.add(target / "kustomization.yaml" if target.is_dir() else target)
    roots = {KUBERNETES / "overlays" / name / "kustomization.yaml" for name in ("cpu", "gpu")}
    roots.add(KUBERNETES / "components" / "keda" / "kustomization.yaml")  # in place of hpa, by choice
    plain = {path for path, _ in documents(KUBERNETES / "kserve")}
    assert {path for path, _ in documents()} == named | roots | plain, "a file that nothing names"


def test_the_grace_that_a_pod_is_given_is_longer_than_its_drain() -> None:
    deployments = [document for path, document in kinds("Deployment") if path.name not in PATCHES]
    assert deployments
    for document in deployments:
        needed, given = drains(document["spec"]["template"]["spec"])
        assert needed < given


def test_selectors_find_the_pods() -> None:
    (labels,) = [
        document["spec"]["template"]["metadata"]["labels"]
        for path, document in kinds("Deployment")
        if path.name not in PATCHES
    ]
    selectors = [document["spec"]["selector"] for _, document in kinds("Service")]
    selectors += [document["spec"]["selector"]["matchLabels"] for _, document in kinds("PodDisruptionBudget")]
    selectors += [document["spec"]["podSelector"]["matchLabels"] for _, document in kinds("NetworkPolicy")]
    assert len(selectors) == 3
    for selector in selectors:
        assert selector.items() <= labels.items()


def test_no_container_may_write_or_gain_rights() -> None:
    containers = [
        container
        for path, document in [*kinds("Deployment"), *kinds("ServingRuntime")]
        if path.name not in PATCHES
        for container in (
            document["spec"]["template"]["spec"] if document["kind"] == "Deployment" else document["spec"]
        )["containers"]
    ]
    assert len(containers) == 2
    for container in containers:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
