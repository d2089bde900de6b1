"""Runs an agent's self-test: two processes move bytes by the configured backend and compare them.

The supervisor starts it as a process; it prints one JSON line, a `SelfTest`. The receiving process is a fork, made before
any library is loaded that a fork would break. The two exchange msgpack over a socket pair. The memory is numpy's, because
loading a tensor library would take longer than the rest of an agent's start.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from typing import IO

import msgspec
import numpy as np

from longshore_agent import logs
from longshore_agent.errors import TransportError
from longshore_agent.settings import Settings
from longshore_agent.transport_choice import make_ports, make_transport
from longshore_agent.transports.answers import own_output, say
from longshore_agent.transports.base import Pieces, Transport, WriteState
from longshore_spec.status import SelfTest
from longshore_wire.errors import LongshoreError
from longshore_wire.names import UNKNOWN_WIRE, wire_name

# Limit of the whole test on a busy machine. A backend that needs longer for a few bytes does not work.
LIMIT_S = 30.0
_DATAGRAM_BYTES_MAX = 1 << 20
_PAUSE_S = 0.0005
# The receiver only has to close its transport.
_END_LIMIT_S = 2.0


class _Card(msgspec.Struct):
    metadata: bytes
    address: int


def run(settings: Settings, out: IO[bytes]) -> SelfTest:
    """Move `settings.self_test_bytes` to a second process; write the result, also after a failure.

    Args:
        settings: the agent's settings.
        out: receives the answer. The second process closes it, so that its reader waits for this process only.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(LIMIT_S)
    theirs.settimeout(LIMIT_S)
    receiver = multiprocessing.get_context("fork").Process(target=_receive, args=(settings, theirs, (ours, out)))
    receiver.start()
    theirs.close()
    start_s = time.monotonic()
    try:
        wire, error = _send(settings, ours)
    except (LongshoreError, OSError, msgspec.DecodeError) as failure:
        wire, error = UNKNOWN_WIRE, str(failure) or type(failure).__name__
    finally:
        ours.close()
        receiver.join(_END_LIMIT_S)
        if receiver.exitcode is None:
            receiver.kill()
            receiver.join()
    moved_bytes = 0 if error else settings.self_test_bytes
    return SelfTest(settings.backend.value, wire, moved_bytes, time.monotonic() - start_s, error)


def _send(settings: Settings, link: socket.socket) -> tuple[str, str]:
    """Return the wire, and what is wrong with the bytes that arrived; empty if they are right."""
    length_bytes = settings.self_test_bytes
    transport = _transport(settings, "sender")
    try:
        buffer = _pattern(length_bytes)
        transport.register(buffer.ctypes.data, length_bytes)
        card = msgspec.msgpack.decode(link.recv(_DATAGRAM_BYTES_MAX), type=_Card)
        peer = transport.connect(card.metadata)
        wire = transport.probe_wire(peer, buffer.ctypes.data, card.address, length_bytes)
        write = transport.draft(peer, Pieces.one(buffer.ctypes.data, card.address, length_bytes), b"")
        transport.start(write)
        deadline_s = time.monotonic() + LIMIT_S
        while transport.state(write) is WriteState.OPEN:
            if time.monotonic() > deadline_s:
                raise TransportError(f"{length_bytes} bytes did not arrive within {LIMIT_S:g} s")
        if transport.state(write) is WriteState.FAILED:
            raise TransportError(write.error)
        transport.release(write)
        link.send(b"sent")
        same = link.recv(16) == b"same"
        return wire_name(wire), "" if same else "the bytes that arrived are not those that were sent"
    finally:
        transport.close()


def _receive(settings: Settings, link: socket.socket, others: tuple[socket.socket, IO[bytes]]) -> None:
    for other in others:
        other.close()
    length_bytes = settings.self_test_bytes
    transport = _transport(settings, "receiver")
    try:
        # Written once before the transfer, since reading would map only the shared zero page.
        buffer = np.full(length_bytes, 0xA5, dtype=np.uint8)
        transport.register(buffer.ctypes.data, length_bytes)
        link.send(msgspec.msgpack.encode(_Card(transport.metadata(), buffer.ctypes.data)))
        # It makes no connection of its own: UCX logs an ERROR for one that is not complete when its peer closes.
        _drive_until_sent(transport, link)
        same = np.array_equal(buffer, _pattern(length_bytes))
        link.send(b"same" if same else b"other")
    except ConnectionError:
        # The sender has ended, such as with its agent: nobody waits for the result.
        return
    finally:
        transport.close()


def _transport(settings: Settings, role: str) -> Transport:
    """Return a transport whose ports admit only this machine, if the kernel supports the filter."""
    ports = make_ports(settings)
    transport = make_transport(settings, f"self-test-{role}-{os.getpid()}", ports)
    ports.admit([str(ports.address)])
    return transport


def _drive_until_sent(transport: Transport, link: socket.socket) -> None:
    link.setblocking(False)
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        transport.notices()
        try:
            link.recv(16)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
            continue
        break
    link.setblocking(True)


def _pattern(length_bytes: int) -> np.ndarray:
    return (np.arange(length_bytes, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8)


def main() -> int:
    """Run the test."""
    settings = Settings.from_environment(os.environ)
    logs.begin(settings, "self-test")
    out = own_output()
    result = run(settings, out)
    say(out, result)
    return 1 if result.error else 0


if __name__ == "__main__":
    sys.exit(main())
