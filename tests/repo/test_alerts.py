"""Tests that alerts, dashboard and the page on scaling name metrics and labels that exist, and that each alert has a runbook and both kinds of tests.

`e2e/test_alert_rules.py` runs these rules, and `e2e/test_monitoring.py` runs every query on pages of real agents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from test_code_blocks import of
from tree_of_files import ROOT, text_files

from longshore_agent.status.metric_table import TABLE, Kind, Metric
from longshore_operator.metrics import Metrics
from longshore_spec.findings import CODES

CHART = ROOT / "charts" / "longshore" / "files"
RUNBOOKS = ROOT / "docs" / "runbooks.md"
# Their values are a datasource's and those of Prometheus' own labels.
VARIABLES = {"datasource", "namespace", "deployment"}
# Labels that Prometheus adds to each scraped series, by docs/how-to/monitoring.md.
SCRAPED = {"job", "namespace", "deployment", "roles", "node", "pod", "instance", "worker", "le"}
# `up` is Prometheus' own; vLLM's are counted by a real vLLM (e2e/vllm/test_vllm_how_to.py).
OTHERS = {
    "up",
    "vllm:longshore_load_time_seconds_sum",
    "vllm:longshore_load_time_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
}
NAME = re.compile(r"(?<![\w:])(?:longshore[\w:]*|vllm:\w+|up)(?![\w(])")
QUOTED = re.compile(r'"[^"]*"')
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")
HISTOGRAM = ("_bucket", "_sum", "_count")

Rule = dict[str, Any]


def rules() -> list[Rule]:
    text = (CHART / "rules.yaml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def alerts() -> list[Rule]:
    return [rule for rule in rules() if "alert" in rule]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "dashboard.json").read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def scaling() -> dict[str, str]:
    """Return the queries of the page on scaling, by the workload that they scale and their number."""
    listed = [body for block in of("yaml") for body in yaml.safe_load_all(block.text)]
    return {
        f"{body['metadata']['name']} {number}": trigger["metadata"]["query"]
        for body in listed
        if body.get("kind") == "ScaledObject"
        for number, trigger in enumerate(body["spec"]["triggers"])
    }


def queries() -> dict[str, str]:
    found = {f"rule {rule.get('alert') or rule['record']}": str(rule["expr"]) for rule in rules()}
    for panel in panels():
        for target in panel["targets"]:
            found[f"panel {panel['title']} {target['refId']}"] = target["expr"]
    return found | scaling()


def known() -> dict[str, Metric | None]:
    """Return every name of a series with its row in the agent's table, if it is the agent's."""
    names: dict[str, Metric | None] = dict.fromkeys(OTHERS)
    for row in TABLE:
        names |= {f"{row.name}{end}": row for end in (HISTOGRAM if row.kind is Kind.HISTOGRAM else ("",))}
    for family in Metrics().registry.collect():
        ends = {"counter": ("_total",), "histogram": HISTOGRAM}.get(family.type, ("",))
        names |= dict.fromkeys(f"{family.name}{end}" for end in ends)
    return names | dict.fromkeys(rule["record"] for rule in rules() if "record" in rule)


def faults(query: str) -> Iterator[str]:
    """Return the names and values of a query that do not exist."""
    names = known()
    yield from (f"metric {name}" for name in set(NAME.findall(QUOTED.sub("", query))) - names.keys())
    for name, matchers in SELECTOR.findall(query):
        row = names.get(name)
        for label, operator, value in MATCHER.findall(matchers):
            if label in SCRAPED:
                continue
            if row is None or label not in row.labels:
                yield f"label {label} of {name}"
                continue
            domain = row.domains[row.labels.index(label)]
            values = value.split("|") if "~" in operator else [value]
            yield from (f"value {one} of {label}" for one in values if domain and one not in domain)
    labels = {label for row in TABLE for label in row.labels} | SCRAPED | {"error", "wire"}
    grouped = {label.strip() for found in GROUPING.findall(query) for label in found.split(",")} - {""}
    yield from (f"label {label}" for label in grouped - labels)


@pytest.mark.parametrize("name", queries())
def test_a_query_names_only_what_exists(name: str) -> None:
    assert list(faults(queries()[name])) == []


def test_a_misspelt_metric_label_or_value_is_found() -> None:
    good = 'sum by (reason) (rate(longshore_rooms_total{half="target",outcome=~"done|failed"}[5m]))'
    assert list(faults(good)) == []
    for old, new, fault in (
        ("rooms_total", "room_total", "metric longshore_room_total"),
        ("half=", "side=", "label side of longshore_rooms_total"),
        ("|failed", "|fails", "value fails of outcome"),
        ("by (reason)", "by (reasons)", "label reasons"),
    ):
        assert fault in list(faults(good.replace(old, new)))


def test_the_pages_name_only_metrics_that_exist() -> None:
    ends = re.compile(r"(?<![\w:./-])longshore_\w+_(?:total|bytes|seconds|open|ready)\b")
    pages = [(path, text) for path, text in text_files() if path.suffix == ".md"]
    named = {(str(path), name) for path, text in pages for name in ends.findall(text)}
    assert len(named) > 60 and len(scaling()) == 4
    families = known().keys() | {name.removesuffix("_bucket") for name in known()}
    assert [(path, name) for path, name in named if name not in families] == []


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_how_bad_it_is_and_has_a_runbook(alert: Rule) -> None:
    assert alert["alert"].startswith("Longshore")
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{alert['alert'].lower()}"
    assert "$labels." in alert["annotations"]["description"]
    section = RUNBOOKS.read_text(encoding="utf-8").partition(f"\n## {alert['alert']}\n")[2].partition("\n## ")[0]
    for part in ("**Meaning:**", "**Look:**", "**Causes:**", "**Remedy:**"):
        assert part in section, part


def test_a_runbook_is_that_of_an_alert() -> None:
    text = RUNBOOKS.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles == [*(alert["alert"] for alert in alerts()), "Findings"]
    # Their text is compared with the table by test_reference_pages.
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == list(CODES)


def test_commands_of_the_runbooks_print_what_they_look_for() -> None:
    text = re.sub(r" \\\n *", " ", RUNBOOKS.read_text(encoding="utf-8"))
    commands = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for command in commands:
        # `describe` sorts keys, so that a condition's type is its last line.
        assert not re.search(r"describe dgdep .*\| grep", command), command
        # `logs` with a selector prints ten lines of each pod, unless told otherwise.
        assert " logs -l " not in command or "--tail=" in command, command
        # kubectl hides the body of a 503.
        assert "agent /readyz" not in command, command
    assert sum(" logs -l " in command for command in commands) >= 2


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_has_unit_tests_in_which_it_fires_and_does_not_and_waits(alert: Rule) -> None:
    fires, quiet, waits = [], [], []
    for path in sorted((ROOT / "e2e" / "alerts").glob("*.test.yaml")):
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            tried = [entry for entry in test["alert_rule_test"] if entry["alertname"] == alert["alert"]]
            fired = [entry for entry in tried if entry["exp_alerts"]]
            fires += [test["name"]] if fired else []
            quiet += [test["name"]] if tried and not fired else []
            waits += [test["name"]] if fired and not tried[0]["exp_alerts"] else []
    assert fires and quiet and waits, (fires, quiet, waits)


def test_panels_have_their_own_ids_and_do_not_overlap() -> None:
    found = dashboard()["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    cells: dict[tuple[int, int], str] = {}
    for panel in found:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert cells.setdefault((x, y), panel["title"]) == panel["title"], (x, y)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_has_a_unit_a_description_and_a_legend_and_takes_its_data_source_by_variable(
    panel: dict[str, Any],
) -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["datasource"] == source
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"].endswith(".")
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == source and target["expr"] and target["legendFormat"]
        assert set(re.findall(r"\$(?!__)(\w+)", target["expr"])) <= VARIABLES
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_variables_are_those_that_queries_use() -> None:
    assert {entry["name"] for entry in dashboard()["templating"]["list"]} == VARIABLES
