"""What faq.md, measuring.md and CITATION.cff say is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FORMATTED = "…"


def strings(package: str) -> list[str]:
    """Every string of a package as it is written, what is filled in as one sign."""
    found = []
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else FORMATTED for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted() -> list[str]:
    return re.findall(r"^> (.+)$", (ROOT / "docs/faq.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def written() -> list[str]:
    return [*strings("service"), *strings("export")]


def test_every_error_that_the_faq_quotes_is_one_that_the_code_has(written: list[str]) -> None:
    assert len(quoted()) > 10
    for quote in quoted():
        pieces = [piece.strip() for piece in quote.split(FORMATTED) if piece.strip()]
        wanted = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
        assert any(wanted.search(text) for text in written), quote
    assert not any("no such text is anywhere" in text for text in written)


def test_every_command_of_the_page_on_measuring_is_there() -> None:
    text = (ROOT / "docs/measuring.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets
    for module in re.findall(r"`python -m (bench\.\w+)`", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    assert "make bench-peers" in text


def test_the_citation_is_well_formed_and_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{cited["version"]}"' in project
    assert f'license = "{cited["license"]}"' in project
    for reference in cited["references"]:
        assert reference["title"]
        assert all(author["family-names"] and author["given-names"] for author in reference["authors"])
        assert isinstance(reference["year"], int)
