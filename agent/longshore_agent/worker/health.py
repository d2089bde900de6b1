"""When a worker must be replaced: where only its end, or the next one's fresh memory, can help.

Asked by the worker's control thread; says why, and when to ask again. Ends nothing by itself.
"""

from __future__ import annotations

import resource
from pathlib import Path

from longshore_agent.pipeline.slabs import OutboundSlab
from longshore_agent.settings import Settings
from longshore_agent.worker.moving import Mover
from longshore_wire.peer_messages import RoomKey
from longshore_wire.target_session import TargetSession

# The rest is for the rooms that end before the next worker takes over.
DESCRIPTORS_SHARE = 0.75
# Between two looks at the data ports: peers that cannot connect meanwhile try again.
_PORTS_LOOK_NS = 1_000_000_000


class WorkerHealth:
    """What one worker knows of its own illness."""

    def __init__(self, settings: Settings, mover: Mover, target: TargetSession | None) -> None:
        self._settings = settings
        self._mover = mover
        self._target = target
        self._held_since_ns: int | None = None
        self._disconnected_count = 0
        self._ports_look_ns = 0
        # Writes that outlive their rooms, and since when; a lane has one each, a GPU a few.
        self._overtaken: list[tuple[OutboundSlab, int]] = []

    @property
    def due_ns(self) -> int | None:
        """When `illness` may say something new at the latest without anything else happening; None: never."""
        dues = [since_ns + self._settings.write_timeout_ns for _, since_ns in self._overtaken]
        if self._held_since_ns is not None:
            dues.append(self._held_since_ns + self._settings.peer_timeout_ns)
        if self._exposed is not None:
            dues.append(self._exposed[1] + self._settings.write_timeout_ns)
        return min(dues, default=None)

    def illness(self, now_ns: int) -> str:
        """Return why this worker must be replaced; empty: it need not."""
        if self._mover.unsettled:
            # Only the end of this process proves that those bytes will not land any more.
            return "a failed write could not be settled"
        return (
            self._endless_write(now_ns)
            or self._quarantine(now_ns)
            or self._exposed_pages(now_ns)
            or self._kept_descriptors()
            or self._lost_port(now_ns)
        )

    def _endless_write(self, now_ns: int) -> str:
        """Say which write has not ended long after its room was given up: what it reads, and its lane, are lost to this worker.

        One that somebody waits for is not judged here: decode fails its room when nothing lands, and an engine by its own limit.
        """
        known = {id(slab): since_ns for slab, since_ns in self._overtaken}
        writing = self._mover.parts.runner.writing()
        self._overtaken = [(slab, known.get(id(slab), now_ns)) for slab in writing if slab.cancelled]
        for slab, since_ns in self._overtaken:
            if now_ns - since_ns >= self._settings.write_timeout_ns:
                peer = slab.effect.peer
                return (
                    f"a write to rank {peer.rank} of {peer.instance} has not ended for {self._settings.write_timeout_s:g} s"
                    f" after its room was given up"
                )
        return ""

    def _kept_descriptors(self) -> str:
        """Say that few descriptors are left. Mooncake keeps its connections to each peer that has ended."""
        if self._mover.disconnected_count == self._disconnected_count:
            return ""
        self._disconnected_count = self._mover.disconnected_count
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            open_count = sum(1 for _ in Path("/proc/self/fd").iterdir())
        except OSError:
            # Counting takes one.
            open_count = limit
        if open_count <= DESCRIPTORS_SHARE * limit:
            return ""
        return f"{open_count} of {limit} descriptors are open: the transport keeps those of peers that have ended"

    def _lost_port(self, now_ns: int) -> str:
        """Say which data port is closed although this worker lives."""
        if now_ns < self._ports_look_ns:
            return ""
        self._ports_look_ns = now_ns + _PORTS_LOOK_NS
        return self._mover.parts.ports.lost()

    @property
    def _exposed(self) -> tuple[RoomKey, int] | None:
        """The oldest failed room whose pages a source may still write, and since when."""
        return next(iter(self._target.exposed_since_ns.items()), None) if self._target is not None else None

    def _exposed_pages(self, now_ns: int) -> str:
        """Say which room's pages its engine does not get back: no proof has come that a source has stopped writing them."""
        if self._exposed is None or now_ns - self._exposed[1] < self._settings.write_timeout_ns:
            return ""
        return (
            f"prefill {self._exposed[0].instance} may still write the pages of room {self._exposed[0].room}, which failed "
            f"{self._settings.write_timeout_s:g} s ago, and cannot be reached"
        )

    def _quarantine(self, now_ns: int) -> str:
        ring = self._target.granter.ring if self._target is not None else None
        if ring is None or 100 * ring.held_bytes <= self._settings.quarantine_percent * ring.capacity_bytes:
            self._held_since_ns = None
            return ""
        # Writers that live confirm when their writes end: only memory that stays in quarantine is lost.
        if self._held_since_ns is None:
            self._held_since_ns = now_ns
        if now_ns - self._held_since_ns < self._settings.peer_timeout_ns:
            return ""
        return f"{ring.held_bytes} of {ring.capacity_bytes} bytes of the ring are in quarantine"
