"""How soon a worker's control thread looks again: at once while bytes are on their way, asleep otherwise.

Asked by the worker before and after each sleep. Drives the transport where it tells of arrivals; decides nothing about
rooms, but tells the cores of time in which nobody listened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from longshore_agent.worker.moving import Mover
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import PeerMessage
from longshore_wire.session import Session
from longshore_wire.target_session import TargetSession

_log = logging.getLogger(__name__)

# How often a worker that expects bytes looks for notices: at first at once, then slower while nothing comes.
_NOTICE_POLL_MS_MAX = 5
_NOTICE_SLOWER_AFTER = 64
_TOLD_DRIVE_NS = 1_000_000
# While bytes are due over a swift wire, the thread does not sleep until nothing has happened for so long: some ten slabs.
_HOT_NS = 2_000_000
# The same while a GPU copies from pages to pages, whose end nobody tells: a slab takes 0.7 ms, and as many times as long
# as ranks write to one GPU.
_HOT_COPYING_NS = 10_000_000
# A look that comes this much late was not only waiting for its turn on a busy processor.
_ABSENT_NS = 250_000_000
_WARN_ABSENT_NS = 1_000_000_000


class Polling:
    """See the module."""

    def __init__(self, mover: Mover, sessions: Mapping[Half, Session], now_ns: int) -> None:
        self._mover = mover
        self._sessions = sessions
        target = sessions.get(Half.TARGET)
        assert target is None or isinstance(target, TargetSession)
        self._target = target
        self._woken_ns = self._due_ns = now_ns
        self._worked_ns = time.thread_time_ns()
        self._idle_ns = 0
        self._quiet_turns = 0
        self._look_again_ns = 0
        self._is_news = False
        self._news_ns = 0

    def woken(self, now_ns: int) -> None:
        """A turn begins. The time by which it is late is nobody's silence: its words wait where we did not look."""
        late_ns = self._idle_ns + max(0, now_ns - self._due_ns)
        self._woken_ns, self._worked_ns = now_ns, time.thread_time_ns()
        if late_ns < _ABSENT_NS:
            return
        self._mover.metrics.add("longshore_absent_seconds_total", late_ns / 1e9)
        if late_ns >= _WARN_ABSENT_NS:
            _log.warning(
                "this worker did not run for %.1f s: its machine is too busy, or was stopped for a while", late_ns / 1e9
            )
        for session in self._sessions.values():
            session.was_absent(late_ns, now_ns)

    def news(self) -> None:
        """Something has happened in this turn: more may follow at once."""
        self._is_news = True

    def notices(self, now_ns: int) -> list[tuple[PeerId, PeerMessage]]:
        """Drive the transport where bytes are due; return what it tells of."""
        if self._target is None or not self._looks_for_notices(self._target, now_ns):
            self._quiet_turns = 0
            return []
        if now_ns < self._look_again_ns:
            return []
        if all(peer.wire in self._mover.parts.transport.announced_by_message for peer in self._target.peers.values()):
            # Nothing is told this way, but the transport wants to be driven now and then.
            self._look_again_ns = now_ns + _TOLD_DRIVE_NS
        taken = self._mover.notices()
        self._quiet_turns = 0 if taken else self._quiet_turns + 1
        self._is_news = self._is_news or bool(taken)
        return taken

    def wait_ms(self, wait_ms: int, now_ns: int) -> int:
        """Return how long the thread may sleep that nobody else wakes before `wait_ms`. It begins to sleep at once."""
        wait_ms = self._shortened(wait_ms, now_ns)
        # A turn may be long because there is much to do, or because others had the processor.
        self._idle_ns = now_ns - self._woken_ns - (time.thread_time_ns() - self._worked_ns)
        self._due_ns = now_ns + wait_ms * 1_000_000
        return wait_ms

    def _shortened(self, wait_ms: int, now_ns: int) -> int:
        if self._is_news:
            # Counted from the end of the turn, which may have been a long one.
            self._is_news, self._news_ns = False, now_ns
        quiet_ns = now_ns - self._news_ns
        hot = quiet_ns < _HOT_NS
        runner = self._mover.parts.runner
        if runner.busy:
            soon = hot or (runner.copying and quiet_ns < _HOT_COPYING_NS)
            wait_ms = 0 if soon else min(wait_ms, 1)
        if hot and self._mover.parts.device is not None and self._target is not None and self._target.in_place_count:
            # A neighbour's copy: its message wakes this thread, but who is awake reads it sooner.
            return 0
        if self._target is not None and self._looks_for_notices(self._target, now_ns):
            transport, wires = self._mover.parts.transport, {peer.wire for peer in self._target.peers.values()}
            if wires & transport.driven or (hot and wires & transport.swift):
                return 0
            wait_ms = min(wait_ms, 1 if self._quiet_turns < _NOTICE_SLOWER_AFTER else _NOTICE_POLL_MS_MAX)
        return wait_ms

    def _looks_for_notices(self, target: TargetSession, now_ns: int) -> bool:
        """Whether bytes are due that the transport itself tells of; elsewhere a control message wakes this thread.

        So are those of a source's probe, also where no room needs the wire: until it ends, nothing else leaves that source.
        """
        return self._mover.parts.transport.notifies and (
            target.expects_bytes
            or any(now_ns < peer.wire_due_ns and peer.wire_epoch != peer.epoch for peer in target.peers.values())
        )
