"""Tests that every half of a room ends, also if a worker dies between messages, and that late messages end none."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import msgspec
import pytest
from core_outputs import effects_of, messages_of
from two_writers import DECODE, FIRST, KEY, SECOND, TOKENS, Scene

from longshore_wire.claims import SERIALS_MAX, UsedSerials
from longshore_wire.effects import SECOND_NS, PeerAttached, ProbeLiveness, RoomEnded, RoomReleased
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason, RoomError
from longshore_wire.peer_messages import Abort, Claim, Complete, PairKey, PeerMessage, Ping, Pong, SlabAck
from longshore_wire.states import TargetPairState
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way


def _pass(scene: Scene, seconds: int) -> None:
    """Let time pass while both sides' loops run."""
    for _ in range(2 * seconds):
        scene.tick(SECOND_NS // 2)


def _restart_and_offer_again(scene: Scene) -> None:
    """Start the first source's next life, whose engine offers the whole room again, and let time pass."""
    scene.restart(FIRST)
    scene.sources[FIRST].offer(KEY.room, [(0, 0, TOKENS)], last=True, now_ns=scene.now_ns)
    _pass(scene, 8)


def test_a_full_hit_ends_at_a_prefill_worker_that_dies_between_two_chunks() -> None:
    scene = Scene.of()
    scene.offer(2, 0, TOKENS // 2)
    scene.claim(2, first_token=TOKENS)
    scene.settle()
    assert scene.ended(2) is Reason.NONE

    scene.restart(FIRST)
    _pass(scene, 8)
    # The engine repeats its open rooms and continues.
    scene.sources[FIRST].offer(2, [(0, 0, TOKENS // 2)], last=False, now_ns=scene.now_ns)
    scene.offer(2, TOKENS // 2, TOKENS)

    assert scene.half(FIRST, 2) is Reason.NONE


def test_a_prefill_worker_that_dies_after_its_last_acknowledgement_was_sent_hears_in_its_next_life_that_all_is_there() -> (
    None
):
    scene = Scene.of()
    scene.offer(KEY.room)
    scene.deliver(SECOND)
    _deliver_without_acknowledgements(scene)
    assert scene.ended(KEY.room) is Reason.NONE

    _restart_and_offer_again(scene)

    assert scene.half(FIRST, KEY.room) is Reason.NONE
    assert KEY not in scene.sources[FIRST].rooms


def test_a_prefill_worker_that_dies_when_its_part_is_there_does_not_fail_the_room_that_others_still_feed() -> None:
    scene = Scene.of()
    scene.offer(KEY.room)
    _deliver_without_acknowledgements(scene)
    assert scene.target.rooms[KEY].pairs[FIRST, 0].state is TargetPairState.COMPLETE

    _restart_and_offer_again(scene)

    assert scene.half(FIRST, KEY.room) is Reason.NONE, "its part is complete"
    assert scene.ended(KEY.room) is None
    scene.deliver(SECOND)
    assert scene.ended(KEY.room) is Reason.NONE


@pytest.mark.parametrize("lost_count", [0, 1, 5])
def test_a_room_ends_on_both_sides_where_decode_could_never_connect_its_sources(lost_count: int) -> None:
    """Its transport fails at the first Attach, so that no claim was ever sent. The first messages about that get lost."""
    scene = Scene.of(settle=False)
    scene.offer(KEY.room)
    for _ in range(20):
        scene.now_ns += SECOND_NS // 2
        for core in (*scene.sources.values(), scene.target):
            core.renew(scene.now_ns)
            core.tick(scene.now_ns)
        said = True
        while said:
            said = messages_of(scene.target)
            for peer, message in said:
                if isinstance(message, Abort) and lost_count:
                    lost_count -= 1
                    continue
                scene.sources[peer].receive(DECODE, message, scene.now_ns)
            for peer, source in scene.sources.items():
                for _, answer in messages_of(source):
                    scene.target.receive(peer, answer, scene.now_ns)
                    _refuse_whoever_attaches(scene, Reason.TRANSFER_FAILED)
    assert [scene.half(peer, KEY.room) for peer in scene.sources] == [Reason.TRANSFER_FAILED] * 2
    assert not any(KEY in core.rooms for core in (*scene.sources.values(), scene.target))
    # It is not dialled for ever.
    assert scene.target.peers == {}


def _refuse_whoever_attaches(scene: Scene, reason: Reason = Reason.WIRE_NOT_ALLOWED) -> set[object]:
    """Be a decode worker whose transport refuses every source; return the other effects of its core."""
    asked: set[object] = set()
    while effects := effects_of(scene.target):
        for effect in effects:
            if isinstance(effect, PeerAttached):
                scene.target.refuse(effect.peer, reason, "not these wires", scene.now_ns)
        asked.update(effect for effect in effects if isinstance(effect, RoomReleased))
    return asked


@pytest.mark.parametrize("way", [Way.STAGED, Way.SLICES])
def test_a_room_ends_on_both_sides_where_its_sources_are_refused_each_time_that_they_attach(way: Way) -> None:
    scene = Scene.of(way)
    effects_of(scene.target)
    scene.offer(KEY.room)
    for peer in (FIRST, SECOND):
        scene.target.refuse(peer, Reason.WIRE_NOT_ALLOWED, "not these wires", scene.now_ns)
        for write in scene.writes(peer):
            scene.land(peer, write)
    released = _refuse_whoever_attaches(scene)
    for _ in range(20):
        scene.now_ns += SECOND_NS // 2
        for core in (*scene.sources.values(), scene.target):
            core.renew(scene.now_ns)
            core.tick(scene.now_ns)
        while scene.exchange():
            released |= _refuse_whoever_attaches(scene)
            for peer in scene.sources:
                for write in scene.writes(peer):
                    scene.land(peer, write)

    assert released == {RoomReleased(Half.TARGET, KEY)}
    assert [scene.half(peer, KEY.room) for peer in scene.sources] == [Reason.WIRE_NOT_ALLOWED] * 2
    assert not any(KEY in core.rooms for core in (*scene.sources.values(), scene.target))


def test_a_failure_that_a_prefill_worker_had_heard_of_is_told_to_its_next_life() -> None:
    scene = Scene.of()
    scene.target.cancel(KEY, Reason.CANCELLED, "enough", scene.now_ns)
    scene.settle()
    assert scene.half(FIRST, KEY.room) is Reason.CANCELLED

    _restart_and_offer_again(scene)

    assert scene.half(FIRST, KEY.room) is Reason.CANCELLED
    assert KEY not in scene.sources[FIRST].rooms


def _fail_then_lose_all(scene: Scene) -> None:
    scene.target.cancel(KEY, Reason.CANCELLED, "enough", scene.now_ns)
    scene.settle()


def _lose_worker_and_engine_at_once(scene: Scene) -> None:
    """The worker can tell nobody that its engine has ended."""
    scene.offer(KEY.room)
    scene.settle()
    scene.target.peer_dead(FIRST, 7, scene.now_ns)


def _complete_and_lose_all(scene: Scene) -> None:
    """Decode has all of the first source's part, and waits for the second one."""
    scene.offer(KEY.room)
    _deliver_without_acknowledgements(scene)


ENDS = [_fail_then_lose_all, _lose_worker_and_engine_at_once, _complete_and_lose_all]


@pytest.mark.parametrize("end", ENDS)
def test_the_next_engine_of_a_name_is_told_nothing_of_the_rooms_that_the_last_one_had(
    end: Callable[[Scene], None],
) -> None:
    scene = Scene.of()
    end(scene)

    scene.restart(FIRST)
    object.__setattr__(scene.sources[FIRST].config, "engine", 2)
    # It may use the same room id.
    scene.sources[FIRST].offer(KEY.room, [(0, 0, TOKENS)], last=True, now_ns=scene.now_ns)
    _pass(scene, 8)
    assert scene.half(FIRST, KEY.room) is None

    # The last engine's room ends only now, if it had not ended.
    scene.target.cancel(KEY, Reason.CANCELLED, "enough", scene.now_ns)
    _pass(scene, 8)
    assert scene.half(FIRST, KEY.room) is None


def test_a_claim_by_the_endpoint_of_an_engine_that_has_ended_fails_as_soon_as_the_next_engine_answers() -> None:
    scene = Scene.of()
    _fail_then_lose_all(scene)
    for peer in (FIRST, SECOND):
        scene.restart(peer)
        object.__setattr__(scene.sources[peer].config, "engine", 2)
    _pass(scene, 8)
    old = scene.endpoint()
    ranks = tuple(msgspec.structs.replace(each, engine=1) for each in old.ranks)
    scene.claim(2, endpoint=msgspec.structs.replace(old, ranks=ranks))
    _pass(scene, 8)

    assert scene.ended(2) is Reason.STALE_EPOCH
    assert not any(source.rooms for source in scene.sources.values())


def test_the_next_engine_is_told_nothing_of_a_claim_that_named_the_last_one_and_never_reached_it() -> None:
    scene = Scene.of()
    for peer in (FIRST, SECOND):
        scene.target.peer_lost(peer, "it has ended", scene.now_ns)
    old = scene.endpoint()
    ranks = tuple(msgspec.structs.replace(each, engine=1) for each in old.ranks)
    key = scene.claim(2, endpoint=msgspec.structs.replace(old, ranks=ranks))
    scene.target.cancel(key, Reason.CANCELLED, "enough", scene.now_ns)
    for peer in (FIRST, SECOND):
        scene.restart(peer)
        object.__setattr__(scene.sources[peer].config, "engine", 2)
    _pass(scene, 8)
    scene.offer(2)
    assert scene.half(FIRST, 2) is None and key in scene.sources[FIRST].rooms


@pytest.mark.parametrize("copies", [1, 3])
def test_claims_of_nothing_take_no_place_of_a_room_and_are_forgotten(copies: int) -> None:
    """A router sends each prompt to both engines at once, and both refuse it: decode tells prefill not to keep pages."""
    scene = Scene.of()
    source = scene.sources[FIRST]
    object.__setattr__(source.config, "rooms_max", 2)
    for room in range(100, 100 + 50 * copies):
        scene.claim(room, first_token=TOKENS)
        scene.settle()
        assert scene.ended(room) is Reason.NONE
    assert [key.room for key in source.rooms] == [KEY.room]
    # One of them is offered after all, and another room has its place.
    for core in scene.sources.values():
        core.offer(100, [(0, 0, TOKENS)], last=True, now_ns=scene.now_ns)
        core.offer(7, [(0, 0, TOKENS)], last=True, now_ns=scene.now_ns)
    assert (scene.half(FIRST, 100), scene.half(SECOND, 100)) == (Reason.NONE, Reason.NONE)
    _pass(scene, 1 + 2 * source.config.lease_ns // SECOND_NS)
    assert not source._completed


@pytest.mark.parametrize("copies", [1, 3])
def test_a_claim_that_comes_again_after_its_source_is_done_fails_nothing(copies: int) -> None:
    scene = Scene.of()
    claim = _claims(scene)
    scene.offer(KEY.room)
    scene.deliver(FIRST)
    assert scene.half(FIRST, KEY.room) is Reason.NONE
    assert scene.ended(KEY.room) is None

    for _ in range(copies):
        scene.sources[FIRST].receive(DECODE, claim, scene.now_ns)
    scene.settle()

    assert scene.ended(KEY.room) is None
    scene.deliver(SECOND)
    assert scene.ended(KEY.room) is Reason.NONE


def test_an_abort_without_a_reason_is_not_taken_for_success() -> None:
    scene = Scene.of()
    scene.offer(KEY.room)
    scene.say(FIRST, Abort(scene.pair(FIRST), Reason.NONE, ""))
    assert scene.ended(KEY.room) is Reason.MALFORMED_MESSAGE


def test_an_offered_room_that_nobody_claims_ends_at_its_limit_and_says_what_it_waited_for() -> None:
    scene = Scene.of(room_timeout_ns=30 * SECOND_NS)
    source = scene.sources[FIRST]
    object.__setattr__(source.config, "room_timeout_ns", 30 * SECOND_NS)
    source.offer(9, [(0, 0, TOKENS)], last=True, now_ns=scene.now_ns)
    effects_of(source)
    _pass(scene, 29)
    assert scene.half(FIRST, 9) is None
    _pass(scene, 2)
    assert scene.half(FIRST, 9) is Reason.TIMED_OUT
    [ended] = [effect for effect in effects_of(source) if isinstance(effect, RoomEnded) and effect.key.room == 9]
    assert "no decode rank has claimed it" in ended.text


def test_a_claimed_room_that_nobody_offers_ends_at_its_limit_on_both_sides() -> None:
    scene = Scene.of(room_timeout_ns=30 * SECOND_NS)
    _pass(scene, 31)
    assert scene.ended(KEY.room) is Reason.TIMED_OUT
    assert "have not sent all its slabs" in scene.target.ended[KEY].text
    assert scene.half(FIRST, KEY.room) is Reason.TIMED_OUT
    assert KEY not in scene.target.rooms


def test_a_room_in_which_something_happens_now_and_then_does_not_end() -> None:
    scene = Scene.of(room_timeout_ns=30 * SECOND_NS)
    for first in range(0, TOKENS, 8):
        _pass(scene, 20)
        scene.offer(KEY.room, first, first + 8)
        scene.deliver(FIRST)
        scene.deliver(SECOND)
    assert scene.ended(KEY.room) is Reason.NONE


def test_time_in_which_a_worker_did_not_run_does_not_count_for_the_limit_of_its_rooms() -> None:
    scene = Scene.of(room_timeout_ns=30 * SECOND_NS)
    _pass(scene, 20)
    scene.target.was_absent(600 * SECOND_NS, scene.now_ns + 600 * SECOND_NS)
    scene.now_ns += 600 * SECOND_NS
    for source in scene.sources.values():
        source.was_absent(600 * SECOND_NS, scene.now_ns)
    _pass(scene, 9)
    assert scene.ended(KEY.room) is None
    _pass(scene, 2)
    assert scene.ended(KEY.room) is Reason.TIMED_OUT


def test_what_is_said_of_a_complete_pair_is_said_until_it_is_acknowledged_and_changes_nothing_twice() -> None:
    scene = Scene.of()
    scene.offer(KEY.room)
    scene.deliver(SECOND)
    _deliver_without_acknowledgements(scene)
    scene.restart(FIRST)
    scene.lost.add(FIRST)
    _pass(scene, 8)
    scene.lost.clear()
    _pass(scene, 20)
    source = scene.sources[FIRST]
    assert not scene.target.peers[FIRST].outcomes
    source.offer(KEY.room, [(0, 0, TOKENS)], last=True, now_ns=scene.now_ns)
    assert scene.half(FIRST, KEY.room) is Reason.NONE
    ended = [effect for effect in effects_of(source) if isinstance(effect, RoomEnded | RoomReleased)]
    assert len(ended) == 2
    again = Complete(PairKey(KEY, 0, 0, source.config.epoch, 9, "D"))
    for _ in range(3):
        source.receive(DECODE, again, scene.now_ns)
    assert not [effect for effect in effects_of(source) if isinstance(effect, RoomEnded)]
    with pytest.raises(RoomError):
        source.offer(KEY.room, [(0, 0, TOKENS)], last=True, now_ns=scene.now_ns)


def _claims(scene: Scene) -> PeerMessage:
    """Return the claim of room KEY that the first source was sent."""
    pair = scene.target.rooms[KEY].pairs[FIRST, 0]
    pages = bytes(32) if pair.way is not Way.STAGED else b""
    return Claim(pair.pair, 0, TOKENS, pair.way, 0, len(pages) // 4, pages, pair.why, pair.serial)


def _deliver_without_acknowledgements(scene: Scene) -> None:
    """Deliver the first source's slabs, and lose all acknowledgements."""
    scene.settle()
    while writes := scene.writes(FIRST):
        for write in writes:
            scene.say(FIRST, scene.land(FIRST, write))
        scene.scatter()
        for peer, message in messages_of(scene.target):
            if not (peer == FIRST and isinstance(message, SlabAck)):
                scene.sources[peer].receive(DECODE, message, scene.now_ns)


def test_a_write_in_place_that_never_ends_fails_its_room_at_the_write_timeout() -> None:
    scene = Scene.of(Way.SLICES, write_timeout_ns=20 * SECOND_NS)
    scene.offer(KEY.room)
    scene.settle()
    assert scene.writes(FIRST)
    _pass(scene, 19)
    assert scene.ended(KEY.room) is None
    _pass(scene, 20)
    assert scene.ended(KEY.room) is Reason.TRANSFER_FAILED
    # Its pages are not released yet, since the write may still land.
    assert scene.target.exposed_since_ns


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("way", [Way.STAGED, Way.SLICES])
def test_a_claim_that_comes_when_everybody_has_forgotten_its_room_opens_nothing_and_writes_nothing(
    way: Way, cancelled: bool
) -> None:
    scene = Scene.of(way)
    claim = _claims(scene)
    if cancelled:
        scene.target.cancel(KEY, Reason.CANCELLED, "enough", scene.now_ns)
        scene.settle()
    else:
        scene.offer(KEY.room)
        scene.deliver(FIRST)
        scene.deliver(SECOND)
    for _ in range(400):
        scene.tick(SECOND_NS // 2)
    source = scene.sources[FIRST]
    assert KEY not in scene.target.ended and KEY not in source.ended
    effects_of(source)
    source.receive(DECODE, claim, scene.now_ns)
    assert KEY not in source.rooms
    # Its pages belong to another room by now, although the engine offers it late.
    source.offer(KEY.room, [(0, 0, TOKENS)], last=True, now_ns=scene.now_ns)
    source.receive(DECODE, claim, scene.now_ns)
    scene.settle()
    assert not scene.writes(FIRST)


def test_claims_are_remembered_as_used_in_little_memory_in_whatever_order_they_come() -> None:
    chosen, used = random.Random(1), UsedSerials(9)
    serials = list(range(1, 5000))
    # Nearly in order, like real messages.
    serials.sort(key=lambda serial: serial + chosen.random() * 20)
    for count, serial in enumerate(serials):
        assert serial not in used
        used.add(serial)
        assert serial in used
        assert len(used.above) <= 40, count
    assert (used.floor, used.above) == (4999, set())
    for serial in range(6000, 6100 + 2 * SERIALS_MAX, 2):
        used.add(serial)
    assert len(used.above) <= SERIALS_MAX
    assert 5500 in used and 6001 not in UsedSerials(9)


def test_a_core_that_nobody_talks_to_forgets_what_has_ended_by_its_own_due_times() -> None:
    scene = Scene.of()
    scene.offer(KEY.room)
    scene.deliver(FIRST)
    scene.deliver(SECOND)
    for core in (scene.target, *scene.sources.values()):
        core.peers.clear()
        core._deadlines.peers = type(core._deadlines.peers)()
        now_ns, turns = scene.now_ns, 0
        while (due_ns := core.next_due_ns()) is not None and turns < 50:
            now_ns, turns = max(now_ns, due_ns), turns + 1
            core.tick(now_ns)
        assert not core.ended


class Silence:
    """One side of a scene, and a peer that has reported its absence and is silent from then on."""

    def __init__(self, judge: Half) -> None:
        scene = Scene.of()
        self.core, self.peer = (scene.target, FIRST) if judge is Half.TARGET else (scene.sources[FIRST], DECODE)
        self.epoch = self.core.peers[self.peer].epoch
        self.now_ns, self.number = scene.now_ns, 0
        for absent_ns in (0, 0):
            self.beat(absent_ns)

    def beat(self, absent_ns: int) -> None:
        """Send one more heartbeat, with the newest number."""
        self.now_ns += self.core.config.heartbeat_ns
        self.core.renew(self.now_ns)
        self.core.tick(self.now_ns)
        pings = [message.number for _, message in messages_of(self.core) if isinstance(message, Ping)]
        self.number = pings[0] if pings else self.number + 1
        self.hear(self.number, absent_ns)

    def hear(self, number: int, absent_ns: int) -> None:
        if isinstance(self.core, TargetSession):
            self.core.receive(self.peer, Pong(self.epoch, self.core.config.epoch, number, absent_ns), self.now_ns)
        else:
            self.core.receive(self.peer, Ping(self.epoch, number, absent_ns), self.now_ns)

    def until_lost_ns(self, *, listens: bool) -> int:
        """Return how long the peer is silent before it counts as lost."""
        heard_ns = self.now_ns
        while self.now_ns < heard_ns + 10 * self.core.config.peer_timeout_ns:
            self.now_ns += self.core.config.heartbeat_ns // 4
            self.core.renew(self.now_ns)
            self.core.tick(self.now_ns)
            asked = [effect for effect in effects_of(self.core) if isinstance(effect, ProbeLiveness)]
            if listens and asked:
                self.core.peer_listens(self.peer, self.epoch, self.now_ns)
            known = self.core.peers.get(self.peer)
            if known is None or known.attach is None:
                break
        return self.now_ns - heard_ns


@pytest.mark.parametrize("judge", Half)
@pytest.mark.parametrize(
    ("absent_s", "listens", "limits"),
    [(0, False, 1.0), (3, False, 1.6), (60, False, 2.0), (0, True, 2.0), (60, True, 4.0)],
)
def test_a_silent_peer_has_the_longer_the_longer_it_was_absent_lately_and_while_its_host_knows_its_process(
    judge: Half, absent_s: float, listens: bool, limits: float
) -> None:
    silence = Silence(judge)
    config = silence.core.config
    assert config.peer_timeout_ns == 5 * SECOND_NS
    silence.beat(int(absent_s * SECOND_NS))

    expected_ns = limits * config.peer_timeout_ns
    assert expected_ns <= silence.until_lost_ns(listens=listens) <= expected_ns + 2 * config.heartbeat_ns


@pytest.mark.parametrize("judge", Half)
def test_a_heartbeat_that_comes_late_or_twice_tells_nothing_of_its_peer(judge: Half) -> None:
    silence = Silence(judge)
    silence.beat(2 * SECOND_NS)
    early, silence.now_ns = silence.number - 1, silence.now_ns + SECOND_NS
    before = copy.deepcopy(silence.core.peers[silence.peer])

    silence.hear(early, 0)
    silence.hear(silence.number, 2 * SECOND_NS)

    assert silence.core.peers[silence.peer] == before
    kind = "Pong" if judge is Half.TARGET else "Ping"
    assert silence.core.counters[f"stale.{kind}"] == 2
