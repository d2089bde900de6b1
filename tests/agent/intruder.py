"""Attacks the ports of an agent without keys: with messages of UCX's TCP and of Mooncake's handshake, and with noise.

Called by tests that check the effect. The messages of UCX are those of uct/tcp in version 1.23, which NIXL 1.5.1 brings.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
_UCX_PUT = 33
# Time limit for an answer of this machine's kernel. A dropped packet gets no answer.
LIMIT_S = 3.0
# An address that no process maps.
UNMAPPED = 0x10


def connect(source: str, host: str, port: int, limit_s: float = LIMIT_S) -> socket.socket | None:
    """Connect from an address of this machine; return None if the connection is not accepted."""
    caller = socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET)
    caller.settimeout(limit_s)
    try:
        caller.bind((source, 0))
        caller.connect((host, port))
    except (TimeoutError, ConnectionRefusedError):
        caller.close()
        return None
    return caller


def reaching(host: str, ports: Sequence[int], *sources: str, limit_s: float = LIMIT_S) -> list[str]:
    """Return the source address of each accepted connection, of one from each source to each port.

    All connect concurrently, since each dropped packet takes the whole limit. Their threads inherit the network of the caller.
    """
    calls = [(source, port) for source in sources for port in ports]
    with ThreadPoolExecutor(len(calls)) as callers:
        found = list(callers.map(lambda call: connect(call[0], host, call[1], limit_s), calls))
    for caller in filter(None, found):
        caller.close()
    return [source for (source, _), caller in zip(calls, found, strict=True) if caller is not None]


def put(caller: socket.socket, address: int, data: bytes) -> None:
    """Ask UCX to write bytes to an address of its process: no handshake, no key of the memory."""
    request = struct.pack("<BIQQI", _UCX_PUT, 20, address, len(data), 1)
    caller.sendall(_UCX_MAGIC + request + data)


def message(caller: socket.socket, number: int) -> None:
    """Send UCX one of its 32 active messages, with noise for content."""
    body = random.Random(number).randbytes(200)
    caller.sendall(_UCX_MAGIC + struct.pack("<BI", number, len(body)) + body)


def noise(caller: socket.socket, seed: int) -> None:
    """Send bytes that are no message of any protocol, and close the connection."""
    with contextlib.suppress(OSError):
        caller.sendall(random.Random(seed).randbytes(20_000))
    caller.close()


def greet(caller: socket.socket, seed: int) -> None:
    """Begin like ZeroMQ with CURVE, and continue with noise."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
    with contextlib.suppress(OSError):
        caller.sendall(greeting + b"\x04\xc8\x05HELLO" + random.Random(seed).randbytes(194))
        # The peer rejects it only after both greetings, and then closes the connection, since nothing follows.
        caller.shutdown(socket.SHUT_WR)
        while caller.recv(4096):
            pass
    caller.close()


def mapped_pages(pid: int, name: str) -> int:
    """Return the address at which a worker has mapped the pages of an engine, which an attacker would have to guess."""
    found = re.search(
        rf"^([0-9a-f]+)-[0-9a-f]+ rw.* /memfd:{name} ", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE
    )
    assert found, f"{pid} has not mapped {name}"
    return int(found[1], 16)
