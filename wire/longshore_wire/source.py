"""The prefill half of a worker's protocol core: offers of its engine, claims of decode ranks, writes in between.

The worker calls it with engine requests (`offer`, `cancel`, `renew`), messages (`receive`), results of lanes
(`write_done`, `write_failed`) and time (`tick`). It answers by `take_effects`. See `session`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.claims import PageParts, Route, UsedSerials, grid, route
from longshore_wire.effects import PairName, PeerId, Replica, RoomGivenUp, RoomReleased, SessionConfig, StartWrite
from longshore_wire.engine_messages import Half
from longshore_wire.errors import LongshoreError, Reason, RoomError
from longshore_wire.layout import PageOrder
from longshore_wire.links import Link, Links, PeerState
from longshore_wire.names import room_name
from longshore_wire.peer_messages import (
    Abort,
    Ask,
    Attach,
    Claim,
    Complete,
    Demand,
    EndAck,
    Grant,
    Offered,
    PairKey,
    PeerMessage,
    Ping,
    Refuse,
    RoomKey,
    SlabAck,
    SlabReady,
    WireFound,
)
from longshore_wire.plan import plans
from longshore_wire.room import Ended, Notes, RoomTable, SourcePair, SourceRoom
from longshore_wire.slabs import SlabGrid, slab_bytes
from longshore_wire.states import (
    SourceEvent,
    SourcePairEvent,
    SourcePairState,
    SourceRoomEvent,
    SourceRoomState,
    SourceSlab,
)
from longshore_wire.timers import Deadlines
from longshore_wire.ways import IN_PLACE, Way, staging_between

# What targets send about a pair.
_OF_PAIRS = (Claim, Grant, SlabAck, Abort, EndAck, Complete, Ask)
# Targets whose used claims are kept: more than the decode ranks of any prefill rank.
TARGETS_MAX = 4096


class Completed(NamedTuple):
    """A pair that needs nothing of a room that our engine has not offered to this life.

    The target has claimed no tokens, or it has all that it had claimed from an earlier life of this worker.
    """

    pair: PairKey
    expected: frozenset[tuple[int, int]]  # target ranks that must claim from this source, each with the cache
    capability: bytes | None = None  # of the claim; None: it was shown to an earlier life


class SourceSession:
    """The prefill half of the core, one for each engine registration that prefills."""

    def __init__(self, config: SessionConfig, *, now_ns: int) -> None:
        self.config = config
        self._deadlines = Deadlines()
        self.links = links = Links(config, Half.SOURCE, self._deadlines)
        self.table: RoomTable[SourceRoom] = RoomTable(config, Half.SOURCE, self._deadlines, now_ns)
        self.identity, self.peers, self.counters = links.identity, links.peers, links.counters
        self.rooms, self.ended = self.table.open, self.table.ended
        # Verbs that concern peers alone, or the table of rooms alone.
        self.take_effects, self.describe, self.wire_fault = links.take_effects, links.describe, links.wire_fault
        self.peer_listens, self.renew = links.peer_listens, self.table.renew
        self._send, self._effect, self._stale, self._name = links.send, links.emit, links.stale, links.name
        self._progress, self._repeat_later = self.table.progress, self.table.repeat_later
        # They are no open rooms: a request that decode refuses must not use a place of another one.
        self._completed: Notes[Completed] = Notes()
        self._asks: Notes[Ask] = Notes()
        self._parts: PageParts[tuple[RoomKey, PairName]] = PageParts()
        # By target. Kept while a target is lost, since it may attach again in the same life.
        self._serials: OrderedDict[PeerId, UsedSerials] = OrderedDict()
        self._names = tuple(cache.name for cache in config.layout.caches)
        self._slots = frozenset(
            index for index, cache in enumerate(config.layout.caches) if cache.order is PageOrder.SLOT
        )

    @property
    def unfinished(self) -> bool:
        """Whether the engine waits for the end of a room."""
        return any(room.unfinished for room in self.rooms.values())

    # -- the engine ------------------------------------------------------------------------------------------------

    def offer(
        self,
        room: int,
        ranges: Sequence[tuple[int, int, int]],
        *,
        last: bool,
        now_ns: int,
        binding: Binding = UNBOUND,
    ) -> RoomKey:
        """Add an offer to a room; return the room's key.

        Args:
            ranges: (cache, first token, end token), each cache at most once.
            last: every cache is offered up to the total now.
        Raises:
            RoomError: the offer breaks the room's rules, the room has ended, or there are too many (BUSY).
        """
        key = RoomKey(self.config.instance, room)
        ended = self._ended(key, binding.capability)
        if ended is not None and key not in self.rooms:
            raise RoomError(
                f"room {room_name(room)} has ended ({ended.reason.name}): {ended.text or 'use a new id for a new request'}",
                reason=ended.reason or Reason.ROOM_REUSED,
            )
        open_room = self.rooms.get(key)
        if open_room is None:
            if len(self.rooms) >= self.config.rooms_max:
                raise RoomError(f"{len(self.rooms)} rooms are open: try again later", reason=Reason.BUSY)
            open_room = SourceRoom(key, opened_ns=now_ns)
        if open_room.failed:
            raise RoomError(f"room {room_name(room)} has failed: {open_room.text}", reason=open_room.reason)
        is_first = not open_room.is_offered
        if not is_first and binding != open_room.binding:
            raise RoomError(
                f"room {room_name(room)}: this chunk has another prompt or capability than the first one",
                reason=Reason.MALFORMED_MESSAGE,
            )
        if self._slots:
            self._check_slots(ranges, last=last)
        open_room.add_offers(ranges, self._names, last=last)
        self.rooms[key] = open_room
        self._progress(open_room, now_ns)
        if is_first:
            open_room.binding = binding
            self._drop_strangers(open_room)
            self._answer_asks(open_room, now_ns)
        self._add_completed(open_room)
        for pair in list(open_room.pairs.values()):
            self._check_pair(open_room, pair, now_ns)
            if not open_room.failed:
                self._advance(open_room, pair, now_ns)
        self._finish(open_room, now_ns)
        return key

    def _check_slots(self, ranges: Sequence[tuple[int, int, int]], *, last: bool) -> None:
        """Raise RoomError unless slots come whole and with the last tokens: a state changes with every token."""
        for cache, first_token, _ in ranges:
            if cache in self._slots and (first_token or not last):
                raise RoomError(
                    f"cache {self._names[cache]!r} is a slot, which has the state after all tokens: offer it once, from token 0 and "
                    "with `last`",
                    reason=Reason.MALFORMED_MESSAGE,
                )

    def cancel(self, key: RoomKey, reason: Reason, text: str, now_ns: int) -> None:
        """Fail a room. RoomEnded follows, and RoomReleased once no lane reads its pages.

        A room that is not open here is recorded as ended, so that a later claim is refused.
        """
        room = self.rooms.get(key)
        if room is not None:
            self._fail(room, reason, text, now_ns)
        elif key not in self.ended and key.instance == self.config.instance:
            self._remember(key, reason, text, now_ns)

    def fail_claimed(self, reason: Reason, text: str, now_ns: int) -> None:
        """Fail every room that a target has claimed, since sibling ranks share it."""
        for room in list(self.rooms.values()):
            if room.pairs:
                self._fail(room, reason, text, now_ns)

    def fail_all(self, reason: Reason, text: str, now_ns: int) -> None:
        """Fail every room."""
        for key in list(self.rooms):
            self.cancel(key, reason, text, now_ns)

    def sibling_failed(
        self, key: RoomKey, reason: Reason, text: str, now_ns: int, capability: bytes | None = None
    ) -> None:
        """Fail a room that a sibling rank has failed, even if this rank's engine asks for it only later.

        Args:
            capability: of the request whose room it is, if a target ended it before the sibling's engine offered it; None: any
                request's.
        """
        room = self.rooms.get(key)
        if room is not None:
            if capability is None or room.may_have(capability):
                self._fail(room, reason, text, now_ns, capability)
        elif key not in self.ended:
            self._remember(key, reason, text, now_ns, capability)

    # -- time ----------------------------------------------------------------------------------------------------------

    def next_due_ns(self) -> int | None:
        """Return when `tick` must be called at the latest, or None."""
        due_ns = self.table.next_due_ns()
        for notes in (self._completed, self._asks):
            if notes:
                due_ns = notes.due_ns() if due_ns is None else min(due_ns, notes.due_ns())
        return due_ns

    def tick(self, now_ns: int) -> None:
        """Repeat unanswered messages, check peers, end idle rooms and leases. Call it at `next_due_ns` at the latest."""
        for key, name in self._deadlines.repeats.pop(now_ns):
            self._repeat(key, name, now_ns)
        for peer in self._deadlines.peers.pop(now_ns):
            self._beat(peer, now_ns)
        for key, reason, text in self.table.expired(now_ns):
            self.cancel(key, reason, text, now_ns)
        self.table.forget(now_ns)
        for notes in (self._completed, self._asks):
            if notes:
                notes.forget(now_ns, self.rooms, self.table.remembered_until_ns(now_ns))

    def was_absent(self, late_ns: int, now_ns: int) -> None:
        """Do not count `late_ns`, in which this side did not run, as silence of peers or for its engine's lease."""
        self.links.was_absent(late_ns, now_ns)
        self.table.was_absent(late_ns, now_ns)

    def _remember(
        self,
        key: RoomKey,
        reason: Reason,
        text: str,
        now_ns: int,
        shown: bytes | None = None,
        claimer: Replica | None = None,
    ) -> None:
        """Record how a room ended. It needs no note any more, but one of another request's."""
        if shown is None:
            self._completed.pop(key, None)
            self._asks.pop(key, None)
        self.table.remember(key, reason, text, now_ns, shown=shown, claimer=claimer)

    def _ended(self, key: RoomKey, capability: bytes) -> Ended | None:
        """Return how the room of a request with this capability has ended; None if it has not."""
        ended = self.ended.get(key)
        return None if ended is None or ended.shown not in (None, capability) else ended

    # -- lanes -----------------------------------------------------------------------------------------------------

    def write_done(
        self,
        peer: PeerId,
        pair_key: PairKey,
        slab: int,
        payload_bytes: int,
        now_ns: int,
        *,
        announce: bool = False,
        digests: bytes = b"",
    ) -> None:
        """Note that a slab's bytes are at the target, or that the lane has dropped it after an abort.

        Args:
            announce: True: the transport has not announced it to the target; a SlabReady message does.
            digests: of the source's pages, for that message.
        """
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        state = pair.step_slab(slab, SourceEvent.WROTE)
        if state is not SourceSlab.DROPPED:
            self.links.moved(peer, payload_bytes)
            self.table.moved(room, payload_bytes, now_ns)
        if state is SourceSlab.WRITTEN:
            if digests:
                pair.digests[slab] = digests
            if announce:
                self._send_ready(room, pair, slab)
            self._deadlines.repeats.set((room.key, pair.name), now_ns + self.config.retry_ns)
        if room.failed:
            self._settle(room)
        else:
            self._advance(room, pair, now_ns)
            self._finish(room, now_ns)

    def write_failed(
        self,
        peer: PeerId,
        pair_key: PairKey,
        slab: int,
        text: str,
        now_ns: int,
        *,
        settled: bool = True,
        reason: Reason = Reason.TRANSFER_FAILED,
    ) -> None:
        """Fail the room of a slab that the lane could not write. If not `settled`, bytes may still land: the target
        then gets no confirmation, and may use the memory only after the end of this worker's life.
        """
        room, pair = self._find(peer, pair_key)
        if room is None or pair is None:
            return
        self._fail(room, reason, text, now_ns)
        if settled and pair.states[slab] is SourceSlab.DRAINING:
            pair.step_slab(slab, SourceEvent.WROTE)
        self._settle(room)

    # -- peers -----------------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: PeerMessage, now_ns: int) -> None:
        """Handle one message of a peer; count and ignore stale ones."""
        if isinstance(message, Attach):
            self._on_attach(peer, message, now_ns)
            return
        if isinstance(message, Ping):
            self.links.answer_ping(peer, message, now_ns)
            return
        link = self.peers.get(peer)
        if link is None or not isinstance(message, _OF_PAIRS):
            self._stale(message)
            return
        if not self._speaks_for(link, message.pair):
            self._stale(message)
            return
        link.heard_ns = now_ns
        if isinstance(message, Abort):
            self._on_abort(link, message, now_ns)
        elif message.pair.source_epoch != self.config.epoch:
            self._stale(message)
        elif isinstance(message, Claim):
            self._on_claim(link, message, now_ns)
        elif isinstance(message, Grant):
            self._on_grant(link, message, now_ns)
        elif isinstance(message, SlabAck):
            self._on_ack(peer, message, now_ns)
        elif isinstance(message, Complete):
            self._on_complete(link, message, now_ns)
        elif isinstance(message, Ask):
            self._on_ask(link, message, now_ns)
        else:
            self._on_end_ack(peer, message)

    def refuse(self, peer: PeerId, reason: Reason, text: str, now_ns: int) -> None:
        """Fail the rooms of a target that this side must not write to."""
        link = self.peers.get(peer)
        for key in list(link.rooms) if link is not None else []:
            self.cancel(key, reason, text, now_ns)

    def peer_lost(self, peer: PeerId, text: str, now_ns: int) -> None:
        """Fail every room that the lost target has claimed."""
        link = self.peers.get(peer)
        if link is None:
            return
        self._parts.forget(lambda name: name[1][0] == peer)
        for key in list(link.rooms):
            room = self.rooms.get(key)
            if room is None:
                continue
            pairs = self._pairs_of(room, peer)
            self._fail(room, Reason.PEER_LOST, text, now_ns, pairs[0].binding.capability if pairs else None)
            for pair in pairs:
                pair.step(SourcePairEvent.LOSE)
            self._settle(room)
        self.links.detach(link, PeerState.LOST, text)

    def peer_dead(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """The answer to ProbeLiveness: that life's address refuses connections, so its process has ended."""
        link = self.peers.get(peer)
        if link is not None and link.epoch == epoch:
            self.peer_lost(peer, f"{self._name(peer)} at {link.address} has ended", now_ns)

    def wire_found(self, peer: PeerId, epoch: int, wire: str, failure: str, now_ns: int) -> None:
        """Take the result of a probe of a peer's life: report the wire to the peer, and continue its slabs.

        Args:
            failure: why the probe could not; empty: it could.
        """
        link = self.peers.get(peer)
        if link is None or link.epoch != epoch:
            return
        link.wire, link.wire_epoch, link.wire_failure = wire, epoch, failure
        self._send(peer, WireFound(self.config.epoch, epoch, wire))
        for key in list(link.rooms):
            room = self.rooms[key]
            for pair in self._pairs_of(room, peer):
                self._advance(room, pair, now_ns)

    def _on_attach(self, peer: PeerId, attach: Attach, now_ns: int) -> None:
        link = self.peers.get(peer)
        refusal = self.links.fault_of(attach)
        if refusal is None and link is not None and attach.epoch < link.epoch:
            # Clocks of two nodes may differ, so a probe asks whether the attached one lives.
            self.links.probe(link)
            refusal = (
                Reason.STALE_EPOCH,
                (
                    f"a newer worker is attached as {self._name(peer)} (DP rank {peer.dp_rank}): two engines "
                    "have one instance name; give each its own"
                ),
            )
        if refusal is not None:
            self._send(peer, Refuse(*refusal, attach.epoch, attach.attempt))
            return
        if link is not None and link.epoch != attach.epoch:
            self.peer_lost(peer, f"{self._name(peer)} was restarted", now_ns)
            link = None
        if link is None:
            link = self.peers[peer] = Link(peer)
        self.links.attach(link, attach, now_ns)

    def _beat(self, peer: PeerId, now_ns: int) -> None:
        """Check a target for silence, since it sends the heartbeats."""
        link = self.peers.get(peer)
        if link is None:
            return
        if text := self.links.silence(link, now_ns):
            self.peer_lost(peer, text, now_ns)
        else:
            self.links.beat(link, now_ns)

    def _speaks_for(self, link: Link, pair: PairKey) -> bool:
        """Whether a pair belongs to this rank and to the current life of that target."""
        peer = link.peer
        theirs = (pair.target_instance, pair.dp_rank, pair.target_rank, pair.memory, pair.target_epoch)
        return (
            theirs == (*peer, link.epoch)
            and pair.source_rank == self.identity.rank
            and 0 <= pair.cache < len(self._names)
        )

    # -- messages --------------------------------------------------------------------------------------------------

    def _on_ask(self, link: Link, ask: Ask, now_ns: int) -> None:
        """Answer a target that waits for the first tokens of a room, or note it until they are offered."""
        key = ask.pair.key
        room, ended = self.rooms.get(key), self._ended(key, ask.binding.capability)
        if key.instance != self.config.instance:
            text = f"room {room_name(key.room)} is not open at {self.config.instance}"
            self._send(link.peer, Abort(ask.pair, Reason.UNKNOWN_INSTANCE, text))
        elif room is None and ended is not None:
            self._send(link.peer, Abort(ask.pair, ended.reason or Reason.ROOM_REUSED, ended.text))
        elif room is not None and room.failed:
            self._send(link.peer, Abort(ask.pair, room.reason, room.text))
        elif room is None or not room.is_offered:
            # A target repeats its ask, so that one that is dropped is noted again.
            self._asks.put(
                key,
                (link.peer, ask.pair.cache),
                ask,
                self.table.remembered_until_ns(now_ns),
                self.config.ended_rooms_max,
            )
        elif ask.binding.capability != room.binding.capability:
            self._turn_away(key, link, ask.pair)
        else:
            self._send(link.peer, Offered(ask.pair))

    def _answer_asks(self, room: SourceRoom, now_ns: int) -> None:
        for (peer, _), (ask, _) in self._asks.pop(room.key, {}).items():
            link = self.peers.get(peer)
            if link is not None and link.attach is not None and link.epoch == ask.pair.target_epoch:
                self._on_ask(link, ask, now_ns)

    def _on_claim(self, link: Link, claim: Claim, now_ns: int) -> None:
        key, peer = claim.pair.key, link.peer
        ended = self._ended(key, claim.binding.capability)
        room = self.rooms.get(key)
        if room is None and ended is not None:
            if ended.reason is Reason.NONE and claim.first_token == claim.end_token:
                self._send(peer, Demand(claim.pair, 1, 0, 0, claim.end_token))
            else:
                self._send(peer, Abort(claim.pair, ended.reason or Reason.ROOM_REUSED, ended.text))
            return
        if room is None and self._takes_nothing(link, claim, now_ns):
            return
        if room is None:
            if key.instance != self.config.instance or len(self.rooms) >= self.config.rooms_max:
                reason = Reason.UNKNOWN_INSTANCE if key.instance != self.config.instance else Reason.BUSY
                self._send(
                    peer, Abort(claim.pair, reason, f"room {room_name(key.room)} is not open at {self.config.instance}")
                )
                return
            room = SourceRoom(key, opened_ns=now_ns)
        pair = room.pairs.get((peer, claim.pair.cache))
        if room.failed:
            # A pair of this life of the target already has its abort.
            if pair is None or pair.pair.target_epoch != claim.pair.target_epoch:
                self._send(peer, Abort(claim.pair, room.reason, room.text))
            return
        if pair is None and self._is_strange(room, link, claim):
            return
        if pair is None and claim.first_token < claim.end_token and claim.serial in self._used_serials(link):
            # A late copy of a claim on a dropped room. Its pages may belong to another room by now.
            self._stale(claim)
            self._send(peer, Abort(claim.pair, Reason.ROOM_REUSED, f"room {room_name(key.room)} has ended"))
            return
        if pair is None:
            pair = self._open_pair(room, link, claim, now_ns)
            if pair is None:
                return
            if room.failed:
                # Failed: its halves contradict each other.
                return
            self._progress(room, now_ns)
        self._advance(room, pair, now_ns, is_claimed=True)
        self._finish(room, now_ns)

    def _takes_nothing(self, link: Link, claim: Claim, now_ns: int) -> bool:
        """Handle a claim of no tokens of a room that is not open: note it and return True. Other claims open the room."""
        is_ours = claim.pair.key.instance == self.config.instance
        if claim.first_token < claim.end_token or not is_ours:
            return False
        self._used_serials(link).add(claim.serial)
        try:
            self._note_complete(link, claim.pair, claim.binding.capability, now_ns)
        except LongshoreError as error:
            self._send(link.peer, Abort(claim.pair, error.reason, str(error)))
        else:
            self._send(link.peer, Demand(claim.pair, 1, 0, 0, claim.end_token))
        return True

    def _is_strange(self, room: SourceRoom, link: Link, claim: Claim) -> bool:
        """Whether a claim does not show the room's capability. Then it changes nothing, and its sender is told."""
        shown = claim.binding.capability
        if room.is_offered:
            if shown == room.binding.capability:
                return False
            self._turn_away(room.key, link, claim.pair)
            return True
        # Only the offer will show whose claim is right. A target repeats its claim until it is answered.
        others = [pair for pair in room.pairs.values() if pair.binding.capability != shown]
        if others:
            self._stale(claim)
        return bool(others)

    def _drop_strangers(self, room: SourceRoom) -> None:
        """Drop the claims that came before the first offer and do not show its capability."""
        for name, pair in list(room.pairs.items()):
            link = self.peers.get(pair.peer)
            if pair.binding.capability == room.binding.capability or link is None:
                continue
            self._turn_away(room.key, link, pair.pair)
            del room.pairs[name]
            if not self._pairs_of(room, pair.peer):
                link.rooms.pop(room.key, None)
            self._deadlines.repeats.clear((room.key, name))
        if not room.pairs:
            room.expected = room.claimer = None

    def _turn_away(self, key: RoomKey, link: Link, pair: PairKey) -> None:
        text = f"the claim of room {room_name(key.room)} does not show the capability that its prefill engine gave with the handover"
        self.counters["refused.AUTHENTICATION"] += 1
        self._send(link.peer, Abort(pair, Reason.AUTHENTICATION, text))

    def _open_pair(self, room: SourceRoom, link: Link, claim: Claim, now_ns: int) -> SourcePair | None:
        assert link.attach is not None
        claimer = link.peer.replica
        try:
            if room.claimer is not None and room.claimer != claimer:
                raise RoomError(
                    f"room {room_name(room.key.room)} was claimed by {room.claimer} already: a room has one target",
                    reason=Reason.ROOM_REUSED,
                )
            claimed = self._route(link, claim.pair, direct=claim.way is Way.DIRECT)
            pages = self._claimed_pages(claim, link.peer)
            if pages is None:
                return None
            cut = grid(self.config, link.attach, claim, claimed, link.sound_pools)
        except LongshoreError as error:
            self._send(link.peer, Abort(claim.pair, error.reason, str(error)))
            return None
        self._used_serials(link).add(claim.serial)
        states = [SourceSlab.WAITING] * cut.count
        self.rooms[room.key] = room
        pair = SourcePair(claim.pair, link.peer, claimed.pair, claim.way, cut, states, pages, claim.why, claim.binding)
        pair.digest_key, pair.serial = claim.digest_key, claim.serial
        pair.tokens = claim.first_token, claim.end_token
        room.pairs[pair.name] = pair
        room.expected, room.claimer = claimed.expected, claimer
        link.claimed(room.key, claim.way if claimed.pair is not None else None)
        self._check_pair(room, pair, now_ns)
        return pair

    def _claimed_pages(self, claim: Claim, peer: PeerId) -> bytes | None:
        """Return the pages that a claim lists, or None until all of its messages are here. Raises RoomError."""
        if claim.way not in IN_PLACE or claim.page_count == 0:
            return b""
        return self._parts.add(
            (claim.pair.key, (peer, claim.pair.cache)), claim.page_offset, claim.page_count, claim.pages
        )

    def _on_grant(self, link: Link, grant: Grant, now_ns: int) -> None:
        peer = link.peer
        room, pair = self._find(peer, grant.pair)
        if room is None or pair is None or room.failed or not _fits(grant, pair, link.attach):
            self._stale(grant)
            ended = self.ended.get(grant.pair.key)
            if room is None and (ended is None or ended.reason is not Reason.NONE):
                # The target holds memory that will never be written. The Abort lets it free the memory.
                self._send(peer, Abort(grant.pair, Reason.STALE_EPOCH, "the room is not open here"))
                self._send(peer, EndAck(grant.pair))
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
        pair.step_slab(ack.slab, SourceEvent.ACK)
        pair.grants.pop(ack.slab, None)
        pair.digests.pop(ack.slab, None)
        pair.attempts = 0
        self._progress(room, now_ns)
        self._advance(room, pair, now_ns)
        self._finish(room, now_ns)

    def _on_abort(self, link: Link, abort: Abort, now_ns: int) -> None:
        peer = link.peer
        if abort.serial > 0:
            self._used_serials(link).add(abort.serial)
        if abort.pair.source_epoch != self.config.epoch:
            # Each life may confirm only its own writes: an earlier life of this name may still write from another node.
            self._stale(abort)
            return
        room, pair = self._find(peer, abort.pair)
        if room is None or pair is None:
            # A pair that is not open has no open write.
            self._send(peer, EndAck(abort.pair, abort.serial))
            self._parts.drop((abort.pair.key, (peer, abort.pair.cache)))
            self._give_up_unclaimed(peer, abort, now_ns)
            return
        if abort.reason is not Reason.STALE_EPOCH and pair.binding.capability != abort.binding.capability:
            # It is of a claim without the capability, at the rank that has claimed the room with it since.
            self._send(peer, EndAck(abort.pair, abort.serial))
            return
        # The target's abort also answers ours.
        pair.step(SourcePairEvent.ABORT)
        self._fail(room, _lasting(abort.reason), abort.text, now_ns, pair.binding.capability)
        self._settle(room)

    def _on_end_ack(self, peer: PeerId, ack: EndAck) -> None:
        room, pair = self._find(peer, ack.pair)
        if room is not None and pair is not None and pair.state is SourcePairState.TELLING:
            pair.step(SourcePairEvent.ANSWER)
            self._settle(room)

    def _route(self, link: Link, pair: PairKey, *, direct: bool = False) -> Route:
        """Return the meaning of a target's claim on a cache of a room. Raises LayoutError."""
        assert link.attach is not None
        config = self.config
        staging = staging_between(config.staging, config.neighbour_staging, near=direct)
        planned = plans(config.layout, link.attach.layout, staging=staging, direct=direct, room=pair.key.room)
        return route(planned, self.identity.rank, link.peer.rank, pair.cache)

    def _used_serials(self, link: Link) -> UsedSerials:
        """Return the used claims of a target's current life."""
        used = self._serials.get(link.peer)
        if used is None or used.epoch != link.epoch:
            used = self._serials[link.peer] = UsedSerials(link.epoch)
        self._serials.move_to_end(link.peer)
        while len(self._serials) > TARGETS_MAX:
            self._serials.popitem(last=False)
        return used

    # -- rooms of an earlier life --------------------------------------------------------------------------------------

    def _on_complete(self, link: Link, message: Complete, now_ns: int) -> None:
        """Handle a target's Complete: it has all of a pair with our last life, which lacked acknowledgements."""
        key = message.pair.key
        self._send(link.peer, EndAck(message.pair))
        if key in self.ended or key.instance != self.config.instance:
            return
        try:
            self._note_complete(link, message.pair, None, now_ns)
        except LongshoreError:
            self._stale(message)

    def _note_complete(self, link: Link, pair: PairKey, capability: bytes | None, now_ns: int) -> None:
        """Record that a target needs nothing more of a room. Raises LayoutError: the two cannot exchange pages."""
        key, peer = pair.key, link.peer
        expected = self._route(link, pair).expected
        completed = Completed(pair, expected, capability)
        room = self.rooms.get(key)
        if room is None:
            # An engine offers all of its open rooms to a new life. Rooms that have ended for it are not offered.
            until_ns = self.table.remembered_until_ns(now_ns)
            self._completed.put(key, (peer, pair.cache), completed, until_ns, self.config.ended_rooms_max)
        elif not room.failed:
            self._open_complete(room, peer, completed)
            self._progress(room, now_ns)
            self._finish(room, now_ns)

    def _open_complete(self, room: SourceRoom, peer: PeerId, completed: Completed) -> None:
        """Add a pair with nothing left to send to the room."""
        link = self.peers.get(peer)
        name = (peer, completed.pair.cache)
        if name in room.pairs or room.claimer not in (None, peer.replica):
            return
        if completed.capability not in (None, room.binding.capability):
            return
        pair = room.pairs[name] = SourcePair(
            completed.pair, peer, None, Way.STAGED, SlabGrid(0, 0, 1), [], binding=room.binding
        )
        room.expected, room.claimer = completed.expected, peer.replica
        if link is not None and link.epoch == completed.pair.target_epoch:
            link.claimed(room.key, None)
        else:
            pair.step(SourcePairEvent.LOSE)

    def _add_completed(self, room: SourceRoom) -> None:
        """Add to an offered room the pairs that targets have already completed."""
        for (peer, _), (completed, _) in self._completed.pop(room.key, {}).items():
            self._open_complete(room, peer, completed)

    def _give_up_unclaimed(self, peer: PeerId, abort: Abort, now_ns: int) -> None:
        """Fail a room that failed at its target before its claim arrived here, or after a claim to our last life.

        Our engine may offer the room later or has offered it, but no target will claim it. If this rank is done, the
        target's claims may not have arrived at our siblings.
        """
        key = abort.pair.key
        reason = _lasting(abort.reason)
        room, capability = self.rooms.get(key), abort.binding.capability
        if room is not None and room.claimer in (None, peer.replica):
            if room.may_have(capability):
                self._fail(room, reason, abort.text, now_ns, capability)
        elif reason is Reason.AUTHENTICATION:
            # An earlier life of this worker refused that claim. The room is another request's.
            return
        elif room is None and key.instance == self.config.instance:
            ended = self.ended.get(key)
            if ended is None:
                self._remember(key, reason, abort.text, now_ns, capability)
            elif ended.claimer != peer.replica:
                return
            self._effect(RoomGivenUp(key, reason, abort.text, capability))

    # -- rooms -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _pairs_of(room: SourceRoom, peer: PeerId) -> list[SourcePair]:
        """Return a target's pairs in a room, one for each cache that it has claimed."""
        return [pair for pair in room.pairs.values() if pair.peer == peer]

    def _find(self, peer: PeerId, pair_key: PairKey) -> tuple[SourceRoom | None, SourcePair | None]:
        room = self.rooms.get(pair_key.key)
        pair = room.pairs.get((peer, pair_key.cache)) if room is not None else None
        if pair is not None and pair.pair.target_epoch != pair_key.target_epoch:
            return room, None
        return room, pair

    def _check_pair(self, room: SourceRoom, pair: SourcePair, now_ns: int) -> None:
        """Fail a room whose halves contradict each other."""
        if not room.is_offered:
            return
        ours, theirs = room.binding.prompt, pair.binding.prompt
        if ours and theirs and ours != theirs:
            text = "prefill has computed another prompt than decode wants: give both engines the same prompt"
            self._fail(room, Reason.PROMPT_MISMATCH, text, now_ns)
        if pair.route is None or room.failed:
            return
        wanted_first, wanted_end = pair.tokens
        if 0 <= room.total_tokens != wanted_end:
            text = f"prefill says {room.total_tokens} tokens, decode {wanted_end}"
            self._fail(room, Reason.TOTAL_MISMATCH, text, now_ns)
        elif wanted_first < (first := room.first_tokens.get(pair.pair.cache, 0)) and pair.grid.count:
            text = f"decode wants tokens from {wanted_first}, prefill offers from {first}"
            if len(self._names) > 1:
                text = f"cache {self._names[pair.pair.cache]!r}: {text}"
            self._fail(room, Reason.TOKENS_MISSING, text, now_ns)

    def _advance(self, room: SourceRoom, pair: SourcePair, now_ns: int, *, is_claimed: bool = False) -> None:
        """Start every slab that has its tokens, its grant and a wire; answer the pair's claim if it has come now."""
        if room.failed:
            return
        is_slot = pair.route is not None and pair.route.slot
        offered_end = room.slot_end(pair) if is_slot else room.end_tokens.get(pair.pair.cache, -1)
        ready = pair.grid.ready(offered_end)
        if room.total_tokens < 0:
            # The last slab starts only when both halves have the same total.
            ready = min(ready, pair.grid.count - 1) if pair.grid.count else 0
        is_more = ready > pair.ready_count
        if is_more:
            pair.ready_count = ready
        if is_more or is_claimed:
            # First, and also without need of a grant: it wakes the target, which then polls for bytes without pause.
            self._send_demand(room, pair)
        fault = self.links.wire_fault_of(pair, now_ns)
        if fault:
            self.cancel(room.key, Reason.WIRE_NOT_ALLOWED, fault, now_ns)
        elif fault is None:
            # `wire_found` continues.
            pass
        elif pair.way in IN_PLACE:
            while pair.next_slab < ready and pair.busy_count < self.config.grant_window:
                self._begin(room, pair, pair.next_slab, None)
                pair.next_slab += 1
        else:
            for slab in [slab for slab in pair.grants if slab < ready and pair.states[slab] is SourceSlab.WAITING]:
                self._begin(room, pair, slab, pair.grants[slab])
        if not pair.done and not room.failed:
            self._repeat_later(room.key, pair.name, pair.attempts, now_ns)

    def _begin(self, room: SourceRoom, pair: SourcePair, slab: int, grant: Grant | None) -> None:
        assert pair.route is not None
        first, end = pair.grid.tokens(slab)
        payload_bytes = pair.route.payload_bytes(first, end)
        if grant is not None and grant.length_bytes < slab_bytes(payload_bytes):
            self._stale(grant)
            pair.grants.pop(slab)
            return
        pair.step_slab(slab, SourceEvent.BEGIN)
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
                first_claimed_token=pair.tokens[0],
                digest_key=pair.digest_key,
            )
        )

    def _send_demand(self, room: SourceRoom, pair: SourcePair) -> None:
        self._send(
            pair.peer,
            Demand(pair.pair, pair.grid.slab_tokens, pair.grid.count, pair.ready_count, room.total_tokens),
        )

    def _send_ready(self, room: SourceRoom, pair: SourcePair, slab: int) -> None:
        assert pair.route is not None
        payload_bytes = pair.route.payload_bytes(*pair.grid.tokens(slab))
        grant = pair.grants.get(slab)
        generation = grant.generation if grant else 0
        ready = SlabReady(pair.pair, slab, generation, payload_bytes, room.total_tokens, pair.digests.get(slab, b""))
        self._send(pair.peer, ready)

    def _repeat(self, key: RoomKey, name: PairName, now_ns: int) -> None:
        room = self.rooms.get(key)
        pair = room.pairs.get(name) if room is not None else None
        if room is None or pair is None:
            return
        if room.failed:
            if pair.state is not SourcePairState.TELLING:
                return
            self._send(pair.peer, Abort(pair.pair, room.reason, room.text))
        elif pair.done:
            return
        else:
            self._send_demand(room, pair)
            for slab, state in enumerate(pair.states):
                if state is SourceSlab.WRITTEN:
                    self._send_ready(room, pair, slab)
        self.counters["retries"] += 1
        pair.attempts += 1
        self._repeat_later(key, name, pair.attempts, now_ns)

    def _finish(self, room: SourceRoom, now_ns: int) -> None:
        """End a room whose slabs are all acknowledged."""
        if room.state is not SourceRoomState.OFFERED or not room.done:
            return
        self._effect(room.ended())
        self._effect(RoomReleased(Half.SOURCE, room.key))
        self._remember(room.key, Reason.NONE, "", now_ns, claimer=room.claimer)
        self._drop(room)

    def _fail(self, room: SourceRoom, reason: Reason, text: str, now_ns: int, shown: bytes | None = None) -> None:
        """Fail a room and abort it at its targets.

        Args:
            shown: the capability of the target that ends it; None: this side does.
        """
        if room.failed:
            return
        assert reason is not Reason.NONE, "a failed room needs a reason"
        room.step(SourceRoomEvent.FAIL)
        room.reason, room.text = reason, text
        self._effect(room.ended())
        self._remember(room.key, reason, text, now_ns, None if room.is_offered else shown)
        for name, pair in room.pairs.items():
            pair.abort()
            if pair.state is SourcePairState.OPEN:
                pair.step(SourcePairEvent.GIVE_UP)
                pair.attempts = 0
                self._send(pair.peer, Abort(pair.pair, reason, text))
                self._deadlines.repeats.set((room.key, name), now_ns + self.config.retry_ns)
        self._settle(room)

    def _settle(self, room: SourceRoom) -> None:
        """Release the pages and confirm to targets once no lane holds a slab; then drop the room."""
        if not room.failed or self.rooms.get(room.key) is not room:
            return
        for pair in room.pairs.values():
            if pair.state is SourcePairState.DRAINING and not pair.busy_count:
                pair.step(SourcePairEvent.QUIET)
                self._send(pair.peer, EndAck(pair.pair, pair.serial))
        if room.busy:
            return
        if room.state is SourceRoomState.FAILED:
            room.step(SourceRoomEvent.RELEASE)
            self._effect(RoomReleased(Half.SOURCE, room.key))
        if not any(pair.state is SourcePairState.TELLING for pair in room.pairs.values()):
            self._drop(room)

    def _drop(self, room: SourceRoom) -> None:
        room.step(SourceRoomEvent.END)
        self.table.drop(room)
        for name in room.pairs:
            self._deadlines.repeats.clear((room.key, name))
            link = self.peers.get(name[0])
            if link is not None:
                link.rooms.pop(room.key, None)


def _lasting(reason: Reason) -> Reason:
    """Return the reason of a room that its target aborts. BUSY would make the engine retry, which is useless then."""
    return Reason.CANCELLED if reason is Reason.BUSY else reason or Reason.MALFORMED_MESSAGE


def _fits(grant: Grant, pair: SourcePair, attach: Attach | None) -> bool:
    """Whether a grant names a slab of the pair and memory in the target's ring."""
    if attach is None or attach.ring is None or not 0 <= grant.slab < len(pair.states):
        return False
    return 0 <= grant.offset_bytes <= grant.offset_bytes + grant.length_bytes <= attach.ring.length_bytes
