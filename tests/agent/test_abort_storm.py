"""Tests that aborts during writes, over each transport, change no page of another room."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
from abort_storm import Storm
from agent_fleet import Fleet, over
from agent_world import Request, wait_for_none
from half_worker import PEERS
from transport_peer import TCP_ALONE

from longshore_client import Half, Reason
from longshore_spec.agent_config import Backend
from longshore_wire.target import TargetSession

KINDS = {
    "loopback": (Backend.LOOPBACK, {}, "Loopback"),
    "mooncake-tcp": (Backend.MOONCAKE, {}, "TCP"),
    "nixl-shm": (Backend.NIXL, {}, "SharedMemory"),
    "nixl-tcp": (Backend.NIXL, {"UCX_TLS": TCP_ALONE}, "TCP"),
}
# Each round aborts six rooms. An abort after the end of the room's write does not count.
ROUNDS_MAX = 2500
# All pages are compared after this many rounds. A room's own pages are compared when it is done.
ROUNDS_A_LOOK = 20
# The same with real agents and clients, which take far longer for a room.
AGENT_ROOMS_COUNT = 50
AGENT_ROOMS_MAX = 2000


@pytest.fixture(params=over(*KINDS, part="storms"))
def storm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storm]:
    backend, environment, wire = KINDS[request.param]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    storm = Storm(backend, environment, seed=11)
    yield storm
    found = storm.decode.session.peers[PEERS[Half.SOURCE]].wire
    assert (storm.close(), found) == (0, wire)


@pytest.mark.slow
@pytest.mark.parametrize("aborts", over(200, 1000, part="storms"))
def test_aborts_that_meet_a_write_change_no_page_of_another_room(storm: Storm, aborts: int) -> None:
    counted: dict[str, dict[str, int]] = {"count": {}}
    for number in range(ROUNDS_MAX):
        storm.round()
        if number % ROUNDS_A_LOOK == 0:
            assert storm.decode.pages.intact()
            # By the lanes' own count: the room was aborted after the write was posted and before it ended.
            counted = storm.count()
            if sum(counted["count"].values()) >= aborts:
                break
    assert storm.decode.pages.intact()
    assert sum(counted["count"].values()) >= aborts, counted
    # Both sides aborted, and both kinds of memory were used: the ring, and pages that are written in place.
    assert min(counted["met"]["prefill"], counted["met"]["decode"]) >= aborts // 10, counted
    assert min(counted["count"].values()) >= aborts // 10, counted
    core = storm.decode.session
    assert isinstance(core, TargetSession)
    assert (core.granter.ring.used_bytes, core.granter.ring.held_bytes, core.rooms) == (0, 0, {})
    # The ring wrapped more often than there were aborts, so its memory was reused by other rooms many times.
    assert core.granter.ring.rounds > aborts // 10


@pytest.mark.rest("storms")
@pytest.mark.parametrize("backend", ["Loopback", "Mooncake", "NIXL"])
def test_rooms_of_real_agents_that_are_cancelled_in_mid_write_change_no_page_of_another_room(
    backend: str, fleet_of: Callable[[str], Fleet]
) -> None:
    fleet = fleet_of(backend)
    chosen, pause = random.Random(3), threading.Event()

    def overtaken() -> float:
        return fleet.prefill.metric("longshore_overtaken_writes_total")

    met, seen = 0, overtaken()
    for turn in range(AGENT_ROOMS_MAX):
        doomed, beside = Request(fleet.two, fleet.three, 600), Request(fleet.one, fleet.same, 200)
        for each in (doomed, beside):
            each.claim()
            each.offer()
        pause.wait(chosen.choice([0.0, 0.001, 0.003, 0.01]))
        half, engine = ((Half.SOURCE, doomed.source), (Half.TARGET, doomed.target))[turn % 2]
        chosen.choice(engine.ranks).client.cancel(doomed.room, half, instance=doomed.source.instance)
        assert {end.reason for end in doomed.ends()} <= {Reason.NONE, Reason.CANCELLED}
        beside.arrives()
        assert fleet.same.intact()
        assert fleet.three.intact()
        now = overtaken()
        met, seen = met + (now > seen), now
        if met >= AGENT_ROOMS_COUNT:
            break
    assert met >= AGENT_ROOMS_COUNT
    wait_for_none(fleet.leftovers)
