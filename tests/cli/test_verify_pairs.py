"""Tests which pairs `longshore verify` chooses, in which rounds, and which it calls slow."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from longshore_cli.verify.pairs import Measured, choose, is_bad, judge, quantile, rounds
from longshore_cli.verify.report import Load, load_table, summary, table, verify_json
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.plan import plan


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 3), (3, 2), (4, 6), (5, 5), (1, 7)])
def test_every_pair_is_chosen_once_and_no_agent_is_twice_in_a_round(prefill: int, decode: int) -> None:
    sources, targets = names("p", prefill), names("d", decode)
    pairs = choose(sources, targets, 1000)
    assert sorted(pairs) == sorted((one, other) for one in sources for other in targets)
    found = list(rounds(pairs))
    assert sorted(pair for now in found for pair in now) == sorted(pairs)
    assert all(max(Counter(name for pair in now for name in pair).values()) == 1 for now in found)
    # As few rounds as the agent with most pairs needs.
    assert len(found) == max(prefill, decode)


def test_an_agent_of_both_roles_is_in_one_pair_at_a_time_and_paired_with_itself() -> None:
    nodes = names("n", 4)
    # Within one agent there is no link, so that these pairs come last.
    assert all(one != other for one, other in choose(nodes, nodes, 12))
    found = list(rounds(choose(nodes, nodes, 1000)))
    assert sum(map(len, found)) == 16
    assert all(len({name for pair in now for name in pair}) == sum(len(set(pair)) for pair in now) for now in found)


@pytest.mark.parametrize(("prefill", "decode"), [(200, 200), (200, 30), (30, 200)])
def test_a_limit_leaves_each_agent_in_about_as_many_pairs(prefill: int, decode: int) -> None:
    pairs = choose(names("p", prefill), names("d", decode), 400)
    assert len(set(pairs)) == 400
    for side, count in ((0, prefill), (1, decode)):
        times = Counter(pair[side] for pair in pairs)
        assert len(times) == count
        assert max(times.values()) - min(times.values()) <= 2


def test_the_first_round_of_many_agents_is_there_before_the_others_are_made() -> None:
    nodes = names("n", 200)
    # `bench cluster` takes only this one. To make all of them takes minutes for 1,000 agents.
    found = rounds(choose(nodes, nodes, 200**2))
    assert iter(found) is found and len(next(found)) == 100


FAST_AND_SLOW_MEMORY = 3 * [(10e9, "gpu")] + 3 * [(1e9, "host")]


def layout(tp: int, page_size: int) -> KVLayout:
    return KVLayout(ModelShape.kv(2, 4, 32, 4), Parallel(tp=tp), page_size)


def pair(number: int, speed: float, wire: str = "RDMA", **more: str) -> Measured:
    return Measured("p", f"d{number}", 1 << 20, speed, "staged", wire, **more)


def test_a_pair_below_half_of_its_wires_median_is_slow_and_named_with_both_nodes() -> None:
    judged = judge([*(pair(number, 10e9) for number in range(3)), pair(3, 4.9e9), pair(4, 1e9, "TCP")])
    assert [each.verdict for each in judged] == ["ok", "ok", "ok", "SLOW", "ok"]
    assert [each.expected for each in judged] == [10e9] * 4 + [0.0]
    assert (is_bad(judged, strict=False), is_bad(judged, strict=True)) == (False, True)
    lines = table(judged)
    assert any(line.startswith("p -> d3: slow: 4.90 GB/s") and "over RDMA" in line for line in lines)
    assert summary(judged, 9) == "5 of 9 pairs moved every byte right; 1 slow, 4 left out: give --pairs 9 for all"


def test_pairs_of_other_memory_have_another_expectation() -> None:
    judged = judge([pair(number, speed, memory=memory) for number, (speed, memory) in enumerate(FAST_AND_SLOW_MEMORY)])
    assert [(each.verdict, each.expected) for each in judged] == 3 * [("ok", 10e9)] + 3 * [("ok", 1e9)]


def test_a_failed_pair_is_no_measurement_and_says_why() -> None:
    bad = pair(9, 0.0, reason="PEER_LOST", text="the peer is silent")
    judged = judge([pair(0, 1.0), pair(1, 1.0), bad, Measured("p", "d5", reason="BUSY", text="d5: no", untested=True)])
    assert [each.verdict for each in judged] == ["ok", "ok", "FAILED", "untested"]
    assert is_bad(judged, strict=False) and is_bad(judged[3:], strict=False)
    assert "p -> d9: PEER_LOST: the peer is silent" in table(judged)
    found = json.loads(verify_json(judged, 4, {"kv": plan(layout(2, 16), layout(1, 8))}))
    assert [each["verdict"] for each in found["pairs"]] == ["ok", "ok", "failed", "untested"]
    assert found["pair_count"] == 4
    assert found["plan"] == {"way": "staged", "rank_pairs": 2}


def test_no_text_of_a_cluster_or_an_engine_controls_the_terminal() -> None:
    said = "no\x1b[2J\nno\x9b\u202e"
    judged = judge([Measured(said, said, reason="BUSY", text=said, wire=said)])
    load = Load("host", 64 << 10, 1, 1, 4, 0, 0.1, 0.2, 1e6, said)
    assert all(line.isprintable() for line in (*table(judged), *load_table([load])))
    assert verify_json(judged, 1, {"kv": plan(layout(2, 16), layout(1, 8))}).replace("\n", "").isprintable()


def test_quantiles_are_measured_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([1.0], 0.5) == 1.0


def test_the_size_of_a_small_room_is_shown_as_it_was_asked() -> None:
    _, line = load_table([Load("host", 64 << 10, 1, 1, 4, 0, 0.1, 0.2, 1e6)])
    assert line.split()[:3] == ["host", "64", "KiB"]
