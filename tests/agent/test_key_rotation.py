"""Tests agents with keys of two adjacent revisions: they attach and move pages.

Agents further apart are refused by name.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agent_fleet import World
from agent_world import Request, wait_for
from test_peer_net import ATTACH, SOURCE, pump, turn

from longshore_agent.control import curve
from longshore_agent.control.peer_net import PeerNet
from longshore_agent.errors import TransportError
from longshore_client import Half, RoomEventKind
from longshore_spec import names
from longshore_wire.addresses import Listener, join, split
from longshore_wire.engine_messages import Endpoint, RankAddress
from longshore_wire.errors import ConfigError, LongshoreError, Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import PeerMessage

FIRST, SECOND, THIRD = (curve.generate() for _ in range(3))
RINGS = {
    "first": curve.KeyRing(FIRST),
    "second": curve.KeyRing(SECOND, FIRST),
    "third": curve.KeyRing(THIRD, SECOND),
}


@pytest.fixture
def nets() -> Iterator[dict[str, PeerNet]]:
    made = {name: PeerNet("127.0.0.1", 0, f"{name}/0/0/1", ring) for name, ring in RINGS.items()}
    yield made
    for net in made.values():
        net.close()


def reaches(near: PeerNet, far: PeerNet) -> bool:
    """Whether `far` reads an Attach of `near`, which dials it at its address."""
    near.dial(SOURCE, far.address)
    found: list[PeerMessage] = []
    near.send(Half.TARGET, SOURCE, ATTACH)
    return pump(far, lambda: ATTACH in found, found, lambda: found.extend(turn(near)))


@pytest.mark.parametrize(("dials", "listens"), [*itertools.product(["first", "second"], repeat=2), ("third", "second")])
def test_workers_of_neighbouring_revisions_reach_each_other(nets, dials: str, listens: str) -> None:
    assert reaches(nets[dials], nets[listens])
    assert nets[listens].refused_count == 0


@pytest.mark.parametrize(("dials", "listens"), [("first", "third"), ("third", "first")])
def test_two_rotations_apart_both_sides_keys_are_named_and_nothing_is_dialled(nets, dials: str, listens: str) -> None:
    with pytest.raises(TransportError) as caught:
        nets[dials].dial(SOURCE, nets[listens].address)
    for keys in (*RINGS[dials].revisions, *RINGS[listens].revisions):
        assert keys.fingerprint in str(caught.value)
    assert (nets[dials].refused_count, nets[listens].refused_count) == (1, 0)


def test_a_client_of_two_rotations_ago_is_not_let_in_although_it_knows_the_server_key(nets) -> None:
    old = curve.CurveKeys(SECOND.server_public, SECOND.server_secret, FIRST.client_public, FIRST.client_secret, ())
    net = PeerNet("127.0.0.1", 0, "old/0/0/1", curve.KeyRing(old))
    try:
        net.dial(SOURCE, nets["third"].address)
        found: list[PeerMessage] = []

        def turned_away() -> bool:
            return nets["third"].refused_count > 0

        net.send(Half.TARGET, SOURCE, ATTACH)
        assert pump(nets["third"], turned_away, found, lambda: turn(net))
        assert found == []
        assert not net._dialled[net._dealers[SOURCE]].greeted
    finally:
        net.close()


def test_an_address_can_choose_among_our_keys_and_bring_none(nets) -> None:
    place = split(nets["second"].address)[0].address
    # The listener has other keys than the address says: the connection is tried with ours, and no answer comes.
    nets["first"].dial(SOURCE, join([Listener(place, FIRST.fingerprint)]))
    nets["first"].send(Half.TARGET, SOURCE, ATTACH)
    with pytest.raises(TransportError):
        nets["first"].dial(SOURCE, join([Listener(place, "0123456789abcdef")]))
    assert reaches(nets["first"], nets["second"])


LAYOUT = KVLayout(ModelShape.kv(2, 4, 8, 2), Parallel(tp=2), 4)
ENDPOINT = Endpoint("prefill-0", LAYOUT, tuple(RankAddress(n, f"10.0.0.{n + 1}:1", 5, 6) for n in range(2)), "life")


@pytest.mark.parametrize(("gives", "dials"), [*itertools.product(["first", "second"], repeat=2), ("third", "second")])
def test_an_endpoint_of_an_agent_of_a_neighbouring_revision_is_taken(gives: str, dials: str) -> None:
    RINGS[dials].check_sealed(RINGS[gives].sealed(ENDPOINT))


CHANGES: list[dict[str, object]] = [
    {"seals": ()},
    {"seals": (b"",)},
    {"seals": (bytes(16),) * 1000},
    {"instance": "prefill-1"},
    {"agent": "other"},
    {"layout": msgspec.structs.replace(LAYOUT, page_size=8)},
    {"ranks": ENDPOINT.ranks[:1]},
    *(
        {"ranks": (msgspec.structs.replace(ENDPOINT.ranks[0], **change), ENDPOINT.ranks[1])}
        for change in ({"address": "10.0.0.9:1"}, {"epoch": 2**62}, {"engine": 7})
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_endpoint_that_was_changed_or_has_no_seal_is_refused(change: dict[str, object]) -> None:
    sealed = RINGS["first"].sealed(ENDPOINT)
    with pytest.raises(LongshoreError, match="no agent of this deployment gave") as caught:
        RINGS["first"].check_sealed(msgspec.structs.replace(sealed, **change))
    assert caught.value.reason is Reason.AUTHENTICATION


def test_seals_of_another_deployment_or_of_two_rotations_ago_are_refused() -> None:
    for gives, dials in (("first", "third"), ("third", "first")):
        with pytest.raises(LongshoreError, match="no agent of this deployment gave"):
            RINGS[dials].check_sealed(RINGS[gives].sealed(ENDPOINT))


def test_an_address_is_read_as_it_was_written() -> None:
    listeners = (Listener("127.0.0.1:1", "a"), Listener("127.0.0.1:2", "b"))
    assert split(join(listeners)) == listeners
    assert split("127.0.0.1:1") == (Listener("127.0.0.1:1"),)
    assert len(split(",".join(["x:1#a"] * 100))) == 2


def test_the_previous_keys_are_read_where_they_are_and_a_broken_file_is_named(tmp_path: Path) -> None:
    curve.write(SECOND, tmp_path)
    assert curve.read_ring(tmp_path) == curve.KeyRing(SECOND)
    curve.write(SECOND, tmp_path)
    shutil.copy(tmp_path / "curve.json", tmp_path / "previous.json")
    assert curve.read_ring(tmp_path) == curve.KeyRing(SECOND, SECOND)
    (tmp_path / "previous.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"previous\.json"):
        curve.read_ring(tmp_path)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("rotation"))
    yield made
    made.close()


def keys_directory(folder: Path, keys: curve.CurveKeys, previous: curve.CurveKeys | None = None) -> str:
    """A folder with keys, mounted as in an agent's pod."""
    folder.mkdir()
    if previous is not None:
        curve.write(previous, folder)
        (folder / names.KEYS_FILE).rename(folder / names.PREVIOUS_KEYS_FILE)
    curve.write(keys, folder)
    return str(folder)


@pytest.mark.shows("agent.keys_directory")
def test_real_agents_of_two_revisions_move_pages_in_both_directions(world: World, tmp_path: Path) -> None:
    old = world.agent("old", LONGSHORE_KEYS_DIRECTORY=keys_directory(tmp_path / "first", FIRST))
    new = world.agent("new", LONGSHORE_KEYS_DIRECTORY=keys_directory(tmp_path / "second", SECOND, FIRST))
    starting = [world.engine(old, "was-here", 2), world.engine(new, "came-since", 1)]
    was_here, came_since = [engine.result() for engine in starting]
    for source, target in ((was_here, came_since), (came_since, was_here)):
        request = Request(source, target, 300)
        request.claim()
        request.offer()
        ends = request.ends()
        assert {end.kind for end in ends} == {RoomEventKind.DONE}, ends
        assert target.intact()
    for agent in (old, new):
        assert agent.metric("longshore_authentication_failures_total") == 0
        wait_for(lambda agent=agent: agent.leftovers() == [])
