"""Decides when a worker must be replaced, because only the end of its process or fresh memory can help.

Called by the worker's control thread. Returns the reason and when to ask again; it ends nothing itself.
"""

from __future__ import annotations

import resource
from pathlib import Path

from longshore_agent.pipeline.slabs import OutboundSlab
from longshore_agent.settings import Settings
from longshore_agent.worker.moving import Mover
from longshore_wire.names import room_name
from longshore_wire.peer_messages import RoomKey
from longshore_wire.target import TargetSession

# Share of the descriptors in use at which a worker is replaced. The rest serves its open rooms until then.
DESCRIPTORS_SHARE = 0.75
# Time between two checks of the data ports. Peers that cannot connect in between try again.
_PORTS_LOOK_NS = 1_000_000_000


class WorkerHealth:
    """The health of one worker."""

    def __init__(self, settings: Settings, mover: Mover, target: TargetSession | None) -> None:
        self._settings = settings
        self._mover = mover
        self._target = target
        self._held_since_ns: int | None = None
        self._disconnected_count = 0
        self._ports_look_ns = 0
        # Open writes of cancelled slabs, and since when. A lane has at most one, a GPU a few.
        self._overtaken: list[tuple[OutboundSlab, int]] = []

    @property
    def due_ns(self) -> int | None:
        """When `illness` must be asked again if nothing else happens; None: never, 0: now."""
        mover = self._mover
        if mover.unsettled or (self._held_since_ns is None and self._quarantined):
            return 0
        if len(self._overtaken) < sum([slab.cancelled for slab in mover.resources.runner.writing()]):
            return 0
        dues = [since_ns + self._settings.write_timeout_ns for _, since_ns in self._overtaken]
        if self._held_since_ns is not None:
            dues.append(self._held_since_ns + self._settings.peer_timeout_ns)
        if self._exposed is not None:
            dues.append(self._exposed[1] + self._settings.write_timeout_ns)
        return min(dues, default=None)

    def illness(self, now_ns: int) -> str:
        """Return the reason to replace this worker; empty: none."""
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
        """Name a write that has not ended long after its slab was cancelled. Its lane and source memory stay occupied.

        Other writes need no limit here: decode fails a room in which nothing lands, and an engine has its own limit.
        """
        writing = [slab for slab in self._mover.resources.runner.writing() if slab.cancelled]
        if not writing and not self._overtaken:
            return ""
        known = {id(slab): since_ns for slab, since_ns in self._overtaken}
        self._overtaken = [(slab, known.get(id(slab), now_ns)) for slab in writing]
        for slab, since_ns in self._overtaken:
            if now_ns - since_ns >= self._settings.write_timeout_ns:
                peer = slab.effect.peer
                return (
                    f"a write to rank {peer.rank} of {peer.instance} has not ended for {self._settings.write_timeout_s:g} s"
                    f" after its room was given up"
                )
        return ""

    def _kept_descriptors(self) -> str:
        """Report that few descriptors are left. Mooncake keeps its connections to each peer that has ended."""
        if self._mover.disconnected_count == self._disconnected_count:
            return ""
        self._disconnected_count = self._mover.disconnected_count
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            open_count = sum(1 for _ in Path("/proc/self/fd").iterdir())
        except OSError:
            # Counting needs a descriptor.
            open_count = limit
        if open_count <= DESCRIPTORS_SHARE * limit:
            return ""
        return f"{open_count} of {limit} descriptors are open: the transport keeps those of peers that have ended"

    def _lost_port(self, now_ns: int) -> str:
        """Name a data port that is closed although this worker lives."""
        if now_ns < self._ports_look_ns:
            return ""
        self._ports_look_ns = now_ns + _PORTS_LOOK_NS
        return self._mover.resources.ports.lost()

    @property
    def _exposed(self) -> tuple[RoomKey, int] | None:
        """Return the oldest failed room whose pages a source may still write, and since when."""
        return next(iter(self._target.exposed_since_ns.items()), None) if self._target is not None else None

    def _exposed_pages(self, now_ns: int) -> str:
        """Name a failed room that keeps its pages from its engine, since a source may still write them."""
        exposed = self._exposed
        if exposed is None or now_ns - exposed[1] < self._settings.write_timeout_ns:
            return ""
        return (
            f"prefill {exposed[0].instance} may still write the pages of room {room_name(exposed[0].room)}, which failed "
            f"{self._settings.write_timeout_s:g} s ago, and cannot be reached"
        )

    @property
    def _quarantined(self) -> bool:
        """Whether more of the ring is in quarantine than may stay there."""
        if self._target is None:
            return False
        ring = self._target.granter.ring
        return 100 * ring.held_bytes > self._settings.quarantine_percent * ring.capacity_bytes

    def _quarantine(self, now_ns: int) -> str:
        if self._target is None or not self._quarantined:
            self._held_since_ns = None
            return ""
        ring = self._target.granter.ring
        # A live source confirms when its writes have ended. Only memory that stays in quarantine is lost.
        if self._held_since_ns is None:
            self._held_since_ns = now_ns
        if now_ns - self._held_since_ns < self._settings.peer_timeout_ns:
            return ""
        return f"{ring.held_bytes} of {ring.capacity_bytes} bytes of the ring are in quarantine"
