"""Sends reports on rooms to a collector of OpenTelemetry. The only module that imports its library.

Called by `supervisor.telemetry`, in a thread of its own: `SpanSender.send` waits for the collector. The library reads its
standard variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME and others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

from longshore_agent.status.metric_table import OUTCOMES
from longshore_agent.status.room_report import RoomReport, StepReport, hashed, trace_id
from longshore_spec import distribution
from longshore_wire.errors import ConfigError

_EXPORTER = ("opentelemetry", "exporter", "otlp", "proto", "http")
_SERVICE = "longshore-agent"
# They may hold a token.
_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
# An entry as the library reads it; it writes any other entry to the log.
_HEADER = re.compile(r"[!#-'*+\-.0-9A-Z^-z|~]+[ \t]*=[ \t!#-+\--:<-\[\]-~]*")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# The library logs an address with its query when the collector fails, and a malformed one with its credentials.
_CREDENTIALS = "?@"
# Names of the halves, as users know them.
_SPANS = {"source": "room prefill", "target": "room decode"}
_FAILED = OUTCOMES[1]


def check(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the library is not installed, would log a secret, or cannot use the endpoint.

    No message has a value, since headers and addresses may hold a token.
    """
    for count in range(1, len(_EXPORTER) + 1):
        # A parent that is not there must not be imported.
        if find_spec(".".join(_EXPORTER[:count])) is None:
            raise ConfigError([f"OpenTelemetry is not installed: {distribution.to_install('agent', 'otel')}"])
    for name in _HEADERS:
        value = environment.get(name, "")
        if not unquote(value).isprintable():
            raise ConfigError([f"{name} has a character that no header may have, such as an end of a line: remove it"])
        for number, entry in enumerate(value.split(","), 1):
            if entry.strip() and not _HEADER.fullmatch(entry.strip()):
                form = "give name=value, separated by commas, and encode other characters than those of URLs by %"
                raise ConfigError([f"{name}: entry {number} is no header: {form}"])
    for name in _ENDPOINTS:
        value = environment.get(name, "http://")
        if not value.strip().lower().startswith(("http://", "https://")):
            raise ConfigError([f"{name} does not begin with http:// or https://: give the whole address"])
        if any(mark in value for mark in _CREDENTIALS):
            text = f"{name} has a query (?) or credentials (@), which would be logged: give a token in {_HEADERS[0]}"
            raise ConfigError([text])


class SpanSender:
    """Turns reports into spans and sends them.

    Args:
        about: further attributes of the agent: deployment, node, version.
    """

    def __init__(self, deployment: str, about: Mapping[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._deployment = deployment
        given = {name: value for name, value in about.items() if value}
        # The user's variables override ours.
        self._resource = Resource({"service.name": _SERVICE, **given}).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("longshore_agent", about.get("service.version", ""))
        self._exporter = OTLPSpanExporter()
        # Once: spans of one process are on one clock, also if somebody sets the host's.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def send(self, reports: Sequence[RoomReport]) -> bool:
        """Send the spans of reports; return whether the collector has taken them. It tries for OTEL_EXPORTER_OTLP_TIMEOUT."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for report in reports for span in self._spans(report)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Let a `send` in another thread end soon."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the library's

    def _spans(self, report: RoomReport) -> list[Any]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        trace = trace_id(self._deployment, report.instance, report.room)
        # All parts of a report name the same parent.
        parent = hashed(8, trace, report.worker, report.half, report.opened_ns)

        def made(name: str, span_id: int, start_ns: int, end_ns: int, **rest: Any) -> ReadableSpan:
            return ReadableSpan(
                name,
                SpanContext(trace, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)),
                resource=self._resource,
                instrumentation_scope=self._scope,
                start_time=start_ns + self._offset_ns,
                end_time=end_ns + self._offset_ns,
                **rest,
            )

        found = []
        if report.is_first:
            status = (
                Status(StatusCode.ERROR, f"{report.reason}: {report.text}") if report.outcome == _FAILED else Status()
            )
            attributes = _attributes(report)
            name = _SPANS[report.half]
            found.append(made(name, parent, report.opened_ns, report.ended_ns, attributes=attributes, status=status))
        above = SpanContext(trace, parent, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        for step in report.steps:
            identity = hashed(8, parent, step)
            rest = {"attributes": _step_attributes(step), "parent": above}
            found.append(made(step.name, identity, step.start_ns, step.end_ns, **rest))
        return found


def _attributes(report: RoomReport) -> dict[str, Any]:
    """Return what is known of a half. Peers, ways, wires and slabs are parallel lists, by pair of ranks."""
    found: dict[str, Any] = {
        "longshore.room": report.room,
        "longshore.instance": report.instance,
        "longshore.half": report.half,
        "longshore.worker": report.worker,
        "longshore.outcome": report.outcome,
        "longshore.bytes": report.bytes_moved,
        "longshore.slabs": sum(pair.slabs for pair in report.pairs),
        "longshore.peers": [pair.peer for pair in report.pairs],
        "longshore.ways": [pair.way for pair in report.pairs],
        "longshore.wires": [pair.wire for pair in report.pairs],
        "longshore.caches": [pair.cache for pair in report.pairs],
    }
    return found | ({"longshore.reason": report.reason} if report.reason else {})


def _step_attributes(step: StepReport) -> dict[str, Any]:
    found = {
        "longshore.source_rank": step.source_rank,
        "longshore.target_rank": step.target_rank,
        "longshore.cache": step.cache,
        "longshore.slab": step.slab,
        "longshore.lane": step.lane,
    }
    return {"longshore.kind": step.kind} | {name: value for name, value in found.items() if value >= 0}
