"""Tests metrics and spans: they match the table, add up across processes, and pass Prometheus' own parser."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from longshore_agent.status import metrics as module
from longshore_agent.status.metric_table import FINDINGS, READY, SECONDS_BUCKETS, TABLE, Kind, named_wire
from longshore_agent.status.metrics import Metrics, MetricsSnapshot, render
from longshore_agent.status.spans import Span, SpanRecorder
from longshore_wire.errors import Reason
from longshore_wire.names import room_name
from longshore_wire.peer_messages import PairKey, RoomKey

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics.md"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """Parse `text` with Prometheus' own Python client."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_something_counts_each_metric() -> None:
    modules = [path for path in (ROOT / "agent").rglob("*.py") if path.name != "metric_table.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in modules)
    assert [row.name for row in TABLE if row.name not in {READY, FINDINGS} and f'"{row.name}"' not in text] == []


def test_counters_gauges_and_histograms_of_two_workers_are_read_back_by_prometheus() -> None:
    first, second = Metrics(), Metrics()
    first.add("longshore_stage_bytes_total", 2**53, stage="gather")
    first.add("longshore_slabs_total", half="source", way="staged")
    first.add("longshore_slabs_total", 2, half="source", way="staged")
    second.add("longshore_slabs_total", half="target", way="slices")
    second.add("longshore_lane_bytes_total", 7, lane=3)
    second.set("longshore_ring_used_bytes", 10)
    second.set("longshore_ring_used_bytes", 4)
    for seconds in (5e-6, 1e-5, 2e-5, 99.0):
        second.observe("longshore_stage_seconds", seconds, stage="scatter")
    samples = parsed(render({"a": first.snapshot(), "b": second.snapshot()}))
    assert samples["longshore_stage_bytes_total", (("stage", "gather"), ("worker", "a"))] == 2**53
    assert samples["longshore_slabs_total", (("half", "source"), ("way", "staged"), ("worker", "a"))] == 3
    assert samples["longshore_slabs_total", (("half", "target"), ("way", "slices"), ("worker", "b"))] == 1
    assert samples["longshore_lane_bytes_total", (("lane", "3"), ("worker", "b"))] == 7
    assert samples["longshore_ring_used_bytes", (("worker", "b"),)] == 4
    bucket = {
        dict(labels)["le"]: value
        for (name, labels), value in samples.items()
        if name == "longshore_stage_seconds_bucket"
    }
    assert bucket["1e-05"] == 2
    assert bucket["3e-05"] == bucket["10"] == 3
    assert bucket["+Inf"] == 4
    assert len(bucket) == len(SECONDS_BUCKETS) + 1
    labels = (("stage", "scatter"), ("worker", "b"))
    assert samples["longshore_stage_seconds_count", labels] == 4
    assert samples["longshore_stage_seconds_sum", labels] == pytest.approx(99.000035)


def test_a_workers_name_cannot_break_the_page() -> None:
    counts = Metrics()
    counts.add("longshore_notices_total")
    name = 'a"b\\c\nd{}'
    assert parsed(render({name: counts.snapshot()}))["longshore_notices_total", (("worker", name),)] == 1


def test_counters_with_few_labels_are_there_from_the_start() -> None:
    samples = parsed(render({"a": Metrics().snapshot()}))
    assert samples["longshore_ring_rounds_total", (("worker", "a"),)] == 0
    assert samples["longshore_slabs_total", (("half", "target"), ("way", "staged"), ("worker", "a"))] == 0
    assert samples["longshore_process_cpu_seconds_total", (("worker", "a"),)] > 0


def test_each_metric_of_the_table_can_be_counted_and_is_shown() -> None:
    counts = Metrics()
    act = {Kind.COUNTER: counts.add, Kind.GAUGE: counts.set, Kind.HISTOGRAM: counts.observe}
    for row in TABLE:
        act[row.kind](row.name, 1.5, **{n: d[0] if d else "x" for n, d in zip(row.labels, row.domains, strict=True)})
    families = {family.name for family in text_string_to_metric_families(render({"a": counts.snapshot()}))}
    assert families == {row.name.removesuffix("_total") for row in TABLE}


@pytest.mark.parametrize(
    ("method", "name", "labels"),
    [
        ("add", "longshore_typo_total", {}),
        ("add", "longshore_ring_used_bytes", {}),
        ("set", "longshore_notices_total", {}),
        ("observe", "longshore_notices_total", {}),
        ("add", "longshore_stage_bytes_total", {}),
        ("add", "longshore_stage_bytes_total", {"stage": "cook"}),
        ("add", "longshore_notices_total", {"stage": "gather"}),
        ("add", "longshore_slabs_total", {"half": "source", "stage": "gather"}),
    ],
)
def test_a_name_or_label_that_the_table_lacks_asserts_and_counts_nothing(
    method: str, name: str, labels: dict[str, str]
) -> None:
    counts = Metrics()
    before = counts.snapshot().series[:-1]
    with pytest.raises((AssertionError, KeyError)):
        getattr(counts, method)(name, 1, **labels)
    assert counts.snapshot().series[:-1] == before


def test_a_label_that_is_not_bounded_asserts_before_it_fills_the_memory() -> None:
    counts = Metrics()
    for number in range(module.SERIES_MAX):
        counts.add("longshore_stale_messages_total", message=f"m{number}")
    with pytest.raises(AssertionError, match="not bounded"):
        counts.add("longshore_stale_messages_total", message="one more")
    assert counts.snapshot().value("longshore_stale_messages_total") == module.SERIES_MAX


def test_a_counter_that_somebody_else_counts_never_goes_back() -> None:
    counts = Metrics()
    counts.advance("longshore_ring_rounds_total", 5)
    counts.advance("longshore_ring_rounds_total", 3)
    assert counts.snapshot().value("longshore_ring_rounds_total") == 5


def test_no_count_is_lost_between_threads() -> None:
    counts = Metrics()

    def work() -> None:
        for _ in range(2000):
            counts.add("longshore_writes_total", way="staged")
            counts.observe("longshore_stage_seconds", 0.001, stage="write")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = counts.snapshot()
    assert snapshot.value("longshore_writes_total", way="staged") == 8000
    assert snapshot.count("longshore_stage_seconds", stage="write") == 8000


def test_a_snapshot_survives_its_way_to_the_supervisor_and_can_be_asked() -> None:
    counts = Metrics()
    counts.add("longshore_rooms_total", half="source", outcome="failed", reason=Reason.PEER_LOST.name.lower())
    counts.add("longshore_rooms_total", 2, half="target", outcome="done", reason="none")
    counts.observe("longshore_stage_seconds", 0.5, stage="gather")
    sent = counts.snapshot()
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=MetricsSnapshot)
    assert snapshot == sent
    assert snapshot.value("longshore_rooms_total") == 3
    assert snapshot.value("longshore_rooms_total", outcome="done") == 2
    assert snapshot.value("longshore_rooms_total", outcome="cancelled") == 0
    assert (snapshot.value("longshore_stage_seconds"), snapshot.count("longshore_stage_seconds")) == (0.5, 1)


def test_every_reason_of_a_failed_room_is_shown_at_0_before_the_first_failure() -> None:
    page = module.render({"d-0/0/0": Metrics().snapshot()})
    for reason in Reason:
        line = f'longshore_rooms_total{{worker="d-0/0/0",half="target",outcome="failed",reason="{reason.name.lower()}"}} 0\n'
        assert (line in page) == (reason not in {Reason.NONE, Reason.CANCELLED})
    assert 'half="target",outcome="done",reason="none"} 0\n' in page


def test_the_table_follows_the_conventions_of_prometheus() -> None:
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names)
    for row in TABLE:
        assert re.fullmatch(r"longshore_[a-z_]+", row.name)
        assert row.name.endswith("_total") == (row.kind is Kind.COUNTER)
        assert row.help.endswith(".")
        assert bool(row.buckets) == (row.kind is Kind.HISTOGRAM)
        if row.unit in {"bytes", "seconds"}:
            assert row.name.removesuffix("_total").endswith(row.unit)


def test_the_reference_page_of_metrics_is_what_the_table_says() -> None:
    assert PAGE.read_text() == module.reference()


def pair(room: int, *, instance: str = "p", source_rank: int = 0) -> PairKey:
    return PairKey(RoomKey(instance, room), source_rank, 1, 11, 12, "d")


def test_spans_of_a_room_come_back_by_their_start_and_others_do_not() -> None:
    spans = SpanRecorder(10)
    spans.record("write", pair(2**63 + 5), 0, 1, 30, 40)
    spans.record("gather", pair(2**63 + 5), 0, 1, 10, 30)
    spans.record("gather", pair(7), 0, 1, 15, 20)
    spans.record("gather", pair(2**63 + 5, instance="q"), 0, 1, 5, 20)
    found = spans.of_room(2**63 + 5, limit=10, instance="p")
    assert [(span.stage, span.start_ns, span.end_ns) for span in found] == [("gather", 10, 30), ("write", 30, 40)]
    assert found[0] == Span("gather", "p", room_name(2**63 + 5), 0, 0, 1, 0, 1, 10, 30)
    assert len(spans.of_room(2**63 + 5, limit=10)) == 3
    assert [span.start_ns for span in spans.newest(limit=2)] == [15, 30]


def test_the_recorder_keeps_the_newest_spans_and_no_more() -> None:
    spans = SpanRecorder(4)
    for number in range(11):
        spans.record("gather", pair(number % 2), number, 0, number, number + 1)
    assert len(spans) == 4
    assert [span.slab for span in spans.newest(limit=100)] == [7, 8, 9, 10]
    assert [span.slab for span in spans.of_room(1, limit=1)] == [9]


@pytest.mark.parametrize(
    ("wire", "way", "label"),
    [("TCP", "staged", "TCP"), ("carrier pigeon", "slices", "Unknown"), ("SharedMemory", "direct", "None")],
)
def test_the_wire_of_written_bytes_is_one_of_the_table(wire: str, way: str, label: str) -> None:
    counts = Metrics()
    counts.add("longshore_written_bytes_total", 7, way=way, wire=named_wire(wire, way))
    assert counts.snapshot().value("longshore_written_bytes_total", way=way, wire=label) == 7


def test_no_peer_has_the_wire_of_direct_copies() -> None:
    found = {
        dict(labels)["wire"]
        for name, labels in parsed(render({"w": Metrics().snapshot()}))
        if name == "longshore_peer_wires"
    }
    assert "Unknown" in found
    assert "None" not in found
