"""The source workers that a decode rank has dialled: attaching, keeping alive, finding dead, coming back.

Base of `target_session`, which adds the rooms. See `session`.
"""

from __future__ import annotations

import msgspec

from longshore_wire.allowed_wires import AllowedWires
from longshore_wire.effects import Dial, HangUp, Knock, PeerAttached, PeerGone, PeerId
from longshore_wire.engine_messages import Endpoint
from longshore_wire.errors import Reason
from longshore_wire.names import UNKNOWN_WIRE
from longshore_wire.peer_messages import Abort, Attach, Ping, Refuse, RoomKey
from longshore_wire.plan import Way
from longshore_wire.room import TargetPair, TargetRoom
from longshore_wire.session import Peer, PeerState, Session

# A source that has left so many pings unanswered may be dead: its host is asked.
_KNOCK_AFTER = 2
# A source finds its wire out within 5 s (`Transport.probe_wire`) or says Unknown; its word may get lost.
WIRE_WAIT_NS = 6_000_000_000


class TargetPeers(Session):
    """A session that dials. `rooms` and what becomes of them are the subclass's."""

    rooms: dict[RoomKey, TargetRoom]

    def refuse(self, peer: PeerId, reason: Reason, text: str, now_ns: int) -> None:
        """A source turned out to be none that may write here: its rooms fail."""
        known = self.peers.get(peer)
        if known is not None:
            self._on_refuse(known, Refuse(reason, text), now_ns)

    def peer_lost(self, peer: PeerId, text: str, now_ns: int, *, dead: bool = False) -> None:
        """A source is silent or gone: its rooms fail. What it may still write stays quarantined unless it is dead."""
        known = self.peers.get(peer)
        if known is None or known.state is PeerState.LOST:
            return
        if known.attach is not None:
            self._effect(PeerGone(peer, known.epoch))
        known.state, known.attach, known.trouble = PeerState.LOST, None, text
        for key in list(known.rooms):
            room = self.rooms.get(key)
            if room is None:
                continue
            self._fail(room, Reason.PEER_LOST, text, now_ns)
            if dead:
                self._confirm(room, room.pairs[peer])
        self._pump(now_ns)

    def peer_dead(self, peer: PeerId, now_ns: int) -> None:
        """Nobody listens any more where a silent source did: its process has ended, and with it every write of it."""
        known = self.peers.get(peer)
        if known is None or known.state not in (PeerState.ATTACHED, PeerState.LOST):
            return
        self.peer_lost(peer, f"{prefill_name(peer)} at {known.address} has ended", now_ns)
        self._confirm_all(known, now_ns, revoked=False)

    def peer_revoked(self, peer: PeerId, now_ns: int) -> None:
        """A source that was lost has no access to our memory any more, whether it lives or not."""
        known = self.peers.get(peer)
        if known is not None and known.state is PeerState.LOST:
            self._confirm_all(known, now_ns, revoked=True)

    def _confirm_all(self, known: Peer, now_ns: int, *, revoked: bool) -> None:
        for key in list(known.rooms):
            room = self.rooms.get(key)
            # A worker of this node writes pages that it has mapped itself: no transport takes those from it.
            if room is not None and not (revoked and room.pairs[known.peer].way is Way.DIRECT):
                self._confirm(room, room.pairs[known.peer])
        self._pump(now_ns)

    def _on_attach(self, known: Peer, attach: Attach, now_ns: int) -> None:
        wrong = self._check_attach(attach)
        if wrong is not None:
            self._on_refuse(known, Refuse(*wrong), now_ns)
            return
        if known.attach is not None and known.epoch != attach.epoch:
            self.peer_lost(known.peer, f"{prefill_name(known.peer)} was restarted", now_ns)
        if known.attach is None:
            known.wire_due_ns = now_ns + WIRE_WAIT_NS
        if known.attach is None or attach.generation > known.attach.generation:
            known.attach = attach
            self._effect(PeerAttached(known.peer, attach))
        known.state, known.heard_ns = PeerState.ATTACHED, now_ns
        self._peer_timers.set(known.peer, self._next_beat_ns(now_ns))
        for key in list(known.rooms):
            room = self.rooms.get(key)
            if room is not None:
                self._resume(room, room.pairs[known.peer], now_ns)
        self._tell_failures(known, now_ns)

    def _resume(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        """Say to a source that has just attached what it must know of a room."""
        if not room.failed:
            if not pair.told:
                self._send_claim(room, pair, now_ns)
        elif pair.pair.source_epoch != self.peers[pair.peer].epoch:
            # The old life's process is gone, and with it every write it had begun.
            self._confirm(room, pair)
        elif not pair.confirmed:
            self._send(pair.peer, Abort(pair.pair, room.reason, room.text))
            self._timers.set((room.key, pair.peer), now_ns + self.config.retry_ns)

    def _wire_allows(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> bool:
        """Whether a pair may be claimed as far as the wire to its source goes.

        It may not yet while that is being found out, and never if it is not on the list: the room fails.
        """
        known, allowed = self.peers[pair.peer], AllowedWires(self.config.wires)
        if not allowed or pair.route is None or pair.way is Way.DIRECT:
            return True
        found = known.wire_epoch == known.epoch
        if not found and now_ns < known.wire_due_ns:
            self._timers.set((room.key, pair.peer), known.wire_due_ns)
            return False
        here = PeerId(self.config.instance, self.config.layout.parallel.dp_rank, self.rank)
        fault = allowed.fault(known.wire if found else UNKNOWN_WIRE, pair.peer, here)
        if fault:
            self._fail(room, Reason.WIRE_NOT_ALLOWED, fault, now_ns)
        return not fault

    def _tell_failures(self, known: Peer, now_ns: int) -> None:
        """Say which rooms have failed without the source's knowledge: its engine may offer them to it again."""
        for key, untold in list(known.untold.items()):
            if untold.until_ns <= now_ns:
                del known.untold[key]
            elif known.state is PeerState.ATTACHED:
                pair = msgspec.structs.replace(untold.pair, source_epoch=known.epoch)
                self._send(known.peer, Abort(pair, untold.reason, untold.text))

    def _on_refuse(self, known: Peer, refuse: Refuse, now_ns: int) -> None:
        known.state, known.trouble = PeerState.REFUSED, refuse.text
        for key in list(known.rooms):
            room = self.rooms.get(key)
            if room is None:
                continue
            self._fail(room, refuse.reason, refuse.text, now_ns)
            pair = room.pairs[known.peer]
            granted = bool(pair.regions) or pair.way is not Way.STAGED
            if refuse.reason is not Reason.STALE_EPOCH or not pair.pair.source_epoch or not granted:
                # Refused for a newer life after it was attached, a source may still write what it had begun.
                self._confirm(room, pair)
        # It hears nothing that we say.
        known.untold.clear()

    def _dial(self, peer: PeerId, endpoint: Endpoint, now_ns: int) -> Peer:
        address, epoch = next((entry.address, entry.epoch) for entry in endpoint.ranks if entry.rank == peer.rank)
        known = self.peers.get(peer)
        if known is None:
            known = self.peers[peer] = Peer(peer, heard_ns=now_ns)
        if known.state is PeerState.ATTACHED and known.epoch < epoch:
            # Epochs grow, and no life begins before the last one's process has ended: what its engine says is newer.
            self.peer_lost(peer, f"{prefill_name(peer)} was restarted", now_ns, dead=True)
        if known.address != address or known.state in (PeerState.LOST, PeerState.REFUSED):
            if known.state is PeerState.ATTACHED:
                self.peer_lost(peer, f"{prefill_name(peer)} has moved to {address}", now_ns, dead=True)
            known.address, known.state, known.attach, known.heard_ns = address, PeerState.DIALING, None, now_ns
            known.dialled_ns = now_ns
            self._effect(Dial(peer, address))
            self._send(peer, self._attach(reply=False))
            self._peer_timers.set(peer, now_ns + self.config.retry_ns)
        return known

    def _beat(self, peer: PeerId, now_ns: int) -> None:
        """Keep a connection alive, or find it dead."""
        known = self.peers.get(peer)
        if known is None:
            return
        self._tell_failures(known, now_ns)
        if known.state in (PeerState.REFUSED, PeerState.LOST) and not known.rooms and not known.untold:
            del self.peers[peer]
            self._effect(HangUp(peer))
            return
        silence_ns = now_ns - known.heard_ns
        if silence_ns >= self.config.peer_timeout_ns and known.state in (PeerState.DIALING, PeerState.ATTACHED):
            self.peer_lost(
                peer, f"{prefill_name(peer)} at {known.address} was silent for {silence_ns / 1e9:.1f} s", now_ns
            )
        if (
            known.rooms
            and known.state in (PeerState.ATTACHED, PeerState.LOST)
            and silence_ns > _KNOCK_AFTER * self.config.heartbeat_ns
        ):
            self._effect(Knock(peer, known.address))
        if known.state is PeerState.LOST and now_ns - known.dialled_ns >= self.config.peer_timeout_ns:
            # The connection may have died without a word on our side.
            known.dialled_ns = now_ns
            self._effect(Dial(peer, known.address))
        if known.state is PeerState.ATTACHED:
            self._send(peer, Ping(self.config.epoch))
        else:
            self._send(peer, self._attach(reply=False))
        self._peer_timers.set(peer, self._next_beat_ns(now_ns))

    def _next_beat_ns(self, now_ns: int) -> int:
        """Return when peers are pinged next: all at one time, so that an idle worker wakes up once for all of them."""
        return (now_ns // self.config.heartbeat_ns + 1) * self.config.heartbeat_ns

    def _fail(self, room: TargetRoom, reason: Reason, text: str, now_ns: int) -> None:
        raise NotImplementedError

    def _confirm(self, room: TargetRoom, pair: TargetPair) -> None:
        raise NotImplementedError

    def _send_claim(self, room: TargetRoom, pair: TargetPair, now_ns: int) -> None:
        raise NotImplementedError

    def _pump(self, now_ns: int) -> None:
        raise NotImplementedError


def prefill_name(peer: PeerId) -> str:
    """Return a source's name in texts for people."""
    return f"prefill {peer.instance} rank {peer.rank}"
