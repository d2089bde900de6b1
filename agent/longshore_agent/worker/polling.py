"""Decides how long a worker's control thread sleeps: not at all while bytes are expected, otherwise until it is woken.

Called by `loop` before and after each sleep. Polls the transport for notices. Decides nothing about rooms, but reports
to the cores the time in which this thread did not run.
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

# Longest poll interval while bytes are expected. It is 1 ms until `_NOTICE_SLOWER_AFTER` polls have found nothing.
_NOTICE_POLL_MS_MAX = 5
_NOTICE_SLOWER_AFTER = 64
_DRIVE_NS = 1_000_000
# While bytes are due over a swift wire, the thread sleeps only after this long without news: the time of ten slabs.
_HOT_NS = 2_000_000
# The limit while direct copies run, whose end only polling shows. A slab takes 0.7 ms, times the ranks that write to
# one GPU.
_HOT_COPYING_NS = 10_000_000
# A turn that is this late has missed more than its share of a busy CPU.
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
        """Begin a turn. If it is late, report that to the cores, which must not count it as the silence of peers."""
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
        """Record that something has happened in this turn, since more may follow at once."""
        self._is_news = True

    def notices(self, now_ns: int) -> list[tuple[PeerId, PeerMessage]]:
        """Drive the transport if bytes are due; return its notices."""
        if self._target is None or not self._looks_for_notices(self._target, now_ns):
            self._quiet_turns = 0
            return []
        if now_ns < self._look_again_ns:
            return []
        if all(
            peer.wire in self._mover.resources.transport.announced_by_message for peer in self._target.peers.values()
        ):
            # No peer's slabs are announced by notices, but the transport must still be driven.
            self._look_again_ns = now_ns + _DRIVE_NS
        taken = self._mover.notices()
        self._quiet_turns = 0 if taken else self._quiet_turns + 1
        self._is_news = self._is_news or bool(taken)
        return taken

    def wait_ms(self, wait_ms: int, now_ns: int) -> int:
        """Return how long the thread may sleep, at most `wait_ms`. The caller must sleep at once."""
        wait_ms = self._shortened(wait_ms, now_ns)
        # Time of the turn in which other threads or processes had the CPU.
        self._idle_ns = now_ns - self._woken_ns - (time.thread_time_ns() - self._worked_ns)
        self._due_ns = now_ns + wait_ms * 1_000_000
        return wait_ms

    def _shortened(self, wait_ms: int, now_ns: int) -> int:
        if self._is_news:
            # Counted from the end of the turn, which may be long after the news.
            self._is_news, self._news_ns = False, now_ns
        quiet_ns = now_ns - self._news_ns
        hot = quiet_ns < _HOT_NS
        runner = self._mover.resources.runner
        if runner.busy:
            soon = hot or (runner.copying and quiet_ns < _HOT_COPYING_NS)
            wait_ms = 0 if soon else min(wait_ms, 1)
        if (
            hot
            and self._mover.resources.device is not None
            and self._target is not None
            and self._target.in_place_count
        ):
            # A neighbour copies into our pages. Its message would wake this thread, but an awake thread reads it
            # sooner.
            return 0
        if self._target is not None and self._looks_for_notices(self._target, now_ns):
            transport, wires = self._mover.resources.transport, {peer.wire for peer in self._target.peers.values()}
            if wires & transport.driven or (hot and wires & transport.swift):
                return 0
            wait_ms = min(wait_ms, 1 if self._quiet_turns < _NOTICE_SLOWER_AFTER else _NOTICE_POLL_MS_MAX)
        return wait_ms

    def _looks_for_notices(self, target: TargetSession, now_ns: int) -> bool:
        """Whether bytes are due whose arrival only the transport shows; otherwise a control message wakes this thread.

        A source's probe counts even without a room: until it ends, no staged write leaves that source.
        """
        return self._mover.resources.transport.notifies and (
            target.expects_bytes
            or any(now_ns < peer.wire_due_ns and peer.wire_epoch != peer.epoch for peer in target.peers.values())
        )
