"""Whether anybody still listens where a silent peer did. The host's kernel answers, not the peer: a process that hangs or
is stopped still listens, one that has ended does not.

Used by the worker's control thread for peers whose bytes may still land. Never blocks.
"""

from __future__ import annotations

import errno
import select
import socket

from longshore_agent.control.doors import main_door
from longshore_wire.effects import PeerId


class Knocker:
    """Connections that are being tried, at most one a peer."""

    def __init__(self) -> None:
        self._tried: dict[PeerId, socket.socket] = {}
        self._refused: list[PeerId] = []

    def knock(self, peer: PeerId, address: str) -> None:
        """Try to connect to a peer's address; an older try that nobody has answered is given up."""
        self._forget(peer)
        host, _, port = main_door(address).rpartition(":")
        tried = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            said = tried.connect_ex((host, int(port)))
        except (OSError, ValueError, OverflowError):
            # An address that cannot be says nothing of the peer.
            said = errno.EINVAL
        self._tried[peer] = tried
        if said != errno.EINPROGRESS:
            self._judge(peer, said)

    @property
    def waits(self) -> bool:
        """Whether a try has not been answered, or an answer not been taken."""
        return bool(self._tried or self._refused)

    def refused(self) -> list[PeerId]:
        """Return the peers at whose address nobody listens, each once."""
        if self._tried:
            watched = select.poll()
            for tried in self._tried.values():
                watched.register(tried, select.POLLOUT)
            answered = {descriptor for descriptor, _ in watched.poll(0)}
            for peer, tried in list(self._tried.items()):
                if tried.fileno() in answered:
                    self._judge(peer, tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        refused, self._refused = self._refused, []
        return refused

    def close(self) -> None:
        """Give every try up."""
        for peer in list(self._tried):
            self._forget(peer)

    def _judge(self, peer: PeerId, said: int) -> None:
        if said == errno.ECONNREFUSED:
            self._refused.append(peer)
        self._forget(peer)

    def _forget(self, peer: PeerId) -> None:
        tried = self._tried.pop(peer, None)
        if tried is not None:
            tried.close()
