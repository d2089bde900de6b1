"""Starts Mooncake's engines, for host or GPU memory, and says which peers they reach.

Only this file imports mooncake and sets its environment.

Called by mooncake.py. The library chooses its transport only by the environment at the time when an engine is made. It
ignores the protocol argument and then writes over TCP. So this module sets the environment, and refuses by name the
variables that would select another transport. How that was found: docs/design/2026-11-21-mooncake.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import ipaddress
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports.data_ports import DataPorts
from longshore_agent.transports.own_network import Address, host_identity, listening_sockets
from longshore_agent.transports.state import Metadata
from longshore_spec import distribution
from longshore_wire.errors import Reason

# Variables that must not be set for GPU memory, and the library's silent behaviour if they are.
_REFUSED = {
    "MC_FORCE_TCP": "move it over TCP",
    "MC_FORCE_SHM": "look for the host's shared memory",
    "MC_USE_TENT": "take another engine of its own",
    "MC_USE_TEV1": "take another engine of its own",
    "MC_SLICE_TIMEOUT": "call copies failed that still run",
}
# Where pip puts CUDA's runtime, in the folders of the package `nvidia`.
_RUNTIME = Path("cu13", "lib", "libcudart.so.13")
# Sleep of the listener of an engine that only writes. An engine that ends waits for it, with Python's lock held.
_LISTENER_SLEEP_US = 50_000
_PORT_MAX = 65535
_LOG_LEVEL = "ERROR"
# Only one thread may stand in for the process's stderr.
_HOLDS_STDERR = threading.Lock()
# Lines that the library writes at each start: it looks for its own segment before it makes one.
_USUAL_LINES = (b"Logging before InitGoogleLogging()", b"Local segment descriptor not found")


class MooncakeMetadata(Metadata, frozen=True, array_like=True):
    """A worker's metadata for peers that write to it.

    Attributes:
        device_index, device: index and UUID of the GPU whose memory is registered; -1 and empty: host memory.
    """

    host: str
    port: int
    regions: tuple[tuple[int, int], ...]  # (address, bytes)
    device_index: int = -1
    device: str = ""


def reach_fault(peer: MooncakeMetadata, device_index: int) -> str:
    """Return why a peer's memory cannot be written from that of `device_index` (-1: the host's); empty if it can.

    Workers of one agent may still copy directly.
    """
    if (peer.device_index < 0) != (device_index < 0):
        ours, theirs = ("the host", "a GPU") if device_index < 0 else ("a GPU", "the host")
        return (
            f"peer {peer.name!r} has memory of {theirs}, this worker of {ours}: Mooncake moves between two of a kind; use NIXL, "
            "or have one agent serve both engines"
        )
    if device_index >= 0 and peer.kernel != host_identity():
        return f"peer {peer.name!r} is on another host: Mooncake moves GPUs' memory inside one only; use NIXL"
    return ""


def remote_address(host: str, port: int, earlier_lives: int) -> str:
    """Return a peer's address for Mooncake. Raises PeerMetadataError.

    Args:
        host, port: from the peer's metadata.
        earlier_lives: number of other workers that had this address before. Mooncake never contacts a known address
            anew; leading zeros of the port make it another one.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        raise PeerMetadataError(f"peer metadata has the host {host[:64]!r}: an address is needed") from error
    if address.is_unspecified or address.is_multicast or not 1 <= port <= _PORT_MAX:
        raise PeerMetadataError(f"peer metadata has the address {address} port {port}, which no worker can have")
    return f"{in_brackets(address)}:{'0' * earlier_lives}{port}"


def in_brackets(address: Address) -> str:
    """Return an address in the form that Mooncake expects before a port."""
    return f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004


def start_on_host(ports: DataPorts) -> Any:
    """Return an engine that moves host memory over TCP; `ports` takes over its ports. Raises TransportError."""
    # The promises of mooncake.py are proven over TCP only. With RDMA devices the library would use those.
    os.environ.setdefault("MC_FORCE_TCP", "1")
    if os.environ.get("MC_TCP_PROTO"):
        raise TransportError(
            "MC_TCP_PROTO is set: with the old protocol Mooncake calls a write complete before its bytes are there; unset it",
            reason=Reason.UNSUPPORTED,
        )
    library = _load(f"install Debian's libcurl4 libibverbs1 libnuma1; {distribution.to_install('mooncake')}")
    return _start(library, "tcp", ports)


def start_on_device(ports: DataPorts) -> Any:
    """Return an engine that moves GPUs' memory inside this host over CUDA IPC, and nothing else; see `start_on_host`.

    Raises:
        TransportError: UNSUPPORTED: the wheel has no such transport, or the environment asks for another.
    """
    for name, what in _REFUSED.items():
        if os.environ.get(name):
            raise TransportError(
                f"{name} is set: of a GPU's memory Mooncake would {what}; unset it", reason=Reason.UNSUPPORTED
            )
    os.environ["MC_INTRANODE_NVLINK"] = "1"
    _preload_runtime()
    library = _load(
        "install torch or nvidia-cuda-runtime, and Debian's libcurl4 libibverbs1 ibverbs-providers libnuma1; "
        f"{distribution.to_install('mooncake-cuda13')}"
    )
    if not getattr(library, "SUPPORT_INTRA_NVLINK", False):
        raise TransportError(
            "the Mooncake that is installed has no NVLink transport: use NIXL, or remove the other Mooncake wheels, which hold "
            f"the same package, and {distribution.to_install('mooncake-cuda13')}",
            reason=Reason.UNSUPPORTED,
        )
    return _start(library, "nvlink_intra", ports)


def start_writer(ports: DataPorts) -> Any:
    """Return an engine as `start_on_device` that serves no peer. It writes to one peer, whose memory its end unmaps."""
    engine = start_on_device(ports)
    _hasten(int(engine.get_rpc_port()))
    return engine


def _load(way_out: str) -> Any:
    # The library reads it when it loads. It would log several INFO lines for each write.
    os.environ.setdefault("MC_LOG_LEVEL", _LOG_LEVEL)
    try:
        import mooncake.engine
    except ImportError as error:
        raise TransportError(f"Mooncake does not load: {way_out} ({error})", reason=Reason.UNSUPPORTED) from error
    return mooncake.engine


def _start(library: Any, protocol: str, ports: DataPorts) -> Any:
    host = in_brackets(ports.address)
    # It always listens on every address.
    with ports.opening(), _without_usual_lines():
        engine = library.TransferEngine()
        said = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    if said:
        raise TransportError(f"Mooncake does not start on {host}: it says {said}; its own lines are in the log")
    return engine


@contextlib.contextmanager
def _without_usual_lines() -> Iterator[None]:
    """Hold what is written to stderr meanwhile, and then write all of it but the lines of each healthy start.

    If the library ends the process meanwhile, they are lost: MC_LOG_LEVEL=INFO shows them.
    """
    if os.environ.get("MC_LOG_LEVEL") != _LOG_LEVEL:
        yield
        return
    with _HOLDS_STDERR, os.fdopen(os.dup(2), "wb", 0) as stderr, os.fdopen(os.memfd_create("stderr"), "w+b", 0) as held:
        sys.stderr.flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr.fileno(), 2)
            held.seek(0)
            lines = held.read().splitlines(keepends=True)
            stderr.write(b"".join(line for line in lines if not any(usual in line for usual in _USUAL_LINES)))


def _preload_runtime() -> None:
    """Load CUDA's runtime from pip's folders, since the library asks for it by a name that no search path has."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        path = Path(folder) / _RUNTIME
        if path.exists():
            ctypes.CDLL(str(path))
            return


def _hasten(port: int) -> None:
    """Let the listener on a port of this process wake often. If the port is not found, its end takes up to a second."""
    with contextlib.suppress(OSError):
        for _, listener in listening_sockets():
            if listener.getsockname()[1] == port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, _LISTENER_SLEEP_US))
                return
