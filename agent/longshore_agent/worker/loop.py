"""Runs a worker's control thread: drives the protocol cores and exchanges messages with peers, engine and supervisor.

Made and run by `main`. `moving` and its pipeline move the bytes. A worker serves one engine and ends when that is gone.
"""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

from longshore_agent.control.curve import read_ring
from longshore_agent.control.engine_link import EngineLink
from longshore_agent.control.liveness import LivenessProbes, Probed
from longshore_agent.control.node_link import (
    LAST_SNAPSHOT,
    AdoptEngine,
    Drain,
    EndpointKnown,
    EngineAdopted,
    EngineLeft,
    Failed,
    NodeLink,
    NodeMessage,
    PoolMessage,
    Retiring,
    RoomFailed,
    SiblingLost,
    SnapshotWanted,
    Started,
    snapshot_parts,
)
from longshore_agent.control.peer_net import PeerNet
from longshore_agent.errors import DeviceError, EngineClosedError, EngineStuckError, TransportError
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.status.steps import StepLog
from longshore_agent.worker import ending
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.engine_requests import EngineRequests, ended_event, offered_event, released_event
from longshore_agent.worker.gc_policy import GCPolicy
from longshore_agent.worker.health import WorkerHealth
from longshore_agent.worker.moving import Mover
from longshore_agent.worker.polling import Polling
from longshore_agent.worker.reporting import RoomReporter
from longshore_agent.worker.status import encode_last_snapshot, encode_snapshot
from longshore_wire.effects import (
    Dial,
    DrainWriter,
    Effect,
    HangUp,
    PeerAttached,
    PeerGone,
    ProbeLiveness,
    RoomEnded,
    RoomGivenUp,
    RoomOffered,
    RoomReleased,
    Send,
    StartScatter,
    StartWrite,
)
from longshore_wire.engine_messages import (
    ENGINE_PROTOCOL_VERSION,
    EndpointUpdate,
    EngineSteps,
    Half,
    Refused,
    ToEngine,
    Welcome,
)
from longshore_wire.errors import CodecError, Reason
from longshore_wire.layout import TargetMemory
from longshore_wire.names import room_name
from longshore_wire.peer_messages import Claim
from longshore_wire.session import Session
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession

_log = logging.getLogger(__name__)

# The longest sleep of an idle control thread. Messages, ends of lives and due times wake it earlier.
_IDLE_POLL_MS = 5000
# A thread that does not sleep looks for the next due time only this long after it may have changed.
_DUE_LOOK_NS = 500_000
# A turn that handles anything looks at the cores' timers and at the worker's health if no turn has for this long.
_TICK_NS = 1_000_000


class Worker:
    """See the module."""

    def __init__(self, config: WorkerConfig, link: NodeLink) -> None:
        self.config = config
        self.settings = settings = config.settings
        self.metrics = Metrics()
        self.spans = SpanRecorder(settings.spans_max)
        self._steps = StepLog(self.spans, config.instance, of_engines=settings.client_spans)
        self._reporter = RoomReporter(config.name, self.spans, self.metrics, link) if settings.otel else None
        self.engine: EngineLink | None = None
        self.started_ns = now_ns = time.monotonic_ns()
        self._link = link
        self._probes = LivenessProbes()
        self._engine_error = ""
        self._stop_ns: int | None = None
        self._retire_ns: int | None = None
        # When a turn must not only poll, at the latest. It is looked up once this thread may sleep.
        self._due_ns, self._is_due_known, self._due_look_ns = 0, False, 0
        self._ticked_ns = 0
        # Whether the last turn did not only poll, and whether work was pending at its end.
        self._is_changed, self._is_pending = True, False
        session_config = config.session_config()
        source = SourceSession(session_config, now_ns=now_ns) if Half.SOURCE in config.roles else None
        target = TargetSession(session_config, now_ns=now_ns) if Half.TARGET in config.roles else None
        self.source, self.target = source, target
        halves = ((Half.SOURCE, source), (Half.TARGET, target))
        self.sessions: dict[Half, Session] = {half: session for half, session in halves if session is not None}
        self.mover = Mover(config, self.metrics, self.spans, link.send)
        self._polling = Polling(self.mover, self.sessions, time.monotonic_ns())
        self._health = WorkerHealth(settings, self.mover, target)
        self._gc_policy = GCPolicy(now_ns)
        self.requests = EngineRequests(
            config.layout.caches,
            self.mover.resources.transport,
            source,
            target,
            device=self.mover.resources.device,
            prepare_pool=self.mover.prepare_pool,
            prepare_pages=self.mover.prepare_pages,
            keys=(keys := read_ring(Path(settings.keys_directory)) if settings.keys_directory else None),
        )
        route = f"{config.peer.path}/{config.epoch}"
        self.net = PeerNet(settings.bind_host, config.port, route, keys, self.mover.resources.ports.admit)
        self._describe()
        for descriptor in (link.fileno(), self.mover.ends.wake):
            self.net.poller.register(descriptor, 1)
        link.send(Started(self.net.address, config.epoch, session_config.agent))

    def run(self) -> None:
        """Serve until engine or supervisor is gone or a drain ends. Raises DeviceError if a GPU still uses pages."""
        try:
            while not self._over():
                ready = frozenset(socket for socket, _ in self.net.poller.poll(self._timeout_ms()))
                try:
                    self._turn(ready, time.monotonic_ns())
                except DeviceError as error:
                    self._device_failed(str(error), time.monotonic_ns())
            for part in snapshot_parts(LAST_SNAPSHOT, encode_last_snapshot(self, time.monotonic_ns())):
                self._link.send(part)
        finally:
            self._close()

    # -- the loop --------------------------------------------------------------------------------------------------

    def _turn(self, ready: frozenset[object], now_ns: int) -> None:
        """Handle readable descriptors, ends of lives and due times."""
        self._polling.woken(now_ns)
        self._steps.woken_ns = now_ns
        ended = self.mover.drive()
        if ready or ended:
            self._polling.news()
        if self._take_notices(now_ns):
            # Begin the scatters of landed slabs before anything else.
            self._note_change()
            self._flush(now_ns)
        if not ready and not ended and now_ns < self._due_ns and not self._is_pending:
            # No message and nothing due: this turn only polls the transport, which it does many times a second.
            self.metrics.settle(1)
            return
        self._note_change()
        if ended:
            # Notify waiting peers first.
            self._take_results(now_ns)
            self._flush(now_ns)
        for message, descriptor in self._link.receive() if self._link.fileno() in ready else ():
            self._obey(message, descriptor, now_ns)
        # Before a peer reports a write into memory that is gone.
        self.requests.fail_torn(now_ns)
        self._steps.begin()
        for half, peer, peer_message in self.net.receive(ready):
            # Reading the message took time in which a write may have ended.
            self.mover.hurry()
            if half in self.sessions:
                self.sessions[half].receive(peer, peer_message, now_ns)
                if isinstance(peer_message, Claim) and self.source is not None:
                    self.mover.claimed(self.source, peer, peer_message.pair)
            self._steps.handled(peer_message)
        if self.mover.ends.wake in ready:
            self.mover.collect()
        self._take_results(now_ns)
        self._serve_engine(ready, now_ns)
        # Engines and peers wait for these effects, but for nothing below.
        self._apply_effects(now_ns)
        if self._probes.waits or self.mover.drain_due_ns is not None:
            self._take_answers(now_ns)
        is_due = now_ns >= self._due_ns or now_ns - self._ticked_ns >= _TICK_NS
        if self._stop_ns is None and (is_due or self._retire_ns is not None or self.mover.unsettled):
            self._check_health(now_ns)
        if is_due:
            self._ticked_ns = now_ns
            for session in self.sessions.values():
                session.tick(now_ns)
        self._flush(now_ns)
        # A claim has left before its page ids are copied to a GPU.
        self._steps.prepared(self.requests.prepare_new() if self.requests.unprepared else ())
        if self._engine_error:
            self._engine_lost(self._engine_error, now_ns)
        self._gc_policy.rest(now_ns, busy=self._has_rooms())

    def _has_rooms(self) -> bool:
        return bool((self.source is not None and self.source.rooms) or (self.target is not None and self.target.rooms))

    def _take_answers(self, now_ns: int) -> None:
        """Tell the cores which silent peers listen, and which dead writers are drained."""
        for (half, peer, epoch), listens in self._probes.answers():
            answered = self.sessions[half].peer_listens if listens else self.sessions[half].peer_dead
            answered(peer, epoch, now_ns)
        for peer, epoch in self.mover.drained(now_ns):
            assert self.target is not None
            self.target.writer_drained(peer, epoch, now_ns)

    def _note_change(self) -> None:
        """Have the next due time, and what the cores expect, looked up again after this turn."""
        self._is_changed = True
        self._polling.changed()

    def _has_pending_work(self) -> bool:
        """Whether a message to the engine or supervisor is unsent, a liveness probe is open, or a writer is drained."""
        engine_waits = self.engine is not None and self.engine.outbox_count > 0
        waits = self._probes.waits or self.mover.drain_due_ns is not None
        return engine_waits or self._link.wants_write or bool(self._engine_error) or waits

    def _flush(self, now_ns: int) -> None:
        """Apply the cores' effects until there are none, then send pending answers."""
        self._apply_effects(now_ns)
        for answer in self.requests.take_left():
            self._tell(answer)
        self.mover.neighbours.report(self.requests)
        if self._link.wants_write:
            self._link.flush()

    def _apply_effects(self, now_ns: int) -> None:
        if self.requests.pools_changed:
            self._describe()
        for half, session in self.sessions.items():
            # An effect may cause others of its own half.
            while session.links.effects:
                for effect in session.take_effects():
                    self._apply(half, session, effect, now_ns)
                self.mover.hurry()

    def _apply(self, half: Half, session: Session, effect: Effect, now_ns: int) -> None:
        # The most frequent effects are first.
        if isinstance(effect, Send):
            self._steps.begin()
            self.net.send(half, effect.peer, effect.message)
            self._steps.sent(effect.message)
        elif isinstance(effect, StartWrite):
            assert self.source is not None
            self._steps.begin()
            self.mover.start_write(effect, self.requests, self.source, now_ns)
            self._steps.started("write", effect)
        elif isinstance(effect, StartScatter):
            self._steps.begin()
            self.mover.start_scatter(effect, self.requests, now_ns)
            self._steps.started("scatter", effect)
        elif isinstance(effect, RoomEnded):
            self._room_ended(effect, now_ns)
        elif isinstance(effect, RoomReleased):
            opened = self.requests.release(effect.half, effect.key)
            self.mover.forget(effect.half, effect.key)
            if opened:
                self._steps.begin()
                self._tell(released_event(effect))
        elif isinstance(effect, RoomGivenUp):
            self._link.send(RoomFailed(Half.SOURCE, effect.key, effect.reason, effect.text, effect.capability))
        elif isinstance(effect, RoomOffered):
            self._steps.begin()
            self._tell(offered_event(effect))
        elif isinstance(effect, PeerAttached):
            try:
                self.mover.connect(half, effect)
            except TransportError as error:
                session.refuse(effect.peer, error.reason, str(error), now_ns)
        elif isinstance(effect, PeerGone):
            self._peer_gone(half, effect)
        elif isinstance(effect, HangUp):
            self.net.hang_up(effect.peer)
        elif isinstance(effect, ProbeLiveness):
            self._probes.start(Probed(half, effect.peer, effect.epoch), effect.address)
        elif isinstance(effect, DrainWriter):
            self.mover.drain(effect, now_ns)
        elif isinstance(effect, Dial):
            self._dial(effect, now_ns)
        else:
            self.metrics.add("longshore_stale_messages_total", 1, message=effect.message)

    def _peer_gone(self, half: Half, effect: PeerGone) -> None:
        self.mover.disconnect(half, effect.peer)
        if half is Half.SOURCE:
            self.net.forget(effect.peer, effect.epoch)
        else:
            self.net.shut_out(effect.peer)

    def _dial(self, effect: Dial, now_ns: int) -> None:
        assert self.target is not None
        try:
            self.net.dial(effect.peer, effect.address)
        except TransportError as error:
            self.target.refuse(effect.peer, error.reason, str(error), now_ns)

    def _room_ended(self, effect: RoomEnded, now_ns: int) -> None:
        effect = self.requests.explained(effect)
        half, reason = effect.half.label, effect.reason.label
        if not self.config.is_test:
            self.metrics.later(
                self.metrics.add, "longshore_rooms_total", half=half, outcome=effect.outcome, reason=reason
            )
        if (effect.half, effect.key) in self.requests.tables:
            # An engine that has not opened the room yet is refused when it does, so it needs no event.
            self._steps.begin()
            self._tell(ended_event(effect))
        if effect.reason is not Reason.NONE:
            _log.warning(
                "room %s failed: %s: %s",
                room_name(effect.key.room),
                effect.reason.name,
                effect.text,
                extra=effect.about(),
            )
            self.mover.cancel(effect.half, effect.key)
            # Each rank hears from its own peer that a claim lacks the capability. The room is open for another request.
            if effect.reason is not Reason.AUTHENTICATION:
                ended = self.sessions[effect.half].ended.get(effect.key)
                shown = None if ended is None else ended.shown
                self._link.send(RoomFailed(effect.half, effect.key, effect.reason, effect.text, shown))
        if self._reporter is not None:
            self._reporter.ended(effect, self.sessions[effect.half].peers, now_ns)

    def _take_results(self, now_ns: int) -> None:
        self.requests.fail_torn(now_ns)
        self.mover.take_results(self.sessions, now_ns)

    def _check_health(self, now_ns: int) -> None:
        """End an unhealthy worker after its open rooms, so that a new one replaces it."""
        if self._retire_ns is None:
            text = self._health.illness(now_ns)
            if not text:
                return
            _log.warning("this worker takes no new rooms and will be replaced: %s", text)
            self._retire_ns = now_ns + round(self.settings.drain_s * 1e9)
            self.requests.closing = text
            self._link.send(Retiring(text))
        if now_ns >= self._retire_ns or not any(session.unfinished for session in self.sessions.values()):
            self._leave(Reason.WORKER_LOST, self.requests.closing, now_ns)

    def _take_notices(self, now_ns: int) -> bool:
        """Pass the transport's notices to the target's core; return whether there were any."""
        taken = self._polling.notices(now_ns)
        if not taken:
            return False
        self._steps.begin()
        for peer, message in taken:
            assert self.target is not None
            self.target.receive(peer, message, now_ns)
            self._steps.handled(message)
        self.metrics.later(self.metrics.add, "longshore_notices_total", len(taken))
        return True

    def _timeout_ms(self) -> int:
        now_ns = time.monotonic_ns()
        if self._is_changed:
            self._is_changed, self._is_due_known = False, False
            self._is_pending = self._has_pending_work()
            self._due_look_ns, self._due_ns = now_ns + _DUE_LOOK_NS, now_ns + 2 * _DUE_LOOK_NS
        elif not self._is_due_known and now_ns >= self._due_look_ns:
            self._look_for_due(now_ns)
        wait_ms = self._polling.wait_ms(self._due_in_ms, now_ns)
        if wait_ms:
            self.metrics.settle()
        return wait_ms

    def _due_in_ms(self, now_ns: int) -> int:
        """Return how long this thread may sleep if no bytes are expected."""
        if not self._is_due_known:
            self._look_for_due(now_ns)
        return min(max(0, (self._due_ns - now_ns) // 1_000_000 + 1), _IDLE_POLL_MS)

    def _look_for_due(self, now_ns: int) -> None:
        self._due_ns, self._is_due_known = self._next_due_ns(now_ns), True

    def _next_due_ns(self, now_ns: int) -> int:
        """Return when a turn must not only poll, at the latest."""
        dues = [session.next_due_ns() for session in self.sessions.values()]
        dues.append(None if self._retire_ns is not None else self._health.due_ns)
        dues += (self.mover.drain_due_ns, self._retire_ns if self._stop_ns is None else self._stop_ns)
        return min((due_ns for due_ns in dues if due_ns is not None), default=now_ns + _IDLE_POLL_MS * 1_000_000)

    # -- the engine ------------------------------------------------------------------------------------------------

    def _serve_engine(self, ready: frozenset[object], now_ns: int) -> None:
        if self.engine is None:
            return
        try:
            if self.engine.outbox_count:
                self.engine.flush()
            self._steps.begin()
            for message, descriptors in self.engine.receive() if self.engine.fileno() in ready else ():
                if isinstance(message, EngineSteps):
                    self.requests.renew(now_ns)
                    self._steps.of_engine(message)
                    continue
                answer = self.requests.handle(message, descriptors, now_ns)
                self._steps.asked(message)
                if isinstance(answer, Refused):
                    self.net.counters[f"refused.{answer.reason.name}"] += 1
                if answer is not None:
                    self._tell(answer)
                self._steps.answered()
            if self.engine.pidfd is not None and self.engine.pidfd in ready:
                raise EngineClosedError(f"{self.engine.peer.shown} died")
        except (EngineClosedError, EngineStuckError) as error:
            self._engine_error = str(error)
        except CodecError as error:
            self.net.counters[f"refused.{error.reason.name}"] += 1
            self._engine_error = str(error)

    def _tell(self, message: ToEngine) -> None:
        if self.engine is None:
            return
        try:
            self.engine.send(message)
            self._steps.told(message)
        except (EngineClosedError, EngineStuckError) as error:
            # The loss is handled at the end of a turn, when no effect is being applied.
            self._engine_error = str(error)

    def _engine_lost(self, text: str, now_ns: int) -> None:
        """Fail the engine's rooms, unmap its memory at once, report the loss, and end soon."""
        self._engine_error = ""
        if self.engine is None:
            return
        for descriptor in (self.engine.fileno(), self.engine.pidfd):
            if descriptor is not None:
                self.net.poller.unregister(descriptor)
        self.engine.close()
        self.engine = None
        fields = self.config.about(Reason.ENGINE_LOST)
        _log.info("engine %s rank %d is gone: %s", self.config.instance, self.config.layout.rank, text, extra=fields)
        self._leave(Reason.ENGINE_LOST, text, now_ns)
        if self.mover.resources.device is not None:
            ending.end_at_the_latest()
        self._flush(now_ns)
        unmapped = [self.requests.let_go(pool) for pool in list(self.requests.pools)]
        self.mover.neighbours.report(self.requests)
        if not all(unmapped):
            self._stop_by(now_ns + ending.FAREWELL_MAPPED_NS)
        elif not self.mover.failure:
            ending.call_off()

    def _device_failed(self, text: str, now_ns: int) -> None:
        """Fail all rooms, report the reason, and end soon. The device's copies never end, so their rooms stay open."""
        self._note_change()
        if not self.mover.failure:
            _log.critical("the device of this worker has failed: %s", text)
            self.mover.fail(text)
            self.requests.closing = text
            self._link.send(Failed(text))
            ending.end_at_the_latest()
        self._leave(Reason.WORKER_LOST, text, now_ns)
        self._stop_by(now_ns + ending.FAREWELL_FAILED_NS)
        self._flush(now_ns)

    def _leave(self, reason: Reason, text: str, now_ns: int) -> None:
        for session in self.sessions.values():
            session.fail_all(reason, text, now_ns)
        for half, session in self.sessions.items():
            for key in list(session.rooms):
                self.mover.cancel(half, key)
        if self._stop_ns is None:
            self._stop_ns = now_ns + ending.FAREWELL_NS
            self._link.send(EngineLeft(reason, text))

    def _stop_by(self, stop_ns: int) -> None:
        self._stop_ns = stop_ns if self._stop_ns is None else min(self._stop_ns, stop_ns)

    # -- the supervisor --------------------------------------------------------------------------------------------

    def _obey(self, message: NodeMessage, descriptor: int | None, now_ns: int) -> None:
        if isinstance(message, AdoptEngine):
            assert descriptor is not None, "an engine comes with its connection"
            self._adopt(descriptor, now_ns)
        elif isinstance(message, EndpointKnown):
            keys, endpoint = self.requests.keys, message.endpoint
            self._tell(EndpointUpdate(endpoint if keys is None else keys.sealed(endpoint)))
        elif isinstance(message, SnapshotWanted):
            for part in snapshot_parts(message.number, encode_snapshot(self, message.room, now_ns)):
                self._link.send(part)
        elif isinstance(message, RoomFailed):
            session = self.sessions.get(message.half)
            if session is not None:
                text = f"at a sibling rank: {message.text}"
                session.sibling_failed(message.key, message.reason, text, now_ns, message.capability)
        elif isinstance(message, SiblingLost):
            for session in self.sessions.values():
                session.fail_claimed(message.reason, message.text, now_ns)
        elif isinstance(message, Drain):
            self._stop_by(now_ns + round(message.limit_s * 1e9))
            self.requests.closing, self.requests.finishes_claimed = "the agent stops", True
        elif isinstance(message, PoolMessage):
            for answer in self.mover.neighbours.obey(message, descriptor, self.requests):
                self._tell(answer)

    def _adopt(self, descriptor: int, now_ns: int) -> None:
        try:
            self.engine = EngineLink(socket.socket(fileno=descriptor))
        except EngineClosedError as error:
            self._leave(Reason.ENGINE_LOST, str(error), now_ns)
            return
        for watched in (self.engine.fileno(), self.engine.pidfd):
            if watched is not None:
                self.net.poller.register(watched, 1)
        self.requests.renew(now_ns)
        keys = self.requests.keys
        self._tell(
            Welcome(
                ENGINE_PROTOCOL_VERSION,
                self.config.epoch,
                self.settings.deployment,
                self.settings.lease_ns,
                TargetMemory[self.settings.decode_target.name],
                self.settings.client_spans,
                () if keys is None else tuple(each.engines for each in keys.revisions),
            )
        )
        self._link.send(EngineAdopted())

    # -- life ------------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        if self._link.closed:
            return True
        if self._stop_ns is None:
            return False
        is_idle = not self.mover.failure and not any(session.rooms for session in self.sessions.values())
        return is_idle or time.monotonic_ns() >= self._stop_ns

    def _describe(self) -> None:
        self.requests.pools_changed = False
        pools = {number: pool.info(number) for number, pool in self.requests.pools.items()}
        own = self.mover.resources
        for session in self.sessions.values():
            session.describe(own.transport.metadata(), own.ring_region, pools, own.probe_region, self.net.address)
        # The transport, the kernels and their libraries are loaded at this point.
        self._gc_policy.settle()

    def _close(self) -> None:
        # A closed connection proves to an engine that no process touches its pages, so unmap them first.
        self.mover.finish_copies()
        pools = [pool.kv_pool for pool in self.requests.pools.values()]
        for number in list(self.requests.pools):
            self.requests.let_go(number)
        # If this worker ends before its rooms, a thread may still copy into the pages.
        deadline_s = time.monotonic() + ending.COPIES_LIMIT_S
        for pages in pools:
            pages.wait_closed(max(0.0, deadline_s - time.monotonic()))
        ending.call_off()
        if self.engine is not None:
            self.engine.close()
        if self.mover.resources.runner.writing():
            # If a transport does not end a write, its close may not return either.
            ending.end_at_the_latest()
        # A closed port proves to peers that no write of ours can land, so close the transport first.
        self.mover.resources.close()
        self._probes.close()
        self.net.close()
        if self._reporter is not None:
            self._reporter.close()
        self._link.close()
