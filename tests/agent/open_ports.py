"""Lists the sockets on which a process receives from others, as the kernel shows them.

Called by tests that compare them with the documentation and the status. Reads /proc only.
"""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"
_LINK = "socket:["


class OpenPort(NamedTuple):
    """One socket: `kind` is the kernel's name of its protocol, such as tcp6."""

    kind: str
    address: str
    port: int


def listening(pid: int) -> list[OpenPort]:
    """Return the listening TCP sockets of a process, and its bound UDP and raw sockets."""
    inodes = _inodes(pid)
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6"):
        table = Path(f"/proc/{pid}/net/{kind}")
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, *others = line.split()
            if others[5] in inodes and (state == _LISTENING or not kind.startswith("tcp")):
                address, _, port = local.rpartition(":")
                found.append(OpenPort(kind, _read(address), int(port, 16)))
    return sorted(found)


def _inodes(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        # Some are closed during the scan.
        with contextlib.suppress(OSError):
            link = str(entry.readlink())
            if link.startswith(_LINK):
                found.add(link[len(_LINK) : -1])
    return found


def _read(text: str) -> str:
    """Return an address of 4 or 16 bytes. The kernel lists it in words of the machine's byte order."""
    raw = bytes.fromhex(text)
    return str(ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))
