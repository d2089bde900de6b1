"""Manages a decode rank's source workers: dials and attaches them, checks heartbeats, finds dead ones and new lives.

Base of `target_session`, which adds the rooms. The mirror of `source_peers`. Quarantined memory is freed only when its
source confirms, or when `_writer_dead` has proof that the life of the source that may write it has ended.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from longshore_wire.addresses import main_address
from longshore_wire.effects import (
    Dial,
    DrainWriter,
    HangUp,
    PeerAttached,
    PeerGone,
    PeerId,
    ProbeLiveness,
    SessionConfig,
)
from longshore_wire.engine_messages import PAGES_PER_MESSAGE_MAX, Endpoint, Half
from longshore_wire.errors import Reason
from longshore_wire.peer_messages import Abort, Attach, Claim, Complete, PairKey, Ping, Pong, Refuse, RoomKey, WireFound
from longshore_wire.peers import Ended, Life, Outcome, Peer, PeerState, Writer
from longshore_wire.room import TargetPair, TargetRoom
from longshore_wire.session import Session
from longshore_wire.states import TargetPairEvent, TargetPairState
from longshore_wire.ways import Way, chosen_way

# Within this time a dead worker is restarted, even on a busy host, and its engine offers open rooms again.
_RESTART_NS = 60_000_000_000
# A source finds its wire within 5 s (`Transport.probe_wire`) or reports Unknown. Its message may get lost.
WIRE_WAIT_NS = 6_000_000_000

_LIVES_KEPT_MAX = 1024


class TargetPeers(Session):
    """A session that dials sources. The subclass manages `rooms`."""

    half = Half.TARGET
    rooms: dict[RoomKey, TargetRoom]

    def __init__(self, config: SessionConfig, *, now_ns: int) -> None:
        super().__init__(config, now_ns=now_ns)
        # Numbers Attaches and Pings over all peers and lives, so that late answers are recognised.
        self._asked_count = config.epoch
        self.in_place_count = 0  # pairs whose bytes may land outside the ring
        self._claim_counts: Counter[PeerId] = Counter()
        self._lives: dict[tuple[Life, ...], tuple[Life, ...]] = {}

    # -- losing a peer -----------------------------------------------------------------------------------------------

    def refuse(self, peer: PeerId, reason: Reason, text: str, now_ns: int) -> None:
        """Fail the rooms of a source that must not write here."""
        known = self.peers.get(peer)
        if known is not None:
            self._lose(known, PeerState.REFUSED, reason, text, now_ns)

    def peer_lost(self, peer: PeerId, text: str, now_ns: int) -> None:
        """Fail the rooms of a silent or lost source; memory that it may still write stays quarantined."""
        known = self.peers.get(peer)
        if known is not None and known.state is not PeerState.LOST:
            self._lose(known, PeerState.LOST, Reason.PEER_LOST, text, now_ns)

    def peer_dead(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """Handle the end of a source's life: its address refuses connections, so its writes have ended, too."""
        known = self.peers.get(peer)
        if known is None:
            return
        is_current = known.epoch == epoch and known.state in (PeerState.ATTACHED, PeerState.DIALING)
        # A life that never attached has epoch 0. It may be starting, unless a room names another address.
        if is_current and (epoch or known.rival_since_ns is not None):
            self.peer_lost(peer, f"{self._name(peer)} at {known.address} has ended", now_ns)
        self._drain(known, epoch)

    def writer_drained(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """The answer to DrainWriter: no byte of that life will land any more."""
        if (known := self.peers.get(peer)) is not None:
            self._writer_dead(known, epoch, now_ns)

    def peer_listens(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """Note that the process of that life exists."""
        super().peer_listens(peer, epoch, now_ns)
        known = self.peers.get(peer)
        if known is not None and epoch in known.writers:
            known.writers[epoch].listens_ns = now_ns

    def peer_revoked(self, peer: PeerId, now_ns: int) -> None:
        """The transport has revoked a lost source's access to our memory, whether or not the source lives."""
        known = self.peers.get(peer)
        if known is not None and known.state is PeerState.LOST:
            for epoch in list(known.writers):
                self._writer_dead(known, epoch, now_ns, revoked=True)

    def _drain(self, known: Peer, epoch: int) -> None:
        """Request a drain of an ended life's bytes, if it may have written our memory."""
        if epoch in known.writers:
            self._effect(DrainWriter(known.peer, epoch, known.writers[epoch].address))

    def _writer_dead(self, known: Peer, epoch: int, now_ns: int, *, revoked: bool = False) -> None:
        """Free the memory that one life of a source may have written. The only place that treats a writer as dead.

        The caller has one of three proofs. The life's address refuses connections (`peer_dead`). Or another life or worker is
        attached there, since only one process can own an address (`_on_attach`). Both count once all data of the life has been
        read. Or the transport has revoked its access (`revoked`), which does not cover pages that a worker of this node has
        mapped. A newer epoch at another address is no proof, since two engines may have the same name.
        """
        for room, pair in self._rooms_of(known):
            is_writer = pair.state is TargetPairState.ABORTING and pair.pair.source_epoch == epoch
            if is_writer and not (revoked and pair.way is Way.DIRECT):
                self._confirm(room, pair)
        self._pump(now_ns)

    def _lose(self, known: Peer, state: PeerState, reason: Reason, text: str, now_ns: int) -> None:
        """Fail the rooms of a source that is LOST or REFUSED now, then dial another address that waiting rooms name.

        The source may still complete open writes, so their memory is not freed here.
        """
        if known.attach is not None:
            self._effect(PeerGone(known.peer, known.epoch))
        known.state, known.attach, known.trouble = state, None, text
        for room, pair in self._rooms_of(known):
            if not self._is_elsewhere(known, pair):
                self._give_up(room, pair, reason, text, now_ns)
        known.rival_since_ns = None
        if rivals := self._rivals_of(known):
            self._dial_at(known, rivals[0][1].address, now_ns)
        self._pump(now_ns)

    # -- attaching -----------------------------------------------------------------------------------------------------

    def _on_attach(self, known: Peer, attach: Attach, now_ns: int) -> bool:
        """Handle a source's Attach; return whether it is attached now."""
        again = attach.attempt == known.answered and attach.epoch == known.epoch
        answers = known.answered < attach.attempt <= known.attempt or again
        is_here = main_address(attach.address) == main_address(known.address)
        if not answers or not is_here or attach.epoch < known.epoch:
            # A late message, or one of a life that this side has left.
            self._stale(attach)
            return False
        known.answered = attach.attempt
        for epoch, writer in list(known.writers.items()):
            if epoch != attach.epoch and main_address(writer.address) == main_address(attach.address):
                self._drain(known, epoch)
        wrong = self._check_attach(attach) or self._check_name(known.peer, attach)
        if wrong is not None:
            self._lose(known, PeerState.REFUSED, *wrong, now_ns)
            return False
        if known.attach is not None and known.epoch != attach.epoch:
            last_epoch = known.epoch
            self.peer_lost(known.peer, f"{self._name(known.peer)} was restarted", now_ns)
            self._drain(known, last_epoch)
        if known.attach is None:
            known.wire_due_ns = now_ns + WIRE_WAIT_NS
            known.absent_ns, known.beat_number = -1, self._asked_count
        if known.attach is None or attach.generation > known.attach.generation:
            known.attach = attach
            self._effect(PeerAttached(known.peer, attach))
        known.state, known.heard_ns = PeerState.ATTACHED, now_ns
        self._deadlines.peers.set(known.peer, self._next_beat_ns(now_ns))
        self._queue_outcomes(known, now_ns)
        for room, pair in self._rooms_of(known):
            if pair.state in (TargetPairState.WAITING, TargetPairState.CLAIMED) and not room.failed:
                self._send_claim(room, pair, now_ns)
        for key in list(known.outcomes):
            self._send_outcome(known, key, now_ns)
        return True

    def _check_name(self, peer: PeerId, attach: Attach) -> tuple[Reason, str] | None:
        """Return why the answering worker is not the dialled one, or None. Another worker may get a port that became free."""
        found = PeerId.of(attach)
        if found == peer:
            return None
        text = f"{self._name(found)} listens at {attach.address}, and {self._name(peer)} was dialled there"
        return Reason.UNKNOWN_INSTANCE, text

    def _on_refuse(self, known: Peer, refuse: Refuse, now_ns: int) -> None:
        if refuse.epoch != self.config.epoch or not known.answered < refuse.attempt <= known.attempt:
            self._stale(refuse)
            return
        known.answered = refuse.attempt
        waits = known.state is PeerState.DIALING and now_ns - known.dialled_ns < self.config.peer_timeout_ns
        if refuse.reason is Reason.STALE_EPOCH and (waits or known.state is PeerState.LOST):
            # The source first probes our other life or namesake, so ask again. LOST makes the next Attach send it outcomes.
            known.heard_ns = now_ns
            return
        self._lose(known, PeerState.REFUSED, refuse.reason or Reason.MALFORMED_MESSAGE, refuse.text, now_ns)

    def _on_pong(self, known: Peer, pong: Pong, now_ns: int) -> None:
        newest = known.beat_number < pong.ping_number <= self._asked_count
        if known.attach is None or pong.ping_epoch != self.config.epoch or not newest:
            self._stale(pong)
        elif pong.epoch == known.epoch:
            known.beat(pong.ping_number, pong.absent_ns, self.config.lease_ns, now_ns)
        else:
            self.peer_lost(known.peer, f"{self._name(known.peer)} was restarted", now_ns)

    def _dial(self, peer: PeerId, endpoint: Endpoint, key: RoomKey, now_ns: int) -> None:
        """Add a room to its source's, and dial that at the address that the engine gave, unless that is done."""
        named = next(entry for entry in endpoint.ranks if entry.rank == peer.rank)
        known = self.peers.get(peer)
        if known is None:
            known = self.peers[peer] = Peer(peer, answered=self._asked_count)
        is_here = main_address(known.address) == main_address(named.address)
        if known.attach is not None and is_here and known.epoch < named.epoch:
            # Only one process can own this address, so the attached life has ended. The new one's Attach is the proof.
            self.peer_lost(peer, f"{self._name(peer)} was restarted", now_ns)
        # If the source is lost from here on, the room's address is dialled.
        known.rooms[key] = None
        if known.state in (PeerState.LOST, PeerState.REFUSED) or not known.address:
            self._dial_at(known, named.address, now_ns)
        elif not is_here and known.rival_since_ns is None:
            # Two addresses for one name: probe the dialled one before the other is dialled.
            known.rival_since_ns = now_ns
            self._beat(peer, now_ns)

    def _dial_at(self, known: Peer, address: str, now_ns: int) -> None:
        known.address, known.state, known.attach = address, PeerState.DIALING, None
        known.heard_ns = known.dialled_ns = now_ns
        known.listens_ns, known.rival_since_ns = -1, now_ns if self._rivals_of(known) else None
        self._effect(Dial(known.peer, address))
        self._send_attach(known)
        self._deadlines.peers.set(known.peer, now_ns + self.config.retry_ns)

    def _refuse_rivals(self, known: Peer, now_ns: int) -> None:
        """Fail rooms that name another address, since the attached life is alive."""
        known.rival_since_ns = None
        for room, pair in self._rivals_of(known):
            text = (
                f"{self._name(known.peer)} answers at {main_address(known.address)}, and this room names "
                f"{main_address(pair.address)}: two engines have one instance name (give each its own), or the room's "
                "endpoint is out of date"
            )
            self._give_up(room, pair, Reason.STALE_EPOCH, text, now_ns)

    # -- keeping alive -------------------------------------------------------------------------------------------------

    def _beat(self, peer: PeerId, now_ns: int) -> None:
        """Send a heartbeat, or redial a dead connection."""
        known = self.peers.get(peer)
        if known is None:
            return
        gone = known.state in (PeerState.REFUSED, PeerState.LOST)
        is_awaited = known.state is PeerState.LOST and now_ns < known.outcomes_until_ns
        if gone and not known.rooms and not is_awaited:
            del self.peers[peer]
            self._effect(HangUp(peer))
            return
        if not gone and self._check_silence(known, f"{self._name(peer)} at {known.address}", now_ns):
            known = self.peers[peer]
        self._judge_rival(known, now_ns)
        for epoch, writer in known.writers.items():
            if epoch != known.epoch:
                self._effect(ProbeLiveness(peer, epoch, writer.address))
        if known.state is PeerState.LOST and now_ns - known.dialled_ns >= self.config.peer_timeout_ns:
            # The connection may have died without an error on our side.
            known.dialled_ns = now_ns
            known.address = known.address_of_writer(now_ns - 2 * self.config.heartbeat_ns) or known.address
            self._effect(Dial(peer, known.address, admits=False))
        if known.state is PeerState.ATTACHED:
            self._asked_count += 1
            self._send(peer, Ping(self.config.epoch, self._asked_count, self._deadlines.absent_ns))
        else:
            self._send_attach(known)
        self._deadlines.peers.set(peer, self._next_beat_ns(now_ns))

    def _judge_rival(self, known: Peer, now_ns: int) -> None:
        """Decide between two addresses of one name: is the life at the dialled one alive?"""
        if known.rival_since_ns is None or known.state not in (PeerState.ATTACHED, PeerState.DIALING):
            return
        answers = known.attach is not None and known.heard_ns > known.rival_since_ns
        if answers and now_ns - known.rival_since_ns >= self.config.peer_timeout_ns:
            self._refuse_rivals(known, now_ns)
        else:
            self._effect(ProbeLiveness(known.peer, known.epoch, known.address))

    def _next_beat_ns(self, now_ns: int) -> int:
        """Return the next time to ping all peers. They share one time, so that an idle worker wakes up once."""
        return (now_ns // self.config.heartbeat_ns + 1) * self.config.heartbeat_ns

    def _send_attach(self, known: Peer) -> None:
        self._asked_count += 1
        known.attempt = self._asked_count
        self._send(known.peer, self._attach(known.attempt))

    # -- how rooms ended -----------------------------------------------------------------------------------------------

    def _remember_room(self, room: TargetRoom, reason: Reason, text: str, now_ns: int) -> None:
        """Record how a room ended and its sources' lives, so that later lives can be informed."""
        until_ns = self._remembered_until_ns(now_ns) + _RESTART_NS
        lives = []
        for pair in room.pairs.values():
            known = self.peers[pair.peer]
            known.outcomes_until_ns = max(known.outcomes_until_ns, until_ns)
            if self._concerns(known, pair):
                lives.append(Life(pair.peer, pair.pair.source_epoch, pair.engine))
        # Most rooms have the same lives, so they share one tuple.
        if len(self._lives) > _LIVES_KEPT_MAX:
            self._lives.clear()
        shared = self._lives.setdefault(tuple(lives), tuple(lives))
        self._remember(room.key, reason, text, until_ns, shared)

    def _queue_outcomes(self, known: Peer, now_ns: int) -> None:
        """Queue the outcomes of earlier lives' rooms for a source that has attached, once for each life."""
        attach = known.attach
        assert attach is not None
        for room, pair in self._rooms_of(known):
            # This life must confirm these itself, even if another life of its name was informed meanwhile.
            is_writer = pair.state is TargetPairState.ABORTING and pair.pair.source_epoch == attach.epoch
            if is_writer and room.key not in known.outcomes:
                ended = Ended(room.reason, room.text, self._remembered_until_ns(now_ns))
                self._note_outcome(known, room.key, ended, pair.serial)
        if known.queued_epoch == attach.epoch:
            return
        known.queued_epoch = attach.epoch
        for key, ended in self.ended.items():
            for life in ended.lives:
                # Another engine of the same name never had the room.
                if life.peer == known.peer and life.epoch != attach.epoch and life.engine in (0, attach.engine):
                    self._note_outcome(known, key, ended)
        done = Ended(Reason.NONE, "", self._remembered_until_ns(now_ns))
        for room, pair in self._rooms_of(known):
            if pair.state is TargetPairState.COMPLETE and pair.pair.source_epoch != attach.epoch and not room.failed:
                self._note_outcome(known, room.key, done)

    def _queue_outcome(self, pair: TargetPair, key: RoomKey, ended: Ended, now_ns: int) -> None:
        """Queue the outcome of an ended room for a pair's source, unless the room was for another worker of its name."""
        known = self.peers[pair.peer]
        if self._concerns(known, pair):
            self._note_outcome(known, key, ended, pair.serial)
            self._send_outcome(known, key, now_ns)

    def _note_outcome(self, known: Peer, key: RoomKey, ended: Ended, serial: int = 0) -> None:
        known.outcomes[key] = Outcome(ended, serial)

    def _send_outcome(self, known: Peer, key: RoomKey, now_ns: int) -> None:
        """Send a pair's outcome to its source and repeat until it answers; wait if it is not attached."""
        outcome = known.outcomes.get(key)
        if outcome is None or known.state is not PeerState.ATTACHED:
            return
        ended = outcome.ended
        if ended.until_ns <= now_ns:
            del known.outcomes[key]
            return
        pair = self._pair_key(key, known.peer, known.epoch)
        if ended.reason is Reason.NONE:
            self._send(known.peer, Complete(pair))
        else:
            self._send(known.peer, Abort(pair, ended.reason, ended.text, outcome.serial))
        self._repeat_later(key, known.peer, outcome.attempts, now_ns)
        self.counters["retries"] += outcome.attempts > 0
        outcome.attempts += 1

    # -- claims --------------------------------------------------------------------------------------------------------

    def _choose_way(self, room: TargetRoom, pair: TargetPair, known: Peer, now_ns: int) -> bool:
        """Have the final way of a pair chosen; return False while the wire, on which it depends, is unknown."""
        assert known.attach is not None
        assert pair.open is not None
        config = self.config
        needs_wire = self._probe is not None and config.crossover.needs_wire(config.backend)
        if needs_wire and not known.has_wire and self._awaits_wire(room.key, known, now_ns):
            return False
        choice = chosen_way(
            pair.open,
            config.crossover,
            (config.backend, known.found_wire),
            in_place=known.attach.in_place,
            lane_bytes=known.attach.slab_bytes_max,
            ring_bytes=config.ring_bytes,
        )
        self.in_place_count -= pair.expects_bytes
        pair.way, pair.why, pair.open = choice.way, choice.why, None
        self.in_place_count += pair.expects_bytes
        return True

    def _send_claim(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        known = self.peers[pair.peer]
        if known.attach is None or not self._is_here(known, pair):
            return
        first_time = pair.state is TargetPairState.WAITING
        if first_time and not self._wire_allows(room, pair, now_ns):
            return
        if pair.open is not None and not self._choose_way(room, pair, known, now_ns):
            return
        if first_time:
            if pair.route is not None:
                known.claimed(room.key, pair.way)
                self.counters[f"claims.{pair.way.label}.{pair.why.label}"] += 1
            pair.pair = msgspec.structs.replace(pair.pair, source_epoch=known.epoch)
            pair.engine = known.attach.engine
            self._claim_counts[pair.peer] += 1
            pair.serial = self._claim_counts[pair.peer]
        pair.step(TargetPairEvent.CLAIM)
        first = room.end_token if pair.route is None else room.first_token
        digest_key = self.config.digest_key if room.digest else b""
        count = room.page_count if pair.way is not Way.STAGED and first < room.end_token else 0
        for offset in range(0, max(count, 1), PAGES_PER_MESSAGE_MAX):
            pages = room.pages[4 * offset : 4 * (offset + PAGES_PER_MESSAGE_MAX)] if count else b""
            self._send(
                pair.peer,
                Claim(
                    pair.pair, first, room.end_token, pair.way, offset, count, pages, pair.why, pair.serial, digest_key
                ),
            )
        self._repeat_later(room.key, pair.peer, pair.attempts, now_ns)

    def _awaits_wire(self, room: RoomKey, known: Peer, now_ns: int) -> bool:
        if now_ns >= known.wire_due_ns:
            return False
        self._deadlines.repeats.set((room, known.peer), known.wire_due_ns)
        return True

    def _on_wire_found(self, known: Peer, found: WireFound, now_ns: int) -> None:
        if (found.source_epoch, found.target_epoch) != (known.epoch, self.config.epoch):
            self._stale(found)
            return
        known.heard_ns = now_ns
        known.wire, known.wire_epoch = found.wire, found.source_epoch
        for room, pair in self._rooms_of(known):
            if pair.state is TargetPairState.WAITING:
                self._send_claim(room, pair, now_ns)

    # -- rooms ---------------------------------------------------------------------------------------------------------

    def _pair_key(self, room: RoomKey, source: PeerId, source_epoch: int) -> PairKey:
        """Return the key of this rank and life, and one life of a source, in a room."""
        us = self.identity
        return PairKey(room, source.rank, us.rank, source_epoch, self.config.epoch, us.instance, us.dp_rank, us.memory)

    def _rooms_of(self, known: Peer) -> list[tuple[TargetRoom, TargetPair]]:
        """Return a peer's open rooms with its pairs in them, in the order in which they were opened."""
        return [(room, room.pairs[known.peer]) for key in known.rooms if (room := self.rooms.get(key)) is not None]

    @staticmethod
    def _is_here(known: Peer, pair: TargetPair) -> bool:
        """Whether a pair's room names the address at which its source is dialled."""
        return main_address(pair.address) == main_address(known.address)

    def _is_elsewhere(self, known: Peer, pair: TargetPair) -> bool:
        """Whether a pair waits for a life at another address than the dialled one."""
        return pair.state is TargetPairState.WAITING and not self._is_here(known, pair)

    def _rivals_of(self, known: Peer) -> list[tuple[TargetRoom, TargetPair]]:
        """Return a peer's rooms that wait for a life at another address than the dialled one."""
        return [(room, pair) for room, pair in self._rooms_of(known) if self._is_elsewhere(known, pair)]

    def _concerns(self, known: Peer, pair: TargetPair) -> bool:
        """Whether a pair was claimed, or would be at the address that is dialled now."""
        return bool(pair.pair.source_epoch) or self._is_here(known, pair)

    def _abort_pair(self, pair: TargetPair) -> None:
        """Abort the pair of a failed room; quarantine the memory that its writer may write."""
        if not pair.exposed:
            pair.step(TargetPairEvent.CLOSE)
            return
        pair.step(TargetPairEvent.ABORT)
        writers = self.peers[pair.peer].writers
        writers.setdefault(pair.pair.source_epoch, Writer(pair.address)).pair_count += 1

    def _confirm_pair(self, pair: TargetPair) -> None:
        """Note that the pair's writer will not write any more."""
        pair.step(TargetPairEvent.CONFIRM)
        writers = self.peers[pair.peer].writers
        writer = writers[pair.pair.source_epoch]
        writer.pair_count -= 1
        if not writer.pair_count:
            del writers[pair.pair.source_epoch]

    def _give_up(self, room: TargetRoom, pair: TargetPair, reason: Reason, text: str, now_ns: int) -> None:
        raise NotImplementedError

    def _confirm(self, room: TargetRoom, pair: TargetPair) -> None:
        raise NotImplementedError

    def _pump(self, now_ns: int) -> None:
        raise NotImplementedError
