"""Tests two engines of one agent: one copy moves bytes from pages to pages without staging; memory is released as usual."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from agent_fleet import World
from agent_world import EVENT_LIMIT_S, Agent, Engine, Request, holders_of, room_ids, wait_for, wait_for_none
from test_lost_memory import unsealed_region

from longshore_client import Half, PageOrder, Reason, RoomError, RoomEventKind
from longshore_lab.test_engine import memory


@dataclass
class Node:
    """One agent with engines of both roles, and a second agent with one engine."""

    world: World
    agent: Agent
    elsewhere: Agent
    two: Engine
    three: Engine  # small pages
    one: Engine  # head-major pages
    same: Engine  # laid out as `two`
    far: Engine

    def direct_writes(self) -> float:
        return self.agent.metric("longshore_writes_total", way="direct")


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[Node]:
    world = World(tmp_path_factory.mktemp("direct"), LONGSHORE_DIRECT="true", LONGSHORE_LEASE_S="15")
    try:
        agent, elsewhere = world.agent("node"), world.agent("elsewhere")
        target = [Half.TARGET]
        # Tests find memory by its engine's name. Engines of other tests' fleets may be alive, so these have other names.
        starting = {
            "two": world.engine(agent, "near-two", 2),
            "three": world.engine(agent, "near-three", 3, page_size=4, roles=target),
            "one": world.engine(agent, "near-one", order=PageOrder.HND, roles=target),
            "same": world.engine(agent, "near-same", 2, roles=target),
            "far": world.engine(elsewhere, "near-far", roles=target),
        }
        yield Node(world, agent, elsewhere, **{name: engine.result() for name, engine in starting.items()})
    finally:
        world.close()


@pytest.mark.parametrize("target", ["three", "one", "same"])
@pytest.mark.parametrize(
    ("total", "prefix", "cuts"), [(1, 0, ()), (333, 0, (100, 200)), (250, 37, (129,)), (64, 64, ())]
)
def test_pages_of_another_layout_are_written_by_one_copy_and_nothing_beside_them(node, target, total, prefix, cuts):
    engine = getattr(node, target)
    before = node.direct_writes()
    each = Request(node.two, engine, total, prefix=prefix, cuts=cuts)
    each.claim()
    each.offer()
    each.arrives()
    assert engine.intact()
    assert (node.direct_writes() > before) == (prefix < total)
    for rank in range(len(engine.ranks)):
        assert node.agent.worker(engine.instance, rank)["ring"]["used_bytes"] == 0


def test_the_plan_by_their_names_says_so_before_any_room(node):
    found = node.agent.get("/v1/plan?source=near-two&target=near-three")
    assert (found["way"], {pair["why"] for pair in found["pairs"]}) == ("Direct", {"near"})
    listed = {each["instance"]: each for each in node.agent.get("/v1/bootstrap")["instances"]}["near-three"]
    assert listed["agent"] == node.two.endpoint().agent
    assert {(rank["device"], rank["near"]) for rank in listed["ranks"]} == {("cpu", listed["agent"])}


def test_memory_that_its_engine_may_truncate_is_staged_and_the_plan_says_so(node, monkeypatch):
    monkeypatch.setattr(memory, "create_region", unsealed_region)
    target = node.world.engine(node.agent, "near-open", roles=[Half.TARGET]).result()
    each = Request(node.two, target, 100)
    each.claim()
    each.offer()
    each.arrives()
    found = node.agent.get("/v1/plan?source=near-two&target=near-open")
    peers = node.agent.worker("near-open")["peers"]
    assert ({found["way"].lower()}, {way for peer in peers for way in peer["ways"]}) == ({"staged"}, {"staged"})


def test_an_engine_of_another_agent_is_written_through_the_transport(node):
    before = node.direct_writes()
    each = Request(node.two, node.far, 200)
    each.offer()
    each.claim()
    each.arrives()
    assert node.far.intact()
    assert node.direct_writes() == before


def test_an_endpoint_that_names_the_wrong_agent_fails_its_room_with_the_reason(node):
    worker = node.elsewhere.worker("near-far")
    assert worker is not None
    # As if an engine had confused two endpoints: the target believes that its writer is at the same agent.
    near = node.far.endpoint().agent
    endpoint = msgspec.structs.replace(node.two.endpoint(), agent=near)
    room = next(room_ids)
    node.far.client.receive(room, endpoint, [0, 1], 0, 20)
    for rank in node.two.ranks:
        # If a sibling rank has already failed the room, the offer is refused with the same reason.
        with contextlib.suppress(RoomError):
            rank.client.send(room, [0, 1], 0, 20, last=True)
    end = node.far.client.wait(room, Half.TARGET, "near-two", timeout_s=EVENT_LIMIT_S)
    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.TRANSFER_FAILED), end
    assert "no worker of this node" in end.text


def test_a_pool_that_was_registered_anew_is_written_and_the_old_one_is_let_go(node):
    target = node.one
    rank = target.ranks[0]
    each = Request(node.two, target, 100)
    each.claim()
    each.offer()
    each.arrives()
    assert len(holders_of("near-one")) > 2
    rank.client.unregister_pool(0)
    # Immediately: on a GPU, freeing memory that a process has mapped is undefined behaviour.
    assert holders_of("near-one").keys() == {os.getpid()}
    rank.client.register_pool(0, rank.geometry, rank.memory.regions)
    again = Request(node.two, target, 120, prefix=7)
    again.claim()
    again.offer()
    again.arrives()
    assert target.intact()


def test_memory_of_a_killed_engine_is_let_go_by_the_worker_that_wrote_it_too(node):
    victim = node.world.process(node.agent, "near-victim", page_size=8)
    room = next(room_ids)
    pages = node.two.take_pages(0, 200)
    victim.ask(
        "receive",
        room=room,
        endpoint=msgspec.json.encode(node.two.endpoint()).decode(),
        pages=list(range(25)),
        total=200,
    )
    for rank in node.two.ranks:
        rank.client.send(room, pages[:7], 0, 112, last=False)
    wait_for(lambda: len(holders_of("near-victim")) >= 4, what="both writers to map the victim's pages")
    victim.kill()
    wait_for(lambda: not holders_of("near-victim"), what="the memory to be free")
    end = node.two.client.wait(room, Half.SOURCE, timeout_s=EVENT_LIMIT_S)
    assert (end.kind, end.reason) == (RoomEventKind.FAILED, Reason.ENGINE_LOST), end


def test_a_writer_that_is_killed_fails_its_rooms_and_the_next_one_maps_the_pages_again(node):
    epoch = node.two.ranks[1].client.epoch
    each = Request(node.two, node.three, 300, cuts=(200,))
    each.claim()
    each.offer_chunk(0)
    wait_for(lambda: (node.agent.room(each.room, Half.TARGET) or {"tokens_done": 0})["tokens_done"])
    os.kill(node.agent.worker("near-two", 1)["pid"], signal.SIGKILL)
    ends = each.ends()
    assert {end.kind for end in ends} == {RoomEventKind.FAILED}, ends
    wait_for(lambda: node.two.ranks[1].client.connected and node.two.ranks[1].client.epoch != epoch)
    node.three.accept(each.target_pages)
    after = Request(node.two, node.three, 150, prefix=30)
    after.claim()
    after.offer()
    after.arrives()
    assert node.three.intact()
    wait_for_none(lambda: node.agent.leftovers() + node.elsewhere.leftovers())


def test_the_content_of_a_page_is_what_was_sent_element_by_element(node):
    each = Request(node.two, node.same, 50)
    each.claim()
    each.offer()
    each.arrives()
    for near, far in zip(node.two.ranks, node.same.ranks, strict=True):
        for token in (0, 17, 49):
            sent = near.planes[:, :, each.source_pages[token // 16], token % 16]
            assert np.array_equal(sent, far.planes[:, :, each.target_pages[token // 16], token % 16])
