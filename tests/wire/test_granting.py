"""Tests the allocation of ring memory: round-robin, only free memory, and no stalled room blocks another."""

from __future__ import annotations

from collections import Counter

from longshore_wire.effects import PeerId, SessionConfig
from longshore_wire.engine_messages import CachePages
from longshore_wire.granting import Granter
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import PairKey, RoomKey
from longshore_wire.plan import Pair
from longshore_wire.room import TargetPair, TargetRoom
from longshore_wire.slabs import ALIGNMENT_BYTES, SlabGrid, slab_bytes
from longshore_wire.states import TargetEvent, TargetRoomEvent, TargetSlab
from longshore_wire.ways import Way

LAYOUT = KVLayout(ModelShape.kv(1, 1, 16, 4), Parallel(), 16)
TOKEN_BYTES = 128
SLAB_TOKENS = 8
SLAB_BYTES = slab_bytes(SLAB_TOKENS * TOKEN_BYTES)


def _granter(ring_slabs: int, window: int = 4) -> Granter:
    config = SessionConfig("d", "D", 1, LAYOUT, ring_bytes=ring_slabs * SLAB_BYTES, grant_window=window)
    return Granter(config)


def _room(number: int, source_rank: int, slabs: int, ready: int | None = None) -> TargetRoom:
    key = RoomKey("P", number)
    peer = PeerId("P", 0, source_rank)
    route = Pair(source_rank, 0, (0, 1), ((0, 1),), TOKEN_BYTES, Way.STAGED)
    pair = TargetPair(PairKey(key, source_rank, 0, 1, 1, "D"), peer, route, Way.STAGED)
    pair.grid = SlabGrid(0, slabs * SLAB_TOKENS, SLAB_TOKENS)
    pair.states = [TargetSlab.WANTED] * slabs
    pair.ready_count = slabs if ready is None else ready
    room = TargetRoom(key, (CachePages(0, 0, slabs * SLAB_TOKENS, 0, b""),))
    room.pairs[peer, 0] = pair
    return room


def _pair(room: TargetRoom) -> TargetPair:
    return next(iter(room.pairs.values()))


def _land_and_free(granter: Granter, room: TargetRoom, slab: int) -> None:
    pair = _pair(room)
    pair.step_slab(slab, TargetEvent.LAND)
    pair.step_slab(slab, TargetEvent.SCATTERED)
    granter.free(room, pair, slab)


def test_grants_go_in_turns_over_peers_and_over_the_rooms_of_each() -> None:
    granter = _granter(64)
    rooms = {room.key: room for room in [*(_room(n, 0, 8) for n in range(6)), _room(6, 1, 8)]}
    for room in rooms.values():
        granter.want(_pair(room))

    granted = [key.room for key, _, _ in granter.grants(rooms)]

    assert Counter(granted) == dict.fromkeys(range(7), 4)
    # The only room of peer 1 has its window after four turns of two peers, independent of peer 0.
    assert Counter(granted[:8])[6] == 4


def test_only_free_memory_is_granted_and_the_rest_follows_when_some_comes_back() -> None:
    granter = _granter(4)
    rooms = {room.key: room for room in (_room(1, 0, 4), _room(2, 1, 4))}
    for room in rooms.values():
        granter.want(_pair(room))

    first = list(granter.grants(rooms))

    # A room holds at most a quarter of the ring ahead: one slab each, here.
    assert [key.room for key, _, _ in first] == [1, 2]
    assert not list(granter.grants(rooms))
    _land_and_free(granter, rooms[RoomKey("P", 1)], 0)
    assert [(key.room, grant.slab) for key, _, grant in granter.grants(rooms)] == [(1, 1)]


def test_the_time_in_which_a_ready_slab_waits_for_memory_is_counted() -> None:
    granter = _granter(2)
    rooms = {room.key: room for room in (_room(n, n, 1) for n in range(3))}
    for room in rooms.values():
        granter.want(_pair(room))

    def pump(now_ns: int) -> tuple[int, int]:
        list(granter.grants(rooms))
        granter.note_wait(now_ns)
        return granter.credit_waits, granter.credit_wait_ns

    assert [pump(10), pump(12)] == [(1, 0), (1, 2)]
    _land_and_free(granter, rooms[RoomKey("P", 0)], 0)
    assert [pump(17), pump(30)] == [(1, 7), (1, 7)]


def test_rooms_that_are_still_computed_get_a_window_only_from_a_ring_that_is_half_free() -> None:
    granter = _granter(16)
    waiting = {room.key: room for room in (_room(n, n, 4, ready=0) for n in range(8))}
    for room in waiting.values():
        granter.want(_pair(room))

    list(granter.grants(waiting))
    assert granter.ring.free_bytes * 2 >= granter.ring.capacity_bytes - 2 * SLAB_BYTES

    ready = _room(99, 99, 4)
    waiting[ready.key] = ready
    granter.want(_pair(ready))
    assert {key.room for key, _, _ in granter.grants(waiting)} == {99}


def test_a_stalled_room_and_a_quarantined_one_do_not_stop_two_hundred_others() -> None:
    granter = _granter(100)
    stalled, given_up = _room(1000, 0, 1), _room(1001, 1, 1)
    rooms = {room.key: room for room in (stalled, given_up)}
    for room in rooms.values():
        granter.want(_pair(room))
    assert len(list(granter.grants(rooms))) == 2
    granter.quarantine(_pair(given_up))
    given_up.step(TargetRoomEvent.FAIL)
    passed = 0
    for number in range(200):
        room = _room(number, number % 3, 12)
        rooms[room.key] = room
        granter.want(_pair(room))
        while granted := list(granter.grants(rooms)):
            for _, _, grant in granted:
                _land_and_free(granter, room, grant.slab)
        passed += _pair(room).done_count == 12

    assert passed == 200
    assert granter.ring.held_bytes == SLAB_BYTES
    assert granter.ring.used_bytes == SLAB_BYTES


def test_memory_in_quarantine_is_not_granted_before_its_writer_confirms() -> None:
    granter = _granter(4, window=1)
    given_up = _room(1, 0, 1)
    rooms = {given_up.key: given_up}
    granter.want(_pair(given_up))
    [(_, _, grant)] = list(granter.grants(rooms))
    granter.quarantine(_pair(given_up))
    given_up.step(TargetRoomEvent.FAIL)
    others = [_room(n, n, 1) for n in range(2, 8)]
    rooms |= {room.key: room for room in others}
    for room in others:
        granter.want(_pair(room))

    offsets = [other.offset_bytes for _, _, other in granter.grants(rooms)]

    assert len(offsets) == 3
    assert grant.offset_bytes not in offsets
    granter.release(given_up, _pair(given_up))
    for room in others:
        granter.want(_pair(room))
    assert [other.offset_bytes for _, _, other in granter.grants(rooms)] == [grant.offset_bytes]


def test_what_a_room_was_granted_ahead_does_not_keep_its_other_writers_from_what_is_ready() -> None:
    """Memory that was granted ahead is freed only after more tokens are computed, which may wait for the ready slabs."""
    granter = _granter(16, window=16)
    room, other = _room(1, 0, 12, ready=2), _room(1, 1, 12, ready=2)
    first, second = _pair(room), _pair(other)
    rooms = {room.key: room}
    granter.want(first)
    granted = [grant.slab for _, _, grant in granter.grants(rooms)]
    for slab in (0, 1):
        _land_and_free(granter, room, slab)
    granted += [grant.slab for _, _, grant in granter.grants(rooms)]
    assert granted[:2] == [0, 1]
    assert room.ring_bytes == len(first.regions) * SLAB_BYTES > 0
    # The other writer's first tokens are ready only now.
    room.pairs[second.name] = second
    granter.want(second)

    assert [(pair.peer.rank, grant.slab) for _, pair, grant in granter.grants(rooms)][:2] == [(1, 0), (1, 1)]


def test_a_slab_that_is_ready_is_granted_beside_the_one_that_its_room_was_granted_ahead() -> None:
    granter = _granter(6)
    room, other = _room(1, 0, 2, ready=0), _room(1, 1, 2, ready=2)
    second = _pair(other)
    rooms = {room.key: room}
    granter.want(_pair(room))
    assert [grant.slab for _, _, grant in granter.grants(rooms)] == [0]
    room.pairs[second.name] = second
    for slab in range(2):
        granter.want(second)
        assert [(pair.peer.rank, grant.slab) for _, pair, grant in granter.grants(rooms)] == [(1, slab)]
        second.step_slab(slab, TargetEvent.LAND)
        second.step_slab(slab, TargetEvent.SCATTERED)
        granter.free(room, second, slab)


def test_rooms_that_are_still_computed_leave_half_of_the_ring_to_what_is_ready() -> None:
    """Their tokens may be computed only after prefill has free pages, which the ready slabs still hold."""
    # A little more than two slabs: the first one leaves a little more than half of it.
    config = SessionConfig("d", "D", 1, LAYOUT, ring_bytes=2 * SLAB_BYTES + 3 * ALIGNMENT_BYTES)
    granter = Granter(config)
    rooms = {room.key: room for room in (_room(1, 0, 2, ready=0), _room(2, 1, 2, ready=0), _room(3, 2, 1))}
    for room in rooms.values():
        granter.want(_pair(room))

    assert [key.room for key, _, _ in granter.grants(rooms)] == [1, 3]


def test_a_slab_ahead_that_fits_nowhere_does_not_stop_those_that_are_ready() -> None:
    granter = _granter(16)
    large, ready = _room(1, 0, 2, ready=0), _room(2, 1, 1)
    pair = _pair(large)
    pair.grid, pair.states = SlabGrid(0, 64, 32), [TargetSlab.WANTED] * 2
    rooms = {room.key: room for room in (large, ready)}
    # Most of the ring is free, but no contiguous piece is large enough for the large slab.
    regions = [granter.ring.allocate(SLAB_BYTES) for _ in range(16)]
    for index, region in enumerate(regions):
        if region is not None and index % 4 != 3:
            granter.ring.free(region)
    granter.want(pair)
    granter.want(_pair(ready))

    assert [key.room for key, _, _ in granter.grants(rooms)] == [2]

    # When its tokens are ready, it waits for its turn.
    pair.ready_count = 1
    granter.want(pair)
    assert not list(granter.grants(rooms))
    assert granter.blocked
    assert regions[7] is not None
    granter.ring.free(regions[7])
    assert [key.room for key, _, _ in granter.grants(rooms)] == [1]


def test_rooms_that_are_still_computed_leave_a_place_for_the_largest_slab_that_a_source_may_have_ready() -> None:
    """Once more than half of the ring was free without a contiguous quarter, so that a ready slab waited for four rooms."""
    granter = _granter(16)
    rooms: dict[int, TargetRoom] = {}
    granter.expect(4 * SLAB_BYTES)

    def granted(number: int, tokens: int, ready: int) -> list[int]:
        room = rooms[number] = _room(number, number, 1, ready)
        pair = _pair(room)
        pair.grid, pair.states = SlabGrid(0, 2 * tokens, tokens), [TargetSlab.WANTED] * 2
        granter.want(pair)
        return [key.room for key, _, _ in granter.grants({each.key: each for each in rooms.values()})]

    for number in range(4):
        assert granted(number, 3 * SLAB_TOKENS, ready=1)[:1] == [number]
        granted(100 + number, SLAB_TOKENS, ready=0)
        _land_and_free(granter, rooms.pop(number), 0)
    assert granter.ring.used_bytes
    assert granted(200, 4 * SLAB_TOKENS, ready=1)[:1] == [200]


def test_what_a_source_says_of_its_slabs_keeps_no_more_than_half_of_the_ring_from_rooms_that_are_computed() -> None:
    granter = _granter(8)
    granter.expect(1 << 62)
    room = _room(1, 0, 8, ready=0)
    granter.want(_pair(room))
    assert [grant.slab for _, _, grant in granter.grants({room.key: room})] == [0]
