"""Tests two live workers with one name: one is served, the other gets the reason, and no memory changes its owner."""

from __future__ import annotations

import msgspec
import two_writers
from core_outputs import effects_of, messages_of
from source_voice import attach_to, drain_writers, stay_alive

from longshore_wire.claims import Wanted
from longshore_wire.effects import (
    SECOND_NS,
    Dial,
    PeerAttached,
    PeerId,
    ProbeLiveness,
    RoomEnded,
    RoomReleased,
    SessionConfig,
)
from longshore_wire.engine_messages import CachePages, Endpoint, Half, RankAddress
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.links import PeerState
from longshore_wire.peer_messages import Abort, Attach, EndAck, PairKey, Ping, Pong, Refuse, RegionInfo, RoomKey
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way

LAYOUT = KVLayout(ModelShape.kv(2, 4, 16, 2), Parallel(), 16)
PREFILL, DECODE = PeerId("P", 0, 0), PeerId("D", 0, 0)
ENDPOINT = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),))


def prefill() -> SourceSession:
    session = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
    session.describe(b"", None, {}, address="h:1")
    return session


def decode(epoch: int) -> TargetSession:
    session = TargetSession(SessionConfig("d", "D", epoch, LAYOUT, ring_bytes=1 << 20, force_way=Way.STAGED), now_ns=0)
    session.describe(b"", RegionInfo(0, 1 << 20), {})
    return session


def claim(session: TargetSession, room: int) -> list[object]:
    """Claim a room; return the session's messages."""
    session.claim(Wanted(RoomKey("P", room), ENDPOINT, (CachePages(0, 0, 60, 4, bytes(16)),)), 0)
    return [message for _, message in messages_of(session)]


def exchange(source: SourceSession, target: TargetSession, said: list[object], now_ns: int = 0) -> None:
    """Deliver messages in both directions until neither side has any."""
    while said:
        for message in said:
            source.receive(DECODE, message, now_ns)
        for _, answer in messages_of(source):
            target.receive(PREFILL, answer, now_ns)
        said = [message for _, message in messages_of(target)]


def insist(source: SourceSession, target: TargetSession, seconds: int) -> None:
    """Let time pass for a target, which dials a source repeatedly."""
    for second in range(1, seconds + 1):
        target.renew(second * SECOND_NS)
        target.tick(second * SECOND_NS)
        exchange(source, target, [message for _, message in messages_of(target)], second * SECOND_NS)


def test_the_older_of_two_workers_of_one_name_is_refused_by_that_name_and_the_newer_one_keeps_its_rooms() -> None:
    source = prefill()
    older, newer = decode(100), decode(200)
    exchange(source, newer, claim(newer, 1))
    effects_of(source)

    exchange(source, older, claim(older, 2))
    insist(source, older, 6)

    ended = [effect for effect in effects_of(older) if isinstance(effect, RoomEnded)]
    assert [effect.reason for effect in ended] == [Reason.STALE_EPOCH]
    assert "decode D rank 0" in ended[0].text and "instance name" in ended[0].text
    assert not [effect for effect in effects_of(source) if isinstance(effect, PeerAttached)]
    assert source.peers[DECODE].epoch == 200
    assert list(source.rooms) == [RoomKey("P", 1)]


def test_a_decode_worker_whose_clock_is_behind_is_served_as_soon_as_the_last_one_is_known_to_have_ended() -> None:
    """Its engine has moved to a node whose clock is a little behind, so the newer worker has the lower epoch."""
    source = prefill()
    last, moved = decode(200), decode(100)
    exchange(source, last, claim(last, 1))
    effects_of(source)

    exchange(source, moved, claim(moved, 2))
    insist(source, moved, 2)
    assert not [effect for effect in effects_of(moved) if isinstance(effect, RoomEnded)]
    probes = [effect for effect in effects_of(source) if isinstance(effect, ProbeLiveness)]
    assert {probe.epoch for probe in probes} == {200}
    source.peer_dead(DECODE, 200, 2 * SECOND_NS)
    insist(source, moved, 4)

    assert source.peers[DECODE].epoch == 100
    assert RoomKey("P", 2) in source.rooms


def test_a_source_that_refuses_after_it_was_silent_is_told_all_the_same_how_the_room_ended() -> None:
    """The source was stopped while it probed whether the last life of a moved decode worker still lives."""
    source = prefill()
    last, moved = decode(200), decode(100)
    exchange(source, last, claim(last, 1))
    source.offer(2, [(0, 0, 60)], last=True, now_ns=0)
    exchange(source, moved, claim(moved, 2))
    for second in range(1, 9):
        moved.renew(second * SECOND_NS)
        moved.tick(second * SECOND_NS)
    assert [effect.reason for effect in effects_of(moved) if isinstance(effect, RoomEnded)] == [Reason.PEER_LOST]
    assert moved.peers[PREFILL].state is PeerState.LOST

    exchange(source, moved, [message for _, message in messages_of(moved)], 8 * SECOND_NS)
    source.peer_dead(DECODE, 200, 8 * SECOND_NS)
    insist(source, moved, 10)

    assert source.ended[RoomKey("P", 2)].reason is Reason.PEER_LOST


def test_a_refusal_of_an_earlier_life_means_nothing_to_the_next_one() -> None:
    source = prefill()
    newer = decode(200)
    exchange(source, newer, claim(newer, 1))

    newer.receive(PREFILL, Refuse(Reason.STALE_EPOCH, "late", epoch=100, attempt=2), 0)

    assert newer.peers[PREFILL].state is PeerState.ATTACHED
    assert list(newer.rooms) == [RoomKey("P", 1)]


def test_an_older_worker_is_served_once_the_newer_one_is_gone() -> None:
    source = prefill()
    older, newer = decode(100), decode(200)
    exchange(source, newer, claim(newer, 1))
    source.tick(source.config.peer_timeout_ns + SECOND_NS)
    messages_of(source)

    exchange(source, older, claim(older, 2))

    assert source.peers[DECODE].epoch == 100
    assert RoomKey("P", 2) in source.rooms


def test_what_the_refused_worker_was_being_sent_stays_quarantined() -> None:
    """It was attached before, so a write to its ring may still be open. Only the ring's owner must not reuse the memory."""
    source = prefill()
    older = decode(100)
    exchange(source, older, claim(older, 2))
    source.offer(2, [(0, 0, 60)], last=True, now_ns=0)
    for _, message in messages_of(source):
        older.receive(PREFILL, message, 0)
    granted = older.granter.ring.used_bytes
    assert granted
    messages_of(older)

    older.describe(b"", RegionInfo(0, 1 << 20), {})
    attempt = older.peers[PREFILL].attempt
    older.receive(PREFILL, Refuse(Reason.STALE_EPOCH, "a newer one is there", epoch=100, attempt=attempt), 0)

    assert older.peers[PREFILL].trouble == "a newer one is there"
    assert older.granter.ring.held_bytes == granted


def test_a_room_of_the_older_one_that_was_granted_nothing_is_forgotten_when_it_is_refused() -> None:
    """The claim went to a source that had attached to the newer one meanwhile, so no source will ever confirm it."""
    source = prefill()
    older, newer = decode(100), decode(200)
    exchange(source, older, claim(older, 1))
    exchange(source, newer, claim(newer, 2))
    effects_of(older)

    claim(older, 3)  # lost: it is sent over a connection that the source no longer knows
    older.tick(SECOND_NS)
    [ping] = [message for _, message in messages_of(older) if isinstance(message, Ping)]
    older.receive(PREFILL, Pong(0, ping.epoch, ping.number), SECOND_NS)
    older.tick(2 * SECOND_NS)
    attempt = older.peers[PREFILL].attempt
    older.receive(PREFILL, Refuse(Reason.STALE_EPOCH, "a newer worker is attached", 100, attempt), 2 * SECOND_NS)

    assert RoomKey("P", 3) not in older.rooms
    assert RoomReleased(Half.TARGET, RoomKey("P", 3)) in effects_of(older)
    # Room 1's granted memory may still be written.
    assert list(older.rooms) == [RoomKey("P", 1)]
    assert older.granter.ring.held_bytes


# -- prefill workers of one name -----------------------------------------------------------------------------------


TWIN = Endpoint("P", two_writers.HALVES, (RankAddress(0, "h:9", 8), RankAddress(1, "h:2", 7)))


def _held_write() -> two_writers.Scene:
    """Decode has granted memory to both ranks of a prefill instance, and their writes are held."""
    scene = two_writers.Scene.of()
    scene.offer(two_writers.KEY.room)
    scene.settle()
    assert scene.target.rooms[two_writers.KEY].pairs[two_writers.FIRST, 0].regions
    return scene


def _hear_outcomes(scene: two_writers.Scene) -> None:
    """Confirm the ends of rooms as the first rank of the attached engine."""
    peer = two_writers.FIRST
    for key, _ in list(scene.target.peers[peer].outcomes):
        pair = PairKey(key, 0, 0, scene.target.peers[peer].epoch, 9, "D", 0)
        scene.target.receive(peer, EndAck(pair), scene.now_ns)
    assert not scene.target.peers[peer].outcomes


def _dialled(target: TargetSession) -> list[str]:
    """Return the addresses at which the first rank was dialled since the last look."""
    return [each.address for each in effects_of(target) if isinstance(each, Dial) and each.peer == two_writers.FIRST]


def _pass(scene: two_writers.Scene, seconds: int) -> None:
    for _ in range(2 * seconds):
        scene.tick(SECOND_NS // 2)


def test_a_room_that_names_another_live_prefill_worker_of_one_name_fails_by_that_name_and_frees_nothing() -> None:
    scene = _held_write()
    used = scene.target.granter.ring.used_bytes
    scene.claim(2, endpoint=TWIN)
    _pass(scene, 8)
    assert scene.ended(2) is Reason.STALE_EPOCH
    text = scene.target.ended[RoomKey("P", 2)].text
    assert "h:1" in text and "h:9" in text and "one instance name" in text
    # The first one's writes continue, into memory that is still granted to them.
    assert scene.target.granter.ring.used_bytes == used
    scene.deliver(two_writers.FIRST)
    scene.deliver(two_writers.SECOND)
    assert scene.ended(two_writers.KEY.room) is Reason.NONE


def test_a_prefill_worker_that_is_silent_keeps_its_memory_in_quarantine_when_another_of_its_name_is_dialled() -> None:
    scene = _held_write()
    first = sum(
        region.length_bytes
        for region in scene.target.rooms[two_writers.KEY].pairs[two_writers.FIRST, 0].regions.values()
    )
    scene.lost.add(two_writers.FIRST)
    scene.claim(2, endpoint=TWIN)
    dialled = []
    for _ in range(16):
        scene.tick(SECOND_NS // 2)
        dialled += [effect.address for effect in scene.effects if isinstance(effect, Dial)]
    scene.end_writes(two_writers.SECOND)
    scene.settle()
    assert "h:9" in dialled
    assert scene.ended(two_writers.KEY.room) is Reason.PEER_LOST
    assert scene.held == first
    # Its next life at the other address proves nothing about the one at this address.
    attach = Attach(2, "d", "P", 8, two_writers.HALVES, "Loopback", b"", None, (), 1 << 20, engine=1)
    attach_to(scene.target, two_writers.FIRST, attach, scene.now_ns)
    assert scene.target.peers[two_writers.FIRST].epoch == 8
    assert scene.held == first
    scene.target.peer_dead(two_writers.FIRST, 8, scene.now_ns)
    scene.settle()
    assert not drain_writers(scene.target, scene.now_ns)
    assert scene.held == first
    scene.target.peer_dead(two_writers.FIRST, 7, scene.now_ns)
    drain_writers(scene.target, scene.now_ns)
    assert scene.held == 0


def test_a_prefill_worker_that_has_moved_is_dialled_as_soon_as_its_old_address_refuses() -> None:
    scene = two_writers.Scene.of()
    effects_of(scene.target)
    scene.claim(2, endpoint=TWIN)
    [probe] = [effect for effect in effects_of(scene.target) if isinstance(effect, ProbeLiveness)]
    assert (probe.epoch, probe.address) == (7, "h:1")
    scene.target.peer_dead(two_writers.FIRST, 7, scene.now_ns)
    assert Dial(two_writers.FIRST, "h:9") in effects_of(scene.target)
    assert scene.ended(2) is None


def test_a_claim_that_comes_when_the_silence_of_a_moved_worker_ends_dials_the_new_address() -> None:
    scene = two_writers.Scene.of()
    scene.lost.add(two_writers.FIRST)
    _pass(scene, 4)
    effects_of(scene.target)
    # The limit of its silence has passed, and the next heartbeat has not come.
    scene.now_ns += scene.target.config.peer_timeout_ns
    scene.claim(2, endpoint=TWIN)
    assert Dial(two_writers.FIRST, "h:9") in effects_of(scene.target)
    assert scene.ended(2) is None
    assert scene.target.peers[two_writers.FIRST].address == "h:9"


def test_the_worker_of_a_refused_room_is_told_of_its_end_once_its_namesake_has_ended() -> None:
    """The namesake may be the last life of an engine that has moved, and was stopped for a while."""
    scene = two_writers.Scene.of()
    scene.claim(2, endpoint=TWIN)
    _pass(scene, 8)
    assert scene.ended(2) is Reason.STALE_EPOCH
    scene.target.peer_dead(two_writers.FIRST, 7, scene.now_ns)
    assert "h:9" in _dialled(scene.target)
    attach = Attach(2, "d", "P", 8, two_writers.HALVES, "Loopback", b"", None, (), 1 << 20, engine=1)
    attach_to(scene.target, two_writers.FIRST, attach, scene.now_ns)
    said = [message for peer, message in messages_of(scene.target) if peer == two_writers.FIRST]
    told = {each.pair.key.room: each.reason for each in said if isinstance(each, Abort)}
    assert told[2] is Reason.STALE_EPOCH


def test_a_namesake_that_answers_no_more_fails_no_room_of_the_other_address() -> None:
    """The last life of a moved worker answered for a few seconds more, and then its host was cut off."""
    scene = two_writers.Scene.of()
    scene.claim(2, endpoint=TWIN)
    _pass(scene, 2)
    scene.lost.add(two_writers.FIRST)
    dialled = []
    for _ in range(16):
        scene.tick(SECOND_NS // 2)
        dialled += [effect.address for effect in scene.effects if isinstance(effect, Dial)]
        assert dialled or scene.ended(2) is None
    assert dialled[0] == "h:9"


def test_what_a_moved_worker_said_before_its_end_is_no_answer_of_it_after_decode_was_stopped() -> None:
    scene = two_writers.Scene.of()
    target = scene.target
    scene.claim(2, endpoint=TWIN)
    messages_of(target)
    stopped_ns = 7 * SECOND_NS
    scene.now_ns += stopped_ns
    target.was_absent(stopped_ns, scene.now_ns)
    target.receive(two_writers.FIRST, Pong(7, 9, target.links.asked_count), scene.now_ns)
    target.tick(scene.now_ns)
    assert scene.ended(2) is None

    target.peer_dead(two_writers.FIRST, 7, scene.now_ns)
    assert Dial(two_writers.FIRST, "h:9") in effects_of(target)
    assert scene.ended(2) is None


def test_a_life_does_not_confirm_that_an_earlier_one_of_its_name_writes_no_more() -> None:
    source, target = prefill(), decode(200)
    exchange(source, target, claim(target, 1))
    earlier = PairKey(RoomKey("P", 1), 0, 0, 6, 200, "D", 0)
    source.receive(DECODE, Abort(earlier, Reason.CANCELLED, "cancelled"), 0)
    assert messages_of(source) == []


def test_a_writer_that_is_back_after_another_life_of_its_name_is_asked_again_to_confirm() -> None:
    scene = _held_write()
    target, peer = scene.target, two_writers.FIRST
    own = target.peers[peer].attach
    assert own is not None
    key = two_writers.KEY

    def aborts() -> list[int]:
        said = [message for to, message in messages_of(target) if to == peer]
        return [message.pair.source_epoch for message in said if isinstance(message, Abort) and message.pair.key == key]

    aborts()
    target.peer_lost(peer, "silent", scene.now_ns)
    held = scene.held
    attach_to(target, peer, msgspec.structs.replace(own, epoch=8), scene.now_ns)
    assert aborts() == [8]
    target.receive(peer, EndAck(PairKey(key, 0, 0, 8, 9, "D", 0)), scene.now_ns)
    target.peer_lost(peer, "silent", scene.now_ns)
    attach_to(target, peer, own, scene.now_ns)
    assert scene.held == held
    assert aborts() == [7]
    target.receive(peer, EndAck(PairKey(key, 0, 0, 7, 9, "D", 0)), scene.now_ns)
    assert scene.held < held


def test_an_attach_of_a_life_that_is_over_changes_nothing_however_late_it_comes() -> None:
    scene = _held_write()
    target = scene.target
    old = target.peers[two_writers.FIRST].attach
    assert old is not None
    scene.restart(two_writers.FIRST)
    _pass(scene, 3)
    assert target.peers[two_writers.FIRST].epoch == 8
    scene.claim(3)
    scene.offer(3)
    scene.settle()
    used, held = target.granter.ring.used_bytes, target.granter.ring.held_bytes
    for attempt in range(20):
        target.receive(two_writers.FIRST, msgspec.structs.replace(old, attempt=attempt), scene.now_ns)
    assert target.peers[two_writers.FIRST].epoch == 8
    assert (target.granter.ring.used_bytes, target.granter.ring.held_bytes) == (used, held)
    scene.deliver(two_writers.FIRST)
    scene.deliver(two_writers.SECOND)
    assert scene.ended(3) is Reason.NONE


def test_an_answer_to_an_earlier_life_of_decode_attaches_nobody_to_the_next_one() -> None:
    source = prefill()
    earlier, later = decode(100), decode(200)
    for message in claim(earlier, 1):
        source.receive(DECODE, message, 0)
    [(_, answer)] = messages_of(source)
    assert isinstance(answer, Attach)
    claim(later, 2)

    later.receive(PREFILL, answer, 0)

    assert later.peers[PREFILL].state is PeerState.DIALING
    assert not [effect for effect in effects_of(later) if isinstance(effect, PeerAttached)]


def test_answers_to_what_was_asked_of_an_earlier_life_end_no_later_one() -> None:
    scene = _held_write()
    target, peer = scene.target, two_writers.FIRST
    number = target.links.asked_count
    scene.restart(peer)
    _pass(scene, 3)
    scene.claim(3)
    scene.settle()
    for late in (
        *(Pong(epoch, 9, asked) for epoch in (0, 7) for asked in range(number + 1)),
        Pong(0, 5, target.links.asked_count),
        *(Refuse(Reason.BUSY, "late", 9, asked) for asked in range(number + 1)),
    ):
        target.receive(peer, late, scene.now_ns)
    assert target.peers[peer].epoch == 8
    assert scene.ended(3) is None


def test_another_worker_at_the_address_of_one_that_has_ended_is_not_taken_for_it() -> None:
    """The host gave its free port to the next worker. Both workers are of one deployment."""
    scene = _held_write()
    held = scene.target.granter.ring.used_bytes
    peer = two_writers.FIRST
    scene.target.peer_lost(peer, "silent", scene.now_ns)
    sibling = KVLayout(two_writers.MODEL, Parallel(tp=2, tp_rank=1), 16)
    attach = Attach(2, "d", "P", 20, sibling, "Loopback", b"", None, (), 1 << 20)
    attach_to(scene.target, peer, attach, scene.now_ns)
    assert scene.target.peers[peer].state is PeerState.REFUSED
    assert "prefill P rank 1 listens at" in scene.target.peers[peer].trouble
    # One process has an address at a time: the worker that had it before writes nothing more.
    assert set(drain_writers(scene.target, scene.now_ns)) == {7}
    assert 0 < scene.held < held


def test_a_source_that_was_lost_elsewhere_is_looked_for_where_a_writer_of_its_name_may_still_be() -> None:
    """Its engine has moved and come back.

    The worker at its first address is a later life, which proves the end of the first.
    """
    scene = _held_write()
    peer = two_writers.FIRST
    scene.lost.add(peer)
    scene.claim(2, endpoint=TWIN)
    _pass(scene, 8)
    assert scene.target.peers[peer].address == "h:9"
    scene.target.peer_lost(peer, "silent", scene.now_ns)
    held = scene.held
    dialled = set()
    for _ in range(12):
        scene.target.peer_listens(peer, 7, scene.now_ns)
        scene.tick(SECOND_NS // 2)
        dialled |= {effect.address for effect in scene.effects if isinstance(effect, Dial)}
    assert dialled == {"h:1"}
    scene.restart(peer)
    scene.lost.clear()
    _pass(scene, 3)
    assert scene.held < held


def _held_write_and_twin() -> tuple[two_writers.Scene, Attach]:
    """Return a scene whose first writer is silent with a held write, and the Attach of its name's other engine, which moves room 2."""
    scene = _held_write()
    scene.lost.add(two_writers.FIRST)
    scene.claim(2, endpoint=TWIN)
    _pass(scene, 8)
    twin = Attach(2, "d", "P", 8, two_writers.HALVES, "Loopback", b"", None, (), 1 << 20, engine=2)
    attach_to(scene.target, two_writers.FIRST, twin, scene.now_ns)
    return scene, twin


def test_a_later_life_at_the_address_of_an_ended_writer_is_asked_while_another_engine_of_its_name_is_attached() -> None:
    """A probe finds the later life's listener there, so only its Attach can prove that the writer has ended."""
    scene, twin = _held_write_and_twin()
    target, peer = scene.target, two_writers.FIRST
    scene.now_ns += SECOND_NS
    target.peer_listens(peer, 7, scene.now_ns)
    target.tick(scene.now_ns)
    assert target.peers[peer].address == "h:9", "room 2 is open there"
    target.cancel(RoomKey("P", 2), Reason.CANCELLED, "enough", scene.now_ns)
    effects_of(target)
    held = scene.held

    # Its engine hears first how the room has ended.
    scene.now_ns += SECOND_NS
    target.peer_listens(peer, 7, scene.now_ns)
    target.tick(scene.now_ns)
    assert _dialled(target) == []
    _hear_outcomes(scene)

    scene.now_ns += SECOND_NS
    target.peer_listens(peer, 7, scene.now_ns)
    target.tick(scene.now_ns)
    assert _dialled(target) == ["h:1"]
    later = msgspec.structs.replace(twin, epoch=9, engine=1)
    attach_to(target, peer, later, scene.now_ns)
    assert drain_writers(target, scene.now_ns) == [7]
    assert 0 < scene.held < held, "the other rank's write goes on"
    scene.now_ns += SECOND_NS
    target.tick(scene.now_ns)
    assert _dialled(target) == ["h:9"]


def test_a_writer_that_does_not_answer_takes_one_heartbeat_of_another_engine_of_its_name_per_lease() -> None:
    scene, twin = _held_write_and_twin()
    target, peer = scene.target, two_writers.FIRST
    target.cancel(RoomKey("P", 2), Reason.CANCELLED, "enough", scene.now_ns)
    _hear_outcomes(scene)
    effects_of(target)
    dialled = []
    for _ in range(50):
        scene.now_ns += SECOND_NS
        target.peer_listens(peer, 7, scene.now_ns)
        target.tick(scene.now_ns)
        dialled += _dialled(target)
        if target.peers[peer].address == "h:9":
            attach_to(target, peer, twin, scene.now_ns)
    assert dialled == ["h:1", "h:9"]
    # A room that comes during a visit is not delayed by it.
    scene.now_ns += target.config.lease_ns
    target.peer_listens(peer, 7, scene.now_ns)
    target.tick(scene.now_ns)
    assert target.peers[peer].address == "h:1"
    scene.claim(3, endpoint=TWIN)
    assert target.peers[peer].address == "h:9"


def test_a_claim_of_a_later_life_waits_its_turn_where_a_room_of_another_address_is_dialled_first() -> None:
    scene = two_writers.Scene.of()
    peer = two_writers.FIRST
    scene.claim(2, endpoint=TWIN)
    _pass(scene, 1)
    later = Endpoint("P", two_writers.HALVES, (RankAddress(0, "h:1", 12), RankAddress(1, "h:2", 7)))
    scene.claim(3, endpoint=later)
    assert scene.target.peers[peer].address == "h:9"
    assert scene.target.peers[peer].rival_since_ns is not None


def _claim_at(target: TargetSession, room: int, address: str, now_ns: int) -> None:
    endpoint = Endpoint("P", LAYOUT, (RankAddress(0, address, 1 << 62),))
    target.claim(Wanted(RoomKey("P", room), endpoint, (CachePages(0, 0, 60, 4, bytes(16)),)), now_ns)


def test_addresses_at_which_nobody_answers_delay_a_peer_by_some_heartbeats_and_not_by_its_silence_limit() -> None:
    target = decode(200)
    heartbeat_ns = target.config.heartbeat_ns
    for room, address in ((1, "h:6"), (2, "h:7"), (3, "h:1")):
        _claim_at(target, room, address, 0)
    attach = Attach(2, "d", "P", 7, LAYOUT, "Loopback", b"", None, (), 1 << 20)
    for beat in range(1, 8):
        target.tick(beat * heartbeat_ns)
        if target.peers[PREFILL].address == "h:1":
            attach_to(target, PREFILL, attach, beat * heartbeat_ns)
            break
    assert target.peers[PREFILL].epoch == 7
    assert beat <= 5
    assert RoomKey("P", 3) in target.rooms and not target.rooms[RoomKey("P", 3)].failed


def test_rooms_of_two_addresses_at_which_nobody_answers_all_end() -> None:
    target = decode(200)
    _claim_at(target, 1, "h:6", 0)
    _claim_at(target, 2, "h:7", 0)
    for now_ns in range(0, 3 * target.config.peer_timeout_ns, target.config.heartbeat_ns):
        target.tick(now_ns)
    ended = [effect for effect in effects_of(target) if isinstance(effect, RoomEnded)]
    assert {effect.key.room: effect.reason for effect in ended} == {1: Reason.PEER_LOST, 2: Reason.PEER_LOST}


def _fail_before_its_address_is_dialled() -> tuple[SourceSession, TargetSession]:
    """Return a source at h:1 and a target that dials h:6, and has failed its room of h:1 meanwhile."""
    source, target = prefill(), decode(200)
    source.offer(2, [(0, 0, 60)], last=True, now_ns=0)
    _claim_at(target, 1, "h:6", 0)
    _claim_at(target, 2, "h:1", 0)
    target.cancel(RoomKey("P", 2), Reason.CANCELLED, "enough", 0)
    released = [effect.key.room for effect in effects_of(target) if isinstance(effect, RoomReleased)]
    assert released == [2], "nobody may write its pages"
    messages_of(target)
    return source, target


def test_a_room_that_fails_before_its_address_is_dialled_is_reported_there_once_the_dialled_one_is_dead() -> None:
    source, target = _fail_before_its_address_is_dialled()

    target.peer_dead(PREFILL, 0, 0)
    assert target.peers[PREFILL].address == "h:1"
    exchange(source, target, [message for _, message in messages_of(target)])

    assert source.ended[RoomKey("P", 2)].reason is Reason.CANCELLED
    assert not target.rooms and not target.peers[PREFILL].outcomes


def test_rooms_of_another_address_are_dropped_unreported_if_the_dialled_worker_of_the_name_lives() -> None:
    _, target = _fail_before_its_address_is_dialled()
    _claim_at(target, 3, "h:1", 0)
    attach = Attach(2, "d", "P", 6, LAYOUT, "Loopback", b"", None, (), 1 << 20)
    attach_to(target, PREFILL, attach, 0)

    said = stay_alive(target, 0, target.config.peer_timeout_ns + target.config.heartbeat_ns)

    assert target.ended[RoomKey("P", 3)].reason is Reason.STALE_EPOCH
    assert list(target.rooms) == [RoomKey("P", 1)]
    assert not [message for _, message in said if isinstance(message, Abort)], "that worker never had the rooms"


def test_an_open_rooms_address_is_dialled_before_that_of_a_room_that_has_failed() -> None:
    _, target = _fail_before_its_address_is_dialled()
    _claim_at(target, 3, "h:7", 0)
    target.peer_dead(PREFILL, 0, 0)
    assert target.peers[PREFILL].address == "h:7"


def test_a_claim_of_the_next_life_of_a_target_is_answered_while_its_room_still_drains_at_the_source() -> None:
    source, last, next_life = prefill(), decode(100), decode(200)
    exchange(source, last, claim(last, 1))
    source.offer(1, [(0, 0, 60)], last=True, now_ns=0)
    exchange(source, last, [])
    for _, message in messages_of(source):
        last.receive(PREFILL, message, 0)
    exchange(source, last, [message for _, message in messages_of(last)])
    assert source.rooms[RoomKey("P", 1)].busy

    exchange(source, next_life, claim(next_life, 1))

    ended = [effect for effect in effects_of(next_life) if isinstance(effect, RoomEnded)]
    assert [effect.reason for effect in ended] == [Reason.PEER_LOST]
