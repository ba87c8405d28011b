"""On a real Ray cluster of several nodes: nodes are killed under load, and every answer has the model's own bits.

Run by `make ray-test`, in an environment with Ray and without torch; it makes the stages before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from deploy.ray.options import PipelineOptions, ServiceOptions
from deploy.ray.pipeline import pipeline
from deploy.ray.service import service
from tests.deploy.ray_cluster.cluster import FRONT, REPLICAS, Nodes, ray_cluster
from tests.deploy.ray_cluster.load import CLIENTS, load, metric, questions

# A dozen processes start, each with Ray in it; on cores that are shared that takes its time.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "models"
STAGES = ROOT / "build" / "ray-models"  # made by `make ray-test`
# Windows wait, so that at any moment replicas hold requests: the one that dies has some.
WAITING = {"threads": 1, "max_wait_ms": 400}
SCALING = {"replicas": 2, "max_per_node": 1, "resources": {REPLICAS: 1}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with ray_cluster(workers=2) as made:
        yield made


@pytest.fixture
def nodes(cluster: Nodes) -> Iterator[Nodes]:
    """The cluster, without applications again after each test, whatever became of it."""
    yield cluster
    for name in list(serve.status().applications):
        serve.delete(name)


def wait_until(holds: Callable[[], bool], otherwise: str, limit_s: float = 120) -> None:
    ends = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends, f"{otherwise}: {serve.status()}"
        time.sleep(0.5)


def running(application: str, deployment: str) -> int:
    status = serve.status().applications[application].deployments[deployment]
    return int(status.replica_states.get("RUNNING", 0))


def test_a_node_that_dies_under_load_costs_what_it_had_accepted_and_no_more(nodes: Nodes) -> None:
    options = {"settings": {"models": str(SHIPPED), **WAITING}, "scaling": SCALING}
    serve.run(service(ServiceOptions.model_validate(options)), name="tokenslab", route_prefix="/")
    with load(nodes.port, questions(SHIPPED, "demo-block", ["fp32", "int8"], 40)) as tally:
        tally.wait_for(40, limit_s=60)
        assert tally.failed == [], "nobody fails while nobody dies"
        killed = time.monotonic()
        nodes.kill()
        tally.wait_for(80, limit_s=60)
    assert tally.wrong == []
    assert tally.gave_up == [], "what failed was answered when it was asked again"
    # Ray answers 500 to what the dead replica had accepted, at most one request of each client, and asks another
    # replica for what it had not.
    assert len(tally.failed) <= CLIENTS
    assert [how for _, _, how in tally.failed if not how.startswith("500")] == []
    assert [began for began, ended, _ in tally.failed if ended < killed] == []
    nodes.add()
    wait_until(lambda: running("tokenslab", "tokenslab") == 2, "the lost replica was not replaced on the new node")


def test_a_pipeline_loses_no_request_with_a_node_and_has_the_bits_of_the_whole(nodes: Nodes) -> None:
    options = {
        "settings": {"models": str(STAGES), "threads": 1, "max_wait_ms": 1000},
        "model": "stack",
        "scaling": SCALING,
        "front": {"replicas": 1, "resources": {FRONT: 1}},
    }
    serve.run(pipeline(PipelineOptions.model_validate(options)), name="pipeline", route_prefix="/")
    with load(nodes.port, questions(STAGES, "stack", ["fp32", "int8"], 40)) as tally:
        tally.wait_for(40, limit_s=60)
        assert metric(nodes.port, "tokenslab_front_retries") == 0
        # Not right after answers, when the next requests are on their way to the front: then no replica has any.
        tally.wait_for_silence(0.4, limit_s=60)
        nodes.kill()
        tally.wait_for(80, limit_s=60)
    assert (tally.wrong, tally.failed, tally.gave_up) == ([], [], [])
    # Sixteen clients waited, for windows of both nodes: some of what was on the dead one was asked again.
    assert metric(nodes.port, "tokenslab_front_retries") >= 1


def test_ray_adds_a_replica_while_requests_wait(nodes: Nodes) -> None:
    """One replica is asked for four at once and has all sixteen clients' requests: there may be two."""
    scaling: dict[str, Any] = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4}
    scaling |= {"upscale_delay_s": 0, "resources": {REPLICAS: 1}}
    options = {"settings": {"models": str(SHIPPED), **WAITING}, "scaling": scaling}
    serve.run(service(ServiceOptions.model_validate(options)), name="tokenslab", route_prefix="/")
    assert running("tokenslab", "tokenslab") == 1
    with load(nodes.port, questions(SHIPPED, "demo-block", ["fp32"], 20)) as tally:
        wait_until(lambda: running("tokenslab", "tokenslab") == 2, "no second replica")
        tally.wait_for(40, limit_s=60)
    assert (tally.wrong, tally.failed, tally.gave_up) == ([], [], [])


def test_the_program_of_the_page_on_scaling_serves(nodes: Nodes) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/scaling.md").read_text(), re.DOTALL)
    exec(compile(block.replace("/srv/models", str(SHIPPED)), "docs/scaling.md", "exec"), {})
    with load(nodes.port, questions(SHIPPED, "demo-block", ["int8"], 5)) as tally:
        tally.wait_for(20, limit_s=60)
    assert (tally.wrong, tally.failed, tally.gave_up) == ([], [], [])


@pytest.mark.parametrize(("file", "builder"), [("service.yaml", service), ("pipeline.yaml", pipeline)])
def test_ray_makes_the_options_of_the_arguments_in_a_configuration_file(file: str, builder: Any) -> None:
    """By Ray's own way from a file's `args` to the application: what `serve run` and `serve deploy` do."""
    written = yaml.safe_load((ROOT / "deploy" / "ray" / file).read_text())
    arguments = written["applications"][0]["args"]
    arguments["settings"] = {"models": str(STAGES)}
    application = call_user_app_builder_with_args_if_necessary(builder, arguments)
    assert isinstance(application, serve.Application)
    with pytest.raises(ValidationError, match="extra_forbidden"):
        call_user_app_builder_with_args_if_necessary(builder, {**arguments, "replica": 1})
