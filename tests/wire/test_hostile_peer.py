"""Tests that a peer with well-formed messages of any content and order breaks no core and makes none grow."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from core_outputs import effects_of, messages_of

from longshore_client.memory import pool_geometry
from longshore_wire.claims import PARTS_BYTES_MAX, Wanted
from longshore_wire.effects import PeerId, RoomEnded, RoomReleased, SessionConfig, StartScatter, StartWrite
from longshore_wire.engine_messages import CachePages, Endpoint, RankAddress
from longshore_wire.errors import Reason, RoomError
from longshore_wire.layout import KVLayout, ModelShape, Parallel, PoolGeometry
from longshore_wire.peer_messages import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Claim,
    Complete,
    Demand,
    EndAck,
    Grant,
    PairKey,
    PeerMessage,
    Ping,
    Pong,
    PoolInfo,
    Refuse,
    RegionInfo,
    RoomKey,
    SlabAck,
    SlabReady,
    WireFound,
)
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way

MS = 1_000_000
MODEL = ModelShape.kv(layers=2, kv_heads=4, head_dim=8, element_bytes=2)
NUMBERS = [-(2**62), -1, 0, 0, 1, 2, 3, 7, 16, 64, 100, 2**31, 2**40, 2**62]
OURS, THEIRS = 10, 20
GEOMETRIES = (PoolGeometry(1, (1,), ()), pool_geometry(KVLayout(MODEL, Parallel(tp=2), 4), 32))


def config(instance: str, epoch: int, tp: int) -> SessionConfig:
    return SessionConfig(
        deployment="d",
        instance=instance,
        epoch=epoch,
        layout=KVLayout(MODEL, Parallel(tp=tp), 4),
        slab_bytes_max=1 << 12,
        slab_bytes_min=256,
        ring_bytes=1 << 15,
        rooms_max=16,
        ended_rooms_max=64,
    )


class Talker:
    """Makes messages: mostly of rooms, lives and sizes that exist, sometimes of any."""

    def __init__(self, seed: int, source: PeerId, target: PeerId, source_epoch: int, target_epoch: int) -> None:
        self.random = random.Random(seed)
        self.ends = (source, target)
        self.epochs = (source_epoch, target_epoch)
        self.rooms = [1, 2]
        self.granted: list[Grant] = []  # decode's last message

    def number(self) -> int:
        return self.random.choice(NUMBERS)

    def one_of(self, *likely: int) -> int:
        return self.random.choice(likely) if self.random.random() < 0.95 else self.number()

    def serial(self) -> int:
        return self.random.choice([self.random.randrange(1, 1000), self.number()])

    def pair(self) -> PairKey:
        source, target = self.ends
        key = RoomKey(source.instance, self.one_of(*self.rooms))
        epochs = [self.one_of(epoch) for epoch in self.epochs]
        return PairKey(key, self.one_of(0, 1), self.one_of(0, 1), *epochs, target.instance, 0, cache=self.one_of(0))

    def attach(self, instance: str, epoch: int, tp: int, **changes: Any) -> Attach:
        ring = RegionInfo(self.one_of(4096), self.one_of(1 << 15), self.one_of(0, 4096))
        pool = PoolInfo(self.one_of(0), self.random.choice(GEOMETRIES), self.random.choice([(), (4096,)]))
        made = Attach(
            PROTOCOL_VERSION,
            "d",
            instance,
            epoch,
            KVLayout(MODEL, Parallel(tp=tp), 4),
            "Loopback",
            b"",
            self.random.choice([None, ring]),
            (pool,),
            self.one_of(1 << 12),
            generation=self.random.randrange(100),
            address=self.random.choice(["h:0", "h:1"]),
            attempt=self.one_of(1, 2, 3, 4, 5, 6, 7, 8),
        )
        return msgspec.structs.replace(made, **changes)

    def to_source(self) -> PeerMessage:
        count = self.one_of(0, 1, 25)
        return self.random.choice(
            [
                Claim(
                    self.pair(),
                    self.one_of(0, 5),
                    self.one_of(0, 5, 100),
                    self.random.choice(list(Way)),
                    serial=self.serial(),
                ),
                Claim(
                    self.pair(),
                    self.one_of(0),
                    self.one_of(100),
                    self.random.choice(list(Way)),
                    self.one_of(0, 8),
                    count,
                    bytes(4 * self.random.choice([0, 8, 25])),
                    serial=self.serial(),
                ),
                Grant(self.pair(), self.one_of(0, 1, 2), self.one_of(0), self.one_of(1 << 12), self.one_of(1)),
                Grant(self.pair(), self.one_of(0, 1, 2), self.one_of(0), self.one_of(1 << 12), self.one_of(1)),
                SlabAck(self.pair(), self.one_of(0, 1, 2), self.one_of(1)),
                *self.either(),
            ]
        )

    def to_target(self) -> PeerMessage:
        return self.random.choice(
            [
                Demand(self.pair(), self.one_of(1, 7, 50), self.one_of(2, 15), self.one_of(0, 2), self.one_of(-1, 100)),
                Demand(self.pair(), 50, 2, self.one_of(0, 2), self.one_of(-1, 100)),
                SlabReady(self.pair(), self.one_of(0, 1), self.one_of(0, 1, 2), self.one_of(6400), self.one_of(100)),
                SlabReady(self.pair(), self.one_of(0, 1), self.one_of(0, 1, 2), self.one_of(6400), self.one_of(100)),
                *[self.ready(grant) for grant in self.granted[-8:]],
                WireFound(self.number(), self.number(), "x" * 100),
                *self.either(),
            ]
        )

    def ready(self, grant: Grant) -> SlabReady:
        return SlabReady(grant.pair, self.one_of(grant.slab), self.one_of(grant.generation), self.one_of(6400), 100)

    def either(self) -> list[PeerMessage]:
        rare: list[PeerMessage] = [
            Abort(self.pair(), self.random.choice(list(Reason)), "x" * 50),
            EndAck(self.pair()),
            Refuse(Reason.UNSUPPORTED, "no", self.one_of(*self.epochs), self.one_of(1, 2, 3, 4)),
            Complete(self.pair()),
        ]
        return [
            Ping(self.one_of(*self.epochs), self.number(), self.number()),
            Pong(self.one_of(*self.epochs), self.one_of(*self.epochs), self.one_of(1, 2, 9), self.number()),
            *(rare if self.random.random() < 0.2 else []),
        ]


def carry_out(core: SourceSession | TargetSession, chosen: random.Random, jobs: list[Any], now_ns: int) -> None:
    """Carry out the core's effects in any order, with every failure that lanes and scatters can have."""
    released = {}
    for effect in effects_of(core):
        if isinstance(effect, StartWrite | StartScatter):
            jobs.append(effect)
        elif isinstance(effect, RoomReleased):
            released[effect.key] = True
        elif isinstance(effect, RoomEnded):
            assert len(effect.text) < 1000
    while jobs and chosen.random() < 0.5:
        job = jobs.pop(chosen.randrange(len(jobs)))
        if isinstance(core, SourceSession):
            if chosen.random() < 0.8:
                core.write_done(job.peer, job.pair, job.slab, job.payload_bytes, now_ns)
            else:
                core.write_failed(job.peer, job.pair, job.slab, "it failed", now_ns)
        elif chosen.random() < 0.8:
            core.scatter_done(job.peer, job.pair, job.slab, job.payload_bytes, now_ns)
        else:
            core.scatter_failed(job.peer, job.pair, job.slab, Reason.TRAILER_MISMATCH, "it failed", now_ns)


@pytest.mark.parametrize("seed", range(60))
def test_no_message_of_a_decode_worker_breaks_prefill(seed: int) -> None:
    core = SourceSession(config("P", OURS, 1), now_ns=0)
    core.describe(b"", None, {0: PoolInfo(0, GEOMETRIES[1], (0,))})
    peers = [PeerId("D", 0, rank) for rank in range(2)]
    talker = Talker(seed, PeerId("P", 0, 0), peers[0], OURS, THEIRS)
    chosen, jobs, now_ns = talker.random, [], 0
    for turn in range(600):
        now_ns += chosen.choice([1, 10]) * MS
        core.renew(now_ns)
        peer = chosen.choice(peers)
        talker.rooms = [1 + turn // 20, 2 + turn // 20]
        if turn < 2 or chosen.random() < 0.03:
            layout = KVLayout(MODEL, Parallel(tp=2, tp_rank=peer.rank), 4)
            epoch = chosen.choice([*[THEIRS] * 9, 21])
            core.receive(peer, talker.attach("D", epoch, 2, layout=layout), now_ns)
        elif chosen.random() < 0.1:
            try:
                first = chosen.choice([0, 50])
                core.offer(chosen.choice(talker.rooms), [(0, first, first + 50)], last=first > 0, now_ns=now_ns)
            except RoomError:
                pass
        else:
            core.receive(peer, talker.to_source(), now_ns)
        core.tick(now_ns)
        messages_of(core)
        carry_out(core, chosen, jobs, now_ns)
    assert len(core.rooms) <= 16
    assert len(core.ended) <= 64
    assert core._parts.bytes_kept <= PARTS_BYTES_MAX


@pytest.mark.parametrize("seed", range(60))
def test_no_message_of_a_prefill_worker_breaks_decode(seed: int) -> None:
    core = TargetSession(config("D", OURS, 1), now_ns=0)
    core.describe(b"", RegionInfo(0, 1 << 15), {0: PoolInfo(0, GEOMETRIES[1], (0,))})
    peers = [PeerId("P", 0, rank) for rank in range(2)]
    talker = Talker(seed, peers[0], PeerId("D", 0, 0), THEIRS, OURS)
    layout = KVLayout(MODEL, Parallel(tp=2), 4)
    endpoint = Endpoint("P", layout, tuple(RankAddress(rank, f"h:{rank}", THEIRS) for rank in range(2)))
    chosen, jobs, now_ns = talker.random, [], 0
    for turn in range(600):
        now_ns += chosen.choice([1, 10]) * MS
        core.renew(now_ns)
        peer = chosen.choice(peers)
        talker.rooms = [1 + turn // 20, 2 + turn // 20]
        if turn < 5 or chosen.random() < 0.03:
            theirs = KVLayout(MODEL, Parallel(tp=2, tp_rank=peer.rank), 4)
            epoch = chosen.choice([*[THEIRS] * 9, 21])
            said = talker.attach("P", epoch, 2, layout=theirs)
            known = core.peers.get(peer)
            if known is not None and chosen.random() < 0.9:
                said = msgspec.structs.replace(said, address=known.address, attempt=known.attempt)
            core.receive(peer, said, now_ns)
        elif chosen.random() < 0.1:
            try:
                key = RoomKey("P", chosen.choice(talker.rooms))
                core.claim(Wanted(key, endpoint, (CachePages(0, 0, 100, 25, bytes(100)),)), now_ns)
            except RoomError:
                pass
        else:
            core.receive(peer, talker.to_target(), now_ns)
        core.tick(now_ns)
        talker.granted += [message for _, message in messages_of(core) if isinstance(message, Grant)]
        carry_out(core, chosen, jobs, now_ns)
    ring = core.granter.ring
    assert ring.used_bytes + ring.held_bytes + ring.free_bytes == ring.capacity_bytes
    assert len(core.rooms) <= 16
    assert len(core.ended) <= 64
