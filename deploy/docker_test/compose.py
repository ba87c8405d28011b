"""One run of docker-compose.yml under a project name, an image name and a port of its own. Knows nothing of HTTP."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "tokenslab"
PORT = 8000  # inside the container


class DockerFault(Exception):
    """Docker did not do what it was asked; the message has its own words."""


class Compose:
    """A service of docker-compose.yml, and what it depends on, with `models` mounted and its port 8000 published on a
    free one of 127.0.0.1; `builds` are the services whose images it takes.
    """

    def __init__(self, project: str, models: Path, service: str = SERVICE, builds: Sequence[str] = (SERVICE,)) -> None:
        self._prefix = ("docker", "compose", "--project-name", project, "--file", str(ROOT / "docker-compose.yml"))
        self._environment = {
            **os.environ,
            "SLAB_IMAGE": project,
            "SLAB_MODELS_DIR": str(models.resolve()),
            "SLAB_PUBLISH": "127.0.0.1:0",
        }
        self._project = project
        self._service = service
        self._builds = builds

    def build(self) -> int:
        """Build the images; the size of the service's own in bytes."""
        self._compose("build", *self._builds)
        return int(docker("image", "inspect", "--format", "{{.Size}}", self._project))

    def up(self, timeout_s: int) -> None:
        """Start the containers and return when their health checks say healthy."""
        self._compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(timeout_s), self._service)

    def container(self) -> str:
        """The id of the service's one container."""
        (container,) = self.containers(self._service)
        return container

    def containers(self, service: str) -> list[str]:
        """The ids of the containers of `service`."""
        return self._compose("ps", "--all", "--quiet", service).split()

    def port(self) -> int:
        """The port of 127.0.0.1 that leads to the service."""
        return int(self._compose("port", self._service, str(PORT)).rpartition(":")[2])

    def python(self, code: str, *, user: str | None = None) -> str:
        """Run `code` with the image's Python in the running container; what it printed."""
        as_user = () if user is None else ("--user", user)
        return docker("exec", *as_user, self.container(), "python", "-c", code)

    def state(self) -> dict[str, Any]:
        """The container's state in Docker's words: Status, ExitCode, OOMKilled, Health."""
        state: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", self.container()))
        return state

    def logs(self) -> str:
        """What all of it logged."""
        return self._compose("logs", "--no-color")

    def remove(self) -> None:
        """Remove container, network and image, whatever state they are in."""
        self._compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "10", "--rmi", "local")

    def _compose(self, *arguments: str) -> str:
        return _run([*self._prefix, *arguments], self._environment)


def docker(*arguments: str) -> str:
    """Run `docker` with `arguments`; its standard output. Raises DockerFault."""
    return _run(["docker", *arguments], dict(os.environ))


def missing_engine() -> str | None:
    """None if an engine and compose answer, else why not, in one line."""
    try:
        docker("version", "--format", "{{.Server.Version}}")
        docker("compose", "version", "--short")
    except DockerFault as fault:
        return " ".join(str(fault).split())
    return None


def _run(command: list[str], environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own arguments, no shell
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as cause:
        raise DockerFault(f"{command[0]}: {cause.strerror}") from cause
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-25:])
        raise DockerFault(f"{' '.join(command)}: exit {done.returncode}: {said}")
    return done.stdout.strip()
