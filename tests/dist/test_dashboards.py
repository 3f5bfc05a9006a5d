"""Dashboards and alert rules name only metrics and labels of a live server's /metrics, so a renamed
one fails here. Uses a server with a ledger, like all servers of the pool.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hadal.core.messages.snapshot import FrontSnapshot, Totals
from hadal.core.messages.units import UnitReport
from hadal.core.plans import LinkBytes
from hadal.gateway.desk.metrics import Metrics
from tests.dist.answers import complete
from tests.dist.serving import Server
from tests.waiting import DEADLINE_S

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "hadal.json").read_text())
RULES = DEPLOY / "prometheus" / "hadal.rules.yml"
TRIED = DEPLOY / "prometheus" / "hadal.rules.test.yml"
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]

SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""
ELSEWHERE = {"up"}
"""Metrics that Prometheus adds."""
NOT_HERE = {
    "hadal_drafts_tried_total": {"unit", "place"},
    "hadal_drafts_accepted_total": {"unit", "place"},
    "hadal_link_bytes_total": {"unit", "kind", "nodes"},
    "hadal_refused_connections_total": {"process", "kind"},
}
"""Metric -> labels, for metrics that have series only with drafts or with units of many ranks (these
accept, and may refuse, connections). gateway/desk/metrics defines them.
"""
_SELECTOR = re.compile(r"\b([a-z_]+)\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|on) ?\(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (title of the panel or alert, PromQL expression)."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:hadal_[a-z_]+|up)\b", expression))


def labels_in(expression: str) -> Iterator[tuple[str, str, str]]:
    """Yield (metric, label, value) of each selector, then of each label that the expression groups by,
    with every metric of the expression and an empty value.
    """
    for metric, inside in _SELECTOR.findall(expression):
        for label, value in re.findall(r'([a-z]+) ?=~? ?"([^"]*)"', inside):
            yield metric, label, value
    for group in _GROUPING.findall(expression):
        for metric in metrics_in(expression):
            for label in filter(None, (part.strip() for part in group.split(","))):
                yield metric, label, ""


def series_of(text: str) -> dict[str, list[dict[str, str]]]:
    """Return metric -> labels of its series."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def test_what_they_name_is_there(server: Server) -> None:
    complete(server, 8)
    series = series_of(httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text)
    for where, expression in expressions():
        names = metrics_in(expression) - ELSEWHERE
        assert names or where == "HadalDown"
        missing = {name for name in names if name not in series and name not in NOT_HERE}
        assert missing == set(), where
        for metric, label, value in labels_in(expression):
            if metric in ELSEWHERE or label in SCRAPED:
                continue
            known = NOT_HERE.get(metric) or set().union(*(each.keys() for each in series[metric]))
            assert label in known, f"{where}: {metric} has no label {label}"
            values = {each.get(label) for each in series.get(metric, ())}
            if value and value != "5.." and metric not in NOT_HERE:
                assert any(part in values for part in value.split("|")), f"{where}: {label}={value}"


def test_labels_of_legends_are_in_their_expressions() -> None:
    for panel in panels():
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = _GROUPING.findall(target["expr"])
            if grouped and shown:
                assert shown <= {part.strip() for part in grouped[0].split(",")}, panel["title"]


def test_metrics_that_come_only_with_some_deployments_are_those() -> None:
    """The series that NOT_HERE lists have its labels. Live servers have these series in test_drafts,
    test_ep_exactness and test_stranger.
    """
    drafted = {"drafts_tried": (2,), "drafts_accepted": (1,), "link_bytes": LinkBytes((1, 1))}
    unit = UnitReport("decode-0", "e", 100, 0, 0, 8, 0, **drafted)
    snapshot = FrontSnapshot(False, {}, {"decode-0": unit}, {}, Totals())
    metrics = Metrics(lambda: snapshot, refused={"decode-0.1": {"kv": 1}})
    series = series_of(metrics.text().decode())
    assert {name: set(series[name][-1]) for name in NOT_HERE} == NOT_HERE


def test_the_board_can_be_read() -> None:
    assert BOARD["uid"] == "hadal"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another"
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]


def promtool(*arguments: str) -> None:
    command = ["promtool", *arguments]
    done = subprocess.run(
        command, cwd=RULES.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("promtool")
def test_promtool_takes_rules_and_configuration() -> None:
    promtool("check", "rules", RULES.name)
    promtool("check", "config", "prometheus.yml")


@pytest.mark.promise(
    "Each says what to do, and has a test in which it fires and one in which it does "
    "not (promtool test rules)."
)
@pytest.mark.needs("promtool")
def test_every_alert_fires_and_stays_silent() -> None:
    promtool("test", "rules", TRIED.name)


def test_every_alert_is_tried_when_it_fires_and_when_it_does_not() -> None:
    tests = yaml.safe_load(TRIED.read_text())["tests"]
    tried = [
        (one["alertname"], bool(one["exp_alerts"]))
        for test in tests
        for one in test["alert_rule_test"]
    ]
    assert sorted(tried) == sorted(
        (rule["alert"], fires) for rule in ALERTS for fires in (True, False)
    )


@pytest.mark.needs("promtool")
def test_promtool_takes_the_boards_expressions(tmp_path: Path) -> None:
    groups = [
        {
            "name": panel["title"],
            "rules": [
                {"record": f"x:{number}", "expr": target["expr"].replace("$__rate_interval", "1m")}
                for number, target in enumerate(panel["targets"])
            ],
        }
        for panel in panels()
    ]
    path = tmp_path / "board.yml"
    path.write_text(yaml.safe_dump({"groups": groups}))
    promtool("check", "rules", str(path))
