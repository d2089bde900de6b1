"""What a worker knows of its peers for its transport's sake: their names there, what they attached, and the wires to them.

Used by `moving`. Asks no transport; of two halves of one peer each has its own entry.
"""

from __future__ import annotations

from longshore_agent.errors import TransportError
from longshore_agent.path.jobs import ProbeJob, Results, WriteJob, still_wanted
from longshore_agent.transports.base import Wire
from longshore_wire.allowed_wires import AllowedWires
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import Attach
from longshore_wire.peers import Peer

Address = tuple[Half, PeerId]


class PeerBook:
    """See the module. Also holds the slabs that wait for a wire to be found out.

    Attributes:
        attached: what peers said of themselves.
    """

    def __init__(self, here: PeerId, allowed: AllowedWires, results: Results) -> None:
        """Know nobody.

        Args:
            allowed: wires that bytes may take; all, if there are none: then no slab waits.
            results: answers slabs that nobody will write.
        """
        self.attached: dict[Address, Attach] = {}
        self._here = here
        self._allowed = allowed
        self._results = results
        self._names: dict[Address, str] = {}
        self._peers: dict[str, PeerId] = {}
        self._wires: dict[Address, str] = {}
        self._faults: dict[Address, str] = {}
        self._unreached: dict[Address, TransportError] = {}
        self._waiting: dict[Address, list[WriteJob]] = {}

    def add(self, half: Half, peer: PeerId, name: str, attach: Attach) -> bool:
        """Note a peer by its name at the transport; return whether it is new."""
        address = (half, peer)
        self._unreached.pop(address, None)
        first = address not in self.attached
        self._names[address], self._peers[name] = name, peer
        self.attached[address] = attach
        return first

    def remove(self, half: Half, peer: PeerId) -> str | None:
        """Forget a half of a peer. Return the name that nobody has any more; None: there was none, or the other half has it."""
        address = (half, peer)
        self.attached.pop(address, None)
        self._wires.pop(address, None)
        self._faults.pop(address, None)
        self._unreached.pop(address, None)
        for job in self._waiting.pop(address, []):
            # Nobody learns the wire to it any more: its rooms end when the last of their slabs is answered.
            self._results.drop(job)
        name = self._names.pop(address, None)
        if name is None or name in self._names.values():
            return None
        self._peers.pop(name, None)
        return name

    def unreached(self, half: Half, peer: PeerId, error: TransportError) -> None:
        """The transport cannot serve a peer that has attached: rooms that come later must hear why."""
        self._unreached[half, peer] = error

    def why_unreached(self, peer: PeerId) -> TransportError:
        """Return why the transport does not know a peer to which this source is to write."""
        text = f"the transport does not know rank {peer.rank} of {peer.instance}"
        return self._unreached.get((Half.SOURCE, peer)) or TransportError(text)

    def name(self, half: Half, peer: PeerId) -> str | None:
        """Return a peer's name at the transport; None: it does not know it."""
        return self._names.get((half, peer))

    def named(self, name: str) -> PeerId | None:
        """Return who has a name at the transport."""
        return self._peers.get(name)

    # -- wires -----------------------------------------------------------------------------------------------------

    def wire(self, half: Half, peer: PeerId) -> str:
        """Return what bytes to a peer travel over, as far as it is known."""
        return self._wires.get((half, peer), Wire.UNKNOWN.value)

    def fault(self, peer: PeerId) -> str:
        """Return why no transport may carry bytes of this source to a peer; empty: one may, or nothing is known yet."""
        return self._faults.get((Half.SOURCE, peer), "")

    def wire_fault(self, half: Half, known: Peer) -> str:
        """Return why no transport may carry bytes between a peer and this worker, as `fault`."""
        if half is Half.SOURCE:
            return self.fault(known.peer)
        return self._allowed.fault(known.wire, known.peer, self._here) if known.wire_epoch == known.epoch else ""

    def waits(self, peer: PeerId, job: WriteJob) -> bool:
        """Whether a slab must wait until the wire to a peer is known: it is kept here then."""
        address = (Half.SOURCE, peer)
        if not self._allowed or address in self._wires:
            return False
        self._waiting.setdefault(address, []).append(job)
        return True

    def drop_given_up(self) -> None:
        """Jobs have been given up: those that wait for a wire are answered."""
        for address, waiting in self._waiting.items():
            self._waiting[address] = still_wanted(waiting, self._results.drop)

    def found(self, job: ProbeJob, wire: str, error: str) -> list[WriteJob] | None:
        """The wire to a peer was found out, or could not be. Return the slabs that waited and may go; None: it is another peer now."""
        address = (Half.SOURCE, job.peer)
        attach = self.attached.get(address)
        if attach is None or attach.epoch != job.epoch:
            return None
        self._wires[address] = wire
        forbidden = self._faults[address] = self._allowed.fault(wire, self._here, job.peer, error)
        waiting = self._waiting.pop(address, [])
        if not forbidden:
            return waiting
        for each in waiting:
            self._results.drop(each)
        return []
