"""Probes whether a silent peer's port still accepts connections.

Called by the worker's control thread; never blocks. The peer's kernel answers, not the peer itself. ECONNREFUSED proves
that the process has ended. An accepted connection proves only that it exists: it may hang or be stopped.
"""

from __future__ import annotations

import errno
import select
import socket
from typing import NamedTuple

from longshore_wire.addresses import is_numeric, main_address
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half


class Probed(NamedTuple):
    """A probed life of a peer, and our half that requested the probe."""

    half: Half
    peer: PeerId
    epoch: int


class LivenessProbes:
    """Open probes, at most one for each life of a peer and each of our halves."""

    def __init__(self) -> None:
        self._open: dict[Probed, socket.socket] = {}
        self._answers: list[tuple[Probed, bool]] = []

    def start(self, probed: Probed, address: str) -> None:
        """Start a connection to a peer's address. Replaces an older unanswered probe."""
        self._forget(probed)
        if not is_numeric(address):
            # It proves nothing about the peer, and nothing here resolves names.
            return
        host, _, port = main_address(address).rpartition(":")
        try:
            tried = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError:
            # No descriptor is left. The core probes again at the next heartbeat.
            return
        self._open[probed] = tried
        try:
            code = tried.connect_ex((host, int(port)))
        except OSError:
            self._forget(probed)
            return
        if code != errno.EINPROGRESS:
            self._judge(probed, code)

    @property
    def waits(self) -> bool:
        """Whether a probe is open, or `answers` has not yet returned its answer."""
        return bool(self._open or self._answers)

    def answers(self) -> list[tuple[Probed, bool]]:
        """Return the answer of each finished probe once; False: no process listens there any more."""
        if self._open:
            watched = select.poll()
            for tried in self._open.values():
                watched.register(tried, select.POLLOUT)
            answered = {descriptor for descriptor, _ in watched.poll(0)}
            for probed, tried in list(self._open.items()):
                if tried.fileno() in answered:
                    self._judge(probed, tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Cancel every probe."""
        for probed in list(self._open):
            self._forget(probed)

    def _judge(self, probed: Probed, code: int) -> None:
        # Other errors (no route, a timeout) come from the network and prove nothing about the process.
        if code in (0, errno.ECONNREFUSED):
            self._answers.append((probed, code == 0))
        self._forget(probed)

    def _forget(self, probed: Probed) -> None:
        tried = self._open.pop(probed, None)
        if tried is not None:
            tried.close()
