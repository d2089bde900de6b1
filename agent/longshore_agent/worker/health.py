"""When a worker must be replaced: where only its end, or the next one's fresh memory, can help.

Asked by the worker's control thread; says why, and when to ask again. Ends nothing by itself.
"""

from __future__ import annotations

from longshore_agent.settings import Settings
from longshore_agent.worker.moving import Mover
from longshore_wire.target_session import TargetSession


class WorkerHealth:
    """What one worker knows of its own illness."""

    def __init__(self, settings: Settings, mover: Mover, target: TargetSession | None) -> None:
        self._settings = settings
        self._mover = mover
        self._target = target
        self._held_since_ns: int | None = None

    @property
    def due_ns(self) -> int | None:
        """When `illness` may say something new at the latest without anything else happening; None: never."""
        if self._held_since_ns is None:
            return None
        return self._held_since_ns + self._settings.peer_timeout_ns

    def illness(self, now_ns: int) -> str:
        """Return why this worker must be replaced; empty: it need not."""
        if self._mover.unsettled:
            # Only the end of this process proves that those bytes will not land any more.
            return "a failed write could not be settled"
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
