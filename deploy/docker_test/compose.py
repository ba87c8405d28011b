"""One run of docker-compose.yml under a project name, an image name and a port of its own. Knows nothing of HTTP."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "tokenslab"
PORT = 8000  # inside the container


class DockerFault(Exception):
    """Docker did not do what it was asked; the message has its own words."""


class Compose:
    """The service of docker-compose.yml, with `models` mounted, published on a free port of 127.0.0.1."""

    def __init__(self, project: str, models: Path) -> None:
        self._prefix = ("docker", "compose", "--project-name", project, "--file", str(ROOT / "docker-compose.yml"))
        self._environment = {
            **os.environ,
            "SLAB_IMAGE": project,
            "SLAB_MODELS_DIR": str(models.resolve()),
            "SLAB_PUBLISH": "127.0.0.1:0",
        }
        self._project = project

    def build(self) -> int:
        """Build the image; its size in bytes."""
        self._compose("build")
        return int(docker("image", "inspect", "--format", "{{.Size}}", self._project))

    def up(self, timeout_s: int) -> None:
        """Start the container and return when its health check says healthy."""
        self._compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(timeout_s))

    def container(self) -> str:
        """The container's id."""
        return self._compose("ps", "--all", "--quiet", SERVICE)

    def port(self) -> int:
        """The port of 127.0.0.1 that leads to the service."""
        return int(self._compose("port", SERVICE, str(PORT)).rpartition(":")[2])

    def python(self, code: str, *, user: str | None = None) -> str:
        """Run `code` with the image's Python in the running container; what it printed."""
        as_user = () if user is None else ("--user", user)
        return docker("exec", *as_user, self.container(), "python", "-c", code)

    def state(self) -> dict[str, Any]:
        """The container's state in Docker's words: Status, ExitCode, OOMKilled, Health."""
        state: dict[str, Any] = json.loads(docker("inspect", "--format", "{{json .State}}", self.container()))
        return state

    def logs(self) -> str:
        """What the service logged."""
        return self._compose("logs", "--no-color", "--no-log-prefix", SERVICE)

    def remove(self) -> None:
        """Remove container, network and image, whatever state they are in."""
        self._compose("down", "--volumes", "--remove-orphans", "--timeout", "10", "--rmi", "all")

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
