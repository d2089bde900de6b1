"""The decode half of a worker's protocol core: claims of its engine, grants of ring memory, scatters, done or failed.

Driven by the worker: engine verbs (`claim`, `cancel`, `renew`), messages and notices (`receive`), results of
scatters (`scatter_done`, `scatter_failed`) and time (`tick`). Who is granted what is decided in `granting`.
"""

from __future__ import annotations

from longshore_wire.claims import Wanted, chosen_way, demanded_grid, target_pairs
from longshore_wire.effects import (
    PeerId,
    RoomEnded,
    RoomReleased,
    SessionConfig,
    StartScatter,
)
from longshore_wire.engine_messages import PAGES_PER_MESSAGE_MAX, Half
from longshore_wire.errors import Reason, RoomError
from longshore_wire.granting import Granter
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.peer_messages import (
    Abort,
    AbortAck,
    Attach,
    Claim,
    Demand,
    PairKey,
    PeerMessage,
    Pong,
    Refuse,
    RoomKey,
    SlabAck,
    SlabReady,
    WireFound,
)
from longshore_wire.plan import Way
from longshore_wire.room import TargetPair, TargetRoom
from longshore_wire.session import Peer, PeerState, Untold, backoff_ns
from longshore_wire.states import TargetEvent, TargetSlab
from longshore_wire.target_peers import TargetPeers, prefill_name

# A worker that died is back by then, also on a host with little to spare; its engine offers again what was open.
_RESTART_NS = 60_000_000_000


class TargetSession(TargetPeers):
    """See the module. One per engine registration that decodes."""

    def __init__(self, config: SessionConfig, *, now_ns: int) -> None:
        super().__init__(config, now_ns=now_ns)
        self.rooms: dict[RoomKey, TargetRoom] = {}
        self.granter = Granter(config)
        self.in_place_count = 0

    # -- the engine ------------------------------------------------------------------------------------------------

    def claim(self, wanted: Wanted, now_ns: int) -> None:
        """Open a room. RoomEnded and RoomReleased follow.

        Raises:
            RoomError: the room is known already, there are too many (BUSY), or the range is none.
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
                f"tokens [{wanted.first_token}, {wanted.end_token}) are no range: give 0 <= first <= end",
                reason=Reason.TOKENS_MISSING,
            )
        near = self.config.agent != "" and wanted.endpoint.agent == self.config.agent
        planned = self._plan(wanted.endpoint.layout, self.config.layout, key.room, direct=near)
        pairs = target_pairs(self.config, wanted, planned)
        room = TargetRoom(
            key,
            wanted.first_token,
            wanted.end_token,
            wanted.page_count,
            wanted.pages,
            wanted.memory,
            wanted.digest,
            opened_ns=now_ns,
        )
        self.rooms[key] = room
        for pair in pairs:
            room.pairs[pair.peer] = pair
            self.in_place_count += pair.expects_bytes
            self._dial(pair.peer, wanted.endpoint, now_ns).rooms[key] = None
        for pair in pairs:
            if not room.failed and self.peers[pair.peer].state is PeerState.ATTACHED:
                self._send_claim(room, pair, now_ns)
        self._finish(room, now_ns)

    def cancel(self, key: RoomKey, reason: Reason, text: str, now_ns: int) -> None:
        """Give a room up. RoomEnded, and RoomReleased once nobody can write its pages, follow."""
        room = self.rooms.get(key)
        if room is not None:
            self._fail(room, reason, text, now_ns)

    def was_absent(self, late_ns: int, now_ns: int) -> None:
        """See `Session`: nor for a writer's slowness."""
        super().was_absent(late_ns, now_ns)
        self.granter.was_absent(late_ns)

    def fail_claimed(self, reason: Reason, text: str, now_ns: int) -> None:
        """Give up every room: each has pieces on sibling ranks."""
        self.fail_all(reason, text, now_ns)

    # -- scatters --------------------------------------------------------------------------------------------------

    def scatter_done(self, peer: PeerId, pair_key: PairKey, slab: int, payload_bytes: int, now_ns: int) -> None:
        """The slab is in the pages, or its scatter was dropped after an abort."""
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        state = pair.step(slab, TargetEvent.SCATTERED)
        region = pair.regions[slab]
        self.granter.free(room, pair, slab)
        if state is TargetSlab.DONE:
            room.bytes_moved += payload_bytes
            self._cover(pair, slab)
            self._ack(pair, slab, region.generation)
            self._finish(room, now_ns)
        else:
            self._settle(room)
        self._pump(now_ns)

    def scatter_failed(
        self, peer: PeerId, pair_key: PairKey, slab: int, reason: Reason, text: str, now_ns: int
    ) -> None:
        """The slab cannot be scattered; its room fails and nothing of it counts."""
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        self._fail(room, reason, text, now_ns)
        pair.step(slab, TargetEvent.SCATTERED)
        self.granter.free(room, pair, slab)
        self._settle(room)
        self._pump(now_ns)

    # -- peers -----------------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: PeerMessage, now_ns: int) -> None:
        """Obey one message or notice of a peer; what is stale is counted and otherwise ignored."""
        known = self.peers.get(peer)
        if known is None:
            self._stale(message)
            return
        if isinstance(message, Attach):
            self._on_attach(known, message, now_ns)
            if known.state is PeerState.ATTACHED:
                self.granter.expect(message.slab_bytes_max)
            return
        if isinstance(message, Refuse):
            if message.epoch in (0, self.config.epoch):
                self._on_refuse(known, message, now_ns)
            else:
                self._stale(message)
            return
        if isinstance(message, Pong):
            if message.epoch == known.epoch:
                known.heard_ns = now_ns
            else:
                self.peer_lost(peer, f"{prefill_name(peer)} was restarted", now_ns)
            return
        if known.state is not PeerState.ATTACHED:
            self._stale(message)
            return
        known.heard_ns = now_ns
        if isinstance(message, WireFound):
            known.wire, known.wire_epoch = message.wire, message.source_epoch
            self._claim_open(known, now_ns)
        elif (
            not isinstance(message, Demand | SlabReady | Abort | AbortAck)
            or message.pair.target_epoch != self.config.epoch
            or message.pair.source_epoch != known.epoch
        ):
            self._stale(message)
        elif isinstance(message, Demand):
            self._on_demand(peer, message, now_ns)
        elif isinstance(message, SlabReady):
            self._on_ready(peer, message, now_ns)
        elif isinstance(message, Abort):
            self._on_abort(peer, message, now_ns)
        else:
            self._on_abort_ack(peer, message, now_ns)

    def tick(self, now_ns: int) -> None:
        """Repeat what has not been answered, let leases end. Call it by `next_due_ns` at the latest."""
        for key, peer in self._timers.pop(now_ns):
            self._repeat(key, peer, now_ns)
        for peer in self._peer_timers.pop(now_ns):
            self._beat(peer, now_ns)
        self._end_leases("decode", now_ns)
        self._pump(now_ns)

    @property
    def expects_bytes(self) -> bool:
        """Whether a peer may be writing to this worker now, so that notices should be looked for."""
        return bool(self.granter.ring.region_count) or self.in_place_count > 0

    # -- messages --------------------------------------------------------------------------------------------------

    def _on_demand(self, peer: PeerId, demand: Demand, now_ns: int) -> None:
        room, pair = self._find(peer, demand.pair)
        if room is None or pair is None or room.failed:
            self._stale(demand)
            return
        if pair.grid is None and not self._open_grid(room, pair, demand, now_ns):
            return
        assert pair.grid is not None
        if (demand.slab_count, demand.slab_tokens) != (pair.grid.count, pair.grid.slab_tokens):
            self._stale(demand)
            return
        pair.ready_count = max(pair.ready_count, min(demand.ready_count, demand.slab_count))
        self._learn_total(room, pair, demand.total_tokens, now_ns)
        self.granter.owes(pair, now_ns)
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
            self._fail(room, error.reason, f"{prefill_name(pair.peer)} {error}", now_ns)
            return False
        pair.states = [TargetSlab.WANTED] * pair.grid.count
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
                if ended is not None and ended.reason is Reason.NONE:
                    self._send(peer, SlabAck(ready.pair, ready.slab, ready.generation, self.granter.watermark))
                else:
                    self._send(peer, Abort(ready.pair, Reason.STALE_EPOCH, "the room is not open here"))
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
        elif state is TargetSlab.WANTED and pair.way is not Way.STAGED and ready.generation == 0:
            pair.step(ready.slab, TargetEvent.PLACE)
            room.bytes_moved += ready.payload_bytes
            self._cover(pair, ready.slab)
            self._ack(pair, ready.slab, 0)
            self._watch(room, pair, now_ns)
            self._finish(room, now_ns)
        else:
            self._stale(ready)

    def _land(self, room: TargetRoom, pair: TargetPair, ready: SlabReady, now_ns: int) -> None:
        assert pair.route is not None
        assert pair.grid is not None
        tokens = pair.grid.tokens(ready.slab)
        payload_bytes = pair.route.payload_bytes(*tokens)
        if payload_bytes != ready.payload_bytes:
            self._stale(ready)
            return
        pair.step(ready.slab, TargetEvent.LAND)
        self.granter.owes(pair, now_ns, landed=True)
        pair.attempts = 0
        region = pair.regions[ready.slab]
        self._effect(
            StartScatter(
                pair.peer,
                pair.pair,
                ready.slab,
                tokens,
                pair.route,
                payload_bytes,
                region.offset_bytes,
                region.generation,
                room.digest,
            )
        )

    def _on_abort(self, peer: PeerId, abort: Abort, now_ns: int) -> None:
        room, pair = self._find(peer, abort.pair)
        self._send(peer, AbortAck(abort.pair))
        if room is not None and pair is not None:
            pair.heard = True
            self._fail(room, abort.reason, abort.text, now_ns)

    def _on_abort_ack(self, peer: PeerId, ack: AbortAck, now_ns: int) -> None:
        self.peers[peer].untold.pop(ack.pair.key, None)
        room, pair = self._find(peer, ack.pair)
        if room is not None and pair is not None and room.failed:
            pair.heard = True
            self._confirm(room, pair)
            self._pump(now_ns)

    # -- rooms -----------------------------------------------------------------------------------------------------

    def _claim_open(self, known: Peer, now_ns: int) -> None:
        """Claim what waited for the wire to a source."""
        for key in list(known.rooms):
            room = self.rooms.get(key)
            if room is not None and not room.pairs[known.peer].pair.source_epoch and not room.failed:
                self._send_claim(room, room.pairs[known.peer], now_ns)
        self._tell_failures(known, now_ns)

    def _choose_way(self, room: TargetRoom, pair: TargetPair, known: Peer, now_ns: int) -> bool:
        """Choose the way of a pair for good; False: the wire, on which it depends, is still being found out."""
        assert known.attach is not None
        found = known.wire_epoch == known.epoch
        comes = self._probe is not None and now_ns < known.wire_due_ns
        if comes and not found and self.config.crossover.needs_wire(self.config.backend):
            self._timers.set((room.key, pair.peer), known.wire_due_ns)
            return False
        wire = known.wire if found else UNKNOWN_WIRE
        choice = chosen_way(self.config, known.attach, pair, (room.first_token, room.end_token), wire)
        self.in_place_count -= pair.expects_bytes
        pair.way, pair.why, pair.open = choice.way, choice.why, None
        self.in_place_count += pair.expects_bytes
        return True

    def _send_claim(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        known = self.peers[pair.peer]
        if not pair.pair.source_epoch and not self._wire_allows(room, pair, now_ns):
            return
        if pair.open is not None and not self._choose_way(room, pair, known, now_ns):
            return
        old = pair.pair
        if not old.source_epoch and pair.route is not None:
            known.claimed(room.key, pair.way)
            self.counters[f"claims.{pair.way.name.lower()}.{pair.why.name.lower()}"] += 1
        pair.pair = PairKey(
            old.key,
            old.source_rank,
            old.target_rank,
            known.epoch,
            old.target_epoch,
            old.target_instance,
            old.dp_rank,
        )
        first = room.end_token if pair.route is None else room.first_token
        count = room.page_count if pair.way is not Way.STAGED and first < room.end_token else 0
        for offset in range(0, max(count, 1), PAGES_PER_MESSAGE_MAX):
            pages = room.pages[4 * offset : 4 * (offset + PAGES_PER_MESSAGE_MAX)] if count else b""
            self._send(
                pair.peer,
                Claim(
                    pair.pair, first, room.end_token, pair.way, offset, count, pages, room.digest, room.memory, pair.why
                ),
            )
        self._timers.set((room.key, pair.peer), now_ns + backoff_ns(self.config.retry_ns, pair.attempts))

    def _find(self, peer: PeerId, pair_key: PairKey) -> tuple[TargetRoom | None, TargetPair | None]:
        room = self.rooms.get(pair_key.key)
        return room, (room.pairs.get(peer) if room is not None else None)

    def _cover(self, pair: TargetPair, slab: int) -> None:
        assert pair.grid is not None
        pair.coverage.add(*pair.grid.tokens(slab))

    def _ack(self, pair: TargetPair, slab: int, generation: int) -> None:
        self._send(pair.peer, SlabAck(pair.pair, slab, generation, self.granter.watermark))

    def _pump(self, now_ns: int) -> None:
        """Send the grants that free memory allows, and watch for their answers."""
        for room_key, pair, grant in self.granter.grants(self.rooms):
            self._send(pair.peer, grant)
            self.granter.owes(pair, now_ns)
            self._watch(self.rooms[room_key], pair, now_ns)
        for key in self.granter.take_hopeless(now_ns):
            room = self.rooms.get(key)
            if room is not None:
                text = f"{self.granter.ring.held_bytes} bytes of the ring are quarantined: no slab of this room fits"
                self._fail(room, Reason.RING_TOO_SMALL, text, now_ns)

    def _watch(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        if not self._overdue(room, pair, now_ns) and pair.told and not pair.complete and not room.failed:
            self._timers.set((room.key, pair.peer), now_ns + backoff_ns(self.config.retry_ns, pair.attempts))

    def _overdue(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> bool:
        """Fail a room whose writer has had memory for too long; return whether it has."""
        overdue = self.granter.overdue(pair, now_ns)
        if overdue:
            text = f"{prefill_name(pair.peer)} has ring memory for ready tokens and brought nothing for {self.config.write_timeout_ns / 1e9:g} s"
            self._fail(room, Reason.TRANSFER_FAILED, text, now_ns)
        return overdue

    def _repeat(self, key: RoomKey, peer: PeerId, now_ns: int) -> None:
        room = self.rooms.get(key)
        pair = room.pairs.get(peer) if room is not None else None
        if room is None or pair is None or self.peers[peer].state is not PeerState.ATTACHED:
            return
        if room.failed:
            if pair.confirmed:
                return
            self._send(peer, Abort(pair.pair, room.reason, room.text))
        elif not pair.told:
            pair.attempts += 1
            self.counters["retries"] += 1
            self._send_claim(room, pair, now_ns)
            return
        elif pair.complete or self._overdue(room, pair, now_ns):
            return
        else:
            for slab in sorted(pair.regions):
                if pair.states[slab] is TargetSlab.GRANTED and slab < pair.ready_count:
                    self._send(peer, self.granter.grant(pair, slab))
        self.counters["retries"] += 1
        pair.attempts += 1
        self._timers.set((key, peer), now_ns + backoff_ns(self.config.retry_ns, pair.attempts))

    def _finish(self, room: TargetRoom, now_ns: int) -> None:
        """Tell the engine once everything is there; forget the room once every source knows its part."""
        if room.failed or not room.done:
            return
        if not room.ended:
            room.ended = room.released = True
            self._effect(RoomEnded(Half.TARGET, room.key, Reason.NONE, "", room.bytes_moved))
            self._effect(RoomReleased(Half.TARGET, room.key))
        if all(pair.told for pair in room.pairs.values()):
            self._remember(room.key, Reason.NONE, "", now_ns)
            self._drop(room)

    def _fail(self, room: TargetRoom, reason: Reason, text: str, now_ns: int) -> None:
        """Give a room up on this side and tell its sources; what they may still write is quarantined."""
        if room.failed or self.rooms.get(room.key) is not room:
            return
        room.failed, room.reason, room.text = True, reason, text
        if not room.ended:
            room.ended = True
            self._effect(RoomEnded(Half.TARGET, room.key, reason, text, room.bytes_moved))
        self._remember(room.key, reason, text, now_ns)
        for peer, pair in room.pairs.items():
            pair.aborting, pair.attempts = True, 0
            self.granter.quarantine(pair)
            known = self.peers[peer]
            if pair.pair.source_epoch == 0:
                pair.confirmed = True  # It never heard of the room.
            elif known.state is PeerState.ATTACHED and known.epoch == pair.pair.source_epoch:
                self._send(peer, Abort(pair.pair, reason, text))
                self._timers.set((room.key, peer), now_ns + self.config.retry_ns)
        self._settle(room)

    def _confirm(self, room: TargetRoom, pair: TargetPair) -> None:
        """The pair's writer will not write any more: what was quarantined for it is free."""
        if not room.failed:
            return
        pair.confirmed = True
        self.granter.release(room, pair)
        self._settle(room)

    def _settle(self, room: TargetRoom) -> None:
        """Release the pages once nobody can write them; forget the room once every writer has confirmed."""
        if not room.failed or self.rooms.get(room.key) is not room:
            return
        writing = any(pair.draining_count for pair in room.pairs.values())
        in_place = any(pair.way is not Way.STAGED and not pair.confirmed for pair in room.pairs.values())
        if not room.released and not writing and not in_place:
            room.released = True
            self._effect(RoomReleased(Half.TARGET, room.key))
        if room.released and all(pair.confirmed for pair in room.pairs.values()):
            self._drop(room)

    def _drop(self, room: TargetRoom) -> None:
        del self.rooms[room.key]
        for peer, pair in room.pairs.items():
            self.in_place_count -= pair.expects_bytes
            self._timers.clear((room.key, peer))
            known = self.peers[peer]
            known.rooms.pop(room.key, None)
            ended = self.ended.get(room.key)
            if room.failed and not pair.heard and ended is not None:
                until_ns = ended.until_ns + _RESTART_NS
                known.untold[room.key] = Untold(pair.pair, room.reason, room.text, until_ns)
