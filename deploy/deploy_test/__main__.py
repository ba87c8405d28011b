"""The parts one after another; exit 1 if one failed, 0 if each passed or could not be run here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from deploy.deploy_test.keda import KedaFault, run_keda
from deploy.deploy_test.kserve import KServeFault, run_kserve
from deploy.deploy_test.packages import PackageMissing
from deploy.deploy_test.scale import ScaleFailed, run_scale
from deploy.docker_test.__main__ import say
from deploy.docker_test.answers import WrongAnswer
from deploy.docker_test.compose import ROOT, DockerFault, missing_engine
from deploy.docker_test.http11 import Turned
from service.errors import TokenslabError

# What no test of this repository can run: it needs images from a registry, a cluster, or a GPU.
ELSEWHERE = (
    ("compose profile observe", "its images come from a registry; its rules, dashboard and metrics are tested"),
    ("compose profile gpu", "needs an NVIDIA GPU and its container toolkit"),
    ("kustomize build, server-side admission, scheduling and scaling", "need a cluster"),
    ("KServe and KEDA themselves", "need a cluster"),
)


class NotRun(Exception):
    """A part cannot be run on this machine; the message says why."""


class PartFailed(Exception):
    """A part was run and failed."""


FAULTS = (
    *(PartFailed, KServeFault, KedaFault, ScaleFailed),
    *(DockerFault, Turned, WrongAnswer, TokenslabError),
)


def main() -> int:
    """Run every part and sum up."""
    summary, failed = [], False
    for name, part in PARTS.items():
        say(f"=== {name}")
        try:
            outcome = f"passed: {part()}"
        except (NotRun, PackageMissing) as reason:
            outcome = f"NOT RUN: {reason}"
        except FAULTS as fault:
            outcome, failed = f"FAILED: {fault}", True
        say(outcome)
        summary.append(f"{name}: {outcome}")
    say("=== deploy-test")
    for line in [*summary, *(f"{name}: NOT RUN: {reason}" for name, reason in ELSEWHERE)]:
        say(line)
    return int(failed)


def _files() -> str:
    return _command([sys.executable, "-m", "pytest", "-q", "--tb=short", "tests/deploy"], "schemas, rules, dashboard")


def _scale() -> str:
    missing = missing_engine()
    if missing is not None:
        raise NotRun(f"no Docker engine with compose answers: {missing}")
    return run_scale(ROOT / "models")


def _ray() -> str:
    return _command(["make", "ray-test"], "a Ray cluster of several nodes")


def _command(command: list[str], what: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)  # noqa: S603 - our own words
    if done.returncode:
        raise PartFailed(f"{what}: {' '.join(command)} exited {done.returncode}")
    return what


PARTS: dict[str, Callable[[], str]] = {
    "manifests, alerts and dashboard": _files,
    "KServe resources": lambda: run_kserve(ROOT / "deploy" / "kubernetes" / "kserve"),
    "KEDA's scaling object": lambda: run_keda(ROOT / "deploy" / "kubernetes" / "components" / "keda"),
    "compose profile scale": _scale,
    "Ray cluster": _ray,
}

if __name__ == "__main__":
    sys.exit(main())
