"""A simulated worker: a real protocol core, driven as `longshore_agent.worker.loop` drives it.

Only this file and `sim_lanes` call a core. A turn handles arrivals, ticks the core if something is due, and carries out its
effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sim_lanes import Lanes
from sim_memory import ShadowRing, Staging
from sim_world import MS, SECOND, US, ViolationError, World

from longshore_agent.control.node_link import RoomFailed
from longshore_wire.claims import Wanted
from longshore_wire.effects import (
    Dial,
    DrainWriter,
    Effect,
    HangUp,
    PeerAttached,
    PeerGone,
    PeerId,
    ProbeLiveness,
    RoomEnded,
    RoomGivenUp,
    RoomOffered,
    RoomReleased,
    Send,
    SessionConfig,
    Stale,
    StartScatter,
    StartWrite,
)
from longshore_wire.engine_messages import (
    Accepted,
    Ask,
    CachePages,
    Cancel,
    Half,
    Offer,
    Receive,
    Refused,
    Renew,
    RoomEvent,
    RoomEventKind,
)
from longshore_wire.errors import LongshoreError, Reason, RoomError
from longshore_wire.peer_messages import (
    Attach,
    PeerMessage,
    Ping,
    Pong,
    PoolInfo,
    Refuse,
    RegionInfo,
    RoomKey,
)
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession

if TYPE_CHECKING:
    from sim_agent import Agent
    from sim_engine import Client, Room

LOCAL_NS = 20 * US  # a message to a neighbour process
# As in the agent: the delay of a turn that counts as absence, the sleep of an idle worker, the times of a shutdown.
ABSENT_NS = 250 * MS
IDLE_NS = 5 * SECOND
FAREWELL_NS = 3 * SECOND
DRAIN_NS = 5 * SECOND
BUSY_NS = 50 * MS
QUARANTINE_PERCENT = 25
WIRE_FOUND_NS = 200 * MS
# Polling interval for the data of an ended writer.
DRAIN_LOOK_NS = 20 * MS
# Maximum of consecutive turns in which something is due and stays due.
SPINS_MAX = 8
# The least number of ended rooms that an agent can be set to remember.
ENDED_ROOMS_FEW = 64


class Worker:
    """One life of a worker's process."""

    def __init__(self, world: World, agent: Agent, client: Client, epoch: int, config: SessionConfig) -> None:
        self.world, self.agent, self.client, self.host = world, agent, client, agent.host
        self.epoch, self.half = epoch, client.half
        self.peer = PeerId(config.instance, config.layout.parallel.dp_rank, config.layout.rank, config.memory)
        self.label = self.peer.path
        self.address = f"{agent.name}:{self.label}"
        if self.address in world.listeners:
            # The last life still has its port: a stopped process does not notice that its agent is gone.
            self.address += f"+{epoch}"
        self.alive, self.paused, self.ready, self.draining = True, False, False, False
        self.ended_ns: int | None = None
        self.closing = ""  # why no new room is accepted
        self.tables: dict[RoomKey, Room] = {}
        self.routes: dict[PeerId, Worker] = {}  # a source's: where the newest Attach of a target came from
        self.refused: dict[PeerId, Worker] = {}
        self.names: dict[Worker, PeerId] = {}  # a source's: who a target is, by its Attach
        self.attached: set[PeerId] = set()
        self.connections: dict[PeerId, str] = {}  # a target's
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._wake_ns: int | None = None
        self._due_ns: int | None = None
        self._slept_ns = self._spins = 0
        self._stop_ns: int | None = None
        self._retire_ns: int | None = None
        self._held_since_ns: int | None = None
        self.lanes = Lanes(self)
        self.core: Any
        if self.half is Half.SOURCE:
            self.core = SourceSession(config, now_ns=self.clock())
        else:
            self.core = TargetSession(config, now_ns=self.clock())
            ring = self.core.granter.ring = ShadowRing(self.core.granter.ring.capacity_bytes)
            self.staging = Staging(ring)
        self._describe({})
        world.listeners[self.address] = world.lives[self.peer] = self

    def __repr__(self) -> str:
        return f"{self.label}@{self.agent.name}#{self.epoch // MS % 1_000_000}"

    def clock(self) -> int:
        """Return the time as this process sees it."""
        return self.world.now_ns + self.host.offset_ns

    def _describe(self, pools: dict[int, PoolInfo]) -> None:
        ring = RegionInfo(0, self.core.config.ring_bytes) if self.half is Half.TARGET else None
        self.core.describe(b"", ring, pools, RegionInfo(0, 1) if self.agent.wire else None, self.address)

    # -- the loop --------------------------------------------------------------------------------------------------

    def deliver(self, action: Callable[..., None], *arguments: Any) -> None:
        """Keep an arrival for the next turn of this process."""
        if self.alive:
            self._inbox.append((action, arguments))
            self.wake(self.world.now_ns + self.agent.turn_ns)

    def wake(self, at_ns: int) -> None:
        """Take a turn then, or earlier."""
        if self._wake_ns is None or at_ns < self._wake_ns:
            self._wake_ns = at_ns
            self.world.at(at_ns - self.world.now_ns, self._woken, at_ns)

    def _woken(self, at_ns: int) -> None:
        if self._wake_ns != at_ns or not self.alive or self.paused:
            return
        self._wake_ns = None
        now_ns, due_ns, core = self.clock(), self._due_ns, self.core
        if due_ns is not None and now_ns - due_ns >= ABSENT_NS:
            core.was_absent(now_ns - due_ns, now_ns)
        inbox, self._inbox = self._inbox, []
        for action, arguments in inbox:
            action(*arguments)
            if not self.alive:
                return
        if self._stop_ns is None:
            self._check_health(now_ns)
        due_ns = core.next_due_ns()
        if self.agent.eager or (due_ns is not None and due_ns <= now_ns):
            core.tick(now_ns)
        self.flush()
        if self._stop_ns is not None and (not core.rooms or now_ns >= self._stop_ns):
            self.end("ends")
        else:
            self._sleep(now_ns)

    def _sleep(self, now_ns: int) -> None:
        due_ns = self.core.next_due_ns()
        self._spins = self._spins + 1 if due_ns is not None and due_ns <= now_ns else 0
        if self._spins > SPINS_MAX:
            raise ViolationError(f"{self} spins: what is due at {due_ns} stays due")
        own_ns = self._health_due_ns(now_ns) if self._stop_ns is None else self._stop_ns
        if own_ns is not None:
            due_ns = own_ns if due_ns is None else min(due_ns, own_ns)
        self._due_ns, self._slept_ns = due_ns, now_ns
        if due_ns is not None:
            self.wake(max(self.world.now_ns, due_ns - self.host.offset_ns))

    def flush(self) -> None:
        """Carry out the core's effects until there are none."""
        while taken := self.core.take_effects():
            for effect in taken:
                self._apply(effect)

    def _apply(self, effect: Effect) -> None:
        kind = type(effect)
        if kind is StartWrite:
            self.lanes.start_write(effect)
        elif kind is StartScatter:
            self.lanes.start_scatter(effect)
        elif isinstance(effect, Send):
            self.send(effect.peer, effect.message)
        elif kind is not Stale:
            _APPLY[kind](self, effect)

    # -- the process -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: every thread continues, and the loop detects its delay."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        deferred, self._deferred = self._deferred, []
        for action, arguments in deferred:
            action(*arguments)
        self._wake_ns = None
        self.find_late()

    def find_late(self) -> None:
        """Take a turn now. A real loop also wakes with nothing due, and detects its delay."""
        if self._due_ns is None:
            self._due_ns = self._slept_ns + IDLE_NS
        self.wake(self.world.now_ns)

    def thread(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run a thread's action now, or when the process is continued."""
        if self.alive and self.paused:
            self._deferred.append((action, arguments))
        elif self.alive:
            action(*arguments)

    def end(self, how: str) -> None:
        """End the process, and with it every write that it had begun."""
        if not self.alive:
            return
        self.alive, self.ended_ns = False, self.world.now_ns
        self.world.say(repr(self), how)
        if self.world.listeners.get(self.address) is self:
            del self.world.listeners[self.address]
        self.world.at(LOCAL_NS, self.agent.worker_ended, self)
        self.world.at(LOCAL_NS, self.client.disconnected, self)

    # -- health ----------------------------------------------------------------------------------------------------

    def _health_due_ns(self, now_ns: int) -> int | None:
        if self._retire_ns is not None:
            return self._retire_ns
        config, since_ns = self.core.config, self.lanes.overtaken(now_ns)
        due_ns = None if since_ns is None else since_ns + config.write_timeout_ns
        if self._held_since_ns is not None:
            held_ns = self._held_since_ns + config.peer_timeout_ns
            due_ns = held_ns if due_ns is None else min(due_ns, held_ns)
        if (since_ns := self._exposed_since_ns()) is not None:
            exposed_ns = since_ns + config.write_timeout_ns
            due_ns = exposed_ns if due_ns is None else min(due_ns, exposed_ns)
        return due_ns

    def _exposed_since_ns(self) -> int | None:
        return next(iter(self.core.exposed_since_ns.values()), None) if self.half is Half.TARGET else None

    def _illness(self, now_ns: int) -> str:
        config = self.core.config
        if self.lanes.unsettled:
            return "a failed write could not be settled"
        since_ns = self.lanes.overtaken(now_ns)
        if since_ns is not None and now_ns - since_ns >= config.write_timeout_ns:
            return "a write does not end"
        if self.half is Half.TARGET:
            ring = self.core.granter.ring
            if 100 * ring.held_bytes <= QUARANTINE_PERCENT * ring.capacity_bytes:
                self._held_since_ns = None
            elif self._held_since_ns is None:
                self._held_since_ns = now_ns
            elif now_ns - self._held_since_ns >= config.peer_timeout_ns:
                return "much of the ring is in quarantine"
        since_ns = self._exposed_since_ns()
        if since_ns is not None and now_ns - since_ns >= config.write_timeout_ns:
            return "a source may still write the pages of a room that has failed"
        return ""

    def _check_health(self, now_ns: int) -> None:
        if self._retire_ns is None:
            text = self._illness(now_ns)
            if not text:
                return
            self.world.say(repr(self), f"will be replaced: {text}")
            self._retire_ns, self.closing = now_ns + DRAIN_NS, text
        if now_ns >= self._retire_ns or not self.core.unfinished:
            self._leave(Reason.WORKER_LOST, self.closing, now_ns)

    def _leave(self, reason: Reason, text: str, now_ns: int) -> None:
        self.core.fail_all(reason, text, now_ns)
        for key in list(self.core.rooms):
            self.lanes.cancel(key)
        if self._stop_ns is None:
            self._stop_ns = now_ns + FAREWELL_NS
            replaced = self._retire_ns is not None and reason is Reason.WORKER_LOST
            self.world.at(LOCAL_NS, self.agent.engine_left, self, reason, text, replaced)

    # -- peers -----------------------------------------------------------------------------------------------------

    def send(self, peer: PeerId, message: PeerMessage) -> None:
        """Send a message to a peer, over the dialled connection or to the sender of its newest Attach."""
        if self.half is Half.TARGET:
            address = self.connections.get(peer)
            if address is not None:
                self.agent.net.post(self, peer, message, address=address)
            return
        if isinstance(message, Refuse):
            route = self.routes.get(peer)
            if route is not None and route.epoch == message.epoch:
                self.refused[peer] = self.routes.pop(peer)
            receiver = self.refused.get(peer)
        else:
            receiver = self.routes.get(peer)
        if receiver is not None:
            self.agent.net.post(self, peer, message, receiver=receiver)

    def hear(self, sender: Worker, message: PeerMessage) -> None:
        """Give a message to the core, as the links of a worker do."""
        if self.half is Half.TARGET:
            self.core.receive(sender.peer, message, self.clock())
            return
        if isinstance(message, Attach):
            self.names[sender] = PeerId.of(message)
        peer = self.names.get(sender, sender.peer)
        if self._admit(peer, sender, message):
            self.core.receive(peer, message, self.clock())

    def _admit(self, peer: PeerId, sender: Worker, message: PeerMessage) -> bool:
        """Store the address of a target's life. A live one that is not the newest is heard only when it attaches."""
        route = self.routes.get(peer)
        if isinstance(message, Attach):
            if route is not None and route.epoch > sender.epoch:
                self.refused[peer] = sender
            elif sender.alive:
                self.routes[peer] = sender
            return True
        if route is sender or (route is not None and not sender.alive):
            return True
        if isinstance(message, Ping):
            self.agent.net.post(self, peer, Pong(0, message.epoch, message.number), receiver=sender)
        return False

    def _attach(self, effect: PeerAttached) -> None:
        first = effect.peer not in self.attached
        self.attached.add(effect.peer)
        if self.half is Half.SOURCE and first and effect.attach.probe is not None:
            self.world.at(WIRE_FOUND_NS, self.deliver, self._wire_found, effect.peer, effect.attach.epoch)

    def _wire_found(self, peer: PeerId, epoch: int) -> None:
        self.core.wire_found(peer, epoch, self.agent.wire, "", self.clock())

    def _part(self, effect: PeerGone) -> None:
        self.attached.discard(effect.peer)
        if self.half is Half.SOURCE:
            known = self.routes.get(effect.peer)
            if known is not None and known.epoch == effect.epoch:
                del self.routes[effect.peer]

    def _dial(self, effect: Dial) -> None:
        self.connections[effect.peer] = effect.address

    def _hang_up(self, effect: HangUp) -> None:
        self.connections.pop(effect.peer, None)

    def _probe(self, effect: ProbeLiveness) -> None:
        self.agent.net.probe(self, effect.address, lambda listens: self._probed(effect, listens))

    def _probed(self, effect: ProbeLiveness, listens: bool) -> None:
        answered = self.core.peer_listens if listens else self.core.peer_dead
        answered(effect.peer, effect.epoch, self.clock())

    def _drain(self, effect: DrainWriter) -> None:
        if self.lanes.waits_for(effect.epoch):
            self.world.at(DRAIN_LOOK_NS, self.deliver, self._drain, effect)
        else:
            self.core.writer_drained(effect.peer, effect.epoch, self.clock())

    # -- rooms -----------------------------------------------------------------------------------------------------

    def _room_ended(self, effect: RoomEnded) -> None:
        key, reason = effect.key, effect.reason
        room = self.tables.get(key)
        word = f"fails: {reason.name} {effect.text}" if reason else "is done"
        self.world.say(repr(self), f"room {key.room} {word}")
        if room is not None:
            # The part of an offer that comes after its room was forgotten is a new room. Its engine drops the second end.
            forgets = self.core.config.ended_rooms_max < ENDED_ROOMS_FEW
            if room.ended_by is self and not forgets:
                raise ViolationError(f"{self} ends room {key.room} twice")
            room.ended_by = self
            if not reason:
                room.check_done()
            kind = RoomEventKind.FAILED if reason else RoomEventKind.DONE
            self._tell(RoomEvent(effect.half, key.instance, key.room, kind, reason, effect.text))
        if reason:
            self.lanes.cancel(key)
            if reason is not Reason.AUTHENTICATION:
                ended = self.core.ended.get(key)
                shown = None if ended is None else ended.shown
                self._tell_siblings(RoomFailed(effect.half, key, reason, effect.text, shown))

    def _room_given_up(self, effect: RoomGivenUp) -> None:
        self._tell_siblings(RoomFailed(Half.SOURCE, effect.key, effect.reason, effect.text, effect.capability))

    def _tell_siblings(self, failed: RoomFailed) -> None:
        self.world.at(LOCAL_NS, self.agent.room_failed, self, failed)

    def _room_released(self, effect: RoomReleased) -> None:
        key = effect.key
        room = self.tables.pop(key, None)
        self.world.say(repr(self), f"room {key.room} is released")
        self.lanes.forget(key)
        if room is not None:
            self._tell(RoomEvent(effect.half, key.instance, key.room, RoomEventKind.RELEASED))

    def _room_offered(self, effect: RoomOffered) -> None:
        key = effect.key
        self._tell(RoomEvent(Half.TARGET, key.instance, key.room, RoomEventKind.OFFERED))

    # -- the engine and the supervisor -----------------------------------------------------------------------------

    def adopt(self) -> None:
        """The engine's connection has come."""
        self.core.renew(self.clock())
        self._describe({cache: PoolInfo(cache, each, (0,)) for cache, each in enumerate(self.client.geometries)})
        self.ready = True
        self.agent.adopted(self)
        self.world.at(LOCAL_NS, self.client.welcomed, self)

    def _tell(self, message: Any) -> None:
        self.world.at(LOCAL_NS, self.client.heard, self, message)

    def obey_engine(self, message: Any, room: Room | None) -> None:
        """Carry out an engine's request, like the agent's `engine_requests`."""
        self.core.renew(self.clock())
        if isinstance(message, Renew):
            return
        try:
            if isinstance(message, Cancel):
                key = RoomKey(message.instance, message.room)
                self.core.cancel(key, Reason.CANCELLED, "cancelled by its engine", self.clock())
            else:
                assert room is not None
                self._open(message, room)
        except LongshoreError as error:
            wait_ns = BUSY_NS if error.reason is Reason.BUSY else 0
            self._tell(Refused(message.request, error.reason, str(error), wait_ns))
        else:
            self._tell(Accepted(message.request))

    def _open(self, message: Offer | Ask | Receive, room: Room) -> None:
        key, now_ns = room.key, self.clock()
        old = self.tables.get(key)
        if self.closing and old is None:
            raise RoomError(f"this worker is being replaced: {self.closing}", reason=Reason.BUSY)
        if (
            old is not None
            and isinstance(message, Ask | Receive)
            and not (isinstance(message, Receive) and self.core.is_asked(key))
        ):
            raise RoomError("claimed before", reason=Reason.ROOM_REUSED)
        self.tables[key] = room
        try:
            if isinstance(message, Ask):
                self.core.ask(
                    Wanted(
                        key,
                        message.endpoint,
                        tuple(CachePages(cache, 0, 1, 0, b"") for cache in range(len(self.client.pools))),
                    ),
                    now_ns,
                )
                return
            if isinstance(message, Offer):
                ranges = [(each.cache, each.first_token, each.end_token) for each in message.caches]
                self.core.offer(message.room, ranges, last=message.last, now_ns=now_ns)
            else:
                self.core.claim(Wanted(key, message.endpoint, message.caches), now_ns)
        except LongshoreError:
            if old is None:
                del self.tables[key]
            raise

    def engine_lost(self) -> None:
        """The engine's process has ended."""
        if self._stop_ns is None:
            self._leave(Reason.ENGINE_LOST, "the engine died", self.clock())

    def sibling_failed(self, failed: RoomFailed) -> None:
        """The supervisor passes a failure on."""
        text = f"at a sibling rank: {failed.text}"
        self.core.sibling_failed(failed.key, failed.reason, text, self.clock(), failed.capability)

    def sibling_lost(self, reason: Reason, text: str) -> None:
        """The supervisor passes the end of a sibling on."""
        self.core.fail_claimed(reason, text, self.clock())


_APPLY: dict[type, Callable[[Worker, Any], None]] = {
    RoomEnded: Worker._room_ended,
    RoomReleased: Worker._room_released,
    RoomGivenUp: Worker._room_given_up,
    RoomOffered: Worker._room_offered,
    PeerAttached: Worker._attach,
    PeerGone: Worker._part,
    Dial: Worker._dial,
    HangUp: Worker._hang_up,
    ProbeLiveness: Worker._probe,
    DrainWriter: Worker._drain,
}
