"""Ports of loopback for servers that tests start. Used by the control plane, and by whatever stands beside it."""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
# Below those that Linux gives to whoever asks for any, and below those of Services.
_PORTS = range(20_000, 30_000)
_TRIES = 100


def free_port() -> int:
    """Return a port of loopback that nobody listens on now, and that the kernel gives to nobody who asks for any.

    A server begins to listen some time later, and one that was killed listens there again: meanwhile it must not become
    another process's port.
    """
    for port in random.sample(_PORTS, _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise AssertionError(f"none of {_TRIES} ports between {_PORTS.start} and {_PORTS.stop} is free")
