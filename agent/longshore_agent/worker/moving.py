"""A worker's moving parts: transport, staging memory, lanes and scatters, and the jobs that are under way.

Used by the worker's control thread only. Turns the cores' effects into jobs and the results of jobs into their answers.
On a CPU, threads do the jobs; on a GPU the device does, and `drive` begins and ends what it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

from longshore_agent.errors import DeviceError
from longshore_agent.kernels import rows
from longshore_agent.memory.cuda import Device, open_device
from longshore_agent.memory.device_memory import DeviceStagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_agent.memory.staging import StagingBuffer, StagingPieces
from longshore_agent.path.admit import Desk
from longshore_agent.path.deliver import ready_message
from longshore_agent.path.device_direct import DeviceDirectLanes
from longshore_agent.path.device_lanes import DeviceLanes, buffer_bytes
from longshore_agent.path.device_scatter import DeviceScatterers
from longshore_agent.path.device_stages import DeviceStages
from longshore_agent.path.jobs import (
    PageTable,
    ProbeJob,
    ProbeResult,
    Result,
    Results,
    ScatterJob,
    ScatterResult,
    WriteJob,
    WriteResult,
)
from longshore_agent.path.lanes import Lanes
from longshore_agent.path.scatter import Scatterers
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import LaneStatus
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.transports.base import DraftingTransport, Wire
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.ending import COPIES_LIMIT_S
from longshore_agent.worker.near_writes import NearWrites
from longshore_agent.worker.transport import make_transport
from longshore_wire.codec import PEER
from longshore_wire.effects import PeerAttached, PeerId, StartScatter, StartWrite
from longshore_wire.engine_messages import Half
from longshore_wire.errors import CodecError, Reason
from longshore_wire.peer_messages import Attach, PeerMessage, RegionInfo, RoomKey, WireFound
from longshore_wire.plan import Way
from longshore_wire.session import Peer, Session
from longshore_wire.source_session import SourceSession
from longshore_wire.target_session import TargetSession

# Large enough that a wire's counters show it, small enough to cost nothing.
PROBE_BYTES = 1 << 20
# Over these a control message tells the target that a slab has landed. NIXL's write over shared memory ends only when
# the target has taken the notice of the write before it: a lane would wait for the target's next look, 1 ms and more.
TOLD_WIRES = frozenset({Wire.SHARED_MEMORY.value})
# A slab is over within microseconds on these: who waits for one does not sleep.
SWIFT_WIRES = frozenset({Wire.CUDA_IPC.value, Wire.NVLINK.value})
# NIXL's bytes over the kernel's TCP move only while their target looks for notices.
DRIVEN_WIRES = frozenset({Wire.TCP.value})

_Address = tuple[Half, PeerId]


def _nothing() -> None:
    """Nothing is under way that could be hurried."""


def _over_wire(session: SourceSession, peer: PeerId) -> list[RoomKey]:
    """Return the rooms of which a transport is to bring slabs to a peer."""
    known = session.peers.get(peer)
    pairs = [(key, session.rooms[key].pairs[peer]) for key in known.rooms] if known is not None else []
    return [key for key, pair in pairs if pair.route is not None and pair.way is not Way.DIRECT]


class Mover:
    """See the module."""

    def __init__(
        self,
        config: WorkerConfig,
        settings: Settings,
        metrics: Metrics,
        spans: SpanRecorder,
        ask_pool: Callable[[PeerId, int], None],
    ) -> None:
        self.metrics = metrics
        self.results = Results()
        self.unsettled = False
        self.failure = ""  # of the device: see `fail`
        self.counters: Counter[str] = Counter()
        self.hurry: Callable[[], None] = _nothing  # `DeviceLanes.hurry` of a GPU's source
        self._spans = spans
        self._allowed = settings.allowed_wires
        layout = config.layout
        self._here = PeerId(config.instance, layout.parallel.dp_rank, layout.rank)
        name = f"{config.instance}.{layout.parallel.dp_rank}.{layout.rank}"
        self.device = None if config.device == "cpu" else open_device(config.device)
        if self.device is not None:
            # The transport's library takes the device that is current in the thread that calls it.
            self.device.enter()
        self._stages: DeviceStages | None = None
        self._gives_directly = config.gives_directly(settings)
        self.transport = make_transport(settings, name, self.device)
        self._probe = self._allocate(2 * PROBE_BYTES, settings)
        self.transport.register(self._probe.address, self._probe.length_bytes)
        # Peers write to the first half, our own probes read the second.
        self.probe_region = RegionInfo(self._probe.address, PROBE_BYTES)
        self.ring_region: RegionInfo | None = None
        self.lanes: Lanes | DeviceLanes | None = None
        self._direct: DeviceDirectLanes | None = None
        self.scatterers: Scatterers | DeviceScatterers | None = None
        self._names: dict[_Address, str] = {}
        self._peers: dict[str, PeerId] = {}
        self._attached: dict[_Address, Attach] = {}
        self._wires: dict[_Address, str] = {}
        self._faults: dict[_Address, str] = {}
        self._waiting: dict[_Address, list[WriteJob]] = {}
        self._jobs: dict[tuple[Half, RoomKey], set[int]] = {}
        self._by_id: dict[int, WriteJob | ScatterJob] = {}
        self._taken: dict[Half, list[Result]] = {Half.SOURCE: [], Half.TARGET: []}
        self._buffers: list[StagingPieces] = []
        if self.device is not None:
            self._start_device(self.device, config.roles, settings)
        else:
            rows.prepare()
            if Half.SOURCE in config.roles:
                self.lanes = self._make_lanes(settings)
            if Half.TARGET in config.roles and settings.ring_bytes:
                self._start_ring(settings)
        copying = self.lanes if self._direct is None else self._direct
        self.near = NearWrites(
            self.device,
            self._attached,
            self.results,
            ask_pool,
            None if copying is None else copying.put,
            None if self._stages is None else self._stages.admit_target,
        )

    def _allocate(self, length_bytes: int, settings: Settings) -> StagingPieces:
        """Return memory for what is not staging, of the same kind: a probe proves its wire. It lives as long as this worker."""
        if self.device is None:
            return StagingBuffer(length_bytes)
        return DeviceStagingBuffer(self.device, length_bytes, allocation=settings.gpu_staging_memory)

    def _make_lanes(self, settings: Settings) -> Lanes:
        buffers = [StagingBuffer(settings.lane_bytes) for _ in range(settings.lane_count)]
        for buffer in buffers:
            for extent in buffer.extents():
                self.transport.register(*extent)
        self._buffers += buffers
        return Lanes(
            buffers,
            self.transport,
            self.results,
            self.metrics,
            self._spans,
            slices_batch=settings.slices_batch,
            probe_address=self._probe.address + PROBE_BYTES,
        )

    def _start_ring(self, settings: Settings) -> None:
        ring = StagingBuffer(settings.ring_bytes, extent_bytes=settings.ring_extent_bytes)
        for extent in ring.extents():
            self.transport.register(*extent)
        self.ring_region = RegionInfo(ring.address, ring.length_bytes, settings.ring_extent_bytes)
        self.scatterers = Scatterers(
            ring,
            self.results,
            self.metrics,
            self._spans,
            thread_count=settings.scatter_threads,
            trailer_deadline_ns=settings.trailer_deadline_ns,
        )

    def _start_device(self, device: Device, roles: tuple[Half, ...], settings: Settings) -> None:
        """Start lanes and scatters of a GPU. Each buffer is one allocation and one registration: no write is cut."""
        lane_bytes = buffer_bytes(settings.lane_count, settings.lane_bytes) if Half.SOURCE in roles else 0
        ring_bytes = settings.ring_bytes if Half.TARGET in roles else 0
        lanes, ring = (
            DeviceStagingBuffer(device, length_bytes, extent_bytes=length_bytes, allocation=settings.gpu_staging_memory)
            if length_bytes
            else None
            for length_bytes in (lane_bytes, ring_bytes)
        )
        for buffer in (lanes, ring):
            if buffer is not None:
                self.transport.register(buffer.address, buffer.length_bytes)
        stages = self._stages = DeviceStages(device, lanes, ring)
        if lanes is not None:
            self.lanes = DeviceLanes(
                lanes,
                settings.lane_count,
                stages,
                # The one transport of GPUs' memory drafts.
                cast(DraftingTransport, self.transport),
                self.results,
                self.metrics,
                self._spans,
                probe_address=self._probe.address + PROBE_BYTES,
                enter=device.enter,
            )
            self.hurry = self.lanes.hurry
            self._direct = DeviceDirectLanes(settings.lane_count, stages, self.metrics, self._spans)
        if ring is not None:
            self.ring_region = RegionInfo(ring.address, ring.length_bytes)
            self.scatterers = DeviceScatterers(
                stages, self.metrics, self._spans, trailer_deadline_ns=settings.trailer_deadline_ns
            )

    # -- a GPU -----------------------------------------------------------------------------------------------------

    @property
    def driven(self) -> bool:
        """Whether something is under way that `drive` must bring on: soon, as bytes wait for it."""
        return (
            (self._direct is not None and self._direct.busy)
            or (isinstance(self.lanes, DeviceLanes) and self.lanes.busy)
            or (isinstance(self.scatterers, DeviceScatterers) and self.scatterers.busy)
        )

    @property
    def copying(self) -> bool:
        """Whether a GPU copies from pages to pages: nobody but `drive` learns that it is over."""
        return self._direct is not None and self._direct.copying

    def fail(self, text: str) -> None:
        """The device has failed or hangs: it is asked for nothing and given nothing any more, and its jobs do not end."""
        self.failure, self.hurry = text, _nothing

    def drive(self) -> bool:
        """Begin and end what a GPU's jobs allow; return whether some have ended. Threads need nothing of it."""
        if self.failure:
            return False
        if self._direct is not None and self._direct.busy:
            self._taken[Half.SOURCE] += self._direct.turn()
        if isinstance(self.lanes, DeviceLanes) and self.lanes.busy:
            self._taken[Half.SOURCE] += self.lanes.turn()
        if isinstance(self.scatterers, DeviceScatterers) and self.scatterers.busy:
            self._taken[Half.TARGET] += self.scatterers.turn()
        return bool(self._taken[Half.SOURCE] or self._taken[Half.TARGET])

    def prepare(self, pool: KVPool) -> None:
        """A pool is about to be registered: do what no slab of it should wait for."""
        if self._stages is not None:
            self._stages.prepare(pool)
            if self._gives_directly:
                self._stages.prepare_direct(pool)

    def admit(self, pool: KVPool, table: PageTable, half: Half, ways: frozenset[Way] = frozenset()) -> None:
        """The pages of a half of a room, or more of them, are known.

        Args:
            ways: that a source's slabs will go, as far as they were claimed.
        """
        if self._stages is None:
            return
        if half is Half.SOURCE and (Way.DIRECT in ways or (not ways and self._gives_directly)):
            self._stages.admit_direct(pool, table)
        if not ways or ways - {Way.DIRECT}:
            self._stages.admit(pool, table, half)

    # -- peers -----------------------------------------------------------------------------------------------------

    def connect(self, half: Half, effect: PeerAttached) -> None:
        """Let the transport learn a peer, and (as a source) find out the wire to it. Raises TransportError."""
        address = (half, effect.peer)
        name = self.transport.connect(effect.attach.metadata)
        self._names[address], self._peers[name] = name, effect.peer
        first = address not in self._attached
        self._attached[address] = effect.attach
        if half is Half.SOURCE and first and self.lanes is not None and effect.attach.probe is not None:
            self.lanes.put(ProbeJob(effect.peer, name, effect.attach.probe, effect.attach.epoch))

    def disconnect(self, half: Half, peer: PeerId, wire: str = Wire.UNKNOWN.value) -> bool:
        """Forget a peer; the other half may still need it.

        Args:
            wire: what its bytes travel over to this worker, as far as it is known.
        Returns:
            Whether that took its access away: no write of it can land here any more.
        """
        address = (half, peer)
        self._attached.pop(address, None)
        self._wires.pop(address, None)
        self._faults.pop(address, None)
        for job in self._waiting.pop(address, []):
            # Nobody learns the wire to it any more: its rooms end when the last of their slabs is answered.
            self.results.drop(job)
        name = self._names.pop(address, None)
        if half is Half.SOURCE:
            self.near.pool_gone(peer)
        if name is not None and name not in self._names.values():
            self._peers.pop(name, None)
            self.transport.disconnect(name)
            return any(each.value == wire for each in self.transport.revocable)
        return False

    def wire(self, half: Half, peer: PeerId) -> str:
        """Return what bytes to a peer travel over, as far as it is known."""
        return self._wires.get((half, peer), Wire.UNKNOWN.value)

    def wire_fault(self, half: Half, known: Peer) -> str:
        """Return why no transport may carry bytes between a peer and this worker; empty: one may, or nothing is known yet."""
        if half is Half.SOURCE:
            return self._faults.get((half, known.peer), "")
        return self._allowed.fault(known.wire, known.peer, self._here) if known.wire_epoch == known.epoch else ""

    def notices(self) -> list[tuple[PeerId, PeerMessage]]:
        """Return the notices of arrival that the transport has; what is none is counted and dropped."""
        found: list[tuple[PeerId, PeerMessage]] = []
        for name, data in self.transport.notices():
            peer = self._peers.get(name)
            try:
                message = PEER.decode(data)
            except CodecError as error:
                self.counters[f"refused.{error.reason.name}"] += 1
                continue
            if peer is not None:
                found.append((peer, message))
        return found

    # -- jobs ------------------------------------------------------------------------------------------------------

    def start_write(self, effect: StartWrite, desk: Desk, session: SourceSession, now_ns: int) -> None:
        """Queue one slab for the lanes."""
        assert self.lanes is not None
        if self.failure:
            return
        address = (Half.SOURCE, effect.peer)
        if address not in self._names:
            text = f"the transport does not know rank {effect.peer.rank} of {effect.peer.instance}"
            session.write_failed(effect.peer, effect.pair, effect.slab, text, now_ns)
            return
        if effect.way is not Way.DIRECT and (forbidden := self._faults.get(address)):
            session.cancel(effect.pair.key, Reason.WIRE_NOT_ALLOWED, forbidden, now_ns)
            session.write_failed(effect.peer, effect.pair, effect.slab, forbidden, now_ns)
            return
        attach = self._attached[address]
        if effect.way is Way.STAGED and attach.ring is None:
            text = (
                f"rank {effect.peer.rank} of {effect.peer.instance} has granted ring memory, and has no ring any more"
            )
            session.write_failed(effect.peer, effect.pair, effect.slab, text, now_ns)
            return
        target_pool = next((pool for pool in attach.pools if pool.pool == effect.pair.key.pool), None)
        job = WriteJob(
            effect,
            desk.pools[effect.pair.key.pool].pages,
            desk.tables[Half.SOURCE, effect.pair.key],
            self._names[address],
            attach.ring,
            target_pool,
            attach.layout,
            now_ns,
            self.transport.notifies and self.wire(Half.SOURCE, effect.peer) not in TOLD_WIRES,
        )
        self._track(Half.SOURCE, effect.pair.key, job)
        if effect.way is Way.DIRECT:
            self.near.put(job)
        elif self._allowed and address not in self._wires:
            self._waiting.setdefault(address, []).append(job)
        else:
            self.lanes.put(job)

    def lane_status(self) -> tuple[LaneStatus, ...]:
        """Return what each lane has done, by any way."""
        own = self.lanes.status() if self.lanes is not None else ()
        return own if self._direct is None else self._direct.added_to(own)

    def start_scatter(self, effect: StartScatter, desk: Desk, now_ns: int) -> None:
        """Queue one landed slab for the scatter threads."""
        assert self.scatterers is not None
        if self.failure:
            return
        key = effect.pair.key
        job = ScatterJob(effect, desk.pools[key.pool].pages, desk.tables[Half.TARGET, key], now_ns)
        self._track(Half.TARGET, key, job)
        self.scatterers.put(job)

    def cancel(self, half: Half, key: RoomKey) -> None:
        """Let jobs of a room that have not begun be dropped: at once those that wait for a wire or a pool to be known."""
        for number in self._jobs.get((half, key), ()):
            self._by_id[number].cancelled = True
        if half is not Half.SOURCE:
            return
        for address, waiting in self._waiting.items():
            self._waiting[address] = self.results.wanted(waiting)
        self.near.drop_given_up()
        if isinstance(self.lanes, DeviceLanes):
            self.lanes.drop_given_up()

    def forget(self, half: Half, key: RoomKey) -> None:
        """A room is released: no job of it is left."""
        self._jobs.pop((half, key), None)

    def collect(self) -> None:
        """Take what lanes and scatter threads have handed over since the last time: when their descriptor is readable."""
        for result in self.results.take():
            where = Half.TARGET if isinstance(result, ScatterResult) else Half.SOURCE
            self._taken[where].append(result)

    def take_results(self, half: Half, session: Session, now_ns: int) -> list[tuple[PeerId, PeerMessage]]:
        """Tell a core what became of its jobs that were collected; return messages that must leave at once."""
        taken, self._taken[half] = self._taken[half], []
        messages: list[tuple[PeerId, PeerMessage]] = []
        for result in taken:
            if isinstance(result, ScatterResult):
                assert isinstance(session, TargetSession)
                self._scattered(result, session, now_ns)
            elif isinstance(result, WriteResult):
                assert isinstance(session, SourceSession)
                messages += self._written(result, session, now_ns)
            else:
                assert isinstance(session, SourceSession)
                messages += self._probed(result, session, now_ns)
        return messages

    def finish_copies(self) -> None:
        """Wait until a GPU touches no pages any more: some copies of a millisecond, where nothing is wrong with it.

        Raises:
            DeviceError: it hangs, or has failed before. Only the end of this process takes the pages from it.
        """
        if self.failure:
            raise DeviceError(self.failure)
        if self._stages is not None:
            for lanes in (self.lanes, self._direct):
                if lanes is not None:
                    lanes.stop()
            for job in self._by_id.values():
                job.cancelled = True
            self._stages.wait(COPIES_LIMIT_S)
            self.drive()

    def close(self) -> None:
        """Stop threads that wait and let the transport go; threads that still write end with the process."""
        if self.lanes is not None:
            self.lanes.stop()
        if self.scatterers is not None:
            self.scatterers.stop()
        self.transport.close()

    def _track(self, half: Half, key: RoomKey, job: WriteJob | ScatterJob) -> None:
        self._by_id[id(job)] = job
        self._jobs.setdefault((half, key), set()).add(id(job))

    def _untrack(self, half: Half, key: RoomKey, job: WriteJob | ScatterJob) -> None:
        self._by_id.pop(id(job), None)
        self._jobs.get((half, key), set()).discard(id(job))

    def _written(self, result: WriteResult, session: SourceSession, now_ns: int) -> list[tuple[PeerId, PeerMessage]]:
        job, effect = result.job, result.job.effect
        self._untrack(Half.SOURCE, effect.pair.key, job)
        if result.error:
            self.unsettled = self.unsettled or not result.settled
            session.write_failed(effect.peer, effect.pair, effect.slab, result.error, now_ns, settled=result.settled)
            return []
        if not result.dropped:
            self.metrics.add("longshore_slabs_total", 1, half="source", way=effect.way.name.lower())
        payload_bytes = 0 if result.dropped else effect.payload_bytes
        session.write_done(effect.peer, effect.pair, effect.slab, payload_bytes, now_ns)
        return [(effect.peer, ready_message(job))] if result.notify and not result.dropped else []

    def _scattered(self, result: ScatterResult, session: TargetSession, now_ns: int) -> None:
        job, effect = result.job, result.job.effect
        self._untrack(Half.TARGET, effect.pair.key, job)
        if result.reason is not Reason.NONE and not result.dropped:
            session.scatter_failed(effect.peer, effect.pair, effect.slab, result.reason, result.error, now_ns)
            return
        if not result.dropped:
            self.metrics.add("longshore_slabs_total", 1, half="target", way="staged")
            self.metrics.observe("longshore_stage_seconds", (now_ns - job.landed_ns) / 1e9, stage="deliver")
        session.scatter_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, now_ns)

    def _probed(self, result: ProbeResult, session: SourceSession, now_ns: int) -> list[tuple[PeerId, PeerMessage]]:
        job = result.job
        address = (Half.SOURCE, job.peer)
        if isinstance(self.lanes, DeviceLanes):
            self.lanes.probed(job)
        attach = self._attached.get(address)
        if attach is None or attach.epoch != job.epoch or self.lanes is None:
            return []
        self._wires[address] = result.wire
        forbidden = self._faults[address] = self._allowed.fault(result.wire, self._here, job.peer, result.error)
        if forbidden:
            for key in _over_wire(session, job.peer):
                session.cancel(key, Reason.WIRE_NOT_ALLOWED, forbidden, now_ns)
        for waiting in self._waiting.pop(address, []):
            if forbidden:
                self.results.drop(waiting)
            else:
                self.lanes.put(waiting)
        return [(job.peer, WireFound(session.config.epoch, job.epoch, result.wire))]
