"""The document, the baseline and the page, from stages made by hand."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.loadtest.baseline import THROUGHPUT, BaselineError, Change, compare, read_baseline
from bench.loadtest.document import Document, document
from bench.loadtest.page import page
from bench.loadtest.sweep import Level, Limit, Measurement
from bench.loadtest.windows import Point, batching_gain, recommend
from tests.bench.loadtest.stages import measured

LIMIT = Limit(64, 3200.0, 4.0)


def whole(rate: float = 100.0, p99: float = 10.0, name: str = "ffn") -> Document:
    levels = [Level("closed", 1), Level("closed", 4), Level("open", 50), Level("open", 90)]
    measurements = [Measurement(level, (measured(rate, p99=p99), measured(rate, p99=p99))) for level in levels]
    points = [Point(n, wait, (measured(n),), (measured(),)) for n in (16, 64) for wait in (0.0, 2.0)]
    return document({"model": name, "sizes": "16"}, {"cpu": "any"}, measurements, points, LIMIT)


def test_the_ratios_are_of_the_limit_and_of_a_run() -> None:
    ratios = whole()["ratios"]
    assert ratios["closed: 4 connections: tokens/s over the limit"] == pytest.approx(0.5)
    assert ratios["open: 50 requests/s: p99 over a run"] == pytest.approx(2.5)
    assert not any(name.startswith("open") and name.endswith(THROUGHPUT) for name in ratios)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0, 1))
def test_less_throughput_and_more_latency_are_regressions_beyond_the_tolerance(
    then: float, now: float, tolerance: float
) -> None:
    assert Change(THROUGHPUT, then, now, tolerance).regressed == (now < then * (1 - tolerance))
    assert Change("p99 over a run", then, now, tolerance).regressed == (now > then * (1 + tolerance))
    assert not Change(THROUGHPUT, then, then, tolerance).regressed


def test_a_run_like_its_baseline_passes_and_a_figure_that_is_gone_does_not() -> None:
    then = whole()
    assert not any(change.regressed for change in compare(then, whole(), 0.1, 0.1))
    slower = [change.name for change in compare(then, whole(rate=80), 0.1, 0.1) if change.regressed]
    assert slower == [f"closed: {n} connections: {THROUGHPUT}" for n in (1, 4)]
    assert all("p99" in change.name for change in compare(then, whole(p99=12), 0.1, 0.1) if change.regressed)
    less = copy.deepcopy(then)
    less["ratios"].pop(next(iter(less["ratios"])))
    assert sum(change.regressed for change in compare(then, less, 0.1, 0.1)) == 1


def test_a_baseline_of_another_load_or_of_none_is_refused(tmp_path: Path) -> None:
    other = {**whole(), "plan": {"model": "ffn", "sizes": "32"}}
    with pytest.raises(BaselineError, match="sizes was '32'"):
        compare(other, whole(), 0.1, 0.1)
    for content in ("{", "[]", '{"schema_version": 2, "ratios": {"a": 1}}', '{"schema_version": 1, "ratios": {}}'):
        (tmp_path / "b.json").write_text(content)
        with pytest.raises(BaselineError, match="no baseline"):
            read_baseline(tmp_path / "b.json")


def test_of_nearly_equal_settings_the_shortest_tail_is_recommended() -> None:
    fast = Point(512, 0.0, (measured(100),), (measured(p99=30),))
    near = Point(128, 0.0, (measured(96),), (measured(p99=9),))
    slow = Point(16, 0.0, (measured(40),), (measured(p99=3),))
    failing = Point(256, 0.0, (measured(99),), (measured(p99=1, errors={"status 504": 1}),))
    assert recommend([fast, slow, near, failing]) is near
    assert batching_gain([fast, near, slow]) == pytest.approx(2.5)


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_nobody_for_anything() -> None:
    text = page(whole(name="<script>alert(1)</script>"))
    parsed = Parsed(text)
    assert parsed.open == []
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("svg") == 5
    assert not {"script", "link", "img", "iframe", "object"} & set(tags)
    ids = {values["id"] for _, values in parsed.tags if "id" in values}
    targets = [value for _, values in parsed.tags for name, value in values.items() if name in ("xlink:href", "href")]
    targets += re.findall(r"url\(([^)]*)\)", text)
    assert targets
    assert all(target is not None and target[0] == "#" and target[1:] in ids for target in targets)
    assert "@import" not in text
    assert all(values["aria-label"] for tag, values in parsed.tags if tag == "svg")
    assert "#010203" not in text  # the axes have the page's colour, in the light and in the dark
    assert "in-process limit" in text


def test_the_page_says_why_not_to_trust_it_and_leaves_out_what_was_not_measured() -> None:
    failing = Measurement(Level("closed", 1), (measured(errors={"timeout": 3}),))
    found = json.loads(json.dumps(document({"model": "m", "sizes": "1"}, {}, [failing])))
    found["levels"][0]["saturated"] = ["a client process used 99% of a core"]
    text = page(found)
    assert "3 requests without a result" in text
    assert "99% of a core" in text
    assert "Latency against the rate" not in text
    assert "Recommended" not in text
