"""Checks wires against the list of allowed ones (`transfer.wires`), and words the errors. Pure.

Called by both sides of a pair, by readiness and by status. The source checks every write of a transport, the target every
claim. The list does not apply to way DIRECT, which needs no wire: a worker copies into pages of its own node that it has
mapped, without a transport.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from longshore_wire.effects import PeerId
from longshore_wire.names import ENVIRONMENT_PREFIX, UNKNOWN_WIRE, WIDER_WIRES
from longshore_wire.plan import Way

_TCP = "TCP"
# Only GPU memory uses these. A self-test, which moves host memory, never finds them.
_GPU_WIRES = frozenset({"CudaIPC", "NVLink"})
_MAKE_THERE = "give the agents what such a wire needs (its NIC or GPUs)"
_LIST = f"transfer.wires ({ENVIRONMENT_PREFIX}WIRES)"


@dataclass(frozen=True, slots=True)
class AllowedWires:
    """The list of names; empty allows any wire."""

    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is a list."""
        return bool(self.names)

    def holds(self, wire: str) -> bool:
        """Whether a wire is allowed. An unknown wire is on no list; CudaIPC includes NVLink."""
        return not self.names or wire in self.names or WIDER_WIRES.get(wire) in self.names

    def fault(self, wire: str, source: PeerId, target: PeerId, failure: str = "") -> str:
        """Return why no transport may write from `source` to `target` over `wire`; empty if it may.

        Args:
            failure: why the probe failed; empty if it did not. The wire is unknown after a failure.
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
        """Return why no peer can be reached over an allowed wire, if the wire of a self-test proves it; else an empty text.

        A self-test moves host memory within one host, where a transport uses shared memory even if it would use RDMA
        to another host. Only TCP is proof: a transport uses it as its last choice, within a host and between hosts.
        """
        if self.holds(wire) or wire != _TCP or _GPU_WIRES.intersection(self.names):
            return ""
        return (
            f"it took {wire} inside this host, so nothing faster is there for it, and {_LIST} allows only {self}: "
            f"{_MAKE_THERE}, or add {wire} to the list"
        )

    def __str__(self) -> str:
        """Return the names for messages."""
        return ", ".join(sorted(self.names))


def needs_wire(ways: Collection[str]) -> bool:
    """Whether a peer needs a transport, by the ways of its rooms so far (status names). Without rooms it may need one."""
    return set(ways) != {Way.DIRECT.label}


def _name(peer: PeerId) -> str:
    return f"{peer.instance} rank {peer.rank}"
