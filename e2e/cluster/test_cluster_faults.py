"""Agents and nodes that go away while rooms move between two nodes."""

from __future__ import annotations

import pytest
from cluster_pods import Placed, Rooms
from cluster_site import Site
from controlplane.waiting import until

_MANY = 1_000_000
# A bound of health: with a transport that waits for the old pod's address no room ended for 42 s and more. The aim is 10 s.
_GAP_MAX_S = 25.0
_STATUS_LIMIT_S = 60.0


@pytest.fixture
def load(placed: Placed) -> Rooms:
    """Rooms that move one after the other until the test ends."""
    placed.create()
    placed.wait("Ready")
    placed.start_source()
    rooms = placed.start_target(_MANY, tokens=1024)
    rooms.more(5)
    return rooms


@pytest.mark.shortest
@pytest.mark.parametrize("role", ["decode"])
def test_rooms_go_on_soon_after_an_agents_pod_was_deleted(site: Site, placed: Placed, load: Rooms, role: str) -> None:
    old = placed.agent(role)
    site.kubectl("-n", placed.namespace, "delete", "pod", old, "--wait=false")
    until(lambda: placed.agent(role) != old and placed.is_ready(placed.agent(role)), "another agent is ready")
    load.more(20)
    assert load.longest_gap_s() < _GAP_MAX_S, load.all()
    placed.wait("Ready", 30)
