"""The commands of docs/operations.md, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from tests.e2e.server import serving

ROOT = Path(__file__).parents[2]


def test_the_commands_of_the_page_do_what_they_say() -> None:
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs/operations.md").read_text(), re.DOTALL)
    export, serve = blocks[0].splitlines()
    name, _, value = export.removeprefix("export ").partition("=")
    flags = shlex.split(serve.removeprefix("tokenslab serve --models models"))
    commands = [line for block in blocks[1:] for line in block.replace("\\\n", " ").splitlines()]
    assert len(commands) == 5
    with serving(ROOT / "models", "--threads", "1", *flags, **{name: value}) as server:
        for command in commands:
            here = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
            done = subprocess.run(
                ["bash", "-ec", here], capture_output=True, text=True, timeout=60, check=False, env={**os.environ}
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert '"state":"UNAVAILABLE","reason":"unloaded"' in subprocess.run(
            ["curl", "-sS", "-X", "POST", f"http://127.0.0.1:{server.port}/v2/repository/index"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.replace(": ", ":").replace(", ", ",")
