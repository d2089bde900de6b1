"""A network of a process's own, in which every address of a pod network is this machine. Called by the benchmark.

Pods that nothing runs have addresses all the same; where those lead to this machine, one server can play all agents.
They are no addresses of loopback: the API server refuses those as endpoints, and its controllers would try for ever.
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
    """The machine does not let this process have a network of its own; says what would."""


def enter_own_network(pods: str) -> None:
    """Move this thread, and what it starts, into a new network with loopback alone, to which `pods` belongs, too.

    Call it before other threads are started.

    Raises:
        NoNetworkError: neither root nor a user namespace is to be had.
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
    network = ipaddress.IPv4Network(pods)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        # On loopback the kernel takes the whole network of an address for local.
        _set(control, _SIOCSIFADDR, network.network_address + 1)
        _set(control, _SIOCSIFNETMASK, network.netmask)


def _set(control: socket.socket, request: int, address: ipaddress.IPv4Address) -> None:
    family = struct.pack("=HH4s8x", socket.AF_INET, 0, address.packed)
    fcntl.ioctl(control, request, struct.pack("16s16s", b"lo:pods", family))
