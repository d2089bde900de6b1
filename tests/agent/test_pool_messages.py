"""Tests pool messages between workers of one node: each reaches its worker, and the owner gets the last one's end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from longshore_agent.control.node_link import PoolGone, PoolRegion, PoolUnmapped, PoolWanted
from longshore_agent.supervisor.pool_broker import PoolBroker
from longshore_agent.supervisor.slots import Slot
from longshore_spec.status import WorkerState
from longshore_wire.effects import PeerId

OWNER, ASKER, OTHER, STARTING = (PeerId("decode", 0, 0), *(PeerId("prefill", 0, rank) for rank in range(3)))
ABSENT = PeerId("decode", 1, 0)


@dataclass
class Link:
    """The supervisor's end of a worker's link."""

    said: list[object] = field(default_factory=list)

    def send(self, message: object, descriptor: int | None = None) -> None:
        self.said.append(message if descriptor is None else (message, descriptor))


class Node:
    """The workers of a node and the messages to each of them."""

    def __init__(self) -> None:
        nothing: Any = None
        self.slots: dict[PeerId, Slot] = {}
        for peer in (OWNER, ASKER, OTHER, STARTING):
            link: Any = Link()
            state = WorkerState.STARTING if peer is STARTING else WorkerState.READY
            self.slots[peer] = Slot(peer, nothing, nothing, nothing, nothing, -1, link, None, state)
        self.broker = PoolBroker(self.slots)

    def says(self, peer: PeerId, message: Any, descriptor: int | None = None) -> dict[PeerId, list[object]]:
        """Handle a message of one worker; return the messages to all workers."""
        self.broker.forward(self.slots[peer], message, descriptor)
        links: dict[PeerId, Any] = {peer: slot.link for peer, slot in self.slots.items()}
        told = {peer: list(link.said) for peer, link in links.items() if link.said}
        for link in links.values():
            link.said.clear()
        return told


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_pool_is_asked_of_its_owner_and_each_region_comes_back_to_the_asker_alone(node: Node) -> None:
    wanted = PoolWanted(OWNER, ASKER, 3)
    assert node.says(ASKER, wanted) == {OWNER: [wanted]}
    region = PoolRegion(OWNER, ASKER, 3, 2)
    assert node.says(OWNER, region, 7) == {ASKER: [(region, 7)]}


@pytest.mark.parametrize("owner", [ABSENT, STARTING])
def test_an_asker_hears_at_once_that_a_worker_which_does_not_serve_has_no_such_pool(node: Node, owner: PeerId) -> None:
    assert node.says(ASKER, PoolWanted(owner, ASKER, 3)) == {ASKER: [PoolRegion(owner, ASKER, 3, 0)]}


def test_a_region_for_an_asker_that_has_ended_goes_nowhere_and_is_not_waited_for(node: Node) -> None:
    assert node.says(OWNER, PoolRegion(OWNER, ABSENT, 3, 1), 7) == {}
    assert node.says(OWNER, PoolGone(OWNER, 3))[OWNER] == [PoolUnmapped(OWNER, 3)]


def test_an_owner_hears_that_its_pool_is_unmapped_when_the_last_worker_that_was_given_it_says_so(node: Node) -> None:
    for asker in (ASKER, OTHER):
        node.says(OWNER, PoolRegion(OWNER, asker, 3, 1))
    gone, unmapped = PoolGone(OWNER, 3), PoolUnmapped(OWNER, 3)
    assert node.says(OWNER, gone) == {ASKER: [gone], OTHER: [gone]}
    assert node.says(ASKER, unmapped) == {}
    assert node.says(OTHER, unmapped) == {OWNER: [unmapped]}


def test_an_owner_whose_pool_nobody_was_given_hears_so_at_once(node: Node) -> None:
    node.says(OWNER, PoolRegion(OWNER, ASKER, 3, 0))
    gone = PoolGone(OWNER, 3)
    assert node.says(OWNER, gone) == {OWNER: [PoolUnmapped(OWNER, 3)], ASKER: [gone], OTHER: [gone]}
