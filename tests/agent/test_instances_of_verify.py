"""Tests what a real agent gives the instances of `longshore verify`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from agent_fleet import World
from agent_world import EVENT_LIMIT_S, Agent, wait_for
from test_agent_caches import FAMILIES, TOKENS, WINDOW, layout_of

from longshore_agent.supervisor.lives import FILE_NAME
from longshore_client import Half, ModelShape, PageOrder, Parallel
from longshore_lab.test_engine.headroom import on_host
from longshore_lab.test_engine.instance import Instance
from longshore_wire.layout import KVLayout
from longshore_wire.names import TEST_INSTANCE_PREFIX, TEST_LANE_BYTES_MAX


def test_a_page_that_cannot_be_taken_apart_fits_the_small_staging_of_a_test(tmp_path: Path) -> None:
    layout = KVLayout(ModelShape.kv(16, 8, 128, 2), Parallel(), 128, PageOrder.OPAQUE)
    assert layout.rank_unit_bytes > TEST_LANE_BYTES_MAX
    instances: list[Instance] = []
    world = World(tmp_path, LONGSHORE_FORCE_WAY="Staged")
    try:
        agent = world.agent("opaque", LONGSHORE_LANE_BYTES="64Mi", LONGSHORE_RING_BYTES="512Mi")
        socket, tokens = agent.socket, 3 * layout.page_size
        for half in (Half.SOURCE, Half.TARGET):
            name = f"{TEST_INSTANCE_PREFIX}{half.name}"
            instances.append(Instance(socket, name, layout, half, on_host, tokens, 1, EVENT_LIMIT_S))
        source, target = instances
        end_s = time.monotonic() + EVENT_LIMIT_S
        source.offer([1], tokens, end_s)
        (found,), _ = target.claim(source.endpoint(EVENT_LIMIT_S), [1], tokens, 1, end_s, compare_each=True)
        assert (found.reason, found.text) == ("", "")
        assert found.bytes_moved == 3 * layout.rank_unit_bytes
        ring = next(worker["ring"] for worker in agent.status()["workers"] if worker["ring"])
        assert ring["capacity_bytes"] < 128 << 20
    finally:
        for each in instances:
            each.close()
        world.close()


@pytest.mark.parametrize("windows", [{}, {"window": WINDOW}])
@pytest.mark.parametrize(("tp", "target_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_rooms_of_several_caches_move_and_a_wrong_byte_is_found_by_the_name_of_its_cache(
    tmp_path: Path, family: str, tp: int, target_tp: int, windows: dict[str, int]
) -> None:
    names, instances = FAMILIES[family], []
    world = World(tmp_path, LONGSHORE_FORCE_WAY="Staged")
    try:
        agent, end_s = world.agent("caches"), time.monotonic() + EVENT_LIMIT_S
        for half, ranks in ((Half.SOURCE, tp), (Half.TARGET, target_tp)):
            name, layout = f"{TEST_INSTANCE_PREFIX}{half.name}", layout_of(half, ranks, names)
            rest = layout, half, on_host, TOKENS, 1, EVENT_LIMIT_S, windows
            instances.append(Instance(agent.socket, name, *rest))
        source, target = instances
        endpoint = source.endpoint(EVENT_LIMIT_S)
        # The same place again, with fewer tokens, and in chunks that end in the middle of pages.
        for room, (tokens, cuts) in enumerate(((TOKENS, ()), (TOKENS, (77, 190)), (TOKENS - 83, (120,))), 1):
            source.offer([room], tokens, end_s, cuts)
            (found,), _ = target.claim(endpoint, [room], tokens, 1, end_s, compare_each=True)
            assert (found.reason, found.text) == ("", "")
            assert found.bytes_moved > 0
        for room, wrong in ((4, True), (5, False)):
            source.flip_byte(TOKENS)
            source.offer([room], TOKENS, end_s)
            (found,), _ = target.claim(endpoint, [room], TOKENS, 1, end_s, compare_each=True)
            assert found.reason == ("WRONG_BYTES" if wrong else "")
            assert (f"cache '{names[-1]}'" in found.text) == wrong
    finally:
        for each in instances:
            each.close()
        world.close()


def test_an_agent_keeps_no_port_of_a_test_instance_that_has_left(tmp_path: Path) -> None:
    layout = KVLayout(ModelShape.kv(1, 1, 8, 2), Parallel(), 8)
    world = World(tmp_path)
    try:
        agent = world.agent("ports")
        # It keeps those of engines.
        world.engine(agent, "real").result()
        name = f"{TEST_INSTANCE_PREFIX}1"
        tested = Instance(agent.socket, name, layout, Half.SOURCE, on_host, layout.page_size, 1, EVENT_LIMIT_S)
        assert name in kept(agent)
        tested.close()
        wait_for(lambda: kept(agent) == {"real"}, what="the port of the engine alone")
    finally:
        world.close()


def kept(agent: Agent) -> set[str]:
    """Return the instances whose ports the agent keeps for its next life."""
    return {port[0] for port in json.loads((agent.directory / FILE_NAME).read_bytes())["ports"]}


def test_rooms_of_test_instances_do_not_count_as_traffic_also_if_they_fail(tmp_path: Path) -> None:
    layout = KVLayout(ModelShape.kv(1, 1, 8, 2), Parallel(), 8)
    world = World(tmp_path, LONGSHORE_FORCE_WAY="Staged")
    instances: list[Instance] = []
    try:
        agent = world.agent("tested")
        for half in (Half.SOURCE, Half.TARGET):
            name = f"{TEST_INSTANCE_PREFIX}{half.name}"
            instances.append(
                Instance(agent.socket, name, layout, half, on_host, 2 * layout.page_size, 1, EVENT_LIMIT_S)
            )
        source, target = instances
        end_s = time.monotonic() + EVENT_LIMIT_S
        for room, tokens in ((1, layout.page_size), (2, 2 * layout.page_size)):
            source.offer([room], layout.page_size, end_s)
            (found,), _ = target.claim(source.endpoint(EVENT_LIMIT_S), [room], tokens, 1, end_s, compare_each=True)
            assert found.reason == ("" if room == 1 else "TOTAL_MISMATCH")
        assert agent.metric("longshore_slabs_total") > 0
        assert agent.metric("longshore_rooms_total") == 0
    finally:
        for each in instances:
            each.close()
        world.close()
