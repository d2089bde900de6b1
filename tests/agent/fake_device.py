"""A fake device and a fake transport whose copies and writes end when a test says so, for tests of their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from longshore_agent.errors import DeviceError, PoolError, TransportError
from longshore_agent.kernels.copier import Copy, Part, Parts, Slab
from longshore_agent.kernels.digest import NO_DIGESTS, Digests
from longshore_agent.memory.pools import KVPool
from longshore_agent.pipeline.slabs import InboundSlab, OutboundSlab, trailer_of
from longshore_agent.transports.base import Pieces, WriteState
from longshore_wire.effects import PeerId
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.names import Wire
from longshore_wire.peer_messages import PairKey, RegionInfo, RoomKey
from longshore_wire.slabs import slab_bytes
from longshore_wire.ways import Way

PEER = PeerId("decode", 0, 0)
TRAILER_KEY = b"of the ring"
RING = RegionInfo(1 << 40, 1 << 30, trailer_key=TRAILER_KEY)
ATTACH: Any = SimpleNamespace(ring=RING)


def pair_of(room: int) -> PairKey:
    return PairKey(RoomKey("prefill", room), 0, 0, 11, 12, "decode")


def effect_of(slab: int, payload_bytes: int, room: int = 1) -> Any:
    """A slab's StartWrite or StartScatter, with the fields that its life reads."""
    return SimpleNamespace(
        peer=PEER,
        pair=pair_of(room),
        slab=slab,
        tokens=(0, 1),
        way=Way.STAGED,
        payload_bytes=payload_bytes,
        offset_bytes=slab * slab_bytes(payload_bytes),
        generation=slab + 1,
        total_tokens=-1,
        target_pages=b"",
        first_claimed_token=0,
        digest_key=b"",
        digests=b"",
    )


class PlayedOutbound(OutboundSlab):
    """A slab that also represents its pages. Copies access no real memory."""

    def source(self) -> Any:
        return (Part(cast(Any, self), self.effect.tokens),)

    def neighbour_target(self) -> Any:
        return self.source()


class PlayedInbound(InboundSlab):
    """As `PlayedOutbound`."""

    def target(self) -> Any:
        return (Part(cast(Any, self), self.effect.tokens),)


def outbound_slab(slab: int, payload_bytes: int = 1 << 20, room: int = 1, pool: Any = None) -> OutboundSlab:
    effect = effect_of(slab, payload_bytes, room)
    nothing: Any = None
    return PlayedOutbound(effect, pool, nothing, "decode", ATTACH, transport_announces=True)


def inbound_slab(slab: int, payload_bytes: int = 1 << 20) -> InboundSlab:
    nothing: Any = None
    return PlayedInbound(effect_of(slab, payload_bytes), nothing, nothing, 0)


@dataclass
class FakeCopy:
    """The ticket of one copy; the test sets `done`."""

    slab: Any
    begin_bytes: int = 0
    found: bytes = b""
    done: bool = False
    ended: bool = False
    broken: DeviceError | None = None  # the device's answer to a poll
    pools: list[Any] = field(default_factory=list)
    accepts: Any = None
    digests: Digests = NO_DIGESTS
    unmapped: DeviceError | None = None  # raised by `end`

    def passed(self) -> bool:
        assert not self.ended, "a copy is asked after its end"
        if self.broken is not None:
            raise self.broken
        return self.done

    def end(self) -> bool:
        assert self.done, "memory is let go while the device works on it"
        assert not self.ended
        self.ended = True
        for pool in self.pools:
            pool.let_go()
        if self.unmapped is not None:
            raise self.unmapped
        return self.accepts is None or self.accepts(self.found)


@dataclass
class FakeDevice:
    """A copier; `gathers`, `scatters` and `directs` are in the order in which they were submitted."""

    gathers: list[FakeCopy] = field(default_factory=list)
    scatters: list[FakeCopy] = field(default_factory=list)
    directs: list[FakeCopy] = field(default_factory=list)
    trailers: Iterable[bytes] = ()  # trailers that the next scatters read, before correct ones
    pool_gone: bool = False
    failure: LongshoreError | None = None  # results of the next direct copies
    compiling: set[int] = field(default_factory=set)  # rooms whose kernel for direct copies is not compiled yet
    admitted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._found = itertools.chain(self.trailers, itertools.repeat(b""))

    def prepare_pool(self, _pool: KVPool, *, direct: bool) -> None:
        self.admitted.append(f"pool, {'direct' if direct else 'staged'}")

    def prepare_pages(self, pool: KVPool, pages: Any, *, to_write: bool, direct: bool) -> None:
        pool.check_pages(pages)
        self.admitted.append(f"{'write' if to_write else 'read'} {'direct' if direct else 'staged'} {pages.tolist()}")

    def wait(self, _limit_s: float) -> None:
        """Complete all submitted copies."""
        for copy in (*self.directs, *self.gathers):
            copy.done = True

    def submit(self, copy: Copy) -> FakeCopy | None:
        """Queue a copy. A direct one holds both pools until its end, as a device's copier does."""
        ((source, target, _),) = copy.parts()
        if isinstance(source, PlayedOutbound) and isinstance(target, PlayedOutbound):
            return self._direct(source)
        if self.pool_gone:
            raise PoolError("the pool is unregistered", reason=Reason.UNKNOWN_POOL)
        if isinstance(target, Slab):
            self.gathers.append(FakeCopy(source, target.offset_bytes))
            return self.gathers[-1]
        assert isinstance(source, Slab)
        assert isinstance(target, PlayedInbound)
        found = next(self._found) or trailer_of(target.effect).seal(TRAILER_KEY).data
        self.scatters.append(FakeCopy(target, source.offset_bytes, found, accepts=copy.accepts))
        return self.scatters[-1]

    def digest(self, parts: Parts, key: bytes) -> FakeCopy:
        """Refuse: a GPU's pages are not written in place."""
        raise AssertionError(f"a digest of {parts} with {key!r}")

    def _direct(self, slab: OutboundSlab) -> FakeCopy | None:
        if slab.effect.pair.key.room in self.compiling:
            return None
        if self.failure is not None:
            raise self.failure
        pools = [slab.pool, slab.neighbour]
        for pool in pools:
            assert pool is not None
            pool.hold()
        self.directs.append(FakeCopy(slab, pools=pools))
        return self.directs[-1]


@dataclass
class FakeWrite:
    """One write; the test sets `state`."""

    source: int
    length_bytes: int
    notice: bytes
    state: WriteState = WriteState.OPEN
    begun: bool = False
    dropped: bool = False
    released: bool = False
    error: str = ""


@dataclass
class FakeTransport:
    """A transport that drafts and starts writes, but completes none by itself."""

    drafts: list[FakeWrite] = field(default_factory=list)
    begun: list[FakeWrite] = field(default_factory=list)
    refuses: bool = False
    probing: Any = None  # an Event that a probe waits for
    announced_by_message: frozenset[Wire] = frozenset()

    def draft(self, peer: str, pieces: Pieces, notice: bytes) -> FakeWrite:
        if self.refuses:
            raise TransportError(f"peer {peer!r} is not connected")
        assert len(pieces.sources) == len(pieces.targets) == 1
        self.drafts.append(FakeWrite(int(pieces.sources[0]), int(pieces.lengths[0]), notice))
        return self.drafts[-1]

    def start(self, write: FakeWrite) -> None:
        assert not write.begun
        assert not write.dropped
        write.begun = True
        self.begun.append(write)

    def state(self, write: FakeWrite) -> WriteState:
        assert write.begun
        return write.state

    def release(self, write: FakeWrite) -> bool:
        if not write.begun:
            write.dropped = True
            return True
        assert write.state is not WriteState.OPEN
        write.released = True
        return write.state is WriteState.DONE

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire | None:
        assert self.probing.wait(60)
        return Wire.CUDA_IPC
