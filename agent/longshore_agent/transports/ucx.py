"""How UCX is set up under NIXL: what it may use, where it listens, and who tells of a peer that has died.

Called by nixl.py; the one place that speaks UCX's environment. What was measured, with UCX 1.23 of NIXL 1.5.1:

- UCX listens for TCP on one address of each network interface, and knows no authentication: a PUT names an address of the
  process and is carried out. So it is given one interface, that of the agent's own address.
- It takes the first address of an interface, whatever else the interface has. `data_ports` sees to it that this is ours.
- When a connection ends it connects anew, by a call that waits: where nothing answers at the address any more, as a replaced pod's,
  the caller stood still for up to 134 s. So it is told not to wait (`UCX_TCP_CONN_NB`).
- With `ucx_error_handling_mode` at `peer`, its default, NIXL needs a transport that tells of dead peers, and inside a host that
  is TCP alone: without it NIXL does not start. With `none` it starts without a listener, and 64 MiB between two processes take as
  long as before. A write to a process that has died still fails; one to a process that hangs ends when the peer is disconnected.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from longshore_agent.transports.base import Wire
from longshore_agent.transports.own_address import Address, interface_of

_INFINIBAND_DIRECTORY = Path("/sys/class/infiniband")
_PEER, _NONE = "peer", "none"
# Names of UCX for what opens ports to a network.
_TCP, _RDMA = "tcp", "ib"


class UcxSetup(NamedTuple):
    """What NIXL's UCX backend is asked for.

    Attributes:
        excluded: UCX's transports that it may not use.
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
        """Whether it reaches peers of this host alone."""
        return self.error_handling == _NONE


# By whether TCP and RDMA may carry bytes. Shared memory and GPUs' own wires open no port and are never left out: UCX needs them
# beside the others, and what really carries bytes is found out and held to the list anyway.
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
        rdma_devices: those of this machine.
        fabric: GPUs' memory can be reached by NVLink from other nodes: UCX then needs TCP for what it says beside the bytes.
    """
    joins_nodes = fabric and not {Wire.NVLINK, Wire.CUDA_IPC}.isdisjoint(wires)
    tcp = not wires or Wire.TCP in wires or (joins_nodes and Wire.RDMA not in wires)
    # Without a device nothing would tell of dead peers, and UCX would not start.
    rdma = not wires or (Wire.RDMA in wires and (tcp or bool(rdma_devices)))
    return _SETUPS[tcp, rdma]


def environment(setup: UcxSetup, address: Address, rdma_devices: Collection[str] = ()) -> dict[str, str]:
    """Return UCX's variables for a worker that peers reach at `address`. Raises TransportError: no interface has it."""
    variables = {"UCX_TLS": f"^{','.join(setup.excluded)}"} if setup.excluded else {}
    if setup.listens:
        # The list holds for network cards as well, which are found by names of their own.
        variables["UCX_NET_DEVICES"] = ",".join((interface_of(address), *rdma_devices))
        variables["UCX_TCP_AF_PRIO"] = "inet" if address.version == 4 else "inet6"  # noqa: PLR2004
        variables["UCX_TCP_CONN_NB"] = "y"
    return variables


def find_rdma_devices(address: Address) -> tuple[str, ...]:
    """Return the ports of this machine's RDMA devices, as UCX names them, that may serve an agent at `address`.

    None serves a loopback address: whoever reaches the fabric would reach what this machine alone is to reach.
    """
    if address.is_loopback:
        return ()
    ports = _INFINIBAND_DIRECTORY.glob("*/ports/*")
    return tuple(sorted(f"{port.parent.parent.name}:{port.name}" for port in ports))


@contextlib.contextmanager
def told(variables: Mapping[str, str]) -> Iterator[None]:
    """Let UCX, which reads its environment when an agent is made, see `variables`. Somebody's own settings count more."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
