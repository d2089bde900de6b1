"""Finds free loopback ports for servers of tests. Used by the control plane and other servers in `e2e`."""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
# Below Linux's ephemeral ports and below the ports of Services.
_PORTS = range(20_000, 30_000)
_TRIES = 100


def can_listen(port: int) -> bool:
    """Return whether a server can listen on a loopback port now. That of a killed one is free a moment after its end."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen()
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a free loopback port that is not an ephemeral port.

    A server starts to listen some time later, and a killed one listens there again. The kernel must not assign the port to
    another process meanwhile.
    """
    for port in random.sample(_PORTS, _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise AssertionError(f"none of {_TRIES} ports between {_PORTS.start} and {_PORTS.stop} is free")
