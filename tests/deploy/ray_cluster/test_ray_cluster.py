"""On a real Ray cluster of several nodes: nodes are killed under load, and every answer has the model's own bits.

Run by `make ray-test`, in an environment with Ray and without torch; it makes the stages before.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from ray import serve

from deploy.ray.options import PipelineOptions
from deploy.ray.pipeline import pipeline
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
def nodes() -> Iterator[Nodes]:
    with ray_cluster(workers=2) as made:
        yield made


def run_as_the_page_says(nodes: Nodes, folder: Path) -> None:
    """`serve run deploy/ray/service.yaml`, with this repository's models and two replicas."""
    written = yaml.safe_load((ROOT / "deploy" / "ray" / "service.yaml").read_text())
    written["applications"][0]["args"] = {"settings": {"models": str(SHIPPED), **WAITING}, "scaling": SCALING}
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(written))
    command = [
        Path(sys.executable).with_name("serve"),
        "run",
        "--non-blocking",
        "--address",
        nodes.cluster.address,
        file,
    ]
    finished = subprocess.run(command, timeout=120, cwd=folder, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    wait_until(lambda: serve.status().applications["tokenslab"].status == "RUNNING", "the application does not run")


def wait_until(holds: Callable[[], bool], otherwise: str, limit_s: float = 90) -> None:
    ends = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends, otherwise
        time.sleep(0.2)


def running(application: str, deployment: str) -> int:
    status = serve.status().applications[application].deployments[deployment]
    return int(status.replica_states.get("RUNNING", 0))


def test_a_node_that_dies_under_load_costs_what_it_had_accepted_and_no_more(nodes: Nodes, tmp_path: Path) -> None:
    run_as_the_page_says(nodes, tmp_path)
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
    serve.delete("tokenslab")


def test_a_pipeline_loses_no_request_with_a_node_and_has_the_bits_of_the_whole(nodes: Nodes) -> None:
    options = {
        "settings": {"models": str(STAGES), **WAITING},
        "model": "stack",
        "scaling": SCALING,
        "front": {"replicas": 1, "resources": {FRONT: 1}},
    }
    serve.run(pipeline(PipelineOptions.model_validate(options)), name="pipeline", route_prefix="/")
    with load(nodes.port, questions(STAGES, "stack", ["fp32", "int8"], 40)) as tally:
        tally.wait_for(40, limit_s=60)
        assert metric(nodes.port, "tokenslab_front_retries") == 0
        nodes.kill()
        tally.wait_for(80, limit_s=60)
    assert (tally.wrong, tally.failed, tally.gave_up) == ([], [], [])
    # Sixteen clients keep both replicas of each stage busy: some of what was on the dead node was asked again.
    assert metric(nodes.port, "tokenslab_front_retries") >= 1
    serve.delete("pipeline")
