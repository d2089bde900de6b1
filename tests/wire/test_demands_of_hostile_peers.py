"""Tests that a source's false statements about its slabs harm only that source, not the worker or other rooms."""

from __future__ import annotations

import pytest
from two_writers import FIRST, MODEL, TOKENS, Scene

from longshore_wire.claims import demanded_grid
from longshore_wire.effects import SessionConfig
from longshore_wire.engine_messages import CachePages
from longshore_wire.errors import Reason, RoomError
from longshore_wire.layout import KVLayout, PageOrder, Parallel
from longshore_wire.peer_messages import Demand, EndAck, PairKey, RoomKey, SlabReady
from longshore_wire.plan import Pair
from longshore_wire.room import TargetPair
from longshore_wire.states import TargetPairState
from longshore_wire.ways import Way

TOKEN_BYTES = 2 * 2 * 2 * 32  # layers, K and V, heads of a rank, bytes of a head


@pytest.mark.parametrize("ring_bytes", [TOKENS * TOKEN_BYTES // 2, TOKENS * TOKEN_BYTES])
def test_slabs_that_do_not_fit_twice_into_the_ring_are_malformed(ring_bytes: int) -> None:
    scene = Scene.of(ring_bytes=ring_bytes)
    scene.lost.add(FIRST)
    key = scene.claim(2)
    scene.settle()

    scene.say(FIRST, Demand(scene.target.rooms[key].pairs[FIRST, 0].pair, TOKENS, 1, 1, TOKENS))

    assert scene.ended(2) is Reason.MALFORMED_MESSAGE
    assert "ring" in scene.target.ended[key].text


@pytest.mark.parametrize(("slab_tokens", "field"), [(24, "slab_tokens"), (1, "slab_tokens"), (16, ""), (96, "")])
def test_slabs_that_end_within_an_opaque_page_are_malformed(slab_tokens: int, field: str) -> None:
    layout = KVLayout(MODEL, Parallel(), 16, PageOrder.OPAQUE)
    config = SessionConfig("d", "D", 9, layout)
    route = Pair(0, 0, (0, 2), ((0, 4),), 4096, Way.STAGED, unit_tokens=16)
    pair = TargetPair(PairKey(RoomKey("P", 2), 0, 0, 7, 9, "D"), FIRST, route, Way.STAGED)
    demand = Demand(pair.pair, slab_tokens, -(-90 // slab_tokens), 0)

    if field:
        with pytest.raises(RoomError, match=f"{field} is {slab_tokens}, .* 16") as raised:
            demanded_grid(config, pair, CachePages(0, 0, 90, 0, b""), demand)
        assert raised.value.reason is Reason.MALFORMED_MESSAGE
    else:
        assert demanded_grid(config, pair, CachePages(0, 0, 90, 0, b""), demand).slab_tokens == slab_tokens


def test_more_slabs_than_any_source_cuts_are_malformed() -> None:
    config = SessionConfig("d", "D", 9, KVLayout(MODEL, Parallel(), 16))
    route = Pair(0, 0, (0, 2), ((0, 4),), 512, Way.STAGED)
    pair = TargetPair(PairKey(RoomKey("P", 2), 0, 0, 7, 9, "D"), FIRST, route, Way.STAGED)

    with pytest.raises(RoomError, match="slab_count is 300000") as raised:
        demanded_grid(config, pair, CachePages(0, 0, 300_000, 0, b""), Demand(pair.pair, 1, 300_000, 0))
    assert raised.value.reason is Reason.MALFORMED_MESSAGE


SLAB_TOKENS = TOKENS // 4
SLAB_BYTES = SLAB_TOKENS * TOKEN_BYTES
RING_BYTES = 8 * (SLAB_BYTES + 128)
TIMEOUT_NS = 10_000_000_000


def _liar(scene: Scene, rooms: int) -> list[RoomKey]:
    """Rooms for which the first source reports everything as ready, but writes nothing."""
    scene.lost.add(FIRST)
    keys = [scene.claim(number) for number in range(2, 2 + rooms)]
    scene.settle()
    for key in keys:
        scene.say(FIRST, Demand(scene.target.rooms[key].pairs[FIRST, 0].pair, SLAB_TOKENS, 4, 4, TOKENS))
    return keys


def _pass(scene: Scene, duration_ns: int, keys: list[RoomKey]) -> None:
    """Let time pass in which the first source repeats its messages."""
    for _ in range(duration_ns // 100_000_000):
        scene.tick(100_000_000)
        scene.target.peers[FIRST].heard_ns = scene.now_ns
        for key in keys:
            if (room := scene.target.rooms.get(key)) is not None:
                scene.say(FIRST, Demand(room.pairs[FIRST, 0].pair, SLAB_TOKENS, 4, 4, TOKENS))


def test_a_source_that_says_ready_and_never_writes_holds_ring_memory_no_longer_than_the_timeout() -> None:
    scene = Scene.of(ring_bytes=RING_BYTES, write_timeout_ns=TIMEOUT_NS)
    keys = _liar(scene, 5)
    assert scene.target.granter.ring.free_bytes < SLAB_BYTES

    _pass(scene, TIMEOUT_NS - 200_000_000, keys)
    assert not any(scene.ended(key.room) for key in keys)
    _pass(scene, 400_000_000, keys)

    failed = [key for key in keys if scene.ended(key.room) is Reason.TRANSFER_FAILED]
    assert len(failed) == 4
    assert "rank 0" in scene.target.ended[failed[0]].text
    # Its writer is asked before another room gets the memory. If it confirms, the memory is free at once.
    for key in failed:
        scene.say(FIRST, EndAck(scene.target.rooms[key].pairs[FIRST, 0].pair))
    assert scene.held == 0
    assert scene.free >= RING_BYTES // 2


def test_bytes_that_come_in_time_keep_a_room_however_long_all_of_it_takes() -> None:
    scene = Scene.of(ring_bytes=RING_BYTES, write_timeout_ns=TIMEOUT_NS)
    [key] = _liar(scene, 1)
    pair = scene.target.rooms[key].pairs[FIRST, 0]

    for slab in range(4):
        _pass(scene, TIMEOUT_NS - 200_000_000, [key])
        region = pair.regions[slab]
        scene.say(FIRST, SlabReady(pair.pair, slab, region.generation, SLAB_BYTES, TOKENS))
        scene.scatter()

    assert pair.state is TargetPairState.COMPLETE
    assert scene.ended(2) is None


def test_rooms_that_a_source_only_drips_into_give_their_memory_back_when_their_engine_gives_them_up() -> None:
    scene = Scene.of(ring_bytes=RING_BYTES, write_timeout_ns=TIMEOUT_NS)
    keys = _liar(scene, 5)
    for slab in range(2):
        _pass(scene, TIMEOUT_NS - 200_000_000, keys)
        for key in keys:
            pair = scene.target.rooms[key].pairs[FIRST, 0]
            if (region := pair.regions.get(slab)) is not None:
                scene.say(FIRST, SlabReady(pair.pair, slab, region.generation, SLAB_BYTES, TOKENS))
        scene.scatter()
        # Rooms of others wait for the memory that these hold. docs/design/2026-11-21-late-writes.md explains why no
        # timeout frees it.
        assert scene.target.granter.ring.free_bytes < SLAB_BYTES
    assert not any(scene.ended(key.room) for key in keys)

    for key in keys:
        pair = scene.target.rooms[key].pairs[FIRST, 0]
        scene.target.cancel(key, Reason.CANCELLED, "its request took too long", scene.now_ns)
        scene.say(FIRST, EndAck(pair.pair))
    scene.settle()
    assert scene.held == 0
    assert scene.free >= RING_BYTES // 2


def test_memory_for_tokens_that_are_still_computed_is_owed_by_nobody() -> None:
    scene = Scene.of(ring_bytes=8 * RING_BYTES, write_timeout_ns=TIMEOUT_NS)
    scene.lost.add(FIRST)
    key = scene.claim(2)
    scene.settle()
    pair = scene.target.rooms[key].pairs[FIRST, 0]
    scene.say(FIRST, Demand(pair.pair, SLAB_TOKENS, 4, 0))
    assert pair.regions
    for _ in range(30):
        scene.tick(1_000_000_000)
        scene.target.peers[FIRST].heard_ns = scene.now_ns

    assert scene.ended(2) is None
    # From now on it is.
    _pass(scene, TIMEOUT_NS - 200_000_000, [key])
    assert scene.ended(2) is None
    _pass(scene, 400_000_000, [key])
    assert scene.ended(2) is Reason.TRANSFER_FAILED


def test_time_in_which_nobody_listened_is_not_held_against_a_writer() -> None:
    scene = Scene.of(ring_bytes=RING_BYTES, write_timeout_ns=TIMEOUT_NS)
    [key] = _liar(scene, 1)
    _pass(scene, 1_000_000_000, [key])

    scene.now_ns += 2 * TIMEOUT_NS
    for core in (scene.target, *scene.sources.values()):
        core.was_absent(2 * TIMEOUT_NS, scene.now_ns)
    _pass(scene, 1_000_000_000, [key])

    assert scene.ended(2) is None
