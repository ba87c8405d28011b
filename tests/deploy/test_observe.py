"""What dashboards, alerts and scalers ask of Prometheus exists in a running service, and is PromQL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from service import errors
from tests.deploy.manifests import ROOT, kinds
from tests.e2e.server import serving

OBSERVE = ROOT / "deploy" / "observe"
DASHBOARD = OBSERVE / "grafana" / "dashboards" / "tokenslab.json"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
PROMETHEUS = {"up"}  # its own
METRIC = re.compile(r"\b(?:tokenslab|process)_[a-z_]+\b")


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row"]
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OBSERVE / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Where each stands, and the PromQL, with Grafana's variables filled in."""
    for panel in panels():
        for target in panel["targets"]:
            filled = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*").replace("$instance", ".*")
            yield f"panel {panel['title']!r}", filled
    for rule in alerts():
        yield f"alert {rule['alert']}", rule["expr"]
    for _, document in kinds("ScaledObject"):
        for trigger in document["spec"]["triggers"]:
            yield "KEDA", trigger["metadata"]["query"]


@pytest.fixture(scope="module")
def exposed() -> tuple[set[str], dict[str, set[str]]]:
    """The names of all samples that a running service can have, and the labels seen on them."""
    with serving(ROOT / "models") as server:
        text = server.scrape()
    names: set[str] = set()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        names.update(family.name + suffix for suffix in SUFFIXES.get(family.type, ("",)))
        for sample in family.samples:
            labels.setdefault(family.name, set()).update(sample.labels)
    return names, labels


def test_every_metric_that_is_asked_for_exists(exposed: tuple[set[str], dict[str, set[str]]]) -> None:
    names, _ = exposed
    asked = {(where, name) for where, text in expressions() for name in METRIC.findall(text)}
    assert len(asked) > 30
    assert {(where, name) for where, name in asked if name not in names} == set()
    assert "tokenslab_no_such_total" not in names
    for _, document in kinds("HorizontalPodAutoscaler"):
        assert {metric["pods"]["metric"]["name"] for metric in document["spec"]["metrics"]} <= names


def test_every_metric_of_the_service_is_on_the_dashboard(exposed: tuple[set[str], dict[str, set[str]]]) -> None:
    shown = {name for where, text in expressions() if where.startswith("panel") for name in METRIC.findall(text)}
    families = {name for name in exposed[1] if name.startswith("tokenslab_") and not name.endswith("_created")}
    missing = {family for family in families if not any(name.startswith(family) for name in shown)}
    assert missing == set()


def test_every_expression_parses() -> None:
    for where, text in expressions():
        assert promql_parser.parse(text) is not None, where
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("sum by (rate(tokenslab_tokens_total[1m])")


def test_the_reasons_and_outcomes_that_alerts_name_are_those_that_the_service_counts() -> None:
    reasons = {
        error.reason
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.RequestError)
    }
    named = {
        reason
        for rule in alerts()
        for text in re.findall(r'reason=~"([^"]+)"', rule["expr"])
        for reason in text.split("|")
    }
    assert len(named) >= 5
    assert named <= reasons
    outcomes = {text for rule in alerts() for text in re.findall(r'outcome="([^"]+)"', rule["expr"])}
    assert outcomes <= {"answered", "late", "failed", "gone"}


def test_prometheus_scrapes_the_services_of_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    scrapes = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())["scrape_configs"]
    named = {name for scrape in scrapes for found in scrape["dns_sd_configs"] for name in found["names"]}
    assert named == {"tokenslab", "tokenslab-gpu", "replica", "proxy"}
    assert named < set(services)
    mounted = [volume.split(":")[0] for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    for path in mounted:
        if path.startswith("./"):
            assert (ROOT / path).exists(), path
