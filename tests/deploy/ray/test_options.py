"""What a Serve application may be asked for, and what is refused because it would be ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from deploy.ray.options import OWNED_BY_RAY, PipelineOptions, Scaling, ServiceOptions, engine_settings
from service.settings import Settings

ROOT = Path(__file__).parents[3]


def test_a_replica_has_the_threads_that_it_reserves_unless_they_are_given() -> None:
    assert engine_settings(ServiceOptions(settings={"models": "/m"}), 3).threads == 3
    assert engine_settings(ServiceOptions(settings={"models": "/m", "threads": 2}), 3).threads == 2


def test_a_repository_that_each_node_would_look_for_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="models: models is relative"):
        engine_settings(ServiceOptions(), 1)


@pytest.mark.parametrize(("file", "options"), [("service.yaml", ServiceOptions), ("pipeline.yaml", PipelineOptions)])
def test_the_configuration_files_say_what_the_options_are(file: str, options: type[ServiceOptions]) -> None:
    written = yaml.safe_load((ROOT / "deploy" / "ray" / file).read_text())
    [application] = written["applications"]
    found = options.model_validate(application["args"])
    assert engine_settings(found, found.scaling.cpus).models.is_absolute()
    module, _, builder = application["import_path"].partition(":")
    # As an object, not as text: `serve run` would pass a dict otherwise.
    assert "from __future__ import annotations" not in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert f"def {builder}(options: {options.__name__})" in (ROOT / f"{module.replace('.', '/')}.py").read_text()


@pytest.mark.parametrize("name", sorted(OWNED_BY_RAY))
def test_a_setting_that_ray_replaces_is_refused_not_ignored(name: str) -> None:
    assert name in Settings.model_fields
    value = {"host": "0.0.0.0", "trusted_proxies": "10.0.0.0/8"}.get(name, "7")
    with pytest.raises(ValueError, match=f"{name}: not a setting of a replica"):
        engine_settings(ServiceOptions(settings={name: value}), 1)


def test_so_is_one_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSLAB_PORT", "8001")
    with pytest.raises(ValueError, match="port: not a setting of a replica"):
        engine_settings(ServiceOptions(), 1)


def test_a_fixed_number_of_replicas_is_not_scaled() -> None:
    options = Scaling(replicas=3).of_deployment(Settings())
    assert options["num_replicas"] == 3
    assert "autoscaling_config" not in options


def test_replicas_follow_the_queue_and_drain_as_the_service_does() -> None:
    settings = Settings(drain_limit_s=7)
    options = Scaling(min_replicas=2, max_replicas=5, target_ongoing_requests=10, cpus=2).of_deployment(settings)
    assert options["autoscaling_config"]["target_ongoing_requests"] == 10
    assert (options["autoscaling_config"]["min_replicas"], options["autoscaling_config"]["max_replicas"]) == (2, 5)
    assert options["graceful_shutdown_timeout_s"] == 7
    assert options["ray_actor_options"] == {"num_cpus": 2, "resources": {}}


def test_what_is_misspelt_or_out_of_order_is_refused() -> None:
    with pytest.raises(ValidationError, match="replica\n"):
        Scaling.model_validate({"replica": 2})
    with pytest.raises(ValidationError, match="min_replicas: 3 is more than max_replicas, 2"):
        Scaling(min_replicas=3, max_replicas=2)
    with pytest.raises(ValidationError, match="model\n"):
        PipelineOptions.model_validate({})
