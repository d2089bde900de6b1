"""Keeps each peer's name at the transport and its Attach message.

Called by `moving`. Calls no transport. The two halves of a peer have separate entries under one name.
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
        attached: the newest Attach of each half of a peer.
    """

    def __init__(self) -> None:
        """Begin with no peer."""
        self.attached: dict[Address, Attach] = {}
        self._names: dict[Address, str] = {}
        self._peers: dict[str, PeerId] = {}
        self._unreached: dict[Address, TransportError] = {}

    def add(self, half: Half, peer: PeerId, name: str, attach: Attach) -> bool:
        """Record a peer's name at the transport; return whether it is new."""
        address = (half, peer)
        self._unreached.pop(address, None)
        first = address not in self.attached
        self._names[address], self._peers[name] = name, peer
        self.attached[address] = attach
        return first

    def remove(self, half: Half, peer: PeerId) -> str | None:
        """Forget a half of a peer. Return the name to disconnect; None: it had none, or the other half uses it."""
        address = (half, peer)
        self.attached.pop(address, None)
        self._unreached.pop(address, None)
        name = self._names.pop(address, None)
        if name is None or name in self._names.values():
            return None
        self._peers.pop(name, None)
        return name

    def unreached(self, half: Half, peer: PeerId, error: TransportError) -> None:
        """Record why the transport cannot serve an attached peer, for the failures of later rooms."""
        self._unreached[half, peer] = error

    def why_unreached(self, peer: PeerId) -> TransportError:
        """Return the error for a slab whose target has no name at the transport."""
        text = f"the transport does not know rank {peer.rank} of {peer.instance}"
        return self._unreached.get((Half.SOURCE, peer)) or TransportError(text)

    def name(self, half: Half, peer: PeerId) -> str | None:
        """Return a peer's name at the transport; None: it has none."""
        return self._names.get((half, peer))

    def named(self, name: str) -> PeerId | None:
        """Return the peer with this name at the transport; None: no peer has it."""
        return self._peers.get(name)
