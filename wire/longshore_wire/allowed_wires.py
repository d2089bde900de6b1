"""Which wires may carry bytes between peers (`transfer.wires`), and what is said of one that may not. Pure.

Called by both sides of a pair: the source holds every write of a transport to it, a target what it claims; by readiness and by status.
Way DIRECT needs no wire: a worker copies into pages of its own node that it has mapped, and no transport takes part. So the list is
not asked there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from longshore_wire.effects import PeerId
from longshore_wire.names import ENVIRONMENT_PREFIX, UNKNOWN_WIRE, WIDER_WIRES
from longshore_wire.plan import Way

_TCP = "TCP"
# Only memory of GPUs travels over these; a self-test, which moves the host's, never shows them.
_GPU_WIRES = frozenset({"CudaIPC", "NVLink"})
_MAKE_THERE = "give the agents what such a wire needs (its NIC or GPUs)"
_LIST = f"transfer.wires ({ENVIRONMENT_PREFIX}WIRES)"


@dataclass(frozen=True, slots=True)
class AllowedWires:
    """The list as names; empty: any wire."""

    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is a list at all."""
        return bool(self.names)

    def holds(self, wire: str) -> bool:
        """Whether bytes may travel over a wire. One that was not found out is on no list; CudaIPC allows NVLink, one kind of it."""
        return not self.names or wire in self.names or WIDER_WIRES.get(wire) in self.names

    def fault(self, wire: str, source: PeerId, target: PeerId, failure: str = "") -> str:
        """Return why no transport may write from `source` to `target` over `wire`; empty: it may.

        Args:
            failure: why the probe failed, if it did: nobody knows the wire then.
        """
        if self.holds(wire):
            return ""
        between = f"prefill {_name(source)} reaches decode {_name(target)}"
        if wire == UNKNOWN_WIRE:
            found = f"{between} over a wire that no probe could name{f' ({failure})' if failure else ''}"
            way_out = "or leave the list empty to allow any wire"
        else:
            found = f"{between} over {wire}"
            way_out = f"or add {wire} to the list"
        return f"{found}, and {_LIST} allows only {self}: {_MAKE_THERE}, {way_out}"

    def self_test_fault(self, wire: str) -> str:
        """Return why no peer can be reached over an allowed wire, as far as the wire of a self-test proves that; or nothing.

        It moves the host's memory inside one host, where a transport takes shared memory though it would take RDMA to another
        host, and says nothing of GPUs. Only TCP tells: it is the last that a transport takes, inside a host and between hosts.
        """
        if self.holds(wire) or wire != _TCP or _GPU_WIRES.intersection(self.names):
            return ""
        return (
            f"it took {wire} inside this host, so nothing faster is there for it, and {_LIST} allows only {self}: "
            f"{_MAKE_THERE}, or add {wire} to the list"
        )

    def __str__(self) -> str:
        """Return the names for people."""
        return ", ".join(sorted(self.names))


def needs_wire(ways: Collection[str]) -> bool:
    """Whether a transport serves a peer with which rooms have gone these ways so far, as status names them; none yet: it may."""
    return set(ways) != {Way.DIRECT.name.lower()}


def _name(peer: PeerId) -> str:
    return f"{peer.instance} rank {peer.rank}"
