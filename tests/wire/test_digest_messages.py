"""Rooms with digests in the protocol cores: who computes, who sends, who compares, and how such a room fails."""

from __future__ import annotations

import msgspec
import pytest
from core_outputs import messages_of
from two_writers import DECODE, FIRST, KEY, MODEL, SECOND, TOKENS, Scene

from longshore_wire.codec import CodecError
from longshore_wire.effects import SECOND_NS, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.peer_messages import DIGEST_KEY_BYTES_MAX, PEER, Abort, Claim, SlabReady
from longshore_wire.states import TargetSlab
from longshore_wire.ways import Way

WITH = {"digest": True, "digest_key": b"a key"}
# K and V of both layers, and the heads of one prefill rank.
DIGESTS = bytes(range(8 * 2 * MODEL.layers * (MODEL.kv_heads // 2)))


def offered(way: Way, **settings: object) -> tuple[Scene, StartWrite]:
    """Return ranks of which the first source has begun a slab, and that slab."""
    scene = Scene.of(way, **settings)  # type: ignore[arg-type]
    scene.offer(KEY.room)
    scene.settle()
    return scene, scene.writes(FIRST)[0]


def written(scene: Scene, write: StartWrite, digests: bytes) -> list[SlabReady]:
    """Complete a write at its source; return its announcements."""
    source = scene.sources[FIRST]
    source.write_done(DECODE, write.pair, write.slab, write.payload_bytes, scene.now_ns, announce=True, digests=digests)
    return [message for _, message in messages_of(source) if isinstance(message, SlabReady)]


@pytest.mark.parametrize("way", [Way.STAGED, Way.SLICES])
def test_the_source_gets_the_targets_key_and_its_digests_reach_the_scatter(way: Way) -> None:
    scene, write = offered(way, **WITH)
    assert write.digest_key == b"a key"
    (ready,) = written(scene, write, DIGESTS)
    scene.target.receive(FIRST, ready, scene.now_ns)
    scene.look()
    (landed,) = scene.landed
    assert (landed.way, landed.digest_key, landed.digests) == (way, b"a key", DIGESTS)
    pair = scene.target.rooms[KEY].pairs[FIRST, 0]
    assert pair.states[write.slab] is TargetSlab.LANDED
    assert scene.scatter() == 1
    assert pair.states[write.slab] is TargetSlab.DONE


def test_an_announcement_is_repeated_with_its_digests_until_the_slab_is_acknowledged() -> None:
    scene, write = offered(Way.STAGED, **WITH)
    written(scene, write, DIGESTS)
    source = scene.sources[FIRST]
    scene.now_ns += source.config.retry_ns
    source.tick(scene.now_ns)
    (again,) = [message for _, message in messages_of(source) if isinstance(message, SlabReady)]
    assert again.digests == DIGESTS
    scene.target.receive(FIRST, again, scene.now_ns)
    assert scene.scatter() == 1
    scene.settle()
    assert not source.rooms[KEY].pairs[DECODE, 0].digests


@pytest.mark.parametrize("way", [Way.STAGED, Way.SLICES])
def test_digests_that_differ_fail_the_room_at_both_sides_with_the_place(way: Way) -> None:
    scene, write = offered(way, **WITH)
    (ready,) = written(scene, write, DIGESTS)
    scene.target.receive(FIRST, ready, scene.now_ns)
    scene.look()
    (landed,) = scene.landed
    scene.target.scatter_failed(FIRST, landed.pair, landed.slab, Reason.DIGEST_MISMATCH, "layer 3", scene.now_ns)
    scene.look()
    scene.settle()
    assert scene.told == {KEY.room: Reason.DIGEST_MISMATCH}
    assert scene.half(FIRST, KEY.room) is scene.half(SECOND, KEY.room) is Reason.DIGEST_MISMATCH
    assert scene.sources[SECOND].ended[KEY].text.endswith("layer 3")


def test_a_source_that_finds_a_difference_by_itself_fails_the_room_with_that_reason() -> None:
    scene, write = offered(Way.STAGED, **WITH)
    scene.sources[FIRST].write_failed(
        DECODE, write.pair, write.slab, "layer 3", scene.now_ns, reason=Reason.DIGEST_MISMATCH
    )
    scene.settle()
    scene.look()
    assert scene.told == {KEY.room: Reason.DIGEST_MISMATCH}


@pytest.mark.parametrize("way", [Way.STAGED, Way.SLICES])
def test_a_slab_without_digests_fails_a_room_that_wants_them(way: Way) -> None:
    scene, write = offered(way, **WITH)
    (ready,) = written(scene, write, b"")
    scene.target.receive(FIRST, ready, scene.now_ns)
    scene.look()
    assert scene.told == {KEY.room: Reason.UNSUPPORTED}
    assert "update its agent" in scene.target.ended[KEY].text
    assert not scene.landed


def test_digests_of_another_length_fail_the_room_and_unasked_ones_are_dropped() -> None:
    scene, write = offered(Way.STAGED, **WITH)
    (ready,) = written(scene, write, DIGESTS + b"more")
    scene.target.receive(FIRST, ready, scene.now_ns)
    scene.look()
    assert scene.told == {KEY.room: Reason.MALFORMED_MESSAGE}

    scene, write = offered(Way.STAGED, digest_key=b"a key")
    (ready,) = written(scene, write, DIGESTS)
    scene.target.receive(FIRST, ready, scene.now_ns)
    scene.look()
    (landed,) = scene.landed
    assert (landed.digest_key, landed.digests) == (b"", b"")


def test_a_claim_with_an_endless_key_is_malformed_and_keys_are_not_in_texts() -> None:
    scene, write = offered(Way.STAGED, **WITH)
    claim = Claim(write.pair, 0, TOKENS, Way.STAGED, digest_key=b"k" * DIGEST_KEY_BYTES_MAX)
    assert PEER.decode(PEER.encode(claim)) == claim
    with pytest.raises(CodecError):
        PEER.decode(PEER.encode(msgspec.structs.replace(claim, digest_key=claim.digest_key + b"k")))
    for value in (claim, write, scene.target.config):
        assert "kkk" not in repr(value)
        assert "a key" not in repr(value)


def test_pages_in_place_whose_digests_are_compared_are_not_overdue_while_prefill_pauses() -> None:
    scene = Scene.of(Way.SLICES, write_timeout_ns=3 * SECOND_NS, **WITH)  # type: ignore[arg-type]
    scene.offer(KEY.room, 0, TOKENS // 2)
    scene.settle()
    for peer in (FIRST, SECOND):
        for write in scene.writes(peer):
            source = scene.sources[peer]
            source.write_done(
                DECODE, write.pair, write.slab, write.payload_bytes, scene.now_ns, announce=True, digests=DIGESTS
            )
    scene.settle()
    # The digests wait in the queue, and then prefill computes.
    for _ in range(10):
        scene.tick(SECOND_NS // 2)
    assert scene.landed
    scene.scatter()
    for _ in range(10):
        scene.tick(SECOND_NS // 2)
    assert scene.told == {}


def test_without_digests_no_message_has_any_and_pages_in_place_are_done_at_once() -> None:
    scene, write = offered(Way.SLICES, digest_key=b"a key")
    assert write.digest_key == b""
    (ready,) = written(scene, write, b"")
    assert msgspec.structs.asdict(ready)["digests"] == b""
    scene.target.receive(FIRST, ready, scene.now_ns)
    scene.look()
    assert not scene.landed
    assert scene.target.rooms[KEY].pairs[FIRST, 0].states[write.slab] is TargetSlab.DONE


def test_a_slab_of_a_room_that_has_failed_is_answered_with_the_rooms_reason() -> None:
    scene, write = offered(Way.STAGED, **WITH)
    scene.target.cancel(KEY, Reason.DIGEST_MISMATCH, "layer 3", scene.now_ns)
    for _ in range(2):
        scene.settle()
        for peer in (FIRST, SECOND):
            if KEY in scene.sources[peer].rooms:
                scene.end_writes(peer)
    scene.settle()
    assert KEY not in scene.target.rooms
    ready = SlabReady(write.pair, write.slab, write.generation, write.payload_bytes)
    scene.target.receive(FIRST, ready, scene.now_ns)
    assert [message for _, message in messages_of(scene.target) if isinstance(message, Abort)] == [
        Abort(write.pair, Reason.DIGEST_MISMATCH, "layer 3")
    ]
