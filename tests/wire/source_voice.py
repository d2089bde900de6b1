"""Answers the newest messages of a target's core under test, as a source does."""

from __future__ import annotations

import msgspec
from core_outputs import messages_of

from longshore_wire.effects import SECOND_NS, DrainWriter, PeerId
from longshore_wire.peer_messages import Attach, PeerMessage, Ping, Pong
from longshore_wire.target import TargetSession


def attach_to(core: TargetSession, peer: PeerId, attach: Attach, now_ns: int) -> None:
    """Answer an Attach of the core to `peer`, which it sends again if it was answered, from the address at which it dialled."""
    known = core.peers[peer]
    if known.attempt == known.answered:
        core.links.send_attach(known)
    core.receive(peer, msgspec.structs.replace(attach, address=known.address, attempt=known.attempt), now_ns)


def drain_writers(core: TargetSession, now_ns: int) -> list[int]:
    """Answer that all data of ended lives has been read; return their epochs. Other effects stay."""
    asked = [effect for effect in core.links.effects if isinstance(effect, DrainWriter)]
    core.links.effects = [effect for effect in core.links.effects if not isinstance(effect, DrainWriter)]
    for effect in asked:
        core.writer_drained(effect.peer, effect.epoch, now_ns)
    return [effect.epoch for effect in asked]


def stay_alive(core: TargetSession, from_ns: int, until_ns: int) -> list[tuple[PeerId, PeerMessage]]:
    """Let time pass up to `until_ns` while sources answer every Ping, and nothing else; return the core's other messages."""
    said: list[tuple[PeerId, PeerMessage]] = []
    for now_ns in [*range(from_ns, until_ns, SECOND_NS // 2), until_ns]:
        core.renew(now_ns)
        core.tick(now_ns)
        for peer, message in messages_of(core):
            if not isinstance(message, Ping):
                said.append((peer, message))
            elif (known := core.peers.get(peer)) is not None and known.attach is not None:
                core.receive(peer, Pong(known.epoch, message.epoch, message.number), now_ns)
    return said
