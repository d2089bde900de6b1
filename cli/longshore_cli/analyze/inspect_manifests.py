"""Analyzes DisaggDeployments: as the API server, then the operator, then their sizes, warnings and changes. Pure.

Called by `command`. Each step runs only on what the step before it accepts, as in a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from longshore_cli.analyze import definition
from longshore_cli.analyze.advice import warnings
from longshore_cli.analyze.changes import Effect, effects
from longshore_cli.analyze.findings import By, Finding, Severity, error
from longshore_cli.analyze.sizes import Sizes, device_of, sizes
from longshore_cli.documents import Document
from longshore_spec import agent_pods, manifest, names, permission
from longshore_spec.agent_config import AgentConfig
from longshore_spec.manifest import DisaggDeployment
from longshore_wire.crossover import Crossover
from longshore_wire.errors import ConfigError, RingError


class Analysis(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """All that is found about one deployment.

    Attributes:
        place: the file and line of its document.
        sizes: None for an invalid deployment.
        changes: None if no running deployment was given, or there is none of this name.
        needs: the chart's values that must allow what the deployment uses.
    """

    namespace: str
    name: str
    place: str
    findings: tuple[Finding, ...]
    sizes: Sizes | None = None
    changes: tuple[Effect, ...] | None = None
    needs: tuple[str, ...] = ()

    @property
    def error_count(self) -> int:
        """Findings that make the deployment invalid."""
        return sum(finding.severity is Severity.ERROR for finding in self.findings)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks about.

    Attributes:
        tokens: of a room.
        device: of both roles' pages; None: as the manifest says.
        table: the crossover table.
    """

    tokens: int
    device: str | None
    table: Crossover


def inspect(document: Document, running: Document | None, options: Options) -> Analysis:
    """Return the analysis of one document.

    Args:
        running: the deployment that the document is to change; None for none.
    """
    namespace, name = document.name
    findings = definition.check(document.body, None if running is None else running.body)
    read, config, faults = _read(document)
    # The operator sees only objects that the API server accepts. Its words for the same fault would come twice.
    findings = findings or faults
    found, changes = None, None
    if not findings and read is not None and config is not None:
        devices = {role: options.device or device_of(read.spec, role) for role in names.ROLES}
        try:
            found = sizes(read.spec, config, options.tokens, options.table, devices)
            findings = warnings(read.spec, found)
        except RingError as fault:
            findings = [error(By.AGENTS, "spec.prefill.staging.bufferSize", str(fault))]
    if read is not None and running is not None:
        before = _read(running)[0]
        changes = None if before is None else tuple(effects(before, read))
        findings += _unknown_before(before, running)
    needs = () if read is None else tuple(dict.fromkeys(ask.chart_value for ask in permission.asks(read.spec)))
    return Analysis(
        namespace=namespace,
        name=name,
        place=document.place,
        findings=tuple(findings),
        sizes=found,
        changes=changes,
        needs=needs,
    )


def _read(document: Document) -> tuple[DisaggDeployment | None, AgentConfig | None, list[Finding]]:
    """Return a document as the operator reads it, and its faults."""
    read = None
    try:
        read = manifest.read(definition.completed(document.body))
        config = read.agent_config()
    except ConfigError as failure:
        return read, None, [_from_operator(fault) for fault in failure.faults]
    return read, config, [_from_operator(fault) for fault in agent_pods.faults(read.spec)]


def _unknown_before(before: DisaggDeployment | None, running: Document) -> list[Finding]:
    if before is not None:
        return []
    fault = "the running deployment cannot be read, so that the changes are unknown: give it as `kubectl get dgdep -o yaml` does"
    return [error(By.OPERATOR, running.place, fault)]


def _from_operator(fault: str) -> Finding:
    path, _, message = fault.partition(": ")
    return error(By.OPERATOR, path, message)


def counts(analyses: tuple[Analysis, ...]) -> Mapping[Severity, int]:
    """Return the number of findings of each severity."""
    found = [finding.severity for analysis in analyses for finding in analysis.findings]
    return {severity: found.count(severity) for severity in Severity}
