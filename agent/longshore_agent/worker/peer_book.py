"""What a worker knows of its peers for its transport's sake: their names there, and what they attached.

Used by `moving`. Asks no transport; of two halves of one peer each has its own entry.
"""

from __future__ import annotations

from longshore_agent.errors import TransportError
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import Attach

Address = tuple[Half, PeerId]


class PeerBook:
    """See the module.

    Attributes:
        attached: what peers said of themselves.
    """

    def __init__(self) -> None:
        """Know nobody."""
        self.attached: dict[Address, Attach] = {}
        self._names: dict[Address, str] = {}
        self._peers: dict[str, PeerId] = {}
        self._unreached: dict[Address, TransportError] = {}

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
        self._unreached.pop(address, None)
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
