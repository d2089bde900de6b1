"""Manages a prefill rank's target workers: attaches them, finds dead ones, refuses two with one name, and ends their rooms
with an earlier life of this rank.

Base of `source_session`, which adds the rooms. The mirror of `target_peers`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from longshore_wire.claims import PageParts, route
from longshore_wire.effects import PeerAttached, PeerGone, PeerId, ProbeLiveness, SessionConfig
from longshore_wire.engine_messages import Half
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.peer_messages import (
    Abort,
    Attach,
    Complete,
    EndAck,
    PairKey,
    Ping,
    Pong,
    Refuse,
    RoomKey,
    WireFound,
)
from longshore_wire.peers import Peer, PeerState, UsedSerials
from longshore_wire.room import SourcePair, SourceRoom
from longshore_wire.session import PROBE_AFTER, Session
from longshore_wire.slabs import SlabGrid
from longshore_wire.states import SourcePairEvent
from longshore_wire.ways import Way

# Targets whose used claims are kept: more than the decode ranks of any prefill rank.
TARGETS_MAX = 4096


class Completed(NamedTuple):
    """A target's Complete: it has all of a pair that it had claimed from an earlier life of this worker."""

    pair: PairKey
    expected: frozenset[int]  # target ranks that must claim from this source
    until_ns: int


class SourcePeers(Session):
    """A session to which targets connect. The subclass manages `rooms`."""

    half = Half.SOURCE
    rooms: dict[RoomKey, SourceRoom]

    def __init__(self, config: SessionConfig, *, now_ns: int) -> None:
        super().__init__(config, now_ns=now_ns)
        # Pairs that are complete at their targets, in rooms that our engine has not yet offered to this life.
        self._completed: OrderedDict[RoomKey, dict[PeerId, Completed]] = OrderedDict()
        self._parts: PageParts[tuple[RoomKey, PeerId]] = PageParts()
        # By target. Kept while a target is lost, since it may attach again in the same life.
        self._serials: OrderedDict[PeerId, UsedSerials] = OrderedDict()

    def refuse(self, peer: PeerId, reason: Reason, text: str, now_ns: int) -> None:
        """Fail the rooms of a target that this side must not write to."""
        known = self.peers.get(peer)
        for key in list(known.rooms) if known is not None else []:
            self.cancel(key, reason, text, now_ns)

    def peer_lost(self, peer: PeerId, text: str, now_ns: int) -> None:
        """Fail every room that the lost target has claimed."""
        known = self.peers.get(peer)
        if known is None:
            return
        self._parts.forget(lambda name: name[1] == peer)
        for key in list(known.rooms):
            room = self.rooms.get(key)
            if room is None:
                continue
            self._fail(room, Reason.PEER_LOST, text, now_ns)
            pair = room.pairs.get(peer)
            if pair is not None:
                pair.step(SourcePairEvent.LOSE)
            self._settle(room)
        self._effect(PeerGone(peer, known.epoch))
        del self.peers[peer]

    def peer_dead(self, peer: PeerId, epoch: int, now_ns: int) -> None:
        """Handle the end of a target's life: its address refuses connections."""
        known = self.peers.get(peer)
        if known is not None and known.epoch == epoch:
            self.peer_lost(peer, f"{self._name(peer)} at {known.address} has ended", now_ns)

    def _on_attach(self, peer: PeerId, attach: Attach, now_ns: int) -> None:
        wrong = self._check_attach(attach)
        known = self.peers.get(peer)
        if wrong is None and known is not None and attach.epoch < known.epoch:
            # Clocks of two nodes may differ, so a probe asks whether the attached one lives.
            self._effect(ProbeLiveness(peer, known.epoch, known.address))
            wrong = (
                Reason.STALE_EPOCH,
                (
                    f"a newer worker is attached as {self._name(peer)} (DP rank {peer.dp_rank}): two engines "
                    "have one instance name; give each its own"
                ),
            )
        if wrong is not None:
            self._send(peer, Refuse(*wrong, attach.epoch, attach.attempt))
            return
        if known is not None and known.epoch != attach.epoch:
            self.peer_lost(peer, f"{self._name(peer)} was restarted", now_ns)
            known = None
        if known is None:
            known = self.peers[peer] = Peer(peer)
        if known.attach is None or attach.generation > known.attach.generation:
            known.attach, known.address = attach, attach.address
            self._effect(PeerAttached(peer, attach))
        known.state, known.heard_ns = PeerState.ATTACHED, now_ns
        known.attempt = max(known.attempt, attach.attempt)
        self._deadlines.peers.set(peer, now_ns + PROBE_AFTER * self.config.heartbeat_ns)
        self._send_attach(known)

    def wire_found(self, peer: PeerId, epoch: int, wire: str, failure: str, now_ns: int) -> None:
        """Take the result of a probe of a peer's life: report the wire to the peer, and continue its slabs.

        Args:
            failure: why the probe could not; empty: it could.
        """
        known = self.peers.get(peer)
        if known is None or known.epoch != epoch:
            return
        known.wire, known.wire_epoch, known.wire_failure = wire, epoch, failure
        self._send(peer, WireFound(self.config.epoch, epoch, wire))
        for key in list(known.rooms):
            room = self.rooms[key]
            self._advance(room, room.pairs[peer], now_ns)

    def _awaits_wire(self, room: RoomKey, known: Peer, now_ns: int) -> bool:  # noqa: ARG002 - a target uses all
        if known.attach is not None and known.attach.probe is not None:
            return True
        known.wire_epoch, known.wire_failure = known.epoch, "it has no memory for a probe"
        return False

    def _used_serials(self, known: Peer) -> UsedSerials:
        """Return the used claims of a target's current life."""
        used = self._serials.get(known.peer)
        if used is None or used.epoch != known.epoch:
            used = self._serials[known.peer] = UsedSerials(known.epoch)
        self._serials.move_to_end(known.peer)
        while len(self._serials) > TARGETS_MAX:
            self._serials.popitem(last=False)
        return used

    def _speaks_for(self, known: Peer, pair: PairKey) -> bool:
        """Whether a pair belongs to this rank and to the current life of that target."""
        peer = known.peer
        theirs = (pair.target_instance, pair.dp_rank, pair.target_rank, pair.memory, pair.target_epoch)
        return theirs == (*peer, known.epoch) and pair.source_rank == self.rank

    def _on_ping(self, peer: PeerId, ping: Ping, now_ns: int) -> None:
        known = self.peers.get(peer)
        epoch = 0
        if known is not None and known.epoch == ping.epoch:
            if ping.number <= known.beat_number:
                self._stale(ping)
                return
            known.beat(ping.number, ping.absent_ns, self.config.lease_ns, now_ns)
            epoch = self.config.epoch
        # Epoch 0 makes an unknown target attach again.
        self._send(peer, Pong(epoch, ping.epoch, ping.number, self._deadlines.absent_ns))

    def _on_complete(self, known: Peer, message: Complete, now_ns: int) -> None:
        """Handle a target's Complete: it has all of a pair with our last life, which lacked acknowledgements."""
        key, peer = message.pair.key, known.peer
        self._send(peer, EndAck(message.pair))
        if key in self.ended or key.instance != self.config.instance:
            return
        assert known.attach is not None
        try:
            planned = self._plan(self.config.layout, known.attach.layout, key.room)
            expected = route(planned, self.rank, peer.rank).expected
        except LongshoreError:
            self._stale(message)
            return
        completed = Completed(message.pair, expected, self._remembered_until_ns(now_ns))
        room = self.rooms.get(key)
        if room is None:
            # An engine offers all of its open rooms to a new life. Rooms that have ended for it are not offered.
            self._completed.setdefault(key, {})[peer] = completed
            self._completed.move_to_end(key)
            while len(self._completed) > self.config.ended_rooms_max:
                self._completed.popitem(last=False)
        elif not room.failed:
            self._open_complete(room, peer, completed)
            self._progress(room, now_ns)
            self._finish(room, now_ns)

    def _open_complete(self, room: SourceRoom, peer: PeerId, completed: Completed) -> None:
        """Add a pair with nothing left to send to the room."""
        known = self.peers.get(peer)
        if peer in room.pairs or room.claimer not in (None, peer.replica):
            return
        pair = room.pairs[peer] = SourcePair(completed.pair, peer, None, Way.STAGED, SlabGrid(0, 0, 1), [])
        room.expected, room.claimer = completed.expected, peer.replica
        if known is not None and known.epoch == completed.pair.target_epoch:
            known.claimed(room.key, None)
        else:
            pair.step(SourcePairEvent.LOSE)

    def _add_completed(self, room: SourceRoom) -> None:
        """Add to an offered room the pairs that targets have already completed."""
        for peer, completed in self._completed.pop(room.key, {}).items():
            self._open_complete(room, peer, completed)

    def next_due_ns(self) -> int | None:
        """Return when `tick` must be called at the latest, or None."""
        dues = [super().next_due_ns()]
        if self._completed:
            dues.append(max(each.until_ns for each in next(iter(self._completed.values())).values()))
        return min((due for due in dues if due is not None), default=None)

    def tick(self, now_ns: int) -> None:
        """As `Session.tick`; forget old completed pairs, too."""
        super().tick(now_ns)
        while (
            self._completed and max(each.until_ns for each in next(iter(self._completed.values())).values()) <= now_ns
        ):
            self._completed.popitem(last=False)

    def _give_up_unclaimed(self, peer: PeerId, abort: Abort, now_ns: int) -> None:
        """Fail a room that failed at its target before its claim arrived here, or after a claim to our last life.

        Our engine may offer the room later or has offered it, but no target will claim it.
        """
        key = abort.pair.key
        # BUSY would make the engine retry, which is useless for an ended room.
        reason = Reason.CANCELLED if abort.reason is Reason.BUSY else abort.reason or Reason.MALFORMED_MESSAGE
        room = self.rooms.get(key)
        if room is not None and room.claimer in (None, peer.replica):
            self._fail(room, reason, abort.text, now_ns)
        elif room is None and key not in self.ended and key.instance == self.config.instance:
            self._completed.pop(key, None)
            self._remember(key, reason, abort.text, self._remembered_until_ns(now_ns))

    def _beat(self, peer: PeerId, now_ns: int) -> None:
        """Check a target for silence, since it sends the heartbeats."""
        known = self.peers.get(peer)
        if known is None or self._check_silence(known, self._name(peer), now_ns):
            return
        due_ns = known.heard_ns + PROBE_AFTER * self.config.heartbeat_ns
        self._deadlines.peers.set(peer, due_ns if due_ns > now_ns else now_ns + self.config.heartbeat_ns)

    def _send_attach(self, known: Peer) -> None:
        self._send(known.peer, self._attach(known.attempt))

    def _advance(self, room: SourceRoom, pair: SourcePair, now_ns: int) -> None:
        raise NotImplementedError

    def _fail(self, room: SourceRoom, reason: Reason, text: str, now_ns: int) -> None:
        raise NotImplementedError

    def _finish(self, room: SourceRoom, now_ns: int) -> None:
        raise NotImplementedError

    def _settle(self, room: SourceRoom) -> None:
        raise NotImplementedError
