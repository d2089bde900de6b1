"""A worker's jobs that are under way: it turns the cores' effects into jobs, and the results of jobs into their answers.

Used by the worker's control thread only. `parts` do the jobs; those of a GPU only while `drive` is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from longshore_agent.errors import DeviceError, TransportError
from longshore_agent.memory.pools import KVPool
from longshore_agent.path.admit import Desk
from longshore_agent.path.deliver import ready_message
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
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.transports.base import Wire
from longshore_agent.transports.drain import Drain
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.ending import COPIES_LIMIT_S
from longshore_agent.worker.near_writes import NearWrites
from longshore_agent.worker.parts import Parts, nothing
from longshore_agent.worker.peer_book import PeerBook
from longshore_wire.addresses import main_address
from longshore_wire.codec import PEER
from longshore_wire.effects import DrainWriter, PeerAttached, PeerId, StartScatter, StartWrite
from longshore_wire.engine_messages import Half
from longshore_wire.errors import CodecError, Reason
from longshore_wire.peer_messages import PeerMessage, RoomKey, WireFound
from longshore_wire.plan import Way
from longshore_wire.session import Session
from longshore_wire.source_session import SourceSession
from longshore_wire.target_session import TargetSession

# Over these a control message tells the target that a slab has landed. NIXL's write over shared memory ends only when
# the target has taken the notice of the write before it: a lane would wait for the target's next look, 1 ms and more.
TOLD_WIRES = frozenset({Wire.SHARED_MEMORY.value})
# A slab is over within microseconds on these: who waits for one does not sleep.
SWIFT_WIRES = frozenset({Wire.CUDA_IPC.value, Wire.NVLINK.value})
# NIXL's bytes over the kernel's TCP move only while their target looks for notices.
DRIVEN_WIRES = frozenset({Wire.TCP.value})


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
        self.disconnected_count = 0
        self.failure = ""  # of the device: see `fail`
        self.counters: Counter[str] = Counter()
        self._drains: dict[tuple[PeerId, int], Drain] = {}
        self._gives_directly = config.gives_directly(settings)
        self.parts = Parts(config, settings, self.results, metrics, spans)
        self.hurry: Callable[[], None] = self.parts.hurry
        here = PeerId(config.instance, config.layout.parallel.dp_rank, config.layout.rank)
        self.peers = PeerBook(here, settings.allowed_wires, self.results)
        self._jobs: dict[tuple[Half, RoomKey], set[int]] = {}
        self._by_id: dict[int, WriteJob | ScatterJob] = {}
        self._taken: dict[Half, list[Result]] = {Half.SOURCE: [], Half.TARGET: []}
        stages = self.parts.stages
        self.near = NearWrites(
            self.parts.device,
            self.peers.attached,
            self.results,
            ask_pool,
            self.parts.put_direct,
            None if stages is None else stages.admit_target,
        )

    # -- a GPU -----------------------------------------------------------------------------------------------------

    def fail(self, text: str) -> None:
        """The device has failed or hangs: it is asked for nothing and given nothing any more, and its jobs do not end."""
        self.failure, self.hurry = text, nothing

    def drive(self) -> bool:
        """Begin and end what a GPU's jobs allow; return whether some have ended. Threads need nothing of it."""
        if self.failure:
            return False
        self.parts.turn(self._taken)
        return bool(self._taken[Half.SOURCE] or self._taken[Half.TARGET])

    def prepare(self, pool: KVPool) -> None:
        """A pool is about to be registered: do what no slab of it should wait for."""
        if (stages := self.parts.stages) is not None:
            stages.prepare(pool)
            if self._gives_directly:
                stages.prepare_direct(pool)

    def admit(self, pool: KVPool, table: PageTable, half: Half, ways: frozenset[Way] = frozenset()) -> None:
        """The pages of a half of a room, or more of them, are known.

        Args:
            ways: that a source's slabs will go, as far as they were claimed.
        """
        if (stages := self.parts.stages) is None:
            return
        if half is Half.SOURCE and (Way.DIRECT in ways or (not ways and self._gives_directly)):
            stages.admit_direct(pool, table)
        if not ways or ways - {Way.DIRECT}:
            stages.admit(pool, table, half)

    # -- peers -----------------------------------------------------------------------------------------------------

    def connect(self, half: Half, effect: PeerAttached) -> None:
        """Let the transport learn a peer, and (as a source) find out the wire to it. Raises TransportError."""
        try:
            name = self.parts.transport.connect(effect.attach.metadata)
        except TransportError as error:
            self.peers.unreached(half, effect.peer, error)
            raise
        first = self.peers.add(half, effect.peer, name, effect.attach)
        lanes, probe = self.parts.lanes, effect.attach.probe
        if half is Half.SOURCE and first and lanes is not None and probe is not None:
            lanes.put(ProbeJob(effect.peer, name, probe, effect.attach.epoch))

    def disconnect(self, half: Half, peer: PeerId, wire: str = Wire.UNKNOWN.value) -> bool:
        """Forget a peer; the other half may still need it.

        Args:
            wire: what its bytes travel over to this worker, as far as it is known.
        Returns:
            Whether that took its access away: no write of it can land here any more.
        """
        name = self.peers.remove(half, peer)
        if half is Half.SOURCE:
            self.near.pool_gone(peer)
        if name is None:
            return False
        self.parts.transport.disconnect(name)
        self.disconnected_count += 1
        return any(each.value == wire for each in self.parts.transport.revocable)

    def notices(self) -> list[tuple[PeerId, PeerMessage]]:
        """Return the notices of arrival that the transport has; what is none is counted and dropped."""
        found: list[tuple[PeerId, PeerMessage]] = []
        for name, data in self.parts.transport.notices():
            peer = self.peers.named(name)
            try:
                message = PEER.decode(data)
            except CodecError as error:
                self.counters[f"refused.{error.reason.name}"] += 1
                continue
            if peer is not None:
                found.append((peer, message))
        return found

    def drain(self, effect: DrainWriter, now_ns: int) -> None:
        """A life of a source has ended: see to it that all it had sent is read before `drained` returns it."""
        key = (effect.peer, effect.epoch)
        if key not in self._drains:
            host = main_address(effect.address).rpartition(":")[0]
            self._drains[key] = Drain(host, now_ns)

    @property
    def drain_due_ns(self) -> int | None:
        """When `drained` may return something new; None: nobody is drained."""
        return min((drain.due_ns for drain in self._drains.values()), default=None)

    def drained(self, now_ns: int) -> list[tuple[PeerId, int]]:
        """Return the lives of sources of which no byte will land any more, each once."""
        over = [key for key, drain in self._drains.items() if drain.is_over(now_ns)]
        for key in over:
            del self._drains[key]
        return over

    def claimed(self, source: SourceSession, peer: PeerId, key: RoomKey) -> None:
        """A claim has come whose tokens may come later: what its slabs will need is made ready meanwhile."""
        room = source.rooms.get(key)
        pair = room.pairs.get(peer) if room is not None and not room.failed else None
        if pair is not None and pair.way is Way.DIRECT and pair.target_pages:
            self.near.expect(peer, key.pool, pair.target_pages, pair.grid.first_token)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def start_write(self, effect: StartWrite, desk: Desk, session: SourceSession, now_ns: int) -> None:
        """Queue one slab for the lanes."""
        assert self.parts.lanes is not None
        if self.failure:
            return
        name = self.peers.name(Half.SOURCE, effect.peer)
        if name is None:
            why = self.peers.why_unreached(effect.peer)
            session.cancel(effect.pair.key, why.reason, str(why), now_ns)
            session.write_failed(effect.peer, effect.pair, effect.slab, str(why), now_ns)
            return
        if effect.way is not Way.DIRECT and (forbidden := self.peers.fault(effect.peer)):
            session.cancel(effect.pair.key, Reason.WIRE_NOT_ALLOWED, forbidden, now_ns)
            session.write_failed(effect.peer, effect.pair, effect.slab, forbidden, now_ns)
            return
        attach = self.peers.attached[Half.SOURCE, effect.peer]
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
            name,
            attach.ring,
            target_pool,
            attach.layout,
            now_ns,
            self.parts.transport.notifies and self.peers.wire(Half.SOURCE, effect.peer) not in TOLD_WIRES,
        )
        self._track(Half.SOURCE, effect.pair.key, job)
        if effect.way is Way.DIRECT:
            self.near.put(job)
        elif not self.peers.waits(effect.peer, job):
            self.parts.lanes.put(job)

    def start_scatter(self, effect: StartScatter, desk: Desk, now_ns: int) -> None:
        """Queue one landed slab for the scatter threads."""
        assert self.parts.scatterers is not None
        if self.failure:
            return
        key = effect.pair.key
        job = ScatterJob(effect, desk.pools[key.pool].pages, desk.tables[Half.TARGET, key], now_ns)
        self._track(Half.TARGET, key, job)
        self.parts.scatterers.put(job)

    def cancel(self, half: Half, key: RoomKey) -> None:
        """Let jobs of a room that have not begun be dropped: at once those that wait for a wire or a pool to be known."""
        for number in self._jobs.get((half, key), ()):
            self._by_id[number].cancelled = True
        if half is not Half.SOURCE:
            return
        self.peers.drop_given_up()
        self.near.drop_given_up()
        self.parts.drop_given_up()

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
        if self.parts.stages is not None:
            for job in self._by_id.values():
                job.cancelled = True
            self.parts.stop_device(COPIES_LIMIT_S)
            self.drive()

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
        self.parts.probed(job)
        lanes, waiting = self.parts.lanes, self.peers.found(job, result.wire, result.error)
        if waiting is None or lanes is None:
            return []
        if forbidden := self.peers.fault(job.peer):
            for key in _over_wire(session, job.peer):
                session.cancel(key, Reason.WIRE_NOT_ALLOWED, forbidden, now_ns)
        for each in waiting:
            lanes.put(each)
        return [(job.peer, WireFound(session.config.epoch, job.epoch, result.wire))]
