"""Tests the steps of a room: joined from several agents, with their gaps, as a table and as a file for Perfetto."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longshore_cli.rooms import timeline
from longshore_cli.rooms.clocks import Correction
from longshore_cli.rooms.steps import (
    AmbiguousRoomError,
    Gap,
    NoStepsError,
    arrows,
    busy_ns,
    cut_workers,
    gaps,
    joined,
    transfer,
)

PREFILL, DECODE = "p/0/1", "d/0/0"
SAME = [Correction(0, 0), Correction(0, 0)]
SHIFT_NS = 5_000_000_000
# Above the longest time of a test's room.
LATE_NS = 10**9


def span(worker: str, stage: str, kind: str, start_us: float, end_us: float, **more: Any) -> dict[str, Any]:
    found = {
        "worker": worker,
        "stage": stage,
        "kind": kind,
        "source_rank": -1,
        "target_rank": -1,
        "slab": -1,
        "cache": -1,
        "lane": -1,
        "start_ns": LATE_NS + round(1000 * start_us),
        "end_ns": LATE_NS + round(1000 * end_us),
        "woken_ns": 0,
    }
    return found | more


def detail(half: str, worker: str, *spans: dict[str, Any], instance: str = "p") -> dict[str, Any]:
    halves = [{"worker": worker, "room": {"half": half, "instance": instance}}]
    return {"room": "7", "halves": halves, "spans": spans, "incomplete": []}


def at_peer(worker: str, stage: str, kind: str, start_us: float, end_us: float, woken_us: float) -> dict[str, Any]:
    woken_ns = LATE_NS + round(1000 * woken_us)
    return span(worker, stage, kind, start_us, end_us, source_rank=1, target_rank=0, woken_ns=woken_ns)


def in_lane(worker: str, stage: str, lane: int, start_us: float, end_us: float) -> dict[str, Any]:
    return span(worker, stage, "stage", start_us, end_us, source_rank=1, target_rank=0, slab=0, lane=lane)


def prefill() -> dict[str, Any]:
    return detail(
        "source",
        PREFILL,
        span(PREFILL, "send", "call", 10, 12),
        span(PREFILL, "send waits", "wait", 12, 40),
        at_peer(PREFILL, "Claim", "handle", 9, 10, 8),
        span(PREFILL, "Offer", "handle", 22, 30, woken_ns=LATE_NS + 20_000),
        span(PREFILL, "send Accepted", "send", 31, 32, woken_ns=LATE_NS + 20_000),
        in_lane(PREFILL, "gather", 2, 50, 60),
        in_lane(PREFILL, "write", 2, 60, 70),
    )


def decode() -> dict[str, Any]:
    return detail(
        "target",
        DECODE,
        span(DECODE, "receive", "call", 0, 2),
        span(DECODE, "Receive", "handle", 3, 5, woken_ns=LATE_NS + 2_500),
        at_peer(DECODE, "send Claim", "send", 5, 6, 2.5),
        in_lane(DECODE, "scatter", 0, 75, 95),
        span(DECODE, "send DONE", "send", 100, 101, woken_ns=LATE_NS + 98_000),
        span(DECODE, "DONE", "wait", 110, 115),
    )


def test_steps_of_two_agents_are_in_the_order_of_their_start_and_named_by_role_and_rank() -> None:
    steps = joined([prefill(), decode()], SAME)
    assert [step.start_ns for step in steps] == sorted(step.start_ns for step in steps)
    assert {(step.process, step.thread) for step in steps} == {
        ("decode engine 0", "calls"),
        ("decode engine 0", "events"),
        ("decode worker 0", "control"),
        ("decode worker 0", "scatter thread 0"),
        ("decode worker 0", "turns"),
        ("prefill engine 1", "calls"),
        ("prefill worker 1", "control"),
        ("prefill worker 1", "lane 2"),
        ("prefill worker 1", "turns"),
    }


def test_ranks_of_one_role_that_are_not_unique_are_named_by_their_instance() -> None:
    other = detail("target", "e/0/0", span("e/0/0", "Receive", "handle", 4, 5))
    names = {step.process for step in joined([decode(), other], SAME)}
    assert {"decode worker d/0/0", "decode worker e/0/0"} <= names


def test_a_turn_spans_all_steps_of_the_room_from_the_waking_of_its_thread() -> None:
    turns = [
        (step.process, step.start_ns, step.end_ns) for step in joined([prefill()], SAME[:1]) if step.name == "turn"
    ]
    assert turns == [
        ("prefill worker 1", LATE_NS + 8_000, LATE_NS + 10_000),
        ("prefill worker 1", LATE_NS + 20_000, LATE_NS + 32_000),
    ]


def test_a_host_with_a_shifted_clock_has_the_same_timeline_after_its_correction() -> None:
    late = decode()
    late["spans"] = [
        each
        | {name: each[name] + SHIFT_NS for name in ("start_ns", "end_ns")}
        | {"woken_ns": each["woken_ns"] + SHIFT_NS if each["woken_ns"] else 0}
        for each in late["spans"]
    ]
    assert joined([prefill(), late], SAME) != joined([prefill(), decode()], SAME)
    assert joined([prefill(), late], [Correction(0, 0), Correction(SHIFT_NS, 9)]) == joined([prefill(), decode()], SAME)


def test_gaps_are_the_times_in_which_nothing_ran_and_waits_do_not_fill_them() -> None:
    steps = joined([prefill(), decode()], SAME)
    found = gaps(steps, LATE_NS, LATE_NS + 115_000)
    assert [((gap.start_ns - LATE_NS) / 1e3, (gap.end_ns - LATE_NS) / 1e3, gap.until) for gap in found] == [
        (2, 2.5, "decode worker 0: turn"),
        (6, 8, "prefill worker 1: turn"),
        (12, 20, "prefill worker 1: turn"),
        (32, 40, "prefill engine 1: end of send waits"),
        (40, 50, "prefill worker 1: gather"),
        (70, 75, "decode worker 0: scatter"),
        (95, 98, "decode worker 0: turn"),
        (101, 110, "decode engine 0: DONE"),
        (110, 115, "decode engine 0: end of DONE"),
    ]
    ran_ns = busy_ns(steps, LATE_NS, LATE_NS + 115_000)
    assert ran_ns + sum(gap.end_ns - gap.start_ns for gap in found) == 115_000


def test_a_gap_within_a_window_is_cut_at_its_ends() -> None:
    steps = joined([decode()], SAME[:1])
    found = gaps(steps, LATE_NS + 20_000, LATE_NS + 30_000)
    assert found == [Gap(LATE_NS + 20_000, LATE_NS + 30_000, "the end")]
    assert busy_ns(steps, LATE_NS + 80_000, LATE_NS + 90_000) == 10_000


def test_the_time_of_a_transfer_is_from_both_halves_open_to_the_end_that_decode_takes() -> None:
    assert transfer(joined([prefill(), decode()], SAME)) == (LATE_NS + 10_000, LATE_NS + 115_000)
    assert transfer(joined([prefill()], SAME[:1])) is None


def test_an_arrow_leads_from_each_message_to_the_step_that_handles_it() -> None:
    steps = joined([prefill(), decode()], SAME)
    assert {(steps[sender].name, steps[receiver].name) for sender, receiver in arrows(steps)} == {
        ("receive", "Receive"),
        ("send Claim", "Claim"),
        ("send", "Offer"),
        ("send DONE", "DONE"),
    }


def test_messages_of_two_caches_are_told_apart() -> None:
    ranks = {"source_rank": 1, "target_rank": 0}
    sent = [span(DECODE, "send Claim", "send", 1 + cache, 2 + cache, cache=cache, **ranks) for cache in (0, 1)]
    taken = [span(PREFILL, "Claim", "handle", 11 - cache, 12 - cache, cache=cache, **ranks) for cache in (0, 1)]
    steps = joined([detail("target", DECODE, *sent), detail("source", PREFILL, *taken)], SAME)
    found = [(steps[sender].cache, steps[receiver].cache) for sender, receiver in arrows(steps)]
    assert sorted(found) == [(0, 0), (1, 1)]
    lines = [line for line in timeline.table(steps).splitlines() if "send Claim" in line]
    assert [line.partition("send ")[2] for line in lines] == ["Claim 1→0", "Claim 1→0 cache 1"]


def test_the_table_has_a_line_for_each_step_and_each_gap_and_the_sums() -> None:
    lines = timeline.table(joined([prefill(), decode()], SAME)).splitlines()
    assert lines[0].split() == ["at", "us", "for", "us", "process", "step"]
    assert " 22.0     8.0  prefill worker 1  Offer" in lines
    assert " 60.0    10.0  prefill worker 1  write 1→0 slab 0" in lines
    assert " 70.0     5.0  --                nothing, until decode worker 0: scatter" in lines
    assert not any("nothing" in line and line.split()[1] == "0.5" for line in lines)
    assert lines[-6:] == [
        "from the first step to the last: 115.0 us, and in 50.5 us of them (44 %) nothing of this room ran",
        "from both halves open to decode's DONE: 105.0 us, and in 48.0 us of them (46 %) nothing of this room ran",
        "  of that, prefill engine 1 ran 2.0 us",
        "  of that, prefill worker 1 ran 32.0 us",
        "  of that, decode worker 0 ran 23.0 us",
        "  of that, decode engine 0 ran 0.0 us",
    ]


def test_without_steps_of_engines_the_setting_is_named() -> None:
    page = detail("source", PREFILL, span(PREFILL, "Offer", "handle", 1, 2))
    text = timeline.table(joined([page], SAME[:1]))
    assert "LONGSHORE_CLIENT_SPANS=true" in text
    assert "the time to decode's DONE is not known" in text


def test_a_room_whose_first_steps_are_gone_is_called_incomplete_in_the_table_and_in_the_file(tmp_path) -> None:
    details = [prefill() | {"incomplete": [PREFILL]}, decode()]
    steps, gone = joined(details, SAME), cut_workers(details)
    said = [line for line in timeline.table(steps, gone).splitlines() if "incomplete" in line]
    assert len(said) == 1
    assert "prefill worker 1" in said[0]
    assert "LONGSHORE_SPANS_MAX" in said[0]
    assert "decode" not in said[0]
    assert "incomplete" not in timeline.table(steps, cut_workers([prefill(), decode()]))
    timeline.write(steps, tmp_path / "t.json", gone)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [
        "prefill engine 1",
        "prefill worker 1 (first steps are gone)",
        "decode worker 0",
        "decode engine 0",
    ]


def test_a_long_room_is_cut_in_the_table_and_whole_in_the_file(tmp_path) -> None:
    spans = [span(PREFILL, "Grant", "handle", 2 * number, 2 * number + 1) for number in range(500)]
    steps = joined([detail("source", PREFILL, *spans)], SAME[:1])
    text = timeline.table(steps)
    assert "… 100 more steps" in text
    timeline.write(steps, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 500


def test_the_file_has_a_process_for_each_engine_and_worker_in_the_order_of_the_way(tmp_path) -> None:
    timeline.write(joined([prefill(), decode()], SAME), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[number] for number in sorted(names)] == [
        "prefill engine 1",
        "prefill worker 1",
        "decode worker 0",
        "decode engine 0",
    ]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (spans["Offer"]["ts"], spans["Offer"]["dur"]) == (22, 8)
    arrow = [(event["ph"], names[event["pid"]]) for event in events if event["name"] == "message" and event["id"] == 0]
    assert arrow == [("s", "decode engine 0"), ("f", "decode worker 0")]
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} == rows


def test_a_file_that_cannot_be_written_is_told_with_the_way_out(tmp_path) -> None:
    with pytest.raises(timeline.TraceFileError, match=f"-o {tmp_path}: Is a directory: name a file"):
        timeline.write(joined([prefill()], SAME[:1]), tmp_path)


def test_names_that_an_engine_gives_are_shown_without_control_characters() -> None:
    page = detail("source", PREFILL, span(PREFILL, "send\x1b[2J", "call", 1, 2))
    assert "\x1b" not in timeline.table(joined([page], SAME[:1]))


def test_a_room_without_steps_and_a_number_of_two_instances_are_told_with_the_way_out() -> None:
    with pytest.raises(NoStepsError, match="LONGSHORE_SPANS_MAX"):
        joined([detail("source", PREFILL)], SAME[:1])
    with pytest.raises(AmbiguousRoomError, match="p, q: choose with --instance"):
        joined([prefill(), detail("source", "q/0/0", instance="q")], SAME)
