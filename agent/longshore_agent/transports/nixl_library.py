"""Loads NIXL and starts its agents, sets up UCX for it, and packs its metadata. Only this file imports nixl.

Called by nixl.py. Only this file knows UCX's environment variables. Measured with UCX 1.23 of NIXL 1.5.1:

- UCX listens for TCP on one address of each network interface, and has no authentication: it executes a PUT to any
  address of the process. So it gets one interface, that of the agent's own address.
- It uses the first address of an interface. `data_ports` checks that this is ours.
- When a connection ends, it reconnects by a blocking call. If nothing answers at the address any more, as with a
  replaced pod, the caller was blocked for up to 134 s. So it is told not to wait (`UCX_TCP_CONN_NB`).
- With `ucx_error_handling_mode` at `peer`, its default, NIXL needs a transport that detects dead peers. Inside a host
  only TCP does, and without it NIXL does not start. With `none` it starts without a listener, and 64 MiB between two
  processes take as long as before. A write to a dead process still fails; one to a process that hangs ends when the
  peer is disconnected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports.data_ports import DataPorts
from longshore_agent.transports.own_network import Address, host_identity, interface_of
from longshore_agent.transports.state import Metadata, unseal
from longshore_spec import distribution
from longshore_wire.errors import Reason
from longshore_wire.names import Wire

_INFINIBAND_DIRECTORY = Path("/sys/class/infiniband")
_PEER, _NONE = "peer", "none"
# UCX's names of the transports that open ports to a network.
_TCP, _RDMA = "tcp", "ib"
MAGIC = b"LSNIXL01"
_NIXL_HEAD = b"nixlSerDes|Agent"


class UcxSetup(NamedTuple):
    """Settings of NIXL's UCX backend.

    Attributes:
        excluded: UCX's transports that it must not use.
        error_handling: `ucx_error_handling_mode` of the backend.
    """

    excluded: tuple[str, ...]
    error_handling: str

    @property
    def listens(self) -> bool:
        """Whether UCX opens TCP ports."""
        return _TCP not in self.excluded

    @property
    def alone(self) -> bool:
        """Whether it reaches only peers of this host."""
        return self.error_handling == _NONE


# By whether TCP and RDMA may carry bytes. Shared memory and GPUs' own wires open no port and are never left out: UCX
# needs them beside the others, and what really carries bytes is found out and held to the list anyway.
_SETUPS: Mapping[tuple[bool, bool], UcxSetup] = {
    (True, True): UcxSetup((), _PEER),
    (True, False): UcxSetup((_RDMA,), _PEER),
    (False, True): UcxSetup((_TCP,), _PEER),
    (False, False): UcxSetup((_TCP, _RDMA), _NONE),
}


def setup_for(wires: Collection[Wire], *, rdma_devices: Collection[str] = (), fabric: bool = False) -> UcxSetup:
    """Return how UCX is to be set up.

    Args:
        wires: the allowed ones; empty: any.
        rdma_devices: of this machine.
        fabric: True: other nodes can reach GPU memory over NVLink. UCX then needs TCP for its control messages.
    """
    joins_nodes = fabric and not {Wire.NVLINK, Wire.CUDA_IPC}.isdisjoint(wires)
    tcp = not wires or Wire.TCP in wires or (joins_nodes and Wire.RDMA not in wires)
    # Without a device, no transport would detect dead peers, and UCX would not start.
    rdma = not wires or (Wire.RDMA in wires and (tcp or bool(rdma_devices)))
    return _SETUPS[tcp, rdma]


def environment(setup: UcxSetup, address: Address, rdma_devices: Collection[str] = ()) -> dict[str, str]:
    """Return UCX's variables for a worker that peers reach at `address`. Raises TransportError: no interface has it."""
    variables = {"UCX_TLS": f"^{','.join(setup.excluded)}"} if setup.excluded else {}
    if setup.listens:
        # The list also restricts network cards, which have names of their own.
        variables["UCX_NET_DEVICES"] = ",".join((interface_of(address), *rdma_devices))
        variables["UCX_TCP_AF_PRIO"] = "inet" if address.version == 4 else "inet6"  # noqa: PLR2004
        variables["UCX_TCP_CONN_NB"] = "y"
    return variables


def find_rdma_devices(address: Address) -> tuple[str, ...]:
    """Return UCX's names of the RDMA ports of this machine that may serve an agent at `address`.

    No port serves a loopback address: other machines on the fabric would reach an agent that only this one may reach.
    """
    if address.is_loopback:
        return ()
    ports = _INFINIBAND_DIRECTORY.glob("*/ports/*")
    return tuple(sorted(f"{port.parent.parent.name}:{port.name}" for port in ports))


@contextlib.contextmanager
def told(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` while an agent is made, when UCX reads its environment. Variables that are set already win."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


class Envelope(Metadata, frozen=True, array_like=True):
    """A worker's metadata with that of NIXL.

    Attributes:
        blob: NIXL's metadata of the inbox.
        device_index, device: index and UUID of the GPU whose memory is registered; -1 and empty: host memory.
        alone: the worker writes only inside its host and opens no port for others.
    """

    blob: bytes
    device_index: int = -1
    device: str = ""
    alone: bool = False


def inbox_name(name: str, life: str) -> str:
    """Return the name of the NIXL agent that receives. It is new for each life: NIXL never forgets a name fully."""
    return f"{name}~{life}"


def outbox_name(inbox: str) -> str:
    """Return the name of the NIXL agent that writes, which is the sender of its notices."""
    return f"{inbox}~o"


def unpack(data: bytes) -> Envelope:
    """Return a peer's envelope. Raises PeerMetadataError."""
    envelope = unseal(MAGIC, data, Envelope)
    name = inbox_name(envelope.name, envelope.life).encode()
    if not envelope.blob.startswith(_NIXL_HEAD + struct.pack("<Q", len(name)) + name + b"|"):
        raise PeerMetadataError(f"peer metadata of {envelope.name!r} holds another NIXL agent's name")
    return envelope


def check_reach(peer: Envelope, *, alone: bool) -> None:
    """Raise TransportError if a peer and this worker cannot reach each other; see `Envelope` for `alone`."""
    if peer.alone != alone:
        fault = (
            f"one of peer {peer.name!r} and this worker may use wires inside its host alone, and the other may not: give both "
            "agents the same transfer.wires (LONGSHORE_WIRES)"
        )
    elif alone and peer.kernel != host_identity():
        fault = (
            f"peer {peer.name!r} is on another host, and this worker has only wires inside one: transfer.wires "
            "(LONGSHORE_WIRES) must list TCP, or RDMA with an RDMA device in the agent's pod"
        )
    else:
        return
    raise TransportError(fault, reason=Reason.WIRE_NOT_ALLOWED)


def unreachable(*, alone: bool) -> str:
    """Return why NIXL may not reach a peer on this host; see `Envelope` for `alone`."""
    if not alone:
        return "which may have ended"
    return (
        "which may have ended, or shares no memory with this worker: transfer.wires (LONGSHORE_WIRES) leaves only wires "
        "inside one host, because it lists neither TCP, nor RDMA with an RDMA device in the agent's pod"
    )


class Started(NamedTuple):
    """Two agents of NIXL, the errors of its calls, and whether the agents serve only peers of this host."""

    inbox: Any
    outbox: Any
    errors: tuple[type[Exception], ...]
    alone: bool


def start(
    inbox_name: str, outbox_name: str, ports: DataPorts, wires: Collection[Wire] = (), *, fabric: bool = False
) -> Started:
    """Start both agents of one transport; see `NixlTransport` for `ports`, `wires` and `fabric`.

    Raises:
        TransportError: NIXL is not installed or does not start, or it listens where it should not.
    """
    # The library reads it when it loads. It would log several INFO lines for each agent.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        import nixl
        import nixl._bindings as bindings
    except ImportError as error:
        raise TransportError(
            f"NIXL is not installed: {distribution.to_install('nixl')}", reason=Reason.UNSUPPORTED
        ) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    kinds = vars(bindings).values()
    theirs = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
    # RuntimeError: there is no plugin, or it does not start.
    errors: tuple[type[Exception], ...] = (*theirs, RuntimeError)
    rdma_devices = find_rdma_devices(ports.address)
    setup = setup_for(wires, rdma_devices=rdma_devices, fabric=fabric)

    def make(name: str) -> Any:
        agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"ucx_error_handling_mode": setup.error_handling})
        return agent

    try:
        with told(environment(setup, ports.address, rdma_devices)), ports.opening(is_lasting=True):
            return Started(make(inbox_name), make(outbox_name), errors, setup.alone)
    except errors as error:
        raise TransportError(f"NIXL does not start: {error}; its own lines are in the log") from error
