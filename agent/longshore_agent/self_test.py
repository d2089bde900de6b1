"""The self-test of an agent without engines: two processes of it move bytes by the configured backend and compare them.

Started by the supervisor as a process of its own; prints one JSON line, a `SelfTest`. The receiving process is a fork of
it, made before anything is loaded that a fork would break, and they talk over a socket pair in msgpack. Its memory is
numpy's: loading a tensor library, or anything twice, would cost an agent that starts more than all the rest.
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

from longshore_agent.errors import TransportError
from longshore_agent.settings import Settings
from longshore_agent.status.snapshot import SelfTest
from longshore_agent.transport_choice import make_ports, make_transport
from longshore_agent.transports.answers import own_output, say
from longshore_agent.transports.base import Pieces, Transport, WriteState
from longshore_wire.errors import LongshoreError
from longshore_wire.names import UNKNOWN_WIRE

# The whole test on a busy machine; a backend that needs longer for a few bytes does not work.
LIMIT_S = 30.0
_DATAGRAM_BYTES_MAX = 1 << 20
_PAUSE_S = 0.0005
# The receiver has nothing to do any more but to close its transport.
_END_LIMIT_S = 2.0


class _Card(msgspec.Struct):
    metadata: bytes
    address: int


def run(settings: Settings, out: IO[bytes]) -> SelfTest:
    """Move `settings.self_test_bytes` to a second process; report what was seen, also if it failed.

    Args:
        settings: of the agent.
        out: where the answer goes; the second process lets it go, so that who reads waits for this one alone.
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
    """Return what the bytes travelled over, and what is wrong with those that arrived."""
    length_bytes = settings.self_test_bytes
    transport = _transport(settings, "sender")
    try:
        buffer = _pattern(length_bytes)
        transport.register(buffer.ctypes.data, length_bytes)
        card = msgspec.msgpack.decode(link.recv(_DATAGRAM_BYTES_MAX), type=_Card)
        peer = transport.connect(card.metadata)
        link.send(msgspec.msgpack.encode(_Card(transport.metadata(), 0)))
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
        # While the receiver connects to us, too, this transport must be there.
        same = link.recv(16) == b"same"
        return wire.value, "" if same else "the bytes that arrived are not those that were sent"
    finally:
        transport.close()


def _receive(settings: Settings, link: socket.socket, others: tuple[socket.socket, IO[bytes]]) -> None:
    for other in others:
        other.close()
    length_bytes = settings.self_test_bytes
    transport = _transport(settings, "receiver")
    try:
        # Touched before anybody writes to it: reading alone would map the shared zero page.
        buffer = np.full(length_bytes, 0xA5, dtype=np.uint8)
        transport.register(buffer.ctypes.data, length_bytes)
        link.send(msgspec.msgpack.encode(_Card(transport.metadata(), buffer.ctypes.data)))
        card = msgspec.msgpack.decode(link.recv(_DATAGRAM_BYTES_MAX), type=_Card)
        transport.connect(card.metadata)
        _drive_until_sent(transport, link)
        same = np.array_equal(buffer, _pattern(length_bytes))
        link.send(b"same" if same else b"other")
    finally:
        transport.close()


def _transport(settings: Settings, role: str) -> Transport:
    """Return a transport that lets in this machine alone, where the kernel can see to that."""
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
    out = own_output()
    result = run(settings, out)
    say(out, result)
    return 1 if result.error else 0


if __name__ == "__main__":
    sys.exit(main())
