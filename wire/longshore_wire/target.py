"""The decode half of a worker's protocol core: claims of its engine, grants of ring memory, scatters, done or failed.

The worker calls it with engine requests (`claim`, `cancel`, `renew`), messages and notices (`receive`), results of
scatters (`scatter_done`, `scatter_failed`) and time (`tick`). `granting` decides on grants. It answers by `take_effects`.
See `session`.

Quarantined memory is freed only when its source confirms, or when `_writer_dead` has proof that the life of the source that
may write it has ended.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from longshore_wire.addresses import main_address
from longshore_wire.claims import Wanted, demanded_grid, target_pairs
from longshore_wire.effects import (
    DrainWriter,
    HangUp,
    PairName,
    PeerId,
    RoomOffered,
    RoomReleased,
    SessionConfig,
    StartScatter,
)
from longshore_wire.engine_messages import PAGES_PER_MESSAGE_MAX, Endpoint, Half
from longshore_wire.errors import Reason, RoomError
from longshore_wire.granting import Granter
from longshore_wire.links import PROBE_AFTER, Link, Links, Outcome, PeerState, Writer
from longshore_wire.names import room_name
from longshore_wire.peer_messages import (
    Abort,
    Ask,
    Attach,
    Claim,
    Complete,
    Demand,
    EndAck,
    Offered,
    PairKey,
    PeerMessage,
    Pong,
    Refuse,
    RoomKey,
    SlabAck,
    SlabReady,
    WireFound,
)
from longshore_wire.plan import digests_bytes, plans
from longshore_wire.room import Ended, Life, RoomTable, TargetPair, TargetRoom
from longshore_wire.states import (
    TargetEvent,
    TargetPairEvent,
    TargetPairState,
    TargetRoomEvent,
    TargetRoomState,
    TargetSlab,
)
from longshore_wire.timers import Deadlines
from longshore_wire.ways import Way, chosen_way, is_near, staging_between

# In these states a source may send a Demand: the first one, or one with more ready slabs.
_ANSWERABLE = (TargetPairState.CLAIMED, TargetPairState.OPEN)
# In these states a pair of a failed room keeps the room: its source must confirm, or be told at an address not yet dialled.
_PENDING = (TargetPairState.ABORTING, TargetPairState.WAITING)
# What sources send about a pair.
_OF_PAIRS = (Demand, SlabReady, Abort, EndAck, Offered)
# Within this time a dead worker is restarted, even on a busy host, and its engine offers open rooms again.
_RESTART_NS = 60_000_000_000
# An address that has not answered for this many heartbeats gives way to another one that a room names.
_RIVAL_PATIENCE = 2

_LIVES_KEPT_MAX = 1024
# Sources that are dialled and not attached, of all rooms. Each takes sockets and a handshake of the control thread, and a
# claim may name addresses where nobody answers.
_UNATTACHED_MAX = 256


class TargetSession:
    """The decode half of the core, one for each engine registration that decodes."""

    def __init__(self, config: SessionConfig, *, now_ns: int) -> None:
        self.config = config
        self._deadlines = Deadlines()
        self.links = links = Links(config, Half.TARGET, self._deadlines)
        self.table: RoomTable[TargetRoom] = RoomTable(config, Half.TARGET, self._deadlines, now_ns)
        self.granter = Granter(config)
        self.identity, self.peers, self.counters = links.identity, links.peers, links.counters
        self.rooms, self.ended = self.table.open, self.table.ended
        # Verbs that concern peers alone, or the table of rooms alone.
        self.take_effects, self.describe, self.wire_fault = links.take_effects, links.describe, links.wire_fault
        self.peer_listens, self.renew, self.next_due_ns = links.peer_listens, self.table.renew, self.table.next_due_ns
        self._send, self._effect, self._stale, self._name = links.send, links.emit, links.stale, links.name
        self._progress, self._repeat_later = self.table.progress, self.table.repeat_later
        # Failed rooms whose pages a writer may still write, and since when; oldest first.
        self.exposed_since_ns: dict[RoomKey, int] = {}
        self.in_place_count = 0  # pairs whose bytes may land outside the ring
        self._claim_counts: Counter[PeerId] = Counter()
        self._ask_count = 0
        self._lives: dict[tuple[Life, ...], tuple[Life, ...]] = {}

    @property
    def unfinished(self) -> bool:
        """Whether the engine waits for the end of a room."""
        return any(room.unfinished for room in self.rooms.values())

    @property
    def expects_bytes(self) -> bool:
        """Whether a peer may be writing to this worker now, so that the worker must poll for notices."""
        return bool(self.granter.ring.region_count) or self.in_place_count > 0

    # -- the engine ------------------------------------------------------------------------------------------------

    def ask(self, wanted: Wanted, now_ns: int) -> None:
        """Open a room without pages. RoomOffered follows when prefill has offered it; then `claim` it. It may fail before.

        One source is asked, since its engine offers a prompt at all of its ranks together.

        Raises:
            RoomError, LayoutError: as `claim`.
        """
        room, pairs = self._new_room(wanted, now_ns)
        room.is_asked = True
        pair = next(pair for pair in pairs if pair.route is not None)
        pair.way, pair.open = Way.STAGED, None
        self._open(room, [pair], wanted.endpoint, now_ns)

    def claim(self, wanted: Wanted, now_ns: int) -> None:
        """Open a room. RoomEnded and RoomReleased follow. An asked room is claimed once.

        Raises:
            RoomError: the room is known already, there are too many (BUSY), or the tokens are no range.
            LayoutError: the two instances cannot exchange pages.
            RingError: the ring could never hold two slabs for each source rank.
        """
        asked = self.rooms.get(wanted.key)
        room, pairs = self._new_room(wanted, now_ns)
        if asked is not None:
            self._forget(asked)
        self._open(room, pairs, wanted.endpoint, now_ns)
        self._finish(room, now_ns)

    def _new_room(self, wanted: Wanted, now_ns: int) -> tuple[TargetRoom, list[TargetPair]]:
        """Return a room and its pairs. Raises RoomError, LayoutError, RingError: see `claim`."""
        key = wanted.key
        ended, asked = self.ended.get(key), self.rooms.get(key)
        is_strange = ended is not None and ended.binding.capability != wanted.binding.capability
        if is_strange and ended is not None and ended.reason is Reason.AUTHENTICATION and asked is None:
            # Whoever claimed it before did not show the capability that this request may have.
            self._check_told(key)
            ended = None
        if ended is not None and ended.reason is not Reason.NONE and (asked is None or asked.is_asked):
            raise RoomError(f"room {room_name(key.room)} has failed already: {ended.text}", reason=ended.reason)
        if ended is not None or (asked is not None and not (asked.is_asked and asked.unfinished)):
            raise RoomError(f"room {room_name(key.room)} was claimed before: use a new id", reason=Reason.ROOM_REUSED)
        if asked is None and len(self.rooms) >= self.config.rooms_max:
            raise RoomError(f"{len(self.rooms)} rooms are open: try again later", reason=Reason.BUSY)
        for each in wanted.caches:
            if not 0 <= each.first_token <= each.end_token:
                raise RoomError(
                    f"tokens [{each.first_token}, {each.end_token}) are not a range: give 0 <= first <= end",
                    reason=Reason.TOKENS_MISSING,
                )
        config, endpoint = self.config, wanted.endpoint
        near = is_near(endpoint.agent, config.agent, mappable=wanted.mappable, adjacent=wanted.adjacent)
        staging = staging_between(config.staging, config.neighbour_staging, near=near)
        planned = plans(endpoint.layout, config.layout, staging=staging, direct=near, room=key.room)
        pairs = target_pairs(config, wanted, planned)
        self._check_new(pairs)
        room = TargetRoom(
            key,
            wanted.caches,
            wanted.digest or config.digest,
            opened_ns=now_ns,
            binding=wanted.binding,
        )
        return room, pairs

    def _check_told(self, key: RoomKey) -> None:
        """Raise RoomError (BUSY) if a source has not confirmed the end of an earlier claim of this room.

        This rank repeats that end until it is confirmed, and would not repeat the new claim meanwhile.
        """
        if any(key == room for link in self.peers.values() for room, _ in link.outcomes):
            raise RoomError(
                f"room {room_name(key.room)} was claimed without its capability, and that ends now: try again",
                reason=Reason.BUSY,
            )

    def _open(self, room: TargetRoom, pairs: list[TargetPair], endpoint: Endpoint, now_ns: int) -> None:
        self.rooms[room.key] = room
        self._progress(room, now_ns)
        for pair in pairs:
            room.pairs[pair.name] = pair
            self.in_place_count += pair.expects_bytes
            self._dial(pair.peer, endpoint, room.key, now_ns)
        for pair in pairs:
            if not room.failed and self.peers[pair.peer].state is PeerState.ATTACHED:
                self._send_claim(room, pair, now_ns)

    def _forget(self, asked: TargetRoom) -> None:
        """Drop an asked room, which its engine claims now."""
        self.table.drop(asked)
        for name in asked.pairs:
            self.peers[name[0]].rooms.pop(asked.key, None)
            self._deadlines.repeats.clear((asked.key, name))

    def is_asked(self, key: RoomKey) -> bool:
        """Whether a room is open without pages."""
        room = self.rooms.get(key)
        return room is not None and room.is_asked

    def _check_new(self, pairs: list[TargetPair]) -> None:
        """Raise RoomError if too many sources would be dialled at once."""
        new_count = len({pair.peer for pair in pairs if pair.peer not in self.peers})
        if new_count > _UNATTACHED_MAX:
            raise RoomError(
                f"the room has {new_count} prefill ranks that this worker must dial: {_UNATTACHED_MAX} can be at once",
                reason=Reason.UNSUPPORTED,
            )
        unattached_count = sum(link.attach is None for link in self.peers.values()) if new_count else 0
        if unattached_count + new_count > _UNATTACHED_MAX:
            raise RoomError(
                f"{unattached_count} prefill ranks that rooms name have not answered: try again later",
                reason=Reason.BUSY,
            )

    def cancel(self, key: RoomKey, reason: Reason, text: str, now_ns: int) -> None:
        """Fail a room. RoomEnded follows, and RoomReleased once no writer can write its pages."""
        room = self.rooms.get(key)
        if room is not None:
            self._fail(room, reason, text, now_ns)

    def fail_claimed(self, reason: Reason, text: str, now_ns: int) -> None:
        """Fail every room that sibling ranks share: all of them."""
        self.fail_all(reason, text, now_ns)

    def fail_all(self, reason: Reason, text: str, now_ns: int) -> None:
        """Fail every room."""
        for key in list(self.rooms):
            self.cancel(key, reason, text, now_ns)

    def sibling_failed(
        self, key: RoomKey, reason: Reason, text: str, now_ns: int, capability: bytes | None = None
    ) -> None:
        """Fail a room that a sibling rank has failed, even if this rank's engine asks for it only later.

        Args:
            capability: of the request whose room it is; None: any request's.
        """
        room = self.rooms.get(key)
        if room is not None:
            if capability in (None, room.binding.capability):
                self.cancel(key, reason, text, now_ns)
        elif key not in self.ended:
            self.table.remember(key, reason, text, now_ns, shown=capability)

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Repeat unanswered messages, send heartbeats, end idle rooms and leases, and send the grants that became possible.

        Call it at `next_due_ns` at the latest.
        """
        for key, name in self._deadlines.repeats.pop(now_ns):
            self._repeat(key, name, now_ns)
        for peer in self._deadlines.peers.pop(now_ns):
            self._beat(peer, now_ns)
        for key, reason, text in self.table.expired(now_ns):
            self.cancel(key, reason, text, now_ns)
        self.table.forget(now_ns)
        self._pump(now_ns)

    def was_absent(self, late_ns: int, now_ns: int) -> None:
        """Do not count `late_ns`, in which this side did not run, as silence or slowness of peers, or for the engine's lease."""
        self.links.was_absent(late_ns, now_ns)
        self.table.was_absent(late_ns, now_ns)
        self.granter.was_absent(late_ns)

    # -- scatters --------------------------------------------------------------------------------------------------

    def scatter_done(self, peer: PeerId, pair_key: PairKey, slab: int, payload_bytes: int, now_ns: int) -> None:
        """Note that a slab is in the pages, or that its scatter was dropped after an abort."""
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        region = pair.regions.get(slab)
        if self._scattered(room, pair, slab) is TargetSlab.DONE:
            self.links.moved(peer, payload_bytes)
            self.table.moved(room, payload_bytes, now_ns)
            # The engine hears of its room before the source does of its slab: a message to a peer takes longer to send.
            self._finish(room, now_ns)
            self._ack(pair, slab, 0 if region is None else region.generation)
        else:
            self._settle(room)
        self._pump(now_ns)

    def scatter_failed(
        self, peer: PeerId, pair_key: PairKey, slab: int, reason: Reason, text: str, now_ns: int
    ) -> None:
        """Fail the room of a slab that cannot be scattered, or whose digests differ."""
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        self._fail(room, reason, text, now_ns)
        self._scattered(room, pair, slab)
        self._settle(room)
        self._pump(now_ns)

    def _scattered(self, room: TargetRoom, pair: TargetPair, slab: int) -> TargetSlab:
        """Free the region of a slab; return the slab's state. Pages written in place have none."""
        state = pair.step_slab(slab, TargetEvent.SCATTERED)
        if slab in pair.regions:
            self.granter.free(room, pair, slab)
        return state

    # -- messages -----------------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: PeerMessage, now_ns: int) -> None:
        """Handle one message or notice of a peer; count and ignore stale ones."""
        link = self.peers.get(peer)
        if link is None:
            self._stale(message)
            return
        if isinstance(message, Attach):
            if self._on_attach(link, message, now_ns):
                self.granter.expect(message.slab_bytes_max)
        elif isinstance(message, Refuse):
            self._on_refuse(link, message, now_ns)
        elif isinstance(message, Pong):
            self._on_pong(link, message, now_ns)
        elif link.state is not PeerState.ATTACHED:
            self._receive_detached(link, message, now_ns)
        elif isinstance(message, WireFound):
            self._on_wire_found(link, message, now_ns)
        elif not isinstance(message, _OF_PAIRS) or not self._speaks_for(link, message.pair):
            self._stale(message)
        else:
            link.heard_ns = now_ns
            if isinstance(message, Demand):
                self._on_demand(peer, message, now_ns)
            elif isinstance(message, SlabReady):
                self._on_ready(peer, message, now_ns)
            elif isinstance(message, Abort):
                self._on_abort(peer, message, now_ns)
            elif isinstance(message, Offered):
                self._on_offered(link, message, now_ns)
            else:
                self._take_answer(link, message)
                self._on_end_ack(link, message, now_ns)

    def _receive_detached(self, link: Link, message: PeerMessage, now_ns: int) -> None:
        """Handle a message of a source that is not attached: it may confirm the end of its writes, or abort a room."""
        if not isinstance(message, Abort | EndAck) or not self._is_between(link, message.pair):
            self._stale(message)
        elif isinstance(message, EndAck):
            if message.pair.source_epoch == link.queued_epoch:
                self._take_answer(link, message)
            self._on_end_ack(link, message, now_ns)
        elif link.state is PeerState.REFUSED:
            # Its rooms have already failed here.
            self._send(link.peer, EndAck(message.pair))
        else:
            self._stale(message)

    @staticmethod
    def _take_answer(link: Link, ack: EndAck) -> None:
        """Drop the outcome that a source has heard."""
        outcome = link.outcomes.get((ack.pair.key, ack.pair.cache))
        if outcome is not None and ack.serial in (0, outcome.serial):
            del link.outcomes[ack.pair.key, ack.pair.cache]

    def _is_between(self, link: Link, pair: PairKey) -> bool:
        """Whether a pair belongs to this rank and life, and to any life of that source."""
        is_ours = pair == self._pair_key(pair.key, (link.peer, pair.cache), pair.source_epoch)
        return is_ours and pair.key.instance == link.peer.instance

    def _speaks_for(self, link: Link, pair: PairKey) -> bool:
        """Whether a pair belongs to this rank and life, and to the current life of that source."""
        return pair.source_epoch == link.epoch and self._is_between(link, pair)

    def _on_offered(self, link: Link, message: Offered, now_ns: int) -> None:
        room = self.rooms.get(message.pair.key)
        if (
            room is None
            or not room.is_asked
            or room.is_offered
            or room.failed
            or (link.peer, message.pair.cache) not in room.pairs
        ):
            self._stale(message)
            return
        room.is_offered = True
        self._deadlines.repeats.clear((room.key, (link.peer, message.pair.cache)))
        self._progress(room, now_ns)
        self._effect(RoomOffered(room.key))

    def _on_demand(self, peer: PeerId, demand: Demand, now_ns: int) -> None:
        room, pair = self._find(peer, demand.pair)
        if room is None or pair is None or pair.state not in _ANSWERABLE:
            self._stale(demand)
            return
        if pair.grid is None and not self._open_grid(room, pair, demand, now_ns):
            return
        assert pair.grid is not None
        if (demand.slab_count, demand.slab_tokens) != (pair.grid.count, pair.grid.slab_tokens):
            self._stale(demand)
            return
        ready_count = min(demand.ready_count, demand.slab_count)
        if ready_count > pair.ready_count:
            pair.ready_count = ready_count
            self._progress(room, now_ns)
        self._learn_total(room, pair, demand.total_tokens, now_ns)
        self.granter.note_due(pair, now_ns)
        pair.attempts = 0
        if not room.failed:
            self.granter.want(pair)
            self._pump(now_ns)
            self._watch(room, pair, now_ns)
            self._finish(room, now_ns)

    def _open_grid(self, room: TargetRoom, pair: TargetPair, demand: Demand, now_ns: int) -> bool:
        try:
            pair.grid = demanded_grid(self.config, pair, room.caches[pair.pair.cache], demand)
        except RoomError as error:
            self._fail(room, error.reason, f"{self._name(pair.peer)} {error}", now_ns)
            return False
        pair.states = [TargetSlab.WANTED] * pair.grid.count
        pair.step(TargetPairEvent.CUT)
        self._progress(room, now_ns)
        return True

    def _learn_total(self, room: TargetRoom, pair: TargetPair, total_tokens: int, now_ns: int) -> None:
        if total_tokens < 0:
            return
        pair.total_tokens = total_tokens
        if total_tokens != (end_token := room.caches[pair.pair.cache].end_token):
            text = f"prefill says {total_tokens} tokens, decode {end_token}"
            self._fail(room, Reason.TOTAL_MISMATCH, text, now_ns)

    def _on_ready(self, peer: PeerId, ready: SlabReady, now_ns: int) -> None:
        room, pair = self._find(peer, ready.pair)
        if room is None or pair is None or not 0 <= ready.slab < len(pair.states):
            self._stale(ready)
            if room is None:
                ended = self.ended.get(ready.pair.key)
                if ended is None:
                    self._send(peer, Abort(ready.pair, Reason.STALE_EPOCH, "the room is not open here"))
                elif ended.reason is Reason.NONE:
                    self._send(peer, SlabAck(ready.pair, ready.slab, ready.generation))
                else:
                    self._send(peer, Abort(ready.pair, ended.reason, ended.text, binding=ended.binding))
            return
        if room.failed:
            self._stale(ready)
            return
        self._learn_total(room, pair, ready.total_tokens, now_ns)
        if room.failed:
            return
        state = pair.states[ready.slab]
        if state is TargetSlab.DONE:
            self._stale(ready)
            self._ack(pair, ready.slab, ready.generation)
        elif state is TargetSlab.GRANTED and pair.regions[ready.slab].generation == ready.generation:
            self._land(room, pair, ready, now_ns)
        elif state is not TargetSlab.WANTED or pair.way is Way.STAGED or ready.generation:
            self._stale(ready)
        elif room.digest and pair.way is not Way.DIRECT:
            self._land(room, pair, ready, now_ns)
            self._watch(room, pair, now_ns)
        else:
            pair.step_slab(ready.slab, TargetEvent.PLACE)
            self.links.moved(peer, ready.payload_bytes)
            self.table.moved(room, ready.payload_bytes, now_ns)
            self.granter.note_due(pair, now_ns, landed=True)
            self._watch(room, pair, now_ns)
            self._finish(room, now_ns)
            self._ack(pair, ready.slab, 0)

    def _land(self, room: TargetRoom, pair: TargetPair, ready: SlabReady, now_ns: int) -> None:
        assert pair.route is not None
        assert pair.grid is not None
        tokens = pair.grid.tokens(ready.slab)
        payload_bytes = pair.route.payload_bytes(*tokens)
        if payload_bytes != ready.payload_bytes:
            self._stale(ready)
            return
        sent_bytes = len(ready.digests)
        if room.digest and sent_bytes != (
            due_bytes := digests_bytes(pair.route, self.config.layout.caches[pair.pair.cache], tokens)
        ):
            reason, text = Reason.MALFORMED_MESSAGE, f"has sent {sent_bytes} bytes of digests instead of {due_bytes}"
            if not sent_bytes:
                reason, text = Reason.UNSUPPORTED, "has sent no digests, which the room asks for: update its agent"
            self._fail(room, reason, f"{self._name(pair.peer)} {text}", now_ns)
            return
        pair.step_slab(ready.slab, TargetEvent.LAND)
        self.granter.note_due(pair, now_ns, landed=True)
        pair.attempts = 0
        region = pair.regions.get(ready.slab)
        self._effect(
            StartScatter(
                pair.peer,
                pair.pair,
                ready.slab,
                tokens,
                pair.route,
                payload_bytes,
                0 if region is None else region.offset_bytes,
                0 if region is None else region.generation,
                pair.way,
                self.config.digest_key if room.digest else b"",
                ready.digests if room.digest else b"",
            )
        )

    def _on_abort(self, peer: PeerId, abort: Abort, now_ns: int) -> None:
        room, pair = self._find(peer, abort.pair)
        self._send(peer, EndAck(abort.pair))
        if room is not None and pair is not None:
            self._give_up(room, pair, abort.reason or Reason.MALFORMED_MESSAGE, abort.text, now_ns)

    def _on_end_ack(self, link: Link, ack: EndAck, now_ns: int) -> None:
        """Handle a source's confirmation that it writes no more for a pair."""
        room, pair = self._find(link.peer, ack.pair)
        if room is None or pair is None or pair.state is not TargetPairState.ABORTING:
            return
        # The answer to an earlier claim of this rank, which lacked the capability, says nothing of this one's writes.
        if pair.pair.source_epoch == ack.pair.source_epoch and ack.serial in (0, pair.serial):
            self._confirm(room, pair)
            self._pump(now_ns)

    # -- losing a peer -----------------------------------------------------------------------------------------------

    def refuse(self, peer: PeerId, reason: Reason, text: str, now_ns: int) -> None:
        """Fail the rooms of a source that must not write here."""
        link = self.peers.get(peer)
        if link is not None:
            self._lose(link, PeerState.REFUSED, reason, text, now_ns)

    def peer_lost(self, peer: PeerId, text: str, now_ns: int) -> None:
        """Fail the rooms of a silent or lost source; memory that it may still write stays quarantined."""
        link = self.peers.get(peer)
        if link is not None and link.state is not PeerState.LOST:
            self._lose(link, PeerState.LOST, Reason.PEER_LOST, text, now_ns)

    def peer_dead(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """The answer to ProbeLiveness: that life's address refuses connections, so its process and its writes have ended."""
        link = self.peers.get(peer)
        if link is None:
            return
        is_current = link.epoch == epoch and link.state in (PeerState.ATTACHED, PeerState.DIALING)
        # A life that never attached has epoch 0. It may be starting, unless a room names another address.
        if is_current and (epoch or link.rival_since_ns is not None):
            self.peer_lost(peer, f"{self._name(peer)} at {link.address} has ended", now_ns)
        self._drain(link, epoch)

    def writer_drained(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """The answer to DrainWriter: no byte of that life will land any more."""
        if (link := self.peers.get(peer)) is not None:
            self._writer_dead(link, epoch, now_ns)

    def _drain(self, link: Link, epoch: int) -> None:
        """Request a drain of an ended life's bytes, if it may have written our memory."""
        if epoch in link.writers:
            self._effect(DrainWriter(link.peer, epoch, link.writers[epoch].address))

    def _writer_dead(self, link: Link, epoch: int, now_ns: int) -> None:
        """Free the memory that one life of a source may have written. The only place that treats a writer as dead.

        The caller has one of two proofs. The life's address refuses connections (`peer_dead`). Or another life or worker is
        attached there, since only one process can own an address (`_on_attach`). Both count once all data of the life has been
        read. A newer epoch at another address is no proof, since two engines may have the same name.
        """
        for room, pair in self._rooms_of(link):
            if pair.state is TargetPairState.ABORTING and pair.pair.source_epoch == epoch:
                self._confirm(room, pair)
        self._pump(now_ns)

    def _lose(self, link: Link, state: PeerState, reason: Reason, text: str, now_ns: int) -> None:
        """Fail the rooms of a source that is LOST or REFUSED now, then dial another address that waiting rooms name.

        The source may still complete open writes, so their memory is not freed here. One that is REFUSED still reads messages,
        so it is told first.
        """
        if state is PeerState.LOST:
            self.links.detach(link, state, text)
        for room, pair in self._rooms_of(link):
            if not self._is_elsewhere(link, pair):
                self._give_up(room, pair, reason, text, now_ns)
        if state is PeerState.REFUSED:
            self.links.detach(link, state, text)
        link.rival_since_ns = None
        if rivals := self._rivals_of(link):
            self._dial_at(link, rivals[0][1].address, now_ns)
        elif link.rival and now_ns < link.outcomes_until_ns:
            rival, link.rival = link.rival, ""
            self._dial_at(link, rival, now_ns)
        self._pump(now_ns)

    # -- attaching -----------------------------------------------------------------------------------------------------

    def _on_attach(self, link: Link, attach: Attach, now_ns: int) -> bool:
        """Handle a source's Attach; return whether it is attached now."""
        if not self.links.is_answer(link, attach):
            self._stale(attach)
            return False
        link.answered = attach.attempt
        for epoch, writer in list(link.writers.items()):
            if epoch != attach.epoch and main_address(writer.address) == main_address(attach.address):
                self._drain(link, epoch)
        wrong = self.links.fault_of(attach) or self.links.fault_of_name(link.peer, attach)
        if wrong is not None:
            self._lose(link, PeerState.REFUSED, *wrong, now_ns)
            return False
        if link.attach is not None and link.epoch != attach.epoch:
            last_epoch = link.epoch
            self.peer_lost(link.peer, f"{self._name(link.peer)} was restarted", now_ns)
            self._drain(link, last_epoch)
        self.links.attach(link, attach, now_ns)
        self._queue_outcomes(link, now_ns)
        for room, pair in self._rooms_of(link):
            if pair.state in (TargetPairState.WAITING, TargetPairState.CLAIMED) and not room.failed:
                self._send_claim(room, pair, now_ns)
        for key, cache in list(link.outcomes):
            self._send_outcome(link, key, cache, now_ns)
        return True

    def _on_refuse(self, link: Link, refuse: Refuse, now_ns: int) -> None:
        if refuse.epoch != self.config.epoch or not link.answered < refuse.attempt <= link.attempt:
            self._stale(refuse)
            return
        link.answered = refuse.attempt
        waits = link.state is PeerState.DIALING and now_ns - link.dialled_ns < self.config.peer_timeout_ns
        if refuse.reason is Reason.STALE_EPOCH and (waits or link.state is PeerState.LOST):
            # The source first probes our other life or namesake, so ask again. LOST makes the next Attach send it outcomes.
            link.heard_ns = now_ns
            return
        self._lose(link, PeerState.REFUSED, refuse.reason or Reason.MALFORMED_MESSAGE, refuse.text, now_ns)

    def _on_pong(self, link: Link, pong: Pong, now_ns: int) -> None:
        if not self.links.take_pong(link, pong, now_ns):
            self.peer_lost(link.peer, f"{self._name(link.peer)} was restarted", now_ns)

    def _dial(self, peer: PeerId, endpoint: Endpoint, key: RoomKey, now_ns: int) -> None:
        """Add a room to its source's, and dial that at the address that the engine gave, unless that is done."""
        named = next(entry for entry in endpoint.ranks if entry.rank == peer.rank)
        link = self.peers.get(peer)
        if link is None:
            link = self.peers[peer] = Link(peer, answered=self.links.asked_count)
        is_here = main_address(link.address) == main_address(named.address)
        if is_here and max(link.epoch, link.named_epoch) < named.epoch:
            # Only one process can own this address, so earlier lives have ended. Their Attaches may still come.
            link.named_epoch, link.answered = named.epoch, link.attempt
            if link.state is PeerState.DIALING:
                self.links.send_attach(link)
        if link.attach is not None and is_here and link.epoch < named.epoch:
            # The new life's Attach is the proof.
            self.peer_lost(peer, f"{self._name(peer)} was restarted", now_ns)
        # If the source is lost from here on, the room's address is dialled.
        link.rooms[key] = None
        if link.is_lost or not link.address:
            self._dial_at(link, named.address, now_ns)
            link.named_epoch = named.epoch
        elif link.rival_since_ns is None and main_address(link.address) != main_address(named.address):
            # Two addresses for one name: probe the dialled one before the other is dialled.
            link.rival_since_ns = now_ns
            self._beat(peer, now_ns)

    def _dial_at(self, link: Link, address: str, now_ns: int) -> None:
        self.links.dial(link, address, now_ns)
        link.home = ""
        for room, pair in self._rooms_of(link):
            if room.failed and pair.state is TargetPairState.WAITING and self._is_here(link, pair):
                self._end_wait(room, pair, now_ns)
        link.rival_since_ns = now_ns if self._rivals_of(link) else None

    def _refuse_rivals(self, link: Link, now_ns: int) -> None:
        """Fail rooms that name another address, since the attached life is alive."""
        link.rival_since_ns = None
        for room, pair in self._rivals_of(link):
            text = (
                f"{self._name(link.peer)} answers at {main_address(link.address)}, and this room names "
                f"{main_address(pair.address)}: two engines have one instance name (give each its own), or the room's "
                "endpoint is out of date"
            )
            self._give_up(room, pair, Reason.STALE_EPOCH, text, now_ns)
            if room.failed:
                self._end_wait(room, pair, now_ns)

    # -- keeping alive -------------------------------------------------------------------------------------------------

    def _beat(self, peer: PeerId, now_ns: int) -> None:
        """Send a heartbeat, or redial a dead connection."""
        link = self.peers.get(peer)
        if link is None:
            return
        waits = link.state is PeerState.LOST or link.outcomes
        is_awaited = waits and now_ns < link.outcomes_until_ns
        if link.is_lost and not link.rooms and not is_awaited:
            del self.peers[peer]
            self._effect(HangUp(peer))
            return
        if not link.is_lost and (text := self.links.silence(link, now_ns)):
            self.peer_lost(peer, text, now_ns)
        self._judge_rival(link, now_ns)
        if link.home or link.writers:
            self._visit_writer(link, now_ns)
        self.links.beat(link, now_ns)

    def _try_rival(self, link: Link, now_ns: int) -> None:
        """Dial the next address that a room names, since nobody has answered at this one. All share one limit of silence."""
        rivals = self._rivals_of(link)
        if not rivals:
            link.rival_since_ns = None
            return
        # Rooms of this address come last, so that each address has its turn.
        for room, pair in self._rooms_of(link):
            if self._is_here(link, pair):
                del link.rooms[room.key]
                link.rooms[room.key] = None
        heard_ns = link.heard_ns
        self._dial_at(link, rivals[0][1].address, now_ns)
        link.heard_ns = heard_ns

    def _visit_writer(self, link: Link, now_ns: int) -> None:
        """Dial an earlier life's address for one heartbeat while the source, attached elsewhere, has no room to move.

        Two engines may have one name. A probe finds a listener at the address, and only the listener's Attach tells whether that
        is the life that may still write, which then confirms, or a later one, which proves its end.
        """
        home, link.home = link.home, ""
        if link.outcomes and not home:
            # Its engine must hear them first: the other one is told nothing of its rooms.
            return
        if any(not room.failed and not self._is_elsewhere(link, pair) for room, pair in self._rooms_of(link)):
            return
        if home:
            self._move(link, home, now_ns)
        elif link.state is PeerState.ATTACHED:
            for writer in link.listening(now_ns - 2 * self.config.heartbeat_ns):
                is_due = now_ns - writer.visited_ns >= self.config.lease_ns
                if is_due and main_address(writer.address) != main_address(link.address):
                    writer.visited_ns, home = now_ns, link.address
                    self._move(link, writer.address, now_ns)
                    link.home = home
                    return

    def _move(self, link: Link, address: str, now_ns: int) -> None:
        """Dial another address of a source that has no room to move at the present one."""
        self.links.detach(link, PeerState.LOST, link.trouble)
        self._dial_at(link, address, now_ns)

    def _judge_rival(self, link: Link, now_ns: int) -> None:
        """Decide between two addresses of one name: is the life at the dialled one alive?"""
        if link.rival_since_ns is None or link.is_lost:
            return
        if link.attach is None and now_ns - link.dialled_ns >= _RIVAL_PATIENCE * self.config.heartbeat_ns:
            self._try_rival(link, now_ns)
            return
        # A life that has answered since, and is silent now, may have ended: then its name is the other address's.
        since_ns = max(link.rival_since_ns + 1, now_ns - PROBE_AFTER * self.config.heartbeat_ns)
        answers = link.attach is not None and link.heard_ns >= since_ns
        if answers and now_ns - link.rival_since_ns >= self.config.peer_timeout_ns:
            self._refuse_rivals(link, now_ns)
        else:
            self.links.probe(link)

    # -- how rooms ended -----------------------------------------------------------------------------------------------

    def _remember_room(self, room: TargetRoom, reason: Reason, text: str, now_ns: int) -> None:
        """Record how a room ended and its sources' lives, so that later lives can be informed."""
        until_ns = self.table.remembered_until_ns(now_ns) + _RESTART_NS
        lives = []
        for pair in room.pairs.values():
            link = self.peers[pair.peer]
            link.outcomes_until_ns = max(link.outcomes_until_ns, until_ns)
            address = "" if self._concerns(link, pair) else pair.address
            link.rival = address or link.rival
            lives.append(Life(pair.name, pair.pair.source_epoch, pair.source_engine, address))
        # Most rooms have the same lives, so they share one tuple.
        if len(self._lives) > _LIVES_KEPT_MAX:
            self._lives.clear()
        shared = self._lives.setdefault(tuple(lives), tuple(lives))
        self.table.remember(room.key, reason, text, now_ns, shared, _RESTART_NS)

    def _queue_outcomes(self, link: Link, now_ns: int) -> None:
        """Queue the outcomes of earlier lives' rooms for a source that has attached, once for each life."""
        attach = link.attach
        assert attach is not None
        for room, pair in self._rooms_of(link):
            # This life must confirm these itself, even if another life of its name was informed meanwhile.
            is_writer = pair.state is TargetPairState.ABORTING and pair.pair.source_epoch == attach.epoch
            if is_writer and (room.key, pair.pair.cache) not in link.outcomes:
                ended = Ended(room.reason, room.text, self.table.remembered_until_ns(now_ns), binding=room.binding)
                self._note_outcome(link, room.key, pair.pair.cache, Outcome(ended, pair.source_engine, pair.serial))
        if link.queued_epoch == attach.epoch:
            return
        link.queued_epoch = attach.epoch
        for key, ended in self.ended.items():
            for life in ended.lives:
                is_here = main_address(life.address) in ("", main_address(attach.address))
                if life.name[0] == link.peer and life.epoch != attach.epoch and is_here:
                    self._note_outcome(link, key, life.name[1], Outcome(ended, life.engine))
        done = Ended(Reason.NONE, "", self.table.remembered_until_ns(now_ns))
        for room, pair in self._rooms_of(link):
            if pair.state is TargetPairState.COMPLETE and pair.pair.source_epoch != attach.epoch and not room.failed:
                self._note_outcome(link, room.key, pair.pair.cache, Outcome(done, pair.source_engine))

    def _queue_outcome(self, pair: TargetPair, key: RoomKey, ended: Ended, now_ns: int) -> None:
        """Queue the outcome of an ended room for a pair's source, unless the room was for another worker of its name."""
        link = self.peers[pair.peer]
        if self._concerns(link, pair):
            self._note_outcome(link, key, pair.pair.cache, Outcome(ended, pair.source_engine, pair.serial))
            self._send_outcome(link, key, pair.pair.cache, now_ns)

    def _note_outcome(self, link: Link, key: RoomKey, cache: int, outcome: Outcome) -> None:
        link.outcomes[key, cache] = outcome

    def _send_outcome(self, link: Link, key: RoomKey, cache: int, now_ns: int) -> None:
        """Send a pair's outcome to its source and repeat until it answers; wait if it is not attached.

        Drop it if another engine of the same name is attached: that engine never had the room, and may use its number.
        """
        outcome = link.outcomes.get((key, cache))
        if outcome is None or link.attach is None:
            return
        ended = outcome.ended
        if ended.until_ns <= now_ns or outcome.engine not in (0, link.attach.engine):
            del link.outcomes[key, cache]
            return
        name = (link.peer, cache)
        pair = self._pair_key(key, name, link.epoch)
        if ended.reason is Reason.NONE:
            self._send(link.peer, Complete(pair))
        else:
            self._send(link.peer, Abort(pair, ended.reason, ended.text, outcome.serial, ended.binding))
        self._repeat_later(key, name, outcome.attempts, now_ns)
        self.counters["retries"] += outcome.attempts > 0
        outcome.attempts += 1

    # -- claims --------------------------------------------------------------------------------------------------------

    def _choose_way(self, pair: TargetPair, link: Link, now_ns: int) -> bool:
        """Have the final way of a pair chosen; return False while the wire, on which it depends, is unknown."""
        assert link.attach is not None
        assert pair.open is not None
        config = self.config
        needs_wire = self.links.has_probe and config.crossover.needs_wire(config.backend)
        if needs_wire and not link.has_wire and self.links.awaits_wire(pair, link, now_ns):
            return False
        choice = chosen_way(
            pair.open,
            config.crossover,
            (config.backend, link.found_wire),
            in_place=link.attach.in_place,
            lane_bytes=link.attach.slab_bytes_max,
            ring_bytes=config.ring_bytes,
        )
        self.in_place_count -= pair.expects_bytes
        pair.way, pair.why, pair.open = choice.way, choice.why, None
        self.in_place_count += pair.expects_bytes
        return True

    def _send_claim(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        link = self.peers[pair.peer]
        if link.attach is None or not self._is_here(link, pair):
            return
        first_time = pair.state is TargetPairState.WAITING
        if first_time and pair.named_engine and link.attach.engine not in (0, pair.named_engine):
            text = (
                f"{self._name(pair.peer)} at {link.address} serves another engine than this room's endpoint names: that one has "
                "ended, and its rooms with it; give the endpoint of the engine that computed the prompt"
            )
            self.cancel(room.key, Reason.STALE_EPOCH, text, now_ns)
            return
        if room.is_asked:
            if not room.is_offered:
                if not pair.serial:
                    # Claims are numbered without gaps, so an ask has a number of its own.
                    self._ask_count += 1
                    pair.serial = -self._ask_count
                self._send(pair.peer, Ask(self._pair_key(room.key, pair.name, link.epoch), room.binding))
                self._repeat_later(room.key, pair.name, pair.attempts, now_ns)
            return
        fault = self.links.wire_fault_of(pair, now_ns) if first_time else ""
        if fault:
            self.cancel(room.key, Reason.WIRE_NOT_ALLOWED, fault, now_ns)
        if fault != "":
            return
        if pair.open is not None and not self._choose_way(pair, link, now_ns):
            return
        if first_time:
            if pair.route is not None:
                link.claimed(room.key, pair.way)
                self.counters[f"claims.{pair.way.label}.{pair.why.label}"] += 1
            pair.pair = msgspec.structs.replace(pair.pair, source_epoch=link.epoch)
            pair.engine = link.attach.engine
            self._claim_counts[pair.peer] += 1
            pair.serial = self._claim_counts[pair.peer]
        pair.step(TargetPairEvent.CLAIM)
        wanted = room.caches[pair.pair.cache]
        first = wanted.end_token if pair.route is None else wanted.first_token
        digest_key = self.config.digest_key if room.digest else b""
        count = wanted.page_count if pair.way is not Way.STAGED and first < wanted.end_token else 0
        for offset in range(0, max(count, 1), PAGES_PER_MESSAGE_MAX):
            pages = wanted.pages[4 * offset : 4 * (offset + PAGES_PER_MESSAGE_MAX)] if count else b""
            self._send(
                pair.peer,
                Claim(
                    pair.pair,
                    first,
                    wanted.end_token,
                    pair.way,
                    offset,
                    count,
                    pages,
                    pair.why,
                    pair.serial,
                    digest_key,
                    room.binding,
                ),
            )
        self._repeat_later(room.key, pair.name, pair.attempts, now_ns)

    def _on_wire_found(self, link: Link, message: WireFound, now_ns: int) -> None:
        if (message.source_epoch, message.target_epoch) != (link.epoch, self.config.epoch):
            self._stale(message)
            return
        link.heard_ns = now_ns
        link.wire, link.wire_epoch = message.wire, message.source_epoch
        for room, pair in self._rooms_of(link):
            if pair.state is TargetPairState.WAITING:
                self._send_claim(room, pair, now_ns)

    # -- rooms ---------------------------------------------------------------------------------------------------------

    def _pair_key(self, room: RoomKey, name: PairName, source_epoch: int) -> PairKey:
        """Return the key of this rank and life, and one life of a source, for a cache of a room."""
        us, (source, cache) = self.identity, name
        return PairKey(
            room, source.rank, us.rank, source_epoch, self.config.epoch, us.instance, us.dp_rank, us.memory, cache
        )

    def _rooms_of(self, link: Link) -> list[tuple[TargetRoom, TargetPair]]:
        """Return a peer's open rooms with its pairs in them, in the order in which they were opened."""
        return [
            (room, pair)
            for key in link.rooms
            if (room := self.rooms.get(key)) is not None
            for pair in room.pairs.values()
            if pair.peer == link.peer
        ]

    @staticmethod
    def _is_here(link: Link, pair: TargetPair) -> bool:
        """Whether a pair's room names the address at which its source is dialled."""
        return main_address(pair.address) == main_address(link.address)

    def _is_elsewhere(self, link: Link, pair: TargetPair) -> bool:
        """Whether a pair waits for a life at another address than the dialled one."""
        return pair.state is TargetPairState.WAITING and not self._is_here(link, pair)

    def _rivals_of(self, link: Link) -> list[tuple[TargetRoom, TargetPair]]:
        """Return a peer's rooms that wait for a life at another address than the dialled one, failed ones last."""
        rivals = [(room, pair) for room, pair in self._rooms_of(link) if self._is_elsewhere(link, pair)]
        return sorted(rivals, key=lambda rival: rival[0].failed)

    def _concerns(self, link: Link, pair: TargetPair) -> bool:
        """Whether a pair was claimed, or would be at the address that is dialled now."""
        return bool(pair.pair.source_epoch) or self._is_here(link, pair)

    def _abort_pair(self, pair: TargetPair) -> None:
        """Abort the pair of a failed room; quarantine the memory that its writer may write."""
        if not pair.exposed:
            pair.step(TargetPairEvent.CLOSE)
            return
        pair.step(TargetPairEvent.ABORT)
        writers = self.peers[pair.peer].writers
        writers.setdefault(pair.pair.source_epoch, Writer(pair.address)).pair_count += 1

    def _find(self, peer: PeerId, pair_key: PairKey) -> tuple[TargetRoom | None, TargetPair | None]:
        room = self.rooms.get(pair_key.key)
        return room, (room.pairs.get((peer, pair_key.cache)) if room is not None else None)

    def _ack(self, pair: TargetPair, slab: int, generation: int) -> None:
        self._send(pair.peer, SlabAck(pair.pair, slab, generation))

    def _pump(self, now_ns: int) -> None:
        """Send the grants that free memory permits, and set the deadlines of their answers."""
        for room_key, pair, grant in self.granter.grants(self.rooms):
            self._send(pair.peer, grant)
            self.granter.note_due(pair, now_ns)
            self._watch(self.rooms[room_key], pair, now_ns)
        self.granter.note_wait(now_ns)
        for key in self.granter.take_hopeless(now_ns):
            room = self.rooms.get(key)
            if room is not None:
                text = f"{self.granter.ring.held_bytes} bytes of the ring are quarantined: no slab of this room fits"
                self._fail(room, Reason.RING_TOO_SMALL, text, now_ns)

    def _watch(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        if not self._overdue(room, pair, now_ns) and pair.state is TargetPairState.OPEN:
            self._repeat_later(room.key, pair.name, pair.attempts, now_ns)

    def _overdue(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> bool:
        """Fail a room whose writer's bytes are overdue; return whether it did."""
        overdue = self.granter.overdue(pair, now_ns)
        if overdue:
            text = (
                f"{self._name(pair.peer)} has said that tokens are ready, has the memory for them, and has written none "
                f"for {self.config.write_timeout_ns / 1e9:g} s"
            )
            self._fail(room, Reason.TRANSFER_FAILED, text, now_ns)
        return overdue

    def _repeat(self, key: RoomKey, name: PairName, now_ns: int) -> None:
        room, (peer, cache) = self.rooms.get(key), name
        pair = room.pairs.get(name) if room is not None else None
        link = self.peers.get(peer)
        if link is None or link.state is not PeerState.ATTACHED:
            return
        if (key, cache) in link.outcomes:
            self._send_outcome(link, key, cache, now_ns)
            return
        if room is None or pair is None:
            return
        if pair.state in (TargetPairState.WAITING, TargetPairState.CLAIMED):
            pair.attempts += 1
            self.counters["retries"] += 1
            self._send_claim(room, pair, now_ns)
            return
        if pair.state is not TargetPairState.OPEN or self._overdue(room, pair, now_ns):
            return
        for slab in sorted(pair.regions):
            if pair.states[slab] is TargetSlab.GRANTED and slab < pair.ready_count:
                self._send(peer, self.granter.grant(pair, slab))
        self.counters["retries"] += 1
        pair.attempts += 1
        self._repeat_later(key, name, pair.attempts, now_ns)

    def _finish(self, room: TargetRoom, now_ns: int) -> None:
        """Notify the engine once all tokens are there; drop the room once every source has answered."""
        for pair in room.pairs.values():
            # A source with nothing to send may not know the total yet.
            knows_total = not pair.states or pair.total_tokens == room.caches[pair.pair.cache].end_token
            if pair.state is TargetPairState.OPEN and pair.done and knows_total:
                pair.step(TargetPairEvent.FINISH)
        if room.state is TargetRoomState.OPEN and room.done:
            room.step(TargetRoomEvent.FINISH)
            self._effect(room.ended())
            self._effect(RoomReleased(Half.TARGET, room.key))
        if room.state is TargetRoomState.DONE and room.answered:
            self._remember_room(room, Reason.NONE, "", now_ns)
            for pair in room.pairs.values():
                if pair.state is TargetPairState.CLOSED:
                    self._queue_outcome(pair, room.key, self.ended[room.key], now_ns)
            self._drop(room)

    def _give_up(self, room: TargetRoom, pair: TargetPair, reason: Reason, text: str, now_ns: int) -> None:
        """Fail the room of a pair that its source aborts, unless the room needs nothing more of this source."""
        if room.failed or pair.state in (TargetPairState.COMPLETE, TargetPairState.CLOSED):
            return
        if pair.route is None or room.state is TargetRoomState.DONE:
            pair.step(TargetPairEvent.CLOSE)
            self._finish(room, now_ns)
        else:
            self._fail(room, reason, text, now_ns)

    def _fail(self, room: TargetRoom, reason: Reason, text: str, now_ns: int) -> None:
        """Fail a room and abort it at its sources; quarantine the memory that they may still write."""
        if room.state is not TargetRoomState.OPEN:
            return
        assert reason is not Reason.NONE, "a failed room needs a reason"
        room.step(TargetRoomEvent.FAIL)
        room.reason, room.text = reason, text
        self._effect(room.ended())
        self._remember_room(room, reason, text, now_ns)
        for name, pair in room.pairs.items():
            self._deadlines.repeats.clear((room.key, name))
            if self._is_elsewhere(self.peers[pair.peer], pair):
                # Its source may have offered the room, and can be told only at its own address: see `_end_wait`.
                continue
            if pair.state is not TargetPairState.CLOSED:
                self.granter.quarantine(pair)
                self._abort_pair(pair)
            self._queue_outcome(pair, room.key, self.ended[room.key], now_ns)
        if room.exposed:
            self.exposed_since_ns[room.key] = now_ns
        self._settle(room)

    def _end_wait(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        """End a pair that has outlived its failed room to wait for its source's address; tell the source if it is dialled now."""
        pair.step(TargetPairEvent.CLOSE)
        ended = Ended(room.reason, room.text, self.table.remembered_until_ns(now_ns), binding=room.binding)
        self._queue_outcome(pair, room.key, ended, now_ns)
        self._settle(room)

    def _confirm(self, room: TargetRoom, pair: TargetPair) -> None:
        """Free a pair's quarantined memory: its writer will not write any more."""
        pair.step(TargetPairEvent.CONFIRM)
        writers, epoch = self.peers[pair.peer].writers, pair.pair.source_epoch
        writers[epoch].pair_count -= 1
        if not writers[epoch].pair_count:
            del writers[epoch]
        self.granter.release(room, pair)
        self._settle(room)

    def _settle(self, room: TargetRoom) -> None:
        """Release the pages once no writer can write them; drop the room once every writer has confirmed, and no pair waits."""
        if not room.failed or self.rooms.get(room.key) is not room:
            return
        if room.state is TargetRoomState.FAILED and not room.exposed:
            room.step(TargetRoomEvent.RELEASE)
            self.exposed_since_ns.pop(room.key, None)
            self._effect(RoomReleased(Half.TARGET, room.key))
        pending = any(pair.state in _PENDING for pair in room.pairs.values())
        if room.state is TargetRoomState.RELEASED and not pending:
            self._drop(room)

    def _drop(self, room: TargetRoom) -> None:
        room.step(TargetRoomEvent.END)
        self.table.drop(room)
        for name, pair in room.pairs.items():
            self.in_place_count -= pair.expects_bytes
            link = self.peers[pair.peer]
            link.rooms.pop(room.key, None)
            if (room.key, pair.pair.cache) not in link.outcomes:
                self._deadlines.repeats.clear((room.key, name))
