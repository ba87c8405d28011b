"""What a process in the container may do, seen from inside it."""

from __future__ import annotations

import json

from deploy.docker_test.compose import Compose, DockerFault

# Runs in the container. EROFS rather than EACCES shows that it is the file system that refuses, whoever asks.
PROBE = """
import errno, importlib.util, json, os
def write(path):
    try:
        with open(path, "w"):
            return "written"
    except OSError as error:
        return errno.errorcode[error.errno]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "uid": os.getuid(),
    "capabilities": int(status["CapEff"], 16),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "writes": {path: write(path) for path in ("/probe", "/opt/venv/probe", "/models/probe", "/tmp/probe")},
    "telemetry_off": os.environ.get("ORT_DISABLE_TELEMETRY"),
    "torch": importlib.util.find_spec("torch") is not None,
}))
"""


class Breach(Exception):
    """The container may do more than it should."""


def confinement(compose: Compose) -> list[str]:
    """What was found, a line each. Raises Breach."""
    found = json.loads(compose.python(PROBE))
    root = json.loads(compose.python(PROBE, user="0"))
    writes = {"/probe": "EROFS", "/opt/venv/probe": "EROFS", "/models/probe": "EROFS", "/tmp/probe": "written"}  # noqa: S108 - the container's own
    promised = {"capabilities": 0, "no_new_privileges": 1, "writes": writes, "telemetry_off": "1", "torch": False}
    for name, wanted in promised.items():
        if found[name] != wanted:
            raise Breach(f"{name}: found {found[name]}, expected {wanted}")
    if found["uid"] == 0:
        raise Breach("the service runs as root")
    for path in ("/probe", "/opt/venv/probe", "/models/probe"):
        if root["writes"][path] != "EROFS":
            raise Breach(f"as root, {path}: {root['writes'][path]}, expected EROFS")
    try:
        compose.python("import torch")
    except DockerFault as fault:
        if "ModuleNotFoundError" not in str(fault):
            raise
    else:
        raise Breach("torch can be imported")
    return [
        f"uid {found['uid']}, no capabilities, no new privileges",
        "root file system and /models refuse writes (EROFS, for root too); /tmp takes them",
        "torch is not in the image; ONNX Runtime's telemetry is off",
    ]
