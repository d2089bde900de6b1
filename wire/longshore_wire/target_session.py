"""The decode half of a worker's protocol core: claims of its engine, grants of ring memory, scatters, done or failed.

The worker calls it with engine requests (`claim`, `cancel`, `renew`), messages and notices (`receive`), results of
scatters (`scatter_done`, `scatter_failed`) and time (`tick`). `granting` decides on grants.
"""

from __future__ import annotations

from longshore_wire.claims import Wanted, demanded_grid, target_pairs
from longshore_wire.effects import (
    PeerId,
    RoomReleased,
    SessionConfig,
    StartScatter,
)
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason, RoomError
from longshore_wire.granting import Granter
from longshore_wire.peer_messages import (
    Abort,
    Attach,
    Demand,
    EndAck,
    PairKey,
    PeerMessage,
    Pong,
    Refuse,
    RoomKey,
    SlabAck,
    SlabReady,
    WireFound,
)
from longshore_wire.peers import Peer, PeerState
from longshore_wire.plan import digests_bytes
from longshore_wire.room import TargetPair, TargetRoom
from longshore_wire.states import (
    TargetEvent,
    TargetPairEvent,
    TargetPairState,
    TargetRoomEvent,
    TargetRoomState,
    TargetSlab,
)
from longshore_wire.target_peers import TargetPeers
from longshore_wire.ways import Way, is_near

# In these states a source may send a Demand: the first one, or one with more ready slabs.
_ANSWERABLE = (TargetPairState.CLAIMED, TargetPairState.OPEN)
# What sources send about a pair.
_OF_PAIRS = (Demand, SlabReady, Abort, EndAck)


class TargetSession(TargetPeers):
    """The decode half of the core, one for each engine registration that decodes."""

    def __init__(self, config: SessionConfig, *, now_ns: int) -> None:
        super().__init__(config, now_ns=now_ns)
        self.rooms: dict[RoomKey, TargetRoom] = {}
        self.granter = Granter(config)
        # Failed rooms whose pages a writer may still write, and since when; oldest first.
        self.exposed_since_ns: dict[RoomKey, int] = {}

    # -- the engine ------------------------------------------------------------------------------------------------

    def claim(self, wanted: Wanted, now_ns: int) -> None:
        """Open a room. RoomEnded and RoomReleased follow.

        Raises:
            RoomError: the room is known already, there are too many (BUSY), or the tokens are no range.
            LayoutError: the two instances cannot exchange pages.
            RingError: the ring could never hold two slabs for each source rank.
        """
        key = wanted.key
        ended = self.ended.get(key)
        if ended is not None and ended.reason is not Reason.NONE and key not in self.rooms:
            raise RoomError(f"room {key.room} has failed already: {ended.text}", reason=ended.reason)
        if key in self.rooms or key in self.ended:
            raise RoomError(f"room {key.room} was claimed before: use a new id", reason=Reason.ROOM_REUSED)
        if len(self.rooms) >= self.config.rooms_max:
            raise RoomError(f"{len(self.rooms)} rooms are open: try again later", reason=Reason.BUSY)
        if not 0 <= wanted.first_token <= wanted.end_token:
            raise RoomError(
                f"tokens [{wanted.first_token}, {wanted.end_token}) are not a range: give 0 <= first <= end",
                reason=Reason.TOKENS_MISSING,
            )
        direct = is_near(wanted.endpoint.agent, self.config.agent, mappable=wanted.mappable, adjacent=wanted.adjacent)
        planned = self._plan(wanted.endpoint.layout, self.config.layout, key.room, direct=direct)
        pairs = target_pairs(self.config, wanted, planned)
        room = TargetRoom(
            key,
            wanted.first_token,
            wanted.end_token,
            wanted.page_count,
            wanted.pages,
            wanted.digest or self.config.digest,
            opened_ns=now_ns,
        )
        self.rooms[key] = room
        self._progress(room, now_ns)
        for pair in pairs:
            room.pairs[pair.peer] = pair
            self.in_place_count += pair.expects_bytes
            self._dial(pair.peer, wanted.endpoint, key, now_ns)
        for pair in pairs:
            if not room.failed and self.peers[pair.peer].state is PeerState.ATTACHED:
                self._send_claim(room, pair, now_ns)
        self._finish(room, now_ns)

    def cancel(self, key: RoomKey, reason: Reason, text: str, now_ns: int) -> None:
        """Fail a room. RoomEnded follows, and RoomReleased once no writer can write its pages."""
        room = self.rooms.get(key)
        if room is not None:
            self._fail(room, reason, text, now_ns)

    def was_absent(self, late_ns: int, now_ns: int) -> None:
        """Do not count `late_ns` as silence or slowness of peers, or for the engine's lease."""
        super().was_absent(late_ns, now_ns)
        self.granter.was_absent(late_ns)

    # -- scatters --------------------------------------------------------------------------------------------------

    def scatter_done(self, peer: PeerId, pair_key: PairKey, slab: int, payload_bytes: int, now_ns: int) -> None:
        """Note that a slab is in the pages, or that its scatter was dropped after an abort."""
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        region = pair.regions.get(slab)
        if self._scattered(room, pair, slab) is TargetSlab.DONE:
            self._moved(room, peer, payload_bytes, now_ns)
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

    # -- peers -----------------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: PeerMessage, now_ns: int) -> None:
        """Handle one message or notice of a peer; count and ignore stale ones."""
        known = self.peers.get(peer)
        if known is None:
            self._stale(message)
            return
        if isinstance(message, Attach):
            if self._on_attach(known, message, now_ns):
                self.granter.expect(message.slab_bytes_max)
        elif isinstance(message, Refuse):
            self._on_refuse(known, message, now_ns)
        elif isinstance(message, Pong):
            self._on_pong(known, message, now_ns)
        elif known.state is not PeerState.ATTACHED:
            self._hear_parting(known, message, now_ns)
        elif isinstance(message, WireFound):
            self._on_wire_found(known, message, now_ns)
        elif not isinstance(message, _OF_PAIRS) or not self._speaks_for(known, message.pair):
            self._stale(message)
        else:
            known.heard_ns = now_ns
            if isinstance(message, Demand):
                self._on_demand(peer, message, now_ns)
            elif isinstance(message, SlabReady):
                self._on_ready(peer, message, now_ns)
            elif isinstance(message, Abort):
                self._on_abort(peer, message, now_ns)
            else:
                known.outcomes.pop(message.pair.key, None)
                self._heed_end_ack(known, message, now_ns)

    def _hear_parting(self, known: Peer, message: PeerMessage, now_ns: int) -> None:
        """Handle a message of a source that is not attached: it may confirm the end of its writes, or abort a room."""
        if not isinstance(message, Abort | EndAck) or not self._is_between(known, message.pair):
            self._stale(message)
        elif isinstance(message, EndAck):
            self._heed_end_ack(known, message, now_ns)
        elif known.state is PeerState.REFUSED:
            # Its rooms have already failed here.
            self._send(known.peer, EndAck(message.pair))
        else:
            self._stale(message)

    def _is_between(self, known: Peer, pair: PairKey) -> bool:
        """Whether a pair belongs to this rank and life, and to any life of that source."""
        is_ours = pair == self._pair_key(pair.key, known.peer, pair.source_epoch)
        return is_ours and pair.key.instance == known.peer.instance

    def _speaks_for(self, known: Peer, pair: PairKey) -> bool:
        """Whether a pair belongs to this rank and life, and to the current life of that source."""
        return pair.source_epoch == known.epoch and self._is_between(known, pair)

    def tick(self, now_ns: int) -> None:
        """As `Session.tick`; send the grants that became possible, too."""
        super().tick(now_ns)
        self._pump(now_ns)

    @property
    def expects_bytes(self) -> bool:
        """Whether a peer may be writing to this worker now, so that the worker must poll for notices."""
        return bool(self.granter.ring.region_count) or self.in_place_count > 0

    # -- messages --------------------------------------------------------------------------------------------------

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
            pair.grid = demanded_grid(self.config, pair, (room.first_token, room.end_token), demand)
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
        if total_tokens != room.end_token:
            text = f"prefill says {total_tokens} tokens, decode {room.end_token}"
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
                    self._send(peer, Abort(ready.pair, ended.reason, ended.text))
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
            self._moved(room, peer, ready.payload_bytes, now_ns)
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
        if room.digest and (found := len(ready.digests)) != (wanted := digests_bytes(pair.route, self.config.layout)):
            reason, text = Reason.MALFORMED_MESSAGE, f"has sent {found} bytes of digests instead of {wanted}"
            if not found:
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

    def _heed_end_ack(self, known: Peer, ack: EndAck, now_ns: int) -> None:
        """Handle a source's confirmation that it writes no more for a pair."""
        room, pair = self._find(known.peer, ack.pair)
        if room is None or pair is None or pair.state is not TargetPairState.ABORTING:
            return
        if pair.pair.source_epoch == ack.pair.source_epoch:
            self._confirm(room, pair)
            self._pump(now_ns)

    # -- rooms -----------------------------------------------------------------------------------------------------

    def _find(self, peer: PeerId, pair_key: PairKey) -> tuple[TargetRoom | None, TargetPair | None]:
        room = self.rooms.get(pair_key.key)
        return room, (room.pairs.get(peer) if room is not None else None)

    def _ack(self, pair: TargetPair, slab: int, generation: int) -> None:
        self._send(pair.peer, SlabAck(pair.pair, slab, generation))

    def _pump(self, now_ns: int) -> None:
        """Send the grants that free memory permits, and set the deadlines of their answers."""
        for room_key, pair, grant in self.granter.grants(self.rooms):
            self._send(pair.peer, grant)
            self.granter.note_due(pair, now_ns)
            self._watch(self.rooms[room_key], pair, now_ns)
        for key in self.granter.take_hopeless(now_ns):
            room = self.rooms.get(key)
            if room is not None:
                text = f"{self.granter.ring.held_bytes} bytes of the ring are quarantined: no slab of this room fits"
                self._fail(room, Reason.RING_TOO_SMALL, text, now_ns)

    def _watch(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        if not self._overdue(room, pair, now_ns) and pair.state is TargetPairState.OPEN:
            self._repeat_later(room.key, pair.peer, pair.attempts, now_ns)

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

    def _repeat(self, key: RoomKey, peer: PeerId, now_ns: int) -> None:
        room = self.rooms.get(key)
        pair = room.pairs.get(peer) if room is not None else None
        known = self.peers.get(peer)
        if known is None or known.state is not PeerState.ATTACHED:
            return
        if key in known.outcomes:
            self._send_outcome(known, key, now_ns)
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
        self._repeat_later(key, peer, pair.attempts, now_ns)

    def _finish(self, room: TargetRoom, now_ns: int) -> None:
        """Notify the engine once all tokens are there; drop the room once every source has answered."""
        for pair in room.pairs.values():
            # A source with nothing to send may not know the total yet.
            knows_total = not pair.states or pair.total_tokens == room.end_token
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
        for peer, pair in room.pairs.items():
            if pair.state is not TargetPairState.CLOSED:
                self.granter.quarantine(pair)
                self._abort_pair(pair)
            self._deadlines.repeats.clear((room.key, peer))
            self._queue_outcome(pair, room.key, self.ended[room.key], now_ns)
        if room.exposed:
            self.exposed_since_ns[room.key] = now_ns
        self._settle(room)

    def _confirm(self, room: TargetRoom, pair: TargetPair) -> None:
        """Free a pair's quarantined memory: its writer will not write any more."""
        self._confirm_pair(pair)
        self.granter.release(room, pair)
        self._settle(room)

    def _settle(self, room: TargetRoom) -> None:
        """Release the pages once no writer can write them; drop the room once every writer has confirmed."""
        if not room.failed or self.rooms.get(room.key) is not room:
            return
        if room.state is TargetRoomState.FAILED and not room.exposed:
            room.step(TargetRoomEvent.RELEASE)
            self.exposed_since_ns.pop(room.key, None)
            self._effect(RoomReleased(Half.TARGET, room.key))
        aborting = any(pair.state is TargetPairState.ABORTING for pair in room.pairs.values())
        if room.state is TargetRoomState.RELEASED and not aborting:
            self._drop(room)

    def _drop(self, room: TargetRoom) -> None:
        room.step(TargetRoomEvent.END)
        del self.rooms[room.key]
        self._deadlines.rooms.clear(room.key)
        for peer, pair in room.pairs.items():
            self.in_place_count -= pair.expects_bytes
            known = self.peers[peer]
            known.rooms.pop(room.key, None)
            if room.key not in known.outcomes:
                self._deadlines.repeats.clear((room.key, peer))
