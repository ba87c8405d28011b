"""Every command of every page is run by a test, or is here with the reason why not; and each of its flags exists."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from typing import Any

import pytest
import typer
from typer.main import get_command

import tokenslab
from tests.commands import PAGES, ROOT, blocks, inline

README, QUICK = "tests/e2e/test_readme_page.py", "tests/export/test_export_pages.py"
REQUESTS, OPERATIONS = "tests/e2e/test_quick_start_page.py", "tests/e2e/test_operations_page.py"
WIRE, OWN, LOADS = (
    "tests/e2e/test_wire_page.py",
    "tests/export/test_own_module_page.py",
    "tests/bench/loadtest/test_page_of_docs.py",
)

# page -> the beginning of a block -> the test that runs it, or "not run: " and why.
RUN_BY: dict[str, dict[str, str]] = {
    "README.md": {
        "make demo": "not run: minutes; each of its promises has a test of its own, as the page's table says",
        "make test": "not run: it is what runs this",
        ".venv/bin/tokenslab serve --models models": README,
        "head -c 1280": README,
        "python: import numpy as np": README,
        ".venv/bin/tokenslab export module nets.py:factory": QUICK,
        ".venv/bin/tokenslab inspect": QUICK,
        ".venv/bin/tokenslab verify": QUICK,
    },
    "models/README.md": {
        "tokenslab export random ffn": "not run: it would make the shipped bundle anew; tests/export/test_cli.py",
        "tokenslab export random block": "not run: it would make the shipped bundle anew; tests/export/test_cli.py",
    },
    "docs/deployment.md": {
        "kubectl apply": "not run: it needs a cluster; tests/deploy/test_kubernetes.py checks what it would send",
    },
    "docs/load-testing.md": {
        "tokenslab bench load demo-ffn": LOADS,
        "tokenslab bench windows demo-ffn": LOADS,
        "python: import numpy as np": LOADS,
        "lua: local file": LOADS,
        "wrk": LOADS,
        "python: from locust": LOADS,
        "locust": LOADS,
        "js: import http": "not run: k6, as the page says",
        "perf_analyzer": "not run: its binary needs glibc 2.38, as the page says",
    },
    "docs/operations.md": {
        "export TOKENSLAB_ADMIN_KEYS": OPERATIONS,
        "tokenslab serve": OPERATIONS,
        "curl": OPERATIONS,
    },
    "docs/own-module.md": {"python: import torch": OWN, "tokenslab export module own.py:factory": OWN},
    "docs/precision.md": {"tokenslab verify models/NAME --provider cuda": "not run: it needs a GPU"},
    "docs/quick-start.md": {
        "tokenslab export": QUICK,
        "tokenslab inspect": QUICK,
        "tokenslab verify": QUICK,
        "python: from torch import nn": QUICK,
        "cp -r models/demo-ffn": QUICK,
        "tokenslab serve": "not run: tests/e2e/test_readme_page.py has its like; the folder is made as the page says",
        ".venv/bin/python -c": REQUESTS,
        "curl": REQUESTS,
    },
    "docs/scaling.md": {
        "python: from ray import serve": "tests/deploy/ray_cluster/test_ray_cluster.py",
        "tokenslab export random block --name stack": "not run: by `make ray-test`, in these words",
    },
    "docs/wire.md": {"curl": WIRE, "head -c 768": WIRE, "python: import json": WIRE},
}

# Where one beginning stands for several blocks: how many its test runs.
SEVERAL = {
    ("docs/load-testing.md", "tokenslab bench load demo-ffn"): 4,
    ("docs/operations.md", "curl"): 5,
    ("docs/quick-start.md", "tokenslab export"): 2,
    ("docs/quick-start.md", "curl"): 3,
}


def faults(page: str, found: list[str]) -> list[str]:
    """What of `page`'s blocks nobody runs, and what of RUN_BY is not there."""
    known = RUN_BY.get(page, {})
    wrong = [f"nobody runs {block!r}" for block in found if not any(map(block.startswith, known))]
    for beginning in known:
        count = sum(block.startswith(beginning) for block in found)
        if count != SEVERAL.get((page, beginning), 1):
            wrong.append(f"{count} of {beginning!r}")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_has_its_test_or_its_reason(page: str) -> None:
    assert faults(page, blocks(page)) == []


@pytest.mark.parametrize(("page", "who"), sorted({(p, who) for p, known in RUN_BY.items() for who in known.values()}))
def test_whoever_runs_a_block_of_a_page_reads_it_there(page: str, who: str) -> None:
    if not who.startswith("not run: "):
        assert page in (ROOT / who).read_text()
    for named in re.findall(r"tests/[\w/]+\.py", who):
        assert (ROOT / named).exists()


@pytest.fixture(scope="module")
def console() -> typer.core.TyperGroup:
    app = typer.Typer()
    app.callback()(lambda: None)
    for module, _ in tokenslab.COMMANDS.values():
        import_module(module).register(app)
    command = get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    return command


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_flag_that_a_page_names_exists(page: str, console: typer.core.TyperGroup) -> None:
    for text in (*blocks(page), *inline(page)):
        words = text.removeprefix(".venv/bin/").split()
        if words[0] == "tokenslab":
            assert_known(console, shlex.split(text)[1:], text)
        elif words[:2] == ["python", "-m"]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists() or (
                ROOT / words[2].replace(".", "/") / "__main__.py"
            ).exists(), text


def assert_known(command: typer.core.TyperGroup, words: list[str], text: str) -> None:
    """The subcommands exist, and the last of them has each flag; of `export ...` any export has it."""
    reached: list[Any] = [command]  # commands are of a class that typer keeps to itself
    while words and isinstance(reached[0], typer.core.TyperGroup):
        group = reached[0]
        if words[0] == "..." or words[0].startswith("-"):
            reached = list(_leaves(group))
            break
        assert words[0] in group.commands, f"{text}: no command {words[0]!r}"
        reached, words = [group.commands[words[0]]], words[1:]
    flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    known = {option for each in reached for parameter in each.params for option in _spellings(parameter)}
    assert flags <= known, f"{text}: no such flag"


def _leaves(group: typer.core.TyperGroup) -> list[Any]:
    below = group.commands.values()
    return [leaf for each in below for leaf in (_leaves(each) if isinstance(each, typer.core.TyperGroup) else [each])]


def _spellings(parameter: object) -> list[str]:
    return [*getattr(parameter, "opts", []), *getattr(parameter, "secondary_opts", [])]


def test_a_block_that_nobody_runs_would_be_found() -> None:
    found = blocks("docs/quick-start.md")
    assert faults("docs/quick-start.md", [*found, "tokenslab bench run"]) == ["nobody runs 'tokenslab bench run'"]
    assert faults("docs/quick-start.md", [*found, "curl http://127.0.0.1:8000/v2"]) == ["4 of 'curl'"]
    assert faults("docs/quick-start.md", [block for block in found if not block.startswith("cp -r")])


def test_a_command_or_flag_that_is_not_there_would_be_found(console: typer.core.TyperGroup) -> None:
    for wrong in ("tokenslab serv", "tokenslab serve --modles models", "tokenslab export ... --precison int8"):
        with pytest.raises(AssertionError, match=re.escape(wrong)):
            assert_known(console, wrong.split()[1:], wrong)
