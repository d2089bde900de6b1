"""The table of the agent's metrics: names, kinds, units, labels and meanings.

`metrics` counts by it. Dashboards and the reference page (`python -m longshore_agent.status.metrics`) use its names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from longshore_spec.findings import CODES
from longshore_spec.names import PROTECTIONS
from longshore_spec.status import ATTACHED, CONNECTING, LOST, REFUSED
from longshore_wire.errors import Reason
from longshore_wire.names import UNKNOWN_WIRE, Wire
from longshore_wire.ways import Why


class Kind(StrEnum):
    """The Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


STAGES = ("gather", "write", "deliver", "scatter")
HALVES = ("source", "target")
DIRECT_WAY = "direct"
WAYS = ("staged", "contiguous", DIRECT_WAY, "slices")
WHYS = tuple(why.label for why in Why)
RESULTS = ("equal", "different")
OUTCOMES = ("done", "failed", "cancelled")
WIRES = (*(wire.value for wire in Wire), UNKNOWN_WIRE)
# The wire of direct copies, which no transport makes.
NO_WIRE = "None"
PEER_STATES = (CONNECTING, ATTACHED, REFUSED, LOST)
REASONS = tuple(reason.label for reason in Reason)
# 10 us to 10 s: from one CPU gather of a small slab to a peer that is nearly lost.
SECONDS_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

# Whether the agent is ready, and its findings. The page sets them from its verdict; no process counts them.
READY = "longshore_ready"
FINDINGS = "longshore_findings"

_DOMAINS: Mapping[str, tuple[str, ...]] = {
    "stage": STAGES,
    "half": HALVES,
    "way": WAYS,
    "why": WHYS,
    "outcome": OUTCOMES,
    "reason": REASONS,
    "state": PEER_STATES,
    "wire": (*WIRES, NO_WIRE),
    "protection": PROTECTIONS[1:],
    "result": RESULTS,
    "code": CODES,
}
# Reasons with which a room fails; without one it is done, and cancelled rooms have their own outcome.
_FAILURES = tuple(reason for reason in REASONS if reason not in {Reason.NONE.label, Reason.CANCELLED.label})
# Combinations of labels that are shown at 0 from the start, although their metric has too many to show all: Prometheus'
# increase() does not see the first count of a series that begins with it.
SHOWN_AT_ONCE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "longshore_rooms_total": (
        ("target", "done", Reason.NONE.label),
        *(("target", "failed", reason) for reason in _FAILURES),
    )
}


def named_wire(wire: str, way: str) -> str:
    """Return the label for a slab's wire. A peer may report any text as a wire's name."""
    if way == DIRECT_WAY:
        return NO_WIRE
    return wire if wire in WIRES else UNKNOWN_WIRE


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. A label without a domain holds a small number or a type's name, never a value of a peer or user."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def domains(self) -> tuple[tuple[str, ...], ...]:
        """The valid values of each label, in the order of `labels`; empty means any."""
        return tuple(_DOMAINS.get(label, ()) for label in self.labels)


def _counter(name: str, unit: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(f"longshore_{name}_total", Kind.COUNTER, unit, labels, meaning)


def _gauge(name: str, unit: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(f"longshore_{name}", Kind.GAUGE, unit, labels, meaning)


TABLE: tuple[Metric, ...] = (
    Metric(READY, Kind.GAUGE, "agents", (), "1 if /readyz says that engines may use this agent, else 0."),
    Metric(
        FINDINGS,
        Kind.GAUGE,
        "findings",
        ("code",),
        "Findings of `/v1/status`, by code. A worker has no series for a code without findings.",
    ),
    Metric(
        "longshore_stage_seconds",
        Kind.HISTOGRAM,
        "seconds",
        ("stage",),
        "Time of one slab in a stage of the data path.",
        SECONDS_BUCKETS,
    ),
    _counter("stage_bytes", "bytes", ("stage",), "Bytes that went through a stage."),
    _counter("slabs", "slabs", ("half", "way"), "Slabs finished."),
    _counter("writes", "writes", ("way",), "Writes posted to the transport."),
    _counter("write_pieces", "pieces", ("way",), "Pieces of memory in these writes."),
    _counter(
        "written_bytes",
        "bytes",
        ("way", "wire"),
        "Bytes of slabs that reached their target. The wire of direct copies is None.",
    ),
    _counter(
        "written_seconds",
        "seconds",
        ("way", "wire"),
        "Time of these writes, each from its start to its end. Concurrent writes share their wire.",
    ),
    _counter(
        "cache_bytes",
        "bytes",
        ("cache",),
        "Bytes of slabs of each cache that reached their target. /v1/status has the caches' names.",
    ),
    _counter("overtaken_writes", "writes", ("way",), "Writes of slabs that were in progress when their room failed."),
    _counter(
        "digests",
        "slabs",
        ("result",),
        "Slabs whose digests of both sides were compared here: at decode, and at prefill for direct copies.",
    ),
    _counter("lane_bytes", "bytes", ("lane",), "Bytes that a lane wrote."),
    _counter("lane_slabs", "slabs", ("lane",), "Slabs that a lane wrote."),
    _gauge("ring_capacity_bytes", "bytes", (), "Size of the staging ring."),
    _gauge("ring_used_bytes", "bytes", (), "Bytes of the ring that are granted or hold slabs."),
    _gauge("ring_held_bytes", "bytes", (), "Bytes of the ring in quarantine: a writer may still write them."),
    _counter("ring_rounds", "rounds", (), "Wraps of the ring."),
    _counter("credit_waits", "waits", (), "Times at which ready slabs began to wait for ring memory."),
    _counter("credit_wait_seconds", "seconds", (), "Time in which at least one ready slab waited for ring memory."),
    _gauge("rooms_open", "rooms", ("half",), "Open rooms."),
    _counter(
        "claims", "pairs", ("way", "why"), "Pairs of ranks that a decode rank claimed, by their way and its reason."
    ),
    _counter("rooms", "rooms", ("half", "outcome", "reason"), "Ended rooms, without those of `longshore verify`."),
    _counter("stale_messages", "messages", ("message",), "Messages of another life, another grant or no room."),
    _counter("refused_messages", "messages", ("reason",), "Messages of peers and engines that were refused."),
    _counter("retries", "messages", ("message",), "Messages that were repeated."),
    _counter("notices", "notices", (), "Notices of arrival from the transport."),
    _counter(
        "authentication_failures",
        "connections",
        (),
        "Control connections that were refused because of their key or a malformed handshake, or not made because the "
        "peer has no key in common with this agent.",
    ),
    _counter(
        "http_refusals",
        "requests",
        (),
        "HTTP requests that were malformed, had no valid token, or exceeded the limit of requests in progress.",
    ),
    _counter(
        "starved_accepts",
        "tries",
        (),
        "Failed attempts to accept an engine's connection, for lack of descriptors or memory.",
    ),
    _counter("sent_spans", "spans", (), "Spans of rooms that OpenTelemetry's collector has taken; see LONGSHORE_OTEL."),
    _counter(
        "dropped_spans",
        "spans",
        (),
        "Spans of rooms that were not sent: a queue was full, or the collector did not take them.",
    ),
    _gauge("engines", "engines", ("half",), "Engine ranks that are registered."),
    _gauge("peers", "peers", ("state",), "Workers of other agents."),
    _gauge(
        "peer_wires",
        "peers",
        ("wire",),
        "Attached peers that a transport serves, by the wire that a probe found.",
    ),
    _gauge("data_ports", "ports", ("protection",), "Data ports of transports, by protection."),
    _counter(
        "data_port_refusals",
        "connections",
        (),
        "Attempts to connect to data ports that the kernel's filter dropped.",
    ),
    _gauge("self_test_bytes", "bytes", (), "Bytes that the self-test moved by the configured backend."),
    _counter(
        "worker_replacements",
        "workers",
        (),
        "Workers that drained and ended because only their end proves that memory is free.",
    ),
    _counter("worker_restarts", "restarts", (), "Workers that were restarted after they died."),
    _counter(
        "absent_seconds",
        "seconds",
        (),
        "Time in which a worker should have run and did not, because its machine was busy or suspended.",
    ),
    _counter("process_cpu_seconds", "seconds", (), "Processor time of this process."),
)
