"""Creates a network namespace for this process. Called by the benchmark, and for clusters with real nodes.

KWOK's pods have addresses, although no process runs. If these lead to this machine, one server can simulate all agents.
They are not loopback addresses, because the API server refuses those as endpoints and its controllers would keep retrying.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


class NoNetworkError(RuntimeError):
    """The machine does not permit a network namespace; names the remedy."""


def enter_own_network(pods: str = "") -> None:
    """Move this thread and its children into a new network with only a loopback, which also gets `pods`, if given.

    Call it before other threads are started.

    Raises:
        NoNetworkError: the process is not root, and user namespaces are not permitted.
    """
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _CLONE_NEWNET if uid == 0 else _CLONE_NEWUSER | _CLONE_NEWNET
    if libc.unshare(flags) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise NoNetworkError(f"unshare: {reason}: run this as root, or allow user namespaces")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        if not pods:
            return
        network = ipaddress.IPv4Network(pods)
        # On loopback the kernel treats the whole network of an address as local.
        _set(control, _SIOCSIFADDR, network.network_address + 1)
        _set(control, _SIOCSIFNETMASK, network.netmask)


def _set(control: socket.socket, request: int, address: ipaddress.IPv4Address) -> None:
    family = struct.pack("=HH4s8x", socket.AF_INET, 0, address.packed)
    fcntl.ioctl(control, request, struct.pack("16s16s", b"lo:pods", family))
