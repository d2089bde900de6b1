"""Allocates ring memory round-robin over peers, then over each peer's rooms.

Used by the target session. A grant is the region of one slab. A claim reserves no memory. Slabs whose tokens are ready
come first. A room whose tokens are still being computed holds at most one window or half of its share, and only while
half of the ring stays free.

Only the source claims that tokens are ready. A lying source wastes time and at most one share of the ring a room: if
nothing lands for `write_timeout_ns` in memory that was granted for ready tokens, the session fails the room. If the source
then does not confirm, the memory stays in quarantine; above a quarter of the ring, the worker is replaced. A slow source
keeps its rooms until their engine cancels them; docs/design/2026-11-21-late-writes.md says why no rate is required.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from longshore_wire.effects import PeerId, SessionConfig
from longshore_wire.peer_messages import Grant, RoomKey
from longshore_wire.ring import Ring
from longshore_wire.room import TargetPair, TargetRoom
from longshore_wire.slabs import ALIGNMENT_BYTES, slab_bytes
from longshore_wire.states import TargetEvent, TargetSlab
from longshore_wire.ways import Way


class Granter:
    """The ring of one decode rank and the queue of pairs that wait for its memory."""

    def __init__(self, config: SessionConfig) -> None:
        self._window = config.grant_window
        self.ring = Ring(max(config.ring_bytes, ALIGNMENT_BYTES))
        self._share_bytes = config.ring_bytes // config.ring_share_divisor
        self._turns: deque[PeerId] = deque()
        self._queues: dict[PeerId, deque[TargetPair]] = {}
        self._hopeless: list[RoomKey] = []
        self._hopeless_since_ns: int | None = None
        self._hopeless_patience_ns = config.peer_timeout_ns
        self._write_timeout_ns = config.write_timeout_ns
        self._absent_ns = 0
        self._blocked = False
        self._slab_bytes_max = 0
        self._blocked_since_ns: int | None = None
        self.credit_waits = 0
        self.credit_wait_ns = 0

    @property
    def blocked(self) -> bool:
        """Whether a pair waits for ring memory."""
        return self._blocked

    def expect(self, slab_bytes_max: int) -> None:
        """Note the longest slab of a source. Grants ahead leave room for one such slab, at most half of the ring."""
        self._slab_bytes_max = max(self._slab_bytes_max, min(slab_bytes_max, self.ring.capacity_bytes // 2))

    def want(self, pair: TargetPair) -> None:
        """Queue a pair that may need a grant; harmless if it does not."""
        if pair.queued or pair.grid is None or pair.next_grant >= pair.grid.count or pair.way is not Way.STAGED:
            return
        pair.queued = True
        queue = self._queues.get(pair.peer)
        if queue is None:
            queue = self._queues[pair.peer] = deque()
            self._turns.append(pair.peer)
        queue.append(pair)

    def grants(self, rooms: Mapping[RoomKey, TargetRoom]) -> Iterator[tuple[RoomKey, TargetPair, Grant]]:
        """Yield the grants that are possible now, round-robin; stop at the first that does not fit."""
        self._blocked, was_blocked = False, self._blocked
        while self._turns:
            peer = self._turns[0]
            queue = self._queues[peer]
            pair = queue[0]
            room = rooms.get(pair.pair.key)
            if room is None or room.failed or not self._may(room, pair):
                self._leave_queue()
                continue
            slab = pair.next_grant
            region = self.ring.allocate(self._slab_bytes(pair, slab))
            if slab >= pair.ready_count and (region is None or self.ring.largest_free_bytes < self._slab_bytes_max):
                # Ready slabs must not wait behind this pair. Its next Demand queues it again.
                if region is not None:
                    self.ring.free(region)
                self._leave_queue()
                continue
            if region is None:
                if not self.ring.used_bytes:
                    self._hopeless.append(room.key)
                self._blocked = True
                self.credit_waits += not was_blocked
                return
            pair.next_grant += 1
            pair.regions[slab] = region
            pair.step_slab(slab, TargetEvent.GRANT)
            room.ring_bytes += region.length_bytes
            queue.rotate(-1)
            self._turns.rotate(-1)
            yield room.key, pair, self.grant(pair, slab)

    def note_wait(self, now_ns: int) -> None:
        """Count the time in which a ready slab has waited for ring memory. Called after `grants`."""
        if self._blocked_since_ns is not None:
            self.credit_wait_ns += now_ns - self._blocked_since_ns
        self._blocked_since_ns = now_ns if self._blocked else None

    def _leave_queue(self) -> None:
        """Remove the current pair from the queue until `want` adds it again."""
        queue = self._queues[self._turns[0]]
        queue.popleft().queued = False
        if not queue:
            del self._queues[self._turns.popleft()]

    def grant(self, pair: TargetPair, slab: int) -> Grant:
        """Return the message for a granted slab."""
        region = pair.regions[slab]
        return Grant(pair.pair, slab, region.offset_bytes, region.length_bytes, region.generation)

    def take_hopeless(self, now_ns: int) -> list[RoomKey]:
        """Return rooms that wait for memory in lasting quarantine. Memory of writers that still answer is freed soon."""
        waiting, self._hopeless = self._hopeless, []
        if not waiting:
            self._hopeless_since_ns = None
            return []
        if self._hopeless_since_ns is None:
            self._hopeless_since_ns = now_ns
        return waiting if now_ns - self._hopeless_since_ns >= self._hopeless_patience_ns else []

    def was_absent(self, late_ns: int) -> None:
        """Do not count `late_ns`, in which this worker did not run, as slowness of writers."""
        self._absent_ns += late_ns

    def note_due(self, pair: TargetPair, now_ns: int, *, landed: bool = False) -> None:
        """Note since when a pair's bytes are due: after a grant, after more is ready, and after a slab has `landed`."""
        if landed or pair.due_since_ns is None:
            pair.due_since_ns = now_ns - self._absent_ns if pair.has_bytes_due else None

    def overdue(self, pair: TargetPair, now_ns: int) -> bool:
        """Whether the bytes of a pair's writer are overdue."""
        since_ns = pair.due_since_ns
        return since_ns is not None and now_ns - self._absent_ns - since_ns >= self._write_timeout_ns

    def free(self, room: TargetRoom, pair: TargetPair, slab: int) -> None:
        """Free the region of a slab that was scattered, or dropped after it had landed."""
        region = pair.regions.pop(slab)
        self.ring.free(region)
        room.ring_bytes -= region.length_bytes
        if not room.failed:
            for sibling in room.pairs.values():
                self.want(sibling)

    def quarantine(self, pair: TargetPair) -> None:
        """Abort a pair: hold the regions that its writer may still write, drain those that are being scattered."""
        for slab, state in enumerate(pair.states):
            if pair.step_slab(slab, TargetEvent.ABORT) is TargetSlab.QUARANTINED and state is TargetSlab.GRANTED:
                self.ring.hold(pair.regions[slab])

    def release(self, room: TargetRoom, pair: TargetPair) -> None:
        """Free the held regions of a pair whose writer will not write any more."""
        for slab in list(pair.regions):
            if pair.states[slab] is TargetSlab.QUARANTINED:
                pair.step_slab(slab, TargetEvent.CONFIRM)
                region = pair.regions.pop(slab)
                self.ring.release_held(region)
                room.ring_bytes -= region.length_bytes

    def _slab_bytes(self, pair: TargetPair, slab: int) -> int:
        assert pair.grid is not None
        assert pair.route is not None
        return slab_bytes(pair.route.payload_bytes(*pair.grid.tokens(slab)))

    def _may(self, room: TargetRoom, pair: TargetPair) -> bool:
        if pair.grid is None or pair.next_grant >= pair.grid.count or len(pair.regions) >= self._window:
            return False
        needed = self._slab_bytes(pair, pair.next_grant)
        room_bytes = room.ring_bytes + needed
        if pair.next_grant < pair.ready_count:
            # One ready slab is granted in addition to grants ahead, since nothing else may ever free those.
            return room_bytes <= self._share_bytes or room.ring_bytes == _ahead_bytes(room)
        if room.ring_bytes and 2 * room_bytes > self._share_bytes:
            return False
        # This room's tokens may depend on other rooms being sent first, so half of the ring stays free for ready slabs.
        return pair.next_grant < self._window and 2 * (self.ring.free_bytes - needed) >= self.ring.capacity_bytes


def _ahead_bytes(room: TargetRoom) -> int:
    """Return the ring memory that a room holds for tokens that are still being computed."""
    return sum(
        region.length_bytes
        for pair in room.pairs.values()
        for slab, region in pair.regions.items()
        if slab >= pair.ready_count
    )
