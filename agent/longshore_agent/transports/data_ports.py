"""Protects the ports on which a transport's library listens: binds them, or admits only attached peers.

Made by the worker, which sets the admitted addresses and asks for the status. Transports report when their library
opens ports. Neither UCX nor Mooncake has authentication: a process that reaches such a port can write memory of this
one. So each port is

- bound to the agent's own address, if the library can be told to;
- otherwise restricted to the loopback interface, if the agent is to be reached only there;
- closed to all but the addresses of attached peers, if the kernel lets us attach a filter. Linux required no privilege
  for that until June 2026 ("tcp: restrict SO_ATTACH_FILTER to priv users", in stable kernels, too), and requires CAP_NET_ADMIN
  since.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from longshore_agent.errors import TransportError
from longshore_agent.transports.own_network import (
    Address,
    borrowed,
    descriptors_of,
    interface_of,
    listening_sockets,
    number_of,
    numeric,
    places,
    read_address,
)
from longshore_spec.names import Protection
from longshore_wire.errors import Reason

_log = logging.getLogger(__name__)

# Numbers of <linux/filter.h> and <asm/socket.h>; an instruction is (code, jump if true, jump if false, operand).
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_SO_MEMINFO, _MEMINFO, _DROPS = 55, struct.Struct("9I"), 8
_LOAD_WORD, _LOAD_BYTE, _LOAD_KEPT, _KEEP, _AND, _IF_EQUAL, _SKIP, _RETURN = (
    0x20,
    0x30,
    0x60,
    0x02,
    0x54,
    0x15,
    0x05,
    0x06,
)
_INSTRUCTION = struct.Struct("HBBI")
_PROGRAM = struct.Struct("HL")
# Loads from these offsets read the packet's IP header, and the kernel's metadata of the packet.
_NETWORK_HEADER = -0x100000 & 0xFFFFFFFF
_PROTOCOL = -0x1000 & 0xFFFFFFFF
_FLAGS_OFFSET, _SYN, _SYN_ACK = 13, 0x02, 0x12
_IPV4 = 0x0800
_IPV4_SOURCE_OFFSET, _IPV6_SOURCE_OFFSET = 12, 8
_PASS, _DROP = 0xFFFFFFFF, 0

Instruction = tuple[int, int, int, int]


class DataPort(NamedTuple):
    """One port. `refused_count`: connections that the kernel has dropped before the library saw them."""

    address: str
    port: int
    protection: Protection
    refused_count: int


@dataclass
class _Opened:
    """A port that the library has opened, by its descriptor; `inode` shows whether that is still the same socket."""

    number: int
    inode: int
    is_lasting: bool
    name: str = ""
    is_filtered: bool = False


class DataPorts:
    """The data ports of one transport; every method may be called from any thread.

    Checking an open port needs no descriptor, so it works in a worker that has none left.

    Args:
        host: the agent's own address, the only one at which the library should listen.
        allow_open: True: accept a port that other addresses can reach.
    Raises:
        TransportError: there is no such address.
    """

    def __init__(self, host: str = "127.0.0.1", *, allow_open: bool = False) -> None:
        self.address = numeric(host)
        self._allow_open = allow_open
        self._lock = threading.Lock()
        self._opened: list[_Opened] = []
        # None: `admit` was not called yet, so every address may connect.
        self._admitted: frozenset[Address] | None = None
        self._may_filter = True
        self._lost = ""
        # Addresses of this machine, as last listed.
        self._own = frozenset(place.address for place in places())

    @contextlib.contextmanager
    def opening(self, *, is_lasting: bool = False) -> Iterator[None]:
        """Take over the ports that the library opens inside this context.

        Args:
            is_lasting: True: the library keeps them open until it is closed; see `lost`.
        Raises:
            TransportError: more addresses can reach one than allowed, or no descriptor is left to find them.
        """
        before = set(_listening())
        yield
        with self._lock:
            new = {inode: number for inode, number in _listening().items() if inode not in before}
            for inode, number in new.items():
                opened = _Opened(number, inode, is_lasting)
                self._opened.append(opened)
                with borrowed(number, inode) as port:
                    if port is not None:
                        opened.name = f"{_bound(port)} port {port.getsockname()[1]}"
                        self._close_to_strangers(opened, port)

    def admit(self, hosts: Collection[str]) -> None:
        """Let only these addresses connect from now on, if the kernel allows a filter. Existing connections stay.

        Args:
            hosts: numeric addresses; names are ignored. Empty: admit none. Before the first call every address may
                connect.
        """
        with self._lock:
            admitted = frozenset(address for host in hosts if (address := number_of(host)) is not None)
            if not admitted.isdisjoint(self._own_addresses()):
                # By default, a socket connects to an address of its own machine from that same address.
                admitted |= {self.address}
            if admitted == self._admitted:
                return
            for opened, port in self._ports():
                self._filter(opened, port, admitted)
            self._admitted = admitted

    def describe(self) -> tuple[DataPort, ...]:
        """Return the ports that are open now."""
        with self._lock:
            found = (self._described(opened, port) for opened, port in self._ports())
            return tuple(each for each in found if each is not None)

    def lost(self) -> str:
        """Name a lasting port that the library has closed, so that no new peer can write; empty: none.

        UCX closes a listening socket when it cannot accept a connection, for example without a free descriptor.
        """
        with self._lock:
            for _ in self._ports():
                pass
            return self._lost

    def _described(self, opened: _Opened, port: socket.socket) -> DataPort | None:
        try:
            return DataPort(str(_bound(port)), port.getsockname()[1], self._protection(opened, port), _drops(port))
        except OSError:
            # The library's own thread has closed it just now.
            return None

    def _own_addresses(self) -> frozenset[Address]:
        # Listing them needs a descriptor.
        with contextlib.suppress(TransportError):
            self._own = frozenset(place.address for place in places())
        return self._own

    def _ports(self) -> Iterator[tuple[_Opened, socket.socket]]:
        """Yield the ports that are still open, each borrowed until the next step; forget the others."""
        for opened in tuple(self._opened):
            with borrowed(opened.number, opened.inode) as port:
                if port is None:
                    self._opened.remove(opened)
                    if opened.is_lasting:
                        self._lost = f"the transport's library has closed {opened.name}: no new peer can write to it"
                else:
                    yield opened, port

    def _close_to_strangers(self, opened: _Opened, port: socket.socket) -> None:
        host, bound = self.address, _bound(port)
        if bound.is_unspecified and host.is_loopback:
            with contextlib.suppress(OSError):
                name = interface_of(host).encode() + b"\0"
                port.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        if self._admitted is not None:
            self._filter(opened, port, self._admitted)
        if bound.is_unspecified and not host.is_loopback and host != (first := _first_beside(host)):
            # This cannot be allowed: peers' filters admit the address of the control connection, and would drop our
            # data.
            raise TransportError(
                f"the transport's library connects from {first}, which is not the address that this agent was told: give the pod's own "
                "address, the first of its interface, to LONGSHORE_BIND_HOST",
                reason=Reason.UNSUPPORTED,
            )
        protection = self._protection(opened, port)
        if self._allow_open or protection in (Protection.LOOPBACK, Protection.FILTERED):
            return
        if protection is Protection.OPEN:
            text = _reached_from(host)
        else:
            text = "" if bound == host else f"listens on {bound}, which is not the address that this agent was told"
        if text:
            raise TransportError(
                f"the transport's library {text}: give the pod's own address, the first of its interface, to "
                "LONGSHORE_BIND_HOST, or accept an open data path with LONGSHORE_ALLOW_OPEN_DATA_PATH=true",
                reason=Reason.UNSUPPORTED,
            )

    def _protection(self, opened: _Opened, port: socket.socket) -> Protection:
        bound = _bound(port)
        device = port.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
        if bound.is_loopback or (device and self.address.is_loopback):
            return Protection.LOOPBACK
        if opened.is_filtered:
            return Protection.FILTERED
        return Protection.OPEN if bound.is_unspecified else Protection.BOUND

    def _filter(self, opened: _Opened, port: socket.socket, admitted: frozenset[Address]) -> None:
        """Attach a filter. If that fails, remove the old one, which would keep new peers out."""
        if not self._may_filter:
            return
        try:
            attach(port, filter_program(admitted))
            opened.is_filtered = True
        except OSError as error:
            opened.is_filtered = False
            self._may_filter = error.errno != errno.EPERM
            with contextlib.suppress(OSError):
                port.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            _log.info("the kernel takes no filter of %d addresses for data ports: %s", len(admitted), error.strerror)


def _listening() -> dict[int, int]:
    """Return descriptors of this process's listening sockets by inode. Raises TransportError: no descriptor is left."""
    try:
        return descriptors_of({inode for inode, _ in listening_sockets()})
    except OSError as error:
        raise TransportError(
            f"cannot look for the ports that the transport's library opens: {error.strerror}"
        ) from error


def filter_program(admitted: Collection[Address]) -> list[Instruction]:
    """Return a classic BPF program that drops only connection attempts from addresses other than these."""
    fourth = [
        step
        for address in sorted(admitted, key=int)
        if address.version == 4  # noqa: PLR2004
        for step in ((_IF_EQUAL, 0, 1, int(address)), (_RETURN, 0, 0, _PASS))
    ]
    sixth = [step for address in sorted(admitted, key=int) if address.version == 6 for step in _if_from(address)]  # noqa: PLR2004
    kept = [
        step
        for word in range(4)
        for step in ((_LOAD_WORD, 0, 0, _NETWORK_HEADER + _IPV6_SOURCE_OFFSET + 4 * word), (_KEEP, 0, 0, word))
    ]
    # An attempt is a SYN without ACK. Connections inherit the program, and each later packet costs four instructions.
    return [
        (_LOAD_BYTE, 0, 0, _FLAGS_OFFSET),
        (_AND, 0, 0, _SYN_ACK),
        (_IF_EQUAL, 1, 0, _SYN),
        (_RETURN, 0, 0, _PASS),
        (_LOAD_WORD, 0, 0, _PROTOCOL),
        (_IF_EQUAL, 1, 0, _IPV4),
        (_SKIP, 0, 0, len(fourth) + 2),
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _IPV4_SOURCE_OFFSET),
        *fourth,
        (_RETURN, 0, 0, _DROP),
        *kept,
        *sixth,
        (_RETURN, 0, 0, _DROP),
    ]


def attach(port: socket.socket, program: list[Instruction]) -> None:
    """Attach a program to a socket, in place of its current one. Raises OSError."""
    memory = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*each) for each in program))
    port.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM.pack(len(program), ctypes.addressof(memory)))


def _if_from(address: Address) -> list[Instruction]:
    """Return instructions that pass a packet from one IPv6 address, whose words are loaded, and otherwise continue."""
    program: list[Instruction] = []
    for word, expected in enumerate(struct.unpack(">4I", address.packed)):
        # Jump past the remaining words, two instructions each, and the return.
        program += [(_LOAD_KEPT, 0, 0, word), (_IF_EQUAL, 0, 2 * (3 - word) + 1, expected)]
    return [*program, (_RETURN, 0, 0, _PASS)]


def _reached_from(host: Address) -> str:
    """Name the networks besides that of `host` from which a port on every address can be reached; empty: none."""
    interface = interface_of(host)
    others = [
        f"{place.address} ({place.interface})"
        for place in places()
        if place.interface != interface and not (place.address.is_loopback or place.address.is_link_local)
    ]
    if host.is_loopback:
        return "listens on every address, and this kernel does not let it be given to the loopback interface alone"
    return f"listens on every address, also on {', '.join(others)}" if others else ""


def _first_beside(host: Address) -> Address:
    """Return the first address of `host`'s interface and version, from which the kernel connects to neighbours."""
    interface = interface_of(host)
    return next(
        place.address for place in places() if place.interface == interface and place.address.version == host.version
    )


def _bound(port: socket.socket) -> Address:
    return read_address(port.getsockname()[0])


def _drops(port: socket.socket) -> int:
    try:
        counts = port.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
    except OSError:
        return 0
    return int(_MEMINFO.unpack(counts)[_DROPS]) if len(counts) == _MEMINFO.size else 0
