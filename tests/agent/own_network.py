"""Runs a test in separate network namespaces: one host, and a second one on demand.

A test marked `own_network` runs in a second pytest inside new namespaces, so it can use only pytest's own fixtures. `there`
runs a function on the second host. The test may filter and change the network of both hosts.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

# Addresses of this host: those of INTERFACE, first HERE, and one of another interface.
HERE, SECOND_OF_HERE, STRANGER, ALSO_HERE = "10.77.0.1", "10.77.0.3", "10.77.0.9", "10.79.0.1"
HERE_IPV6, STRANGER_IPV6 = "fd77::1", "fd77::9"
INTERFACE = "own-here"
# Addresses of the other host, to which INTERFACE is connected.
THERE, STRANGER_THERE, THERE_IPV6 = "10.77.0.2", "10.77.0.8", "fd77::2"
_FAR_INTERFACE = "own-there"
_INSIDE = "OWN_NETWORK"
_LIMIT_S = 800.0
_JOIN_LIMIT_S = 90.0
_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x200, 0x20000, 0x40000000
# UCX lists the interfaces in sysfs. A sysfs mount shows those of the namespace that mounted it.
_NEW_SYSFS = "mount -t sysfs none /sys && ip link set lo up"
_PREPARE = f"""
set -e
{_NEW_SYSFS}
ip link add {INTERFACE} type veth peer name {_FAR_INTERFACE}
ip link add own-also type veth peer name own-end
for one in {HERE} {SECOND_OF_HERE} {STRANGER}; do ip addr add $one/24 dev {INTERFACE}; done
for one in {STRANGER_IPV6} {HERE_IPV6}; do ip addr add $one/64 dev {INTERFACE} nodad; done
ip addr add {ALSO_HERE}/24 dev own-also
for one in {INTERFACE} {_FAR_INTERFACE} own-also own-end; do ip link set $one up; done
exec "$@"
"""


def inside() -> bool:
    """Whether this process is on such a host."""
    return _INSIDE in os.environ


def there(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function on the other host; its processes and sockets stay there."""
    namespaces = _other_host()
    with ThreadPoolExecutor(1, initializer=_go, initargs=(namespaces,)) as other:
        return other.submit(function, *arguments).result()


def run(item: pytest.Item) -> None:
    """Run one test inside new namespaces; if it fails, fail with its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{Path(item.path)}::{item.name}"]
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _PREPARE, "sh", *command],
        env=os.environ | {_INSIDE: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_LIMIT_S,
        text=True,
        check=False,
    )
    if ended.returncode:
        pytest.fail(f"in a network of its own:\n{ended.stdout}", pytrace=False)


@functools.cache
def _other_host() -> Path:
    """Start the other host once; return the path of its namespaces. A process holds them until this one ends."""
    command = ["unshare", "--net", "--mount", "sh", "-c", f"{_NEW_SYSFS} && echo ready && exec cat"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
    _ip("link", "set", _FAR_INTERFACE, "netns", str(holder.pid))
    namespaces = Path(f"/proc/{holder.pid}/ns")
    with ThreadPoolExecutor(1, initializer=_go, initargs=(namespaces,)) as other:
        for address, options in ((f"{THERE}/24", ()), (f"{STRANGER_THERE}/24", ()), (f"{THERE_IPV6}/64", ("nodad",))):
            other.submit(_ip, "address", "add", address, "dev", _FAR_INTERFACE, *options).result()
        other.submit(_ip, "link", "set", _FAR_INTERFACE, "up").result()
        # Resolve the neighbour's address first, so that later connections do not include that time.
        for here in (HERE, HERE_IPV6):
            family = socket.AF_INET6 if ":" in here else socket.AF_INET
            with socket.create_server((here, 0), family=family) as listener:
                other.submit(socket.create_connection, listener.getsockname()[:2], _JOIN_LIMIT_S).result().close()
    # Kept with the answer, so that its pipe stays open.
    _holders.append(holder)
    return namespaces


_holders: list[subprocess.Popen[bytes]] = []


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _go(namespaces: Path) -> None:
    """Move this thread to the other host."""
    library = ctypes.CDLL(None, use_errno=True)
    # A thread that shares its root with others cannot change its mount namespace.
    _check(library.unshare(_CLONE_FS))
    for name, kind in (("mnt", _CLONE_NEWNS), ("net", _CLONE_NEWNET)):
        with (namespaces / name).open("rb") as namespace:
            _check(library.setns(namespace.fileno(), kind))


def _check(said: int) -> None:
    if said:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
