"""Decides how long a worker's control thread sleeps: not at all while bytes are expected, otherwise until it is woken.

Called by `loop` before and after each sleep. Polls the transport for notices. Decides nothing about rooms, but reports
to the cores the time in which this thread did not run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from longshore_agent.worker.moving import Mover
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import PeerMessage
from longshore_wire.session import Session
from longshore_wire.target import TargetSession

_log = logging.getLogger(__name__)

# Longest poll interval while bytes are expected. It is 1 ms until `_NOTICE_SLOWER_AFTER` polls after a sleep have found nothing.
_NOTICE_POLL_MS_MAX = 5
_NOTICE_SLOWER_AFTER = 64
_DRIVE_NS = 1_000_000
# Nothing is expected, so only what is due ends the sleep.
_NO_LIMIT_MS = 1 << 31
# While a slab is written, the thread sleeps only after this long without news: the time of ten slabs.
_HOT_NS = 2_000_000
# The limit while direct copies run, or bytes are due over a swift wire, which only polling shows. A slab takes 0.7 ms, times
# the ranks that write to one GPU, and a source serves its targets one after the other.
_HOT_GPU_NS = 10_000_000
# A turn that is this late has missed more than its share of a busy CPU.
_ABSENT_NS = 250_000_000
# The time that this thread has worked is read after turns that were longer than this, and at least this often, because
# reading it is a system call. Far below the time of an absence.
_CLOCK_NS = 10_000_000
_WARN_ABSENT_NS = 1_000_000_000


class Polling:
    """See the module."""

    def __init__(self, mover: Mover, sessions: Mapping[Half, Session], now_ns: int) -> None:
        self._mover = mover
        self._sessions = sessions
        target = sessions.get(Half.TARGET)
        assert target is None or isinstance(target, TargetSession)
        self._target = target
        self._woken_ns = self._due_ns = self._read_ns = now_ns
        self._worked_ns = time.thread_time_ns()
        self._idle_ns = 0
        # What `_look` has found: whether bytes are due, until when a peer probes its wire, and how the peers' wires work.
        self._is_known = self._expects = False
        self._probed_until_ns = 0
        self._only_messages = self._is_driven = self._is_swift = False
        self._quiet_turns = 0
        self._has_slept = False
        self._look_again_ns = 0
        self._is_news = False
        self._news_ns = 0

    def woken(self, now_ns: int) -> None:
        """Begin a turn. If it is late, report that to the cores, which must not count it as the silence of peers."""
        late_ns = self._idle_ns + max(0, now_ns - self._due_ns)
        self._woken_ns = now_ns
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

    def changed(self) -> None:
        """Record that this turn may have changed the cores. A turn that only polls does not."""
        self._is_known = False

    def notices(self, now_ns: int) -> list[tuple[PeerId, PeerMessage]]:
        """Drive the transport if bytes are due; return its notices."""
        if not self._looks_for_notices(now_ns):
            self._quiet_turns = 0
            return []
        if now_ns < self._look_again_ns:
            return []
        if self._only_messages:
            # No peer's slabs are announced by notices, but the transport must still be driven.
            self._look_again_ns = now_ns + _DRIVE_NS
        taken = self._mover.notices()
        if taken:
            self._quiet_turns = 0
        elif self._has_slept:
            self._quiet_turns += 1
        self._is_news = self._is_news or bool(taken)
        return taken

    def wait_ms(self, due_in_ms: Callable[[int], int], now_ns: int) -> int:
        """Return how long the thread may sleep. The caller must sleep at once.

        Args:
            due_in_ms: returns the time until something is due. It is called only if the thread may sleep.
        """
        limit_ms = self._limit_ms(now_ns)
        wait_ms = limit_ms if limit_ms == 0 else min(limit_ms, due_in_ms(now_ns))
        self._idle_ns = 0
        if now_ns - self._read_ns >= _CLOCK_NS:
            # Time of the turn in which other threads or processes had the CPU. This thread may have worked before the turn.
            worked_ns = time.thread_time_ns()
            self._idle_ns = max(0, now_ns - self._woken_ns - (worked_ns - self._worked_ns))
            self._read_ns, self._worked_ns = now_ns, worked_ns
        self._due_ns = now_ns + wait_ms * 1_000_000
        self._has_slept = wait_ms > 0
        return wait_ms

    def _limit_ms(self, now_ns: int) -> int:
        """Return how long the thread may sleep by what it expects."""
        wait_ms = _NO_LIMIT_MS
        if self._is_news:
            # Counted from the end of the turn, which may be long after the news.
            self._is_news, self._news_ns = False, now_ns
        quiet_ns = now_ns - self._news_ns
        hot = quiet_ns < _HOT_NS
        runner = self._mover.resources.runner
        if runner.busy:
            soon = hot or (runner.copying and quiet_ns < _HOT_GPU_NS)
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
        if self._looks_for_notices(now_ns):
            if self._is_driven or (self._is_swift and quiet_ns < _HOT_GPU_NS):
                return 0
            wait_ms = min(wait_ms, 1 if self._quiet_turns < _NOTICE_SLOWER_AFTER else _NOTICE_POLL_MS_MAX)
        return wait_ms

    def _looks_for_notices(self, now_ns: int) -> bool:
        """Whether bytes are due whose arrival only the transport shows; otherwise a control message wakes this thread."""
        if not self._is_known:
            self._look()
        return self._expects or now_ns < self._probed_until_ns

    def _look(self) -> None:
        """Find out what the cores expect.

        A source's probe counts even without a room: until it ends, no staged write leaves that source.
        """
        self._is_known = True
        transport = self._mover.resources.transport
        if self._target is None or not transport.notifies:
            return
        self._expects, self._probed_until_ns = self._target.expects_bytes, 0
        wires = set()
        for peer in self._target.peers.values():
            wires.add(peer.wire)
            if peer.wire_epoch != peer.epoch:
                self._probed_until_ns = max(self._probed_until_ns, peer.wire_due_ns)
        self._only_messages = wires <= transport.announced_by_message
        self._is_driven, self._is_swift = bool(wires & transport.driven), bool(wires & transport.swift)
