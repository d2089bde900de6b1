"""Runs a real Prometheus with the rules of the chart, and asks it. Used by tests and `draw_dashboard`.

Its configuration is examples/prometheus.yaml with shorter intervals, so that the example's labels are those that are tested.
"""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import yaml
from controlplane import binaries
from controlplane.ports import HOST, free_port
from controlplane.processes import Process
from controlplane.waiting import until
from deployments import ROOT

Body = dict[str, Any]

RULES = ROOT / "charts" / "longshore" / "files" / "rules.yaml"
DASHBOARD = ROOT / "charts" / "longshore" / "files" / "dashboard.json"
EXAMPLE = ROOT / "examples" / "prometheus.yaml"
# Grafana's value is at least four scrapes long.
_RATE_INTERVAL = "10s"
_READY_LIMIT_S = 150.0
_ANSWER_LIMIT_S = 100.0
# Some queries cover minutes or a day. Prometheus begins with the first sample that it has.
_VARIABLES = {"$__rate_interval": _RATE_INTERVAL, "$namespace": ".*", "$deployment": ".*"}


class Prometheus:
    """One Prometheus. Use it as a context manager.

    Args:
        namespace: it scrapes the pods of this namespace.
        operator_port: port of an operator that runs as a process.
    """

    def __init__(self, folder: Path, kubeconfig: Path, namespace: str, operator_port: int) -> None:
        body = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        body["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        body["rule_files"] = [str(RULES)]
        for discovery in body["scrape_configs"][0]["kubernetes_sd_configs"]:
            discovery |= {"kubeconfig_file": str(kubeconfig), "namespaces": {"names": [namespace]}}
        labels = {"namespace": namespace, "pod": "longshore-operator"}
        static = {"targets": [f"{HOST}:{operator_port}"], "labels": labels}
        body["scrape_configs"].append({"job_name": "longshore-operator", "static_configs": [static]})
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump(body), encoding="utf-8")
        self.address = f"{HOST}:{free_port()}"
        command = [
            binaries.find("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address={self.address}",
        ]
        self.process = Process("prometheus", command, folder)

    def __enter__(self) -> Self:
        def ready() -> bool:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=_ANSWER_LIMIT_S) as answer:
                return bool(answer.status == 200)

        until(lambda: self.process.check() and ready(), "Prometheus is ready", _READY_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    def ask(self, page: str, **parameters: str) -> Any:
        """Return the data of an answer of its API. Raises HTTPError for a query that it refuses."""
        data = urllib.parse.urlencode(parameters)
        url = f"http://{self.address}/api/v1/{page}?{data}"
        with urllib.request.urlopen(url, timeout=_ANSWER_LIMIT_S) as answer:
            return json.load(answer)["data"]

    def query(self, text: str) -> list[Body]:
        """Return the series of a query now."""
        return list(self.ask("query", query=text)["result"])

    def query_range(self, text: str, start_s: float, end_s: float, step_s: float) -> list[Body]:
        """Return the series of a query over a time."""
        times = {"start": str(start_s), "end": str(end_s), "step": str(step_s)}
        return list(self.ask("query_range", query=text, **times)["result"])

    def names(self) -> set[str]:
        """Return the names of all series that it has, and of metrics on scraped pages that have no series yet."""
        return set(self.ask("label/__name__/values")) | set(self.ask("metadata"))

    def named_by(self, text: str) -> set[str]:
        """Return the names of the series that a query selects, by Prometheus' own parser."""
        return set(_selected(self.ask("parse_query", query=text)))

    def targets(self) -> dict[str, Body]:
        """Return the scraped targets by the name of their pod."""
        return {found["labels"]["pod"]: found for found in self.ask("targets", state="active")["activeTargets"]}

    def rules(self) -> dict[str, Body]:
        """Return rules with their health, by name."""
        return {rule["name"]: rule for group in self.ask("rules")["groups"] for rule in group["rules"]}

    def alerts(self, name: str) -> list[Body]:
        """Return the pending and firing alerts of a rule."""
        return [found for found in self.ask("alerts")["alerts"] if found["labels"]["alertname"] == name]


def _selected(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for entry in node:
            yield from _selected(entry)
    elif isinstance(node, dict):
        if node.get("type") in {"vectorSelector", "matrixSelector"}:
            yield node["name"]
        for entry in node.values():
            yield from _selected(entry)


def panels() -> list[Body]:
    """Return the dashboard's panels, without rows."""
    found: list[Body] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def plain(expression: str) -> str:
    """Return a panel's query with values for Grafana's variables."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    assert not re.search(r"\$\w", expression), expression
    return expression


def rule_expressions() -> dict[str, str]:
    """Return the queries of all rules, by the rule's name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule.get("alert") or rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}
