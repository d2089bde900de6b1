"""Agents that go away while rooms move between two nodes, and agents that do not start."""

from __future__ import annotations

import pytest
from cluster_pods import MANY, Placed, Rooms
from cluster_site import Site
from controlplane.waiting import until

# A bound of health: with a transport that waits for the old pod's address no room ended for 42 s and more. The aim is 10 s.
_GAP_MAX_S = 25.0
_STATUS_LIMIT_S = 60.0


@pytest.fixture
def load(placed: Placed) -> Rooms:
    """Rooms that move one after the other until the test ends."""
    placed.create()
    placed.wait("Ready")
    placed.start_source()
    rooms = placed.start_target(MANY, tokens=1024)
    rooms.more(5)
    return rooms


@pytest.mark.shortest
def test_rooms_go_on_soon_after_decodes_agent_was_deleted(site: Site, placed: Placed, load: Rooms) -> None:
    old = placed.agent("decode")
    site.kubectl("-n", placed.namespace, "delete", "pod", old, "--wait=false")
    until(lambda: placed.agent("decode") != old and placed.is_ready(placed.agent("decode")), "another agent is ready")
    load.more(20)
    assert load.longest_gap_s() < _GAP_MAX_S, load.all()
    placed.wait("Ready", 30)


def test_an_image_that_cannot_be_pulled_is_named(site: Site, placed: Placed) -> None:
    placed.create(tp=1, agents={"image": "localhost/no-such-agent:1"})

    def said() -> str:
        status, _, message = placed.condition("AgentsReady")
        return message if status == "False" and "no-such-agent" in message else ""

    assert "ImagePull" in until(said, "the status names the image", _STATUS_LIMIT_S)
