"""The page's own files: complete, with no other host in them, and nothing that the policy forbids."""

from __future__ import annotations

import re

import pytest

from service.console.assets import HEADERS, PAGE, read_assets

ASSETS = read_assets()
OWN = sorted(name for name in ASSETS if not name.startswith("uPlot"))
HOSTS = {"http://www.w3.org/2000/svg"}  # a name of an XML namespace; nothing is loaded from it


@pytest.mark.parametrize("name", OWN)
def test_no_file_names_another_host(name: str) -> None:
    assert set(re.findall(r"https?://[\w./-]+", ASSETS[name].body.decode())) <= HOSTS


def test_every_file_that_the_page_or_a_module_names_is_there() -> None:
    named = set(re.findall(r'(?:href|src)="console/([^"]+)"', ASSETS[PAGE].body.decode()))
    for name in OWN:
        named |= set(re.findall(r'from "\./([^"]+)"', ASSETS[name].body.decode()))
    assert named
    assert named | {PAGE} == set(ASSETS), "and none is there that nobody names"


def test_the_page_has_no_inline_script_or_style_which_the_policy_would_refuse() -> None:
    page = ASSETS[PAGE].body.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert HEADERS["content-security-policy"].startswith("default-src 'none'")


def test_no_module_makes_markup_of_text() -> None:
    for name in OWN:
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", ASSETS[name].body.decode()
            )
