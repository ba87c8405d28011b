"""What the documents say is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.settings_page import PAGE, page
from service.settings import Settings

ROOT = Path(__file__).parents[1]


def test_the_settings_page_is_the_settings_model() -> None:
    assert (ROOT / PAGE).read_text() == page(), "run `make docs`"


def test_the_stop_grace_of_compose_is_above_delay_and_limit() -> None:
    grace = re.search(r"stop_grace_period: (\d+)s", (ROOT / "docker-compose.yml").read_text())
    settings = Settings()
    assert grace is not None
    assert settings.drain_delay_s + settings.drain_limit_s + 1.5 < int(grace[1])


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "docs/quick-start.md",
        "docs/own-module.md",
        "docs/operations.md",
        "docs/load-testing.md",
        "docs/console.md",
        "docs/scaling.md",
        "docs/deployment.md",
        "docs/faq.md",
        "docs/measuring.md",
        "docs/precision.md",
        "docs/scheduling.md",
        "docs/wire.md",
        "SECURITY.md",
    ],
)
def test_every_make_target_and_linked_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link
