"""Tests the timeline of a transfer: a valid trace file with the stages of every slab in order."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest

from longshore_lab.bench import BenchError
from longshore_lab.bench.timeline import STAGES, Timeline

STARTS = {"gather": 0, "write": 2, "scatter": 4}


def span(stage: str, slab: int, start_ns: int, end_ns: int, *, lane: int = 0, source_rank: int = 0) -> dict[str, Any]:
    return {
        "stage": stage,
        "room": str(2**63 + 1),
        "source_rank": source_rank,
        "target_rank": 0,
        "slab": slab,
        "lane": lane,
        "start_ns": start_ns,
        "end_ns": end_ns,
    }


def spans_of(slab: int, start_ns: int, *, lane: int = 0, source_rank: int = 0) -> list[dict[str, Any]]:
    return [
        span(stage, slab, start_ns + 1000 * at, start_ns + 1000 * at + 1500, lane=lane, source_rank=source_rank)
        for stage, at in STARTS.items()
    ]


def read(path) -> list[dict[str, Any]]:
    """Return the events; check that the file has the required format."""
    body = json.loads(path.read_text())
    assert set(body) == {"traceEvents", "displayTimeUnit"}
    for event in body["traceEvents"]:
        assert event["ph"] in {"X", "M", "s", "t", "f"}
        assert isinstance(event["pid"], int)
        assert event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
    named = {event["pid"] for event in body["traceEvents"] if event["name"] == "process_name"}
    rows = {(event["pid"], event["tid"]) for event in body["traceEvents"] if event["name"] == "thread_name"}
    for event in body["traceEvents"]:
        if event["ph"] == "X":
            assert event["pid"] in named
            assert (event["pid"], event["tid"]) in rows
    assert not [pair for pair in overlapping(body["traceEvents"]) if row_of(pair[0]) == row_of(pair[1])]
    return list(body["traceEvents"])


def row_of(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]


def slab_of(event: dict[str, Any]) -> tuple[int, int, int]:
    arguments = event["args"]
    return arguments["source_rank"], arguments["target_rank"], arguments["slab"]


def overlapping(events: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of spans that ran at the same time."""
    spans = [event for event in events if event["ph"] == "X"]
    return [
        (one, other)
        for one, other in itertools.combinations(spans, 2)
        if one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]
    ]


def by_slab(events: Iterable[dict[str, Any]]) -> dict[tuple[int, int, int], dict[str, dict[str, Any]]]:
    found: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["cat"] not in found.setdefault(slab_of(event), {})
            found[slab_of(event)][event["cat"]] = event
    return found


def test_a_slab_has_its_three_stages_at_its_own_workers_and_an_arrow_through_them(tmp_path):
    timeline = Timeline()
    timeline.add("staged", spans_of(0, 10**15) + spans_of(0, 10**15, source_rank=1), staged=True)
    timeline.write(tmp_path / "t.json")
    events = read(tmp_path / "t.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for (rank, _, _), stages in by_slab(events).items():
        assert [stages[stage]["ts"] for stage in STAGES] == [0, 2, 4]
        assert [names[stages[stage]["pid"]] for stage in STAGES] == [
            f"staged: prefill rank {rank}",
            f"staged: prefill rank {rank}",
            "staged: decode rank 0",
        ]
    arrows = [event for event in events if event["ph"] in {"s", "t", "f"}]
    assert sorted((event["id"], event["ph"]) for event in arrows) == [(n, phase) for n in (0, 1) for phase in "fst"]


def test_spans_of_one_lane_that_overlap_get_rows_of_their_own(tmp_path):
    timeline = Timeline()
    timeline.add("direct", [span("write", slab, 500 * slab, 500 * slab + 900) for slab in range(3)], staged=False)
    timeline.write(tmp_path / "t.json")
    events = [event for event in read(tmp_path / "t.json") if event["ph"] == "X"]
    assert len({row_of(event) for event in events}) == 2
    assert row_of(events[0]) == row_of(events[2])


def test_a_stage_that_is_unknown_is_left_out(tmp_path):
    timeline = Timeline()
    timeline.add("staged", [*spans_of(0, 0), span("dreaming", 0, 1, 2)], staged=True)
    timeline.write(tmp_path / "t.json")
    assert {event.get("cat") for event in read(tmp_path / "t.json")} <= {None, "slab", *STAGES}


@pytest.mark.parametrize(
    ("spans", "what"),
    [
        (spans_of(0, 0)[:2], "has no span of its scatter"),
        (spans_of(1, 0), "slabs from rank 0 to 0 are missing"),
        (spans_of(0, 0)[::2], "has no span of its wire"),
    ],
)
def test_spans_that_the_workers_have_forgotten_are_told_with_the_way_out(spans, what):
    with pytest.raises(BenchError, match=what) as caught:
        Timeline().add("staged", spans, staged=True)
    assert "spans_max" in str(caught.value)


def test_an_empty_timeline_is_not_written(tmp_path):
    with pytest.raises(BenchError):
        Timeline().write(tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


@pytest.mark.rest("benches")
@pytest.mark.slow
def test_a_traced_run_shows_the_stages_of_every_slab_in_order_and_slabs_that_overlap(measured_run):
    events = read(measured_run.trace)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    staged = by_slab(event for event in events if names[event["pid"]].startswith("staged"))
    assert len(staged) >= 8
    assert {source for source, _, _ in staged} == {0, 1}
    for stages in staged.values():
        assert set(stages) == set(STAGES)
        for first, second in itertools.pairwise(stages[stage] for stage in STAGES):
            # Times in the file are microseconds with a fraction: equal ones may differ in the last digit.
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3
    pairs = overlapping(each for stages in staged.values() for each in stages.values())
    assert [pair for pair in pairs if slab_of(pair[0]) != slab_of(pair[1])]
    direct = by_slab(event for event in events if names[event["pid"]].startswith("direct"))
    assert direct
    assert all(set(stages) == {"wire"} for stages in direct.values())
