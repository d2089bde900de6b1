"""A device and a transport whose copies and writes end when a test says so: for the order in which things begin and end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from longshore_agent.errors import DeviceError, PoolError, TransportError
from longshore_agent.path.jobs import ScatterJob, WriteJob, trailer_of
from longshore_agent.transports.base import Wire, WriteState
from longshore_wire.effects import PeerId
from longshore_wire.errors import LongshoreError
from longshore_wire.peer_messages import PairKey, RegionInfo, RoomKey
from longshore_wire.plan import Way
from longshore_wire.slabs import region_bytes

PEER = PeerId("decode", 0, 0)
TRAILER_KEY = b"of the ring"
RING = RegionInfo(1 << 40, 1 << 30, trailer_key=TRAILER_KEY)


def pair_of(room: int) -> PairKey:
    return PairKey(RoomKey("prefill", room, 0), 0, 0, 11, 12, "decode")


def effect_of(slab: int, payload_bytes: int, room: int = 1) -> Any:
    """A slab's StartWrite or StartScatter, as far as lanes and scatters look at it."""
    return SimpleNamespace(
        peer=PEER,
        pair=pair_of(room),
        slab=slab,
        way=Way.STAGED,
        payload_bytes=payload_bytes,
        offset_bytes=slab * region_bytes(payload_bytes),
        generation=slab + 1,
        total_tokens=-1,
    )


def write_job(slab: int, payload_bytes: int = 1 << 20) -> WriteJob:
    job: Any = SimpleNamespace(
        effect=effect_of(slab, payload_bytes), peer_name="decode", ring=RING, noticed=True, cancelled=False
    )
    return job


def scatter_job(slab: int, payload_bytes: int = 1 << 20) -> ScatterJob:
    job: Any = SimpleNamespace(effect=effect_of(slab, payload_bytes), cancelled=False)
    return job


@dataclass
class FakeCopy:
    """One copy; `done` is the test's to set."""

    job: Any
    begin_bytes: int = 0
    found: bytes = b""
    done: bool = False
    ended: bool = False
    broken: DeviceError | None = None  # what the device says when it is asked
    pools: list[Any] = field(default_factory=list)

    def passed(self) -> bool:
        assert not self.ended, "a copy is asked after its end"
        if self.broken is not None:
            raise self.broken
        return self.done

    def trailer(self) -> bytes:
        assert self.done
        return self.found

    def end(self) -> None:
        assert self.done, "memory is let go while the device works on it"
        assert not self.ended
        self.ended = True
        for pool in self.pools:
            pool.let_go()


@dataclass
class FakeDevice:
    """Stages; `gathers`, `scatters` and `directs` are in the order in which they were queued."""

    gathers: list[FakeCopy] = field(default_factory=list)
    scatters: list[FakeCopy] = field(default_factory=list)
    directs: list[FakeCopy] = field(default_factory=list)
    trailers: Iterable[bytes] = ()  # what the next scatters find, before the right ones
    pool_gone: bool = False
    failure: LongshoreError | None = None  # of the next direct copies
    compiling: set[int] = field(default_factory=set)  # rooms whose kernel for direct copies is not there yet

    def __post_init__(self) -> None:
        self._found = itertools.chain(self.trailers, itertools.repeat(b""))

    def gather(self, job: WriteJob, offset_bytes: int) -> FakeCopy:
        if self.pool_gone:
            raise PoolError("the pool is unregistered")
        self.gathers.append(FakeCopy(job, offset_bytes))
        return self.gathers[-1]

    def scatter(self, job: ScatterJob) -> FakeCopy:
        if self.pool_gone:
            raise PoolError("the pool is unregistered")
        found = next(self._found) or trailer_of(job.effect).seal(TRAILER_KEY).data
        self.scatters.append(FakeCopy(job, job.effect.offset_bytes, found))
        return self.scatters[-1]

    def direct(self, job: WriteJob) -> FakeCopy | None:
        """Both pools are held until the copy's end, as by a device's copier."""
        if job.effect.pair.key.room in self.compiling:
            return None
        if self.failure is not None:
            raise self.failure
        pools = [job.pool, job.neighbour]
        for pool in pools:
            assert pool is not None
            pool.hold()
        self.directs.append(FakeCopy(job, pools=pools))
        return self.directs[-1]


@dataclass
class FakeWrite:
    """One write; `state` is the test's to set."""

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
    """Drafts and begins writes; ends none by itself."""

    drafts: list[FakeWrite] = field(default_factory=list)
    begun: list[FakeWrite] = field(default_factory=list)
    refuses: bool = False
    probing: Any = None  # an Event that a probe waits for

    def draft(self, peer: str, sources: Any, targets: Any, lengths: Any, notice: bytes) -> FakeWrite:
        if self.refuses:
            raise TransportError(f"peer {peer!r} is not connected")
        assert len(sources) == len(targets) == 1
        self.drafts.append(FakeWrite(int(sources[0]), int(lengths[0]), notice))
        return self.drafts[-1]

    def start(self, write: FakeWrite) -> None:
        assert not write.begun
        assert not write.dropped
        write.begun = True
        self.begun.append(write)

    def drop(self, write: FakeWrite) -> None:
        assert not write.begun
        write.dropped = True

    def state(self, write: FakeWrite) -> WriteState:
        assert write.begun
        return write.state

    def release(self, write: FakeWrite) -> bool:
        assert write.state is not WriteState.OPEN
        write.released = True
        return write.state is WriteState.DONE

    def probe_wire(self, peer: str, source: int, target: int, length_bytes: int) -> Wire:
        assert self.probing.wait(60)
        return Wire.CUDA_IPC
