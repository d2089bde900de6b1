"""Splits a protocol core's outputs into messages and other effects, for tests that check only one of them."""

from __future__ import annotations

from longshore_wire.effects import Effect, PeerId, Send
from longshore_wire.peer_messages import PeerMessage
from longshore_wire.session import Session


def messages_of(core: Session) -> list[tuple[PeerId, PeerMessage]]:
    """Take the messages to send, in their order; other effects stay."""
    taken = [(effect.peer, effect.message) for effect in core.links.effects if isinstance(effect, Send)]
    core.links.effects = [effect for effect in core.links.effects if not isinstance(effect, Send)]
    return taken


def effects_of(core: Session) -> list[Effect]:
    """Take all but the messages, in their order; these stay."""
    taken = [effect for effect in core.links.effects if not isinstance(effect, Send)]
    core.links.effects = [effect for effect in core.links.effects if isinstance(effect, Send)]
    return taken
