"""Tests rooms in OpenTelemetry: real agents send to a real HTTP server, which decodes their requests by the library."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from agent_fleet import World
from agent_world import DEPLOYMENT, Agent, Engine, Request, wait_for
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.util.re import parse_env_headers
from refused_start import refused_start

from longshore_agent.control.node_link import NodeLink, RoomReported
from longshore_agent.settings import Settings
from longshore_agent.status import otel
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.room_report import STEPS_PER_MESSAGE, PairReport, RoomReport, StepReport
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.status.steps import StepLog
from longshore_agent.supervisor import telemetry
from longshore_agent.worker import reporting
from longshore_agent.worker.reporting import RoomReporter
from longshore_client import Half
from longshore_wire.effects import PairEnd, PeerId, RoomEnded
from longshore_wire.engine_messages import EngineStep, EngineSteps
from longshore_wire.errors import Reason
from longshore_wire.names import room_name
from longshore_wire.peer_messages import PairKey, RoomKey
from longshore_wire.ways import Way

ERROR = 2
OK_OR_UNSET = {0, 1}


class Received(NamedTuple):
    """One span with its attributes and those of its resource."""

    span: Any
    about: dict[str, Any]
    resource: dict[str, Any]


def plain(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


class Collector:
    """A server that takes requests of exporters."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.status = 200
        handler = type("Handler", (_Handler,), {"collector": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def of(self, room: int) -> list[Received]:
        """Return the spans of a room's trace: those of its halves, and the steps below them."""
        halves = [each for each in self.spans if each.about.get("longshore.room") == room_name(room)]
        traces = {each.span.trace_id for each in halves}
        return [each for each in self.spans if each.span.trace_id in traces]

    def take(self, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self.spans += [
                    Received(span, plain(span.attributes), plain(resource.resource.attributes)) for span in scope.spans
                ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    collector: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        self.collector.take(gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data)
        self.send_response(self.collector.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Place(NamedTuple):
    world: World
    collector: Collector
    prefill: Agent
    decode: Agent
    source: Engine
    target: Engine


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    collector = Collector()
    settings = {"LONGSHORE_OTEL": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address, "NO_PROXY": "127.0.0.1"}
    world = World(tmp_path_factory.mktemp("traces"), LONGSHORE_CLIENT_SPANS="true", LONGSHORE_NODE="n7", **settings)
    try:
        agents = [world.agent(name) for name in ("prefill", "decode")]
        engines = [world.engine(agent, f"traced-{tp}", tp) for agent, tp in zip(agents, (2, 1), strict=True)]
        yield Place(world, collector, *agents, *(each.result() for each in engines))
    finally:
        world.close()
        collector.close()


def steps_of(received: list[Received], worker: str, offset_ns: int) -> set[tuple[Any, ...]]:
    """Return the steps of one worker as its agent tells them."""
    (half,) = (each for each in received if each.about.get("longshore.worker") == worker)
    return {
        (
            each.span.name,
            *(each.about.get(f"longshore.{name}", -1) for name in ("source_rank", "target_rank", "slab")),
            each.span.start_time_unix_nano - offset_ns,
            each.span.end_time_unix_nano - offset_ns,
        )
        for each in received
        if each.span.parent_span_id == half.span.span_id
    }


def timeline(agent: Agent, room: int, worker: str) -> set[tuple[Any, ...]]:
    """Return the same from the agent's own page."""
    page = agent.room_page(room)
    spans = page["spans"] if page is not None else []
    names = ("stage", "source_rank", "target_rank", "slab", "start_ns", "end_ns")
    return {tuple(span[name] for name in names) for span in spans if span["worker"] == worker}


@pytest.mark.shows("agent.otel")
@pytest.mark.slow
def test_a_room_of_two_agents_becomes_one_trace_with_the_steps_of_their_own_timeline(place: Place) -> None:
    each = Request(place.source, place.target, 300)
    each.claim()
    each.offer()
    each.arrives()
    workers = {"traced-2/0/0": place.prefill, "traced-2/0/1": place.prefill, "traced-1/0/0": place.decode}

    def halves() -> list[Received] | None:
        found = [one for one in place.collector.of(each.room) if "longshore.half" in one.about]
        return found if len(found) == len(workers) else None

    found = {one.about["longshore.worker"]: one for one in wait_for(halves, what="all halves of the room")}
    assert found.keys() == workers.keys()
    assert len({one.span.trace_id for one in found.values()}) == 1
    for worker, agent in workers.items():
        half = found[worker]

        def offset_ns(worker: str = worker, agent: Agent = agent) -> int:
            first = min((at[4] for at in timeline(agent, each.room, worker)), default=0)
            sent = min((at[4] for at in steps_of(place.collector.of(each.room), worker, 0)), default=0)
            return sent - first

        def same(worker: str = worker, agent: Agent = agent) -> bool:
            sent = steps_of(place.collector.of(each.room), worker, offset_ns())
            return len(sent) > 5 and sent == timeline(agent, each.room, worker)

        wait_for(same, what=f"the steps of {worker}")
        page = agent.room_page(each.room)
        assert page is not None
        entry = next(entry for entry in page["halves"] if entry["worker"] == worker)
        told = entry["room"]
        assert entry["trace_id"] == half.span.trace_id.hex()
        assert entry["trace_id"] in [one["trace_id"] for one in agent.get("/v1/rooms")["rooms"]]
        assert half.span.name == f"room {'prefill' if worker.startswith('traced-2') else 'decode'}"
        assert half.span.status.code in OK_OR_UNSET
        assert half.about["longshore.outcome"] == told["state"] == "done"
        assert half.about["longshore.instance"] == "traced-2"
        assert half.about["longshore.bytes"] > 0
        assert set(half.about["longshore.ways"]) == {"staged"}
        assert set(half.about["longshore.wires"]) == {"Loopback"}
        assert half.about["longshore.slabs"] >= len(half.about["longshore.peers"])
        peers = ["traced-1/0/0"] if worker.startswith("traced-2") else ["traced-2/0/0", "traced-2/0/1"]
        assert sorted(half.about["longshore.peers"]) == peers
        assert half.span.start_time_unix_nano < half.span.end_time_unix_nano
        assert (half.resource["service.name"], half.resource["longshore.deployment"]) == ("longshore-agent", DEPLOYMENT)
        assert half.resource["host.name"] == "n7"
        assert agent.metric("longshore_sent_spans_total") > 0


def test_a_room_that_fails_is_an_error_with_its_reason(place: Place) -> None:
    each = Request(place.source, place.target, 40)
    for rank in place.source.ranks:
        rank.client.send(each.room, each.source_pages[:2], 0, 32, last=True)
    each.claim()
    reasons = {end.reason.name for end in each.ends()}

    def failed() -> list[Received] | None:
        found = [one for one in place.collector.of(each.room) if "longshore.half" in one.about]
        return found if len(found) == 3 else None

    for one in wait_for(failed, what="all halves of the room"):
        assert one.span.status.code == ERROR
        assert one.about["longshore.reason"] in reasons
        assert one.span.status.message.startswith(f"{one.about['longshore.reason']}: ")


def test_without_a_collector_rooms_move_and_their_spans_are_counted_as_dropped(place: Place) -> None:
    away = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    lone = place.world.agent("lone", **away)
    source = place.world.engine(lone, "lone-from")
    target = place.world.engine(lone, "lone-to")
    for _ in range(3):
        each = Request(source.result(), target.result(), 100)
        each.claim()
        each.offer()
        each.arrives()
    wait_for(lambda: lone.metric("longshore_dropped_spans_total") > 10, what="dropped spans")
    assert lone.metric("longshore_sent_spans_total") == 0
    assert "takes no rooms" in lone.log()
    assert lone.stop() == 0


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"HEADERS": "authorization=s3cret%0a"}, "HEADERS has a character that no header may have"),
        ({"HEADERS": "tenant=a,Authorization: Bearer s3cret"}, "HEADERS: entry 2 is no header"),
        ({"TRACES_HEADERS": "authorization=s3cret;a"}, "TRACES_HEADERS: entry 1 is no header"),
        ({"ENDPOINT": "s3cret@collector:4318"}, "ENDPOINT does not begin with http://"),
        ({"ENDPOINT": "http://collector:4318/?key=s3cret"}, "ENDPOINT has a query (?) or credentials (@)"),
        ({"TRACES_ENDPOINT": "https://a:s3cret@collector/v1"}, "TRACES_ENDPOINT has a query (?) or credentials (@)"),
    ],
)
def test_a_variable_that_the_library_would_log_or_cannot_use_is_refused_without_its_value(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    settings = {"LONGSHORE_OTEL": "true", "LONGSHORE_RUN_DIRECTORY": str(tmp_path), "LONGSHORE_DRAIN_S": "0"}
    settings |= {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    complaint = refused_start(settings)
    assert f"OTEL_EXPORTER_OTLP_{said}" in complaint
    assert "s3cret" not in complaint


@pytest.mark.parametrize("value", ["", "a=b", " a = b%20c , d=Bearer e=f/g ,", "x-key=1,"])
def test_headers_that_the_library_reads_are_taken(value: str, caplog: pytest.LogCaptureFixture) -> None:
    otel.check({"OTEL_EXPORTER_OTLP_HEADERS": value, "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector"})
    parse_env_headers(value, liberal=True)
    assert not caplog.records


PAIR = PairKey(RoomKey("p", 7), 1, 0, 11, 12, "d")


def test_new_spans_are_read_once_and_those_that_were_overwritten_are_counted() -> None:
    spans = SpanRecorder(4)

    def add(*starts: int) -> None:
        for start in starts:
            spans.record("write", PAIR, 0, 0, start, start)

    def read(cursor: int) -> tuple[list[int], int, int]:
        found, after, lost = spans.since(cursor)
        return [record[4] for record in found], after, lost

    assert read(0) == ([], 0, 0)
    add(0, 1, 2)
    assert read(0) == ([0, 1, 2], 3, 0)
    add(3)
    assert read(3) == ([3], 4, 0)
    add(4, 5, 6)
    assert read(4) == ([4, 5, 6], 7, 0)
    add(7, 8, 9, 10, 11, 12)
    assert read(7) == ([9, 10, 11, 12], 13, 2)
    assert read(13) == ([], 13, 0)


def test_a_step_of_an_engine_that_ends_in_the_future_is_dropped() -> None:
    spans = SpanRecorder(8)
    steps = (EngineStep("forged", 1, 2**64 - 1), EngineStep("send", 1, 2))
    StepLog(spans, "p", of_engines=True).of_engine(EngineSteps(Half.SOURCE, "p", 7, steps))
    assert [span.stage for span in spans.of_room(7, limit=8)] == ["send"]


def ended(room: int) -> RoomEnded:
    pairs = (PairEnd(PeerId("p", 0, 1), Way.STAGED, 2, 0),)
    return RoomEnded(Half.TARGET, RoomKey("p", room), Reason.NONE, "", 4096, 1, pairs)


def test_a_worker_whose_supervisor_reads_nothing_keeps_a_bounded_number_of_reports_and_counts_the_rest() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    metrics, link = Metrics(), NodeLink(ours)
    spans = SpanRecorder(100)
    reporter = RoomReporter("d/0/0", spans, metrics, link)
    count = 3 * reporting._UNSENT_MAX
    for room in range(count):
        reporter.ended(ended(room), {}, 0)
        spans.record("write", PairKey(RoomKey("p", room), 1, 0, 11, 12, "d"), 0, 0, 1, 2)
    reporter.close()
    assert len(reporter._unsent) <= reporting._UNSENT_MAX
    assert len(reporter._steps) <= spans.capacity
    theirs.setblocking(False)
    taken = [message for message, _ in NodeLink(theirs).receive()]
    found = [RoomReport.from_bytes(message.data) for message in taken if isinstance(message, RoomReported)]
    assert [one.room for one in found] == [str(room) for room in range(len(found))]
    dropped = sum(
        series.value for series in metrics.snapshot().series if series.name == "longshore_dropped_spans_total"
    )
    waiting = sum(message.span_count for message in reporter._unsent)
    # A span for each half and a step of each.
    assert dropped + waiting + sum(one.span_count for one in found) == 2 * count
    assert 0 < len(found) < count
    link.close()
    theirs.close()


def report(**changes: Any) -> RoomReport:
    fields = {
        "worker": "d/0/0", "half": Half.TARGET.name.lower(), "instance": "p", "room": "7", "opened_ns": 1,
        "ended_ns": 2, "outcome": "done", "reason": "", "text": "", "bytes_moved": 3,
        "pairs": (PairReport("p/0/0", "staged", "TCP", 1, 0),),
    }  # fmt: skip
    return RoomReport(**fields | changes)


def test_a_report_of_any_length_is_cut_into_messages_that_fit_a_datagram() -> None:
    step = StepReport("n" * 256, "handle", 1, 2, 0, 3, 4, 2**62, 2**63)
    pairs = tuple(PairReport(f"{'p' * 100}/0/{rank}", "staged", "SharedMemory", 1, 0) for rank in range(1000))
    long = report(text="t" * 100_000, pairs=pairs, instance="i" * 256)
    parts = long.parts([step] * (2 * STEPS_PER_MESSAGE + 1))
    assert [(part.is_first, len(part.steps)) for part in parts] == [
        (True, STEPS_PER_MESSAGE), (False, STEPS_PER_MESSAGE), (False, 1),
    ]  # fmt: skip
    assert max(len(part.to_bytes()) for part in parts) < 60_000
    assert sum(part.span_count for part in parts) == 2 * STEPS_PER_MESSAGE + 2
    assert [len(part.steps) for part in report().parts([])] == [0]


def test_reports_above_the_queues_limit_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "REPORTS_MAX", 2)
    metrics = Metrics()
    off = telemetry.Telemetry(Settings(), metrics, "1")
    for _ in range(5):
        off.take(RoomReported(report().to_bytes(), 4))
    dropped = [series.value for series in metrics.snapshot().series if series.name == "longshore_dropped_spans_total"]
    assert dropped == [12]
    off.close()


def test_spans_are_counted_as_dropped_if_the_library_refuses_its_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER", "nobody")
    metrics = Metrics()
    refused = telemetry.Telemetry(Settings(otel=True), metrics, "1")
    for _ in range(3):
        refused.take(RoomReported(report().to_bytes(), 1))
    # The library takes long to load on a busy machine, and an agent that stops does not wait for it.
    wait_for(lambda: metrics.snapshot().value("longshore_dropped_spans_total") == 3, what="three dropped spans")
    refused.close()
    assert "OpenTelemetry cannot begin" in caplog.text


def test_a_batch_that_cannot_be_sent_does_not_end_the_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def send(_: object, reports: list[RoomReport]) -> bool:
        if not sent:
            sent.append(0)
            raise ValueError("no span can be made of it")
        sent.append(len(reports))
        return True

    monkeypatch.setattr(otel.SpanSender, "send", send)
    metrics = Metrics()
    sending = telemetry.Telemetry(Settings(otel=True), metrics, "1")
    sending.take(RoomReported(report().to_bytes(), 1))
    wait_for(lambda: metrics.snapshot().value("longshore_dropped_spans_total") == 1, what="the dropped batch")
    sending.take(RoomReported(report().to_bytes(), 1))
    wait_for(lambda: metrics.snapshot().value("longshore_sent_spans_total") == 1, what="the sent batch")
    sending.close()


def test_a_collector_that_refuses_every_request_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector()
    collector.status = 401
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    metrics = Metrics()
    sending = telemetry.Telemetry(Settings(otel=True), metrics, "1")

    def send(name: str, count: int) -> None:
        sending.take(RoomReported(report().to_bytes(), 1))
        wait_for(lambda: metrics.snapshot().value(f"longshore_{name}_spans_total") == count, what=f"span {count}")

    try:
        for count in range(1, 6):
            send("dropped", count)
        said = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]
        assert [("401" in text) for text in said] == [True]
        collector.status = 200
        send("sent", 1)
        collector.status = 401
        send("dropped", 6)
        assert [("401" in record.getMessage()) for record in caplog.records].count(True) == 2
    finally:
        sending.close()
        collector.close()
