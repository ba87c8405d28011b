"""Say, before pip runs, which build of torch it would take and what that means for the download."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

CUDA_STACK_GB = 3  # torch from the default index with the CUDA libraries that it names


def main() -> None:
    """Ask pip for its plan without downloading the wheel, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requirement", required=True)
    parser.add_argument("--index", default="")
    args = parser.parse_args()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
    command += ["--no-deps", "--ignore-installed", "--report", "-", args.requirement]
    command += ["--index-url", args.index] if args.index else []
    plan = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own arguments
    found = json.loads(plan.stdout)["install"][0]["metadata"]["version"]
    if found.endswith("+cpu"):
        line = f"torch {found}: a CPU build, about 200 MB"
    else:
        line = (
            f"torch {found}: not marked as a CPU build; on Linux x86-64 it brings the CUDA stack, about "
            f"{CUDA_STACK_GB} GB. Stop here and run `make TORCH_INDEX=<index of torch's CPU wheels> ...` to avoid that."
        )
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
