"""The simulated network between workers, and short texts of messages for the trace.

Messages are sent to an address, or to a life of a peer. Their arrival is random: also late, twice, and in the next life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim_world import MS, US, Host, World

from longshore_wire.effects import PeerId
from longshore_wire.peer_messages import PEER, Attach, PeerMessage, Ping, Pong

if TYPE_CHECKING:
    from sim_worker import Worker


class Net:
    """See the module. A message to an ended life reaches the life that has its name now."""

    def __init__(self, world: World, hosts: dict[str, Host], *, codec: bool) -> None:
        self.world = world
        self._hosts = hosts
        self._codec = codec

    def post(
        self, sender: Worker, peer: PeerId, message: PeerMessage, *, address: str = "", receiver: Worker | None = None
    ) -> None:
        """Send one message."""
        world = self.world
        world.counts["messages"] += 1
        if not isinstance(message, Ping | Pong):
            world.counts["attaches" if isinstance(message, Attach) else "words"] += 1
        label = peer.path
        delays = world.chance.message(sender.label, label)
        if world.trace is not None and not isinstance(message, Ping | Pong):
            note = "" if len(delays) == 1 else " (lost)" if not delays else f" ({len(delays)} times)"
            world.say(repr(sender), f"to {label}: {brief(message)}{note}")
        if self._codec:
            message = PEER.decode(PEER.encode(message))
        for delay_ns in delays:
            world.at(delay_ns, self._arrive, sender, address, receiver, message)

    def _arrive(self, sender: Worker, address: str, receiver: Worker | None, message: PeerMessage) -> None:
        world = self.world
        if address:
            receiver = world.listeners.get(address)
        elif receiver is not None and not receiver.alive:
            receiver = world.lives.get(receiver.peer)
        if receiver is None or not receiver.alive or not sender.host.reaches(receiver.host):
            return
        if world.trace is not None and not isinstance(message, Ping | Pong):
            world.say(repr(receiver), f"hears {brief(message)} of {sender!r}")
        receiver.deliver(receiver.hear, sender, message)

    def probe(self, asker: Worker, address: str, answered: Callable[[bool], None]) -> None:
        """Ask the host of an address whether a process listens there; a host that is cut off does not answer."""
        self.world.at(100 * US, self._probed, asker, address, answered)

    def _probed(self, asker: Worker, address: str, answered: Callable[[bool], None]) -> None:
        listens = address in self.world.listeners
        if asker.host.reaches(self._hosts[address.partition(":")[0]]):
            self.world.say(repr(asker), f"{'finds a listener' if listens else 'is refused'} at {address}")
            self.world.at(100 * US, asker.deliver, answered, listens)


def life(epoch: int) -> str:
    """Return an epoch in few digits."""
    return f"{epoch // MS % 1_000_000}"


def brief(message: PeerMessage) -> str:
    """Return a message in one short line."""
    name, pair = type(message).__name__, getattr(message, "pair", None)
    if pair is None:
        return f"{name}({life(getattr(message, 'epoch', 0))})"
    shown = [f"room {pair.key.room} {pair.source_rank}>{pair.target_rank}"]
    shown.append(f"{life(pair.source_epoch)}>{life(pair.target_epoch)}")
    names = ("slab", "slab_count", "ready_count", "total_tokens", "offset_bytes", "generation", "reason")
    shown += [f"{each} {getattr(message, each)!s}" for each in names if hasattr(message, each)]
    return f"{name}({', '.join(shown)})"
