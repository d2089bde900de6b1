"""The prefill half of a worker's protocol core: offers of its engine, claims of decode ranks, writes in between.

Driven by the worker: engine verbs (`offer`, `cancel`, `renew`), messages (`receive`), results of lanes
(`write_done`, `write_failed`) and time (`tick`). Answers by `take_outbox` and `take_effects`. See `session`.
"""

from __future__ import annotations

from longshore_wire.claims import IN_PLACE, ClaimParts, grid, route
from longshore_wire.effects import PeerAttached, PeerGone, PeerId, RoomEnded, RoomReleased, SessionConfig, StartWrite
from longshore_wire.engine_messages import Half
from longshore_wire.errors import LongshoreError, Reason, RoomError
from longshore_wire.peer_messages import (
    Abort,
    AbortAck,
    Attach,
    Claim,
    Demand,
    Grant,
    PairKey,
    PeerMessage,
    Ping,
    Pong,
    Refuse,
    RoomKey,
    SlabAck,
    SlabReady,
    Watermark,
)
from longshore_wire.plan import Way
from longshore_wire.room import SourcePair, SourceRoom
from longshore_wire.session import Peer, PeerState, Session, backoff_ns
from longshore_wire.slabs import region_bytes
from longshore_wire.states import SourceEvent, SourceSlab


class SourceSession(Session):
    """See the module. One per engine registration that prefills."""

    def __init__(self, config: SessionConfig, *, now_ns: int) -> None:
        super().__init__(config, now_ns=now_ns)
        self.rooms: dict[RoomKey, SourceRoom] = {}
        self._parts = ClaimParts()

    # -- the engine ------------------------------------------------------------------------------------------------

    def offer(self, room: int, pool: int, first_token: int, end_token: int, *, last: bool, now_ns: int) -> RoomKey:
        """Take tokens [first, end) of a room; returns the room's key.

        Raises:
            RoomError: the offer breaks the room's rules, the room has ended, or there are too many (BUSY).
        """
        key = RoomKey(self.config.instance, room, pool)
        ended = self.ended.get(key)
        if ended is not None and key not in self.rooms:
            raise RoomError(
                f"room {room} has ended ({ended.reason.name}): {ended.text or 'use a new id for a new request'}",
                reason=ended.reason or Reason.ROOM_REUSED,
            )
        found = self.rooms.get(key)
        if found is None:
            if len(self.rooms) >= self.config.rooms_max:
                raise RoomError(f"{len(self.rooms)} rooms are open: try again later", reason=Reason.BUSY)
            found = self.rooms[key] = SourceRoom(key, opened_ns=now_ns)
        if found.failed:
            raise RoomError(f"room {room} has failed: {found.text}", reason=found.reason)
        found.add_offer(first_token, end_token, last=last)
        for pair in list(found.pairs.values()):
            self._check_pair(found, pair, now_ns)
            if not found.failed:
                self._advance(found, pair, now_ns)
        self._finish(found, now_ns)
        return key

    def cancel(self, key: RoomKey, reason: Reason, text: str, now_ns: int) -> None:
        """Give a room up. RoomEnded and, once no lane reads its pages, RoomReleased follow."""
        room = self.rooms.get(key)
        if room is not None:
            self._fail(room, reason, text, now_ns)

    def fail_claimed(self, reason: Reason, text: str, now_ns: int) -> None:
        """Give up every room that a target has claimed: it has pieces on sibling ranks."""
        for room in list(self.rooms.values()):
            if room.pairs:
                self._fail(room, reason, text, now_ns)

    def refuse(self, peer: PeerId, reason: Reason, text: str, now_ns: int) -> None:
        """A target turned out to be none that this side may write to: its rooms fail."""
        known = self.peers.get(peer)
        for key in list(known.rooms) if known is not None else []:
            self.cancel(key, reason, text, now_ns)

    # -- lanes -----------------------------------------------------------------------------------------------------

    def write_done(self, peer: PeerId, pair_key: PairKey, slab: int, payload_bytes: int, now_ns: int) -> None:
        """The slab's bytes are at the target, or the lane has dropped it after an abort."""
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        state = pair.step(slab, SourceEvent.WROTE)
        if state is not SourceSlab.DROPPED:
            room.bytes_moved += payload_bytes
        if state is SourceSlab.WRITTEN:
            self._timers.set((room.key, peer), now_ns + self.config.retry_ns)
        if room.failed:
            self._settle(room)
        else:
            self._advance(room, pair, now_ns)
            self._finish(room, now_ns)

    def write_failed(
        self, peer: PeerId, pair_key: PairKey, slab: int, text: str, now_ns: int, *, settled: bool = True
    ) -> None:
        """The lane could not bring the slab over. Not settled: bytes may still land, so the target never hears
        that it may use the memory; only the end of this worker's life says so.
        """
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        self._fail(room, Reason.TRANSFER_FAILED, text, now_ns)
        if settled and pair.states[slab] is SourceSlab.DRAINING:
            pair.step(slab, SourceEvent.WROTE)
        self._settle(room)

    # -- peers -----------------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: PeerMessage, now_ns: int) -> None:
        """Obey one message of a peer; what is stale is counted and otherwise ignored."""
        known = self.peers.get(peer)
        if isinstance(message, Attach):
            self._on_attach(peer, message, now_ns)
            return
        if isinstance(message, Ping):
            if known is not None and known.epoch == message.epoch:
                known.heard_ns = now_ns
            # An unknown peer learns from the epoch that this is another life and attaches again.
            epoch = self.config.epoch if known is not None and known.epoch == message.epoch else 0
            self._send(peer, Pong(epoch))
            return
        if known is None or known.state is not PeerState.ATTACHED:
            self._stale(message)
            return
        known.heard_ns = now_ns
        if isinstance(message, Watermark | Pong | Refuse):
            return
        if isinstance(message, Abort):
            self._on_abort(peer, message, now_ns)
        elif (
            not isinstance(message, Claim | Grant | SlabAck | AbortAck)
            or message.pair.source_epoch != self.config.epoch
            or message.pair.target_epoch != known.epoch
        ):
            self._stale(message)
        elif isinstance(message, Claim):
            self._on_claim(known, message, now_ns)
        elif isinstance(message, Grant):
            self._on_grant(peer, message, now_ns)
        elif isinstance(message, SlabAck):
            self._on_ack(peer, message, now_ns)
        else:
            self._on_abort_ack(peer, message)

    def peer_lost(self, peer: PeerId, text: str, now_ns: int) -> None:
        """A target is gone: every room it claimed fails."""
        known = self.peers.get(peer)
        if known is None or known.state is PeerState.LOST:
            return
        known.state = PeerState.LOST
        self._parts.forget(peer)
        for key in list(known.rooms):
            room = self.rooms.get(key)
            if room is None:
                continue
            self._fail(room, Reason.PEER_LOST, text, now_ns)
            pair = room.pairs.get(peer)
            if pair is not None:
                pair.awaits_ack = pair.owes_ack = False
            self._settle(room)
        self._effect(PeerGone(peer, known.epoch))
        del self.peers[peer]

    def tick(self, now_ns: int) -> None:
        """Repeat what has not been answered, let leases end. Call it by `next_due_ns` at the latest."""
        for key, peer in self._timers.pop(now_ns):
            self._repeat(key, peer, now_ns)
        for peer in self._peer_timers.pop(now_ns):
            known = self.peers.get(peer)
            if known is None:
                continue
            silence_ns = now_ns - known.heard_ns
            if silence_ns >= self.config.peer_timeout_ns:
                self.peer_lost(peer, f"{_name(peer)} was silent for {silence_ns / 1e9:.1f} s", now_ns)
            else:
                self._peer_timers.set(peer, known.heard_ns + self.config.peer_timeout_ns)
        self._end_leases("prefill", now_ns)

    # -- messages --------------------------------------------------------------------------------------------------

    def _on_attach(self, peer: PeerId, attach: Attach, now_ns: int) -> None:
        wrong = self._check_attach(attach) or self._check_newest(peer, attach)
        if wrong is not None:
            self._send(peer, Refuse(*wrong, attach.epoch))
            return
        known = self.peers.get(peer)
        if known is not None and known.epoch != attach.epoch:
            self.peer_lost(peer, f"{_name(peer)} was restarted", now_ns)
            known = None
        if known is None:
            known = self.peers[peer] = Peer(peer)
        newer = known.attach is None or attach.generation > known.attach.generation
        if newer:
            known.attach = attach
            self._effect(PeerAttached(peer, attach))
        known.state, known.heard_ns = PeerState.ATTACHED, now_ns
        self._peer_timers.set(peer, now_ns + self.config.peer_timeout_ns)
        if not attach.reply:
            self._send(peer, self._attach(reply=True))

    def _on_claim(self, known: Peer, claim: Claim, now_ns: int) -> None:
        key, peer = claim.pair.key, known.peer
        ended = self.ended.get(key)
        room = self.rooms.get(key)
        if room is None and ended is not None:
            if ended.reason is Reason.NONE and claim.first_token == claim.end_token:
                self._send(peer, Demand(claim.pair, 1, 0, 0, claim.end_token))
            else:
                self._send(peer, Abort(claim.pair, ended.reason or Reason.ROOM_REUSED, ended.text))
            return
        if room is None:
            if key.instance != self.config.instance or len(self.rooms) >= self.config.rooms_max:
                reason = Reason.UNKNOWN_INSTANCE if key.instance != self.config.instance else Reason.BUSY
                self._send(peer, Abort(claim.pair, reason, f"room {key.room} is not open at {self.config.instance}"))
                return
            room = SourceRoom(key, opened_ns=now_ns)
        pair = room.pairs.get(peer)
        if pair is None:
            pair = self._open_pair(room, known, claim, now_ns)
            if pair is None:
                return
        if room.failed:
            return
        self._send_demand(room, pair)
        self._advance(room, pair, now_ns)
        self._finish(room, now_ns)

    def _open_pair(self, room: SourceRoom, known: Peer, claim: Claim, now_ns: int) -> SourcePair | None:
        assert known.attach is not None
        claimer = (known.peer.instance, known.peer.dp_rank)
        try:
            if room.claimer is not None and room.claimer != claimer:
                raise RoomError(
                    f"room {room.key.room} was claimed by {room.claimer[0]} already: a room has one target",
                    reason=Reason.ROOM_REUSED,
                )
            direct = claim.way is Way.DIRECT
            planned = self._plan(self.config.layout, known.attach.layout, room.key.room, direct=direct)
            found = route(planned, self.rank, known.peer.rank)
            pages = self._parts.add(claim, known.peer)
            if pages is None:
                return None
            cut = grid(self.config, known.attach, claim, found, known.sound_pools)
        except LongshoreError as error:
            self._send(known.peer, Abort(claim.pair, error.reason, str(error)))
            return None
        states = [SourceSlab.WAITING] * cut.count
        self.rooms[room.key] = room
        pair = SourcePair(claim.pair, known.peer, found.pair, claim.way, cut, states, pages, claim.why)
        room.pairs[known.peer] = pair
        room.expected, room.claimer = found.expected, claimer
        known.claimed(room.key, claim.way if found.pair is not None else None)
        self._check_pair(room, pair, now_ns)
        return pair

    def _on_grant(self, peer: PeerId, grant: Grant, now_ns: int) -> None:
        room, pair = self._find(peer, grant.pair)
        if room is None or pair is None or room.failed or not _fits(grant, pair, self.peers[peer].attach):
            self._stale(grant)
            ended = self.ended.get(grant.pair.key)
            if room is None and (ended is None or ended.reason is not Reason.NONE):
                # The target holds memory for us that we shall never write: tell it, so that it may free it.
                self._send(peer, Abort(grant.pair, Reason.STALE_EPOCH, "the room is not open here"))
                self._send(peer, AbortAck(grant.pair))
            return
        state = pair.states[grant.slab]
        if state is SourceSlab.WAITING:
            pair.grants[grant.slab] = grant
            pair.attempts = 0
            self._advance(room, pair, now_ns)
        elif state is SourceSlab.WRITTEN:
            self._send_ready(room, pair, grant.slab)

    def _on_ack(self, peer: PeerId, ack: SlabAck, now_ns: int) -> None:
        room, pair = self._find(peer, ack.pair)
        if room is None or pair is None or not 0 <= ack.slab < len(pair.states):
            self._stale(ack)
            return
        if pair.states[ack.slab] not in (SourceSlab.WRITING, SourceSlab.WRITTEN):
            self._stale(ack)
            return
        pair.step(ack.slab, SourceEvent.ACK)
        pair.grants.pop(ack.slab, None)
        pair.attempts = 0
        self._advance(room, pair, now_ns)
        self._finish(room, now_ns)

    def _on_abort(self, peer: PeerId, abort: Abort, now_ns: int) -> None:
        room, pair = self._find(peer, abort.pair)
        if room is None or pair is None or abort.pair.source_epoch != self.config.epoch:
            # Another life's writes died with its process, and a pair that is not open has none.
            self._send(peer, AbortAck(abort.pair))
            self._parts.drop(abort.pair.key, peer)
            if abort.pair.source_epoch == self.config.epoch:
                self._give_up_unclaimed(peer, abort, now_ns)
            return
        pair.owes_ack, pair.awaits_ack = True, False
        self._fail(room, abort.reason, abort.text, now_ns)
        pair.awaits_ack = False
        self._settle(room)

    def _give_up_unclaimed(self, peer: PeerId, abort: Abort, now_ns: int) -> None:
        """A room has failed at its target before its claim came here, or after a claim that our last life knew of.

        Our engine may offer it now, or has done so: nobody will ever claim it.
        """
        key = abort.pair.key
        # An engine takes BUSY as advice to try again, which is of no use for a room that has ended.
        reason = Reason.CANCELLED if abort.reason is Reason.BUSY else abort.reason
        room = self.rooms.get(key)
        if room is not None and room.claimer in (None, (peer.instance, peer.dp_rank)):
            self._fail(room, reason, abort.text, now_ns)
        elif room is None and key not in self.ended and key.instance == self.config.instance:
            self._remember(key, reason, abort.text, now_ns)

    def _on_abort_ack(self, peer: PeerId, ack: AbortAck) -> None:
        room, pair = self._find(peer, ack.pair)
        if room is not None and pair is not None and room.failed:
            pair.awaits_ack = False
            self._settle(room)

    # -- rooms -----------------------------------------------------------------------------------------------------

    def _find(self, peer: PeerId, pair_key: PairKey) -> tuple[SourceRoom | None, SourcePair | None]:
        room = self.rooms.get(pair_key.key)
        pair = room.pairs.get(peer) if room is not None else None
        if pair is not None and pair.pair.target_epoch != pair_key.target_epoch:
            return room, None
        return room, pair

    def _check_pair(self, room: SourceRoom, pair: SourcePair, now_ns: int) -> None:
        """Fail a room whose halves contradict each other."""
        if pair.route is None or room.first_token < 0:
            return
        if 0 <= room.total_tokens != pair.grid.end_token:
            text = f"prefill says {room.total_tokens} tokens, decode {pair.grid.end_token}"
            self._fail(room, Reason.TOTAL_MISMATCH, text, now_ns)
        elif pair.grid.first_token < room.first_token and pair.grid.count:
            text = f"decode wants tokens from {pair.grid.first_token}, prefill offers from {room.first_token}"
            self._fail(room, Reason.TOKENS_MISSING, text, now_ns)

    def _advance(self, room: SourceRoom, pair: SourcePair, now_ns: int) -> None:
        """Begin every slab that has its tokens and its grant."""
        ready = pair.grid.ready(room.end_token)
        if room.total_tokens < 0:
            # The last slab goes only when both halves have stated the same total.
            ready = min(ready, pair.grid.count - 1) if pair.grid.count else 0
        if ready > pair.ready_count:
            pair.ready_count = ready
            self._send_demand(room, pair)
        if pair.way in IN_PLACE:
            while pair.next_slab < ready and pair.busy_count < self.config.grant_window:
                self._begin(room, pair, pair.next_slab, None)
                pair.next_slab += 1
        else:
            for slab in [slab for slab in pair.grants if slab < ready and pair.states[slab] is SourceSlab.WAITING]:
                self._begin(room, pair, slab, pair.grants[slab])
        if not pair.done:
            self._timers.set((room.key, pair.peer), now_ns + backoff_ns(self.config.retry_ns, pair.attempts))

    def _begin(self, room: SourceRoom, pair: SourcePair, slab: int, grant: Grant | None) -> None:
        assert pair.route is not None
        first, end = pair.grid.tokens(slab)
        payload_bytes = pair.route.payload_bytes(first, end)
        if grant is not None and grant.length_bytes < region_bytes(payload_bytes):
            self._stale(grant)
            pair.grants.pop(slab)
            return
        pair.step(slab, SourceEvent.BEGIN)
        self._effect(
            StartWrite(
                peer=pair.peer,
                pair=pair.pair,
                slab=slab,
                tokens=(first, end),
                route=pair.route,
                way=pair.way,
                payload_bytes=payload_bytes,
                offset_bytes=grant.offset_bytes if grant else 0,
                generation=grant.generation if grant else 0,
                total_tokens=room.total_tokens,
                target_pages=pair.target_pages,
                first_claimed_token=pair.grid.first_token,
            )
        )

    def _send_demand(self, room: SourceRoom, pair: SourcePair) -> None:
        self._send(
            pair.peer,
            Demand(pair.pair, pair.grid.slab_tokens, pair.grid.count, pair.ready_count, room.total_tokens),
        )

    def ready_message(self, room: SourceRoom, pair: SourcePair, slab: int) -> SlabReady:
        """Return the notice that slab `slab` has landed."""
        assert pair.route is not None
        payload_bytes = pair.route.payload_bytes(*pair.grid.tokens(slab))
        grant = pair.grants.get(slab)
        generation = grant.generation if grant else 0
        return SlabReady(pair.pair, slab, generation, payload_bytes, room.total_tokens)

    def _send_ready(self, room: SourceRoom, pair: SourcePair, slab: int) -> None:
        self._send(pair.peer, self.ready_message(room, pair, slab))

    def _repeat(self, key: RoomKey, peer: PeerId, now_ns: int) -> None:
        room = self.rooms.get(key)
        pair = room.pairs.get(peer) if room is not None else None
        if room is None or pair is None:
            return
        if room.failed:
            if not pair.awaits_ack:
                return
            self._send(peer, Abort(pair.pair, room.reason, room.text))
        elif pair.done:
            return
        else:
            self._send_demand(room, pair)
            for slab, state in enumerate(pair.states):
                if state is SourceSlab.WRITTEN:
                    self._send_ready(room, pair, slab)
        self.counters["retries"] += 1
        pair.attempts += 1
        self._timers.set((key, peer), now_ns + backoff_ns(self.config.retry_ns, pair.attempts))

    def _finish(self, room: SourceRoom, now_ns: int) -> None:
        """End a room that has delivered everything."""
        if room.failed or not room.done or not room.engine:
            return
        self._effect(RoomEnded(Half.SOURCE, room.key, Reason.NONE, "", room.bytes_moved))
        self._effect(RoomReleased(Half.SOURCE, room.key))
        self._remember(room.key, Reason.NONE, "", now_ns)
        self._drop(room)

    def _fail(self, room: SourceRoom, reason: Reason, text: str, now_ns: int) -> None:
        """Give a room up on this side and tell its targets."""
        if room.failed:
            return
        room.failed, room.reason, room.text = True, reason, text
        self._effect(RoomEnded(Half.SOURCE, room.key, reason, text, room.bytes_moved))
        self._remember(room.key, reason, text, now_ns)
        for peer, pair in room.pairs.items():
            pair.abort()
            if not pair.owes_ack:
                pair.awaits_ack = True
                pair.attempts = 0
                self._send(peer, Abort(pair.pair, reason, text))
                self._timers.set((room.key, peer), now_ns + self.config.retry_ns)
        self._settle(room)

    def _settle(self, room: SourceRoom) -> None:
        """Once no lane holds a slab: release the pages, confirm to targets; then forget the room."""
        if not room.failed or self.rooms.get(room.key) is not room:
            return
        for peer, pair in room.pairs.items():
            if pair.owes_ack and not pair.busy_count:
                pair.owes_ack = False
                self._send(peer, AbortAck(pair.pair))
        if room.busy:
            return
        if not room.released:
            room.released = True
            self._effect(RoomReleased(Half.SOURCE, room.key))
        if not any(pair.awaits_ack for pair in room.pairs.values()):
            self._drop(room)

    def _drop(self, room: SourceRoom) -> None:
        del self.rooms[room.key]
        for peer in room.pairs:
            self._timers.clear((room.key, peer))
            known = self.peers.get(peer)
            if known is not None:
                known.rooms.pop(room.key, None)


def _fits(grant: Grant, pair: SourcePair, attach: Attach | None) -> bool:
    """Whether a grant names a slab of the pair and memory of the target's ring."""
    if attach is None or attach.ring is None or not 0 <= grant.slab < len(pair.states):
        return False
    return 0 <= grant.offset_bytes <= grant.offset_bytes + grant.length_bytes <= attach.ring.length_bytes


def _name(peer: PeerId) -> str:
    return f"decode {peer.instance} rank {peer.rank}"
