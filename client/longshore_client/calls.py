"""Holds one call to the agent: its messages, and its answer. Pure: no I/O, no clock.

Made by `client.Client`, sent and settled by `core.Core`.
"""

from __future__ import annotations

from typing import NamedTuple

from longshore_client.ledger import HalfKey
from longshore_wire.engine_messages import (
    TO_AGENT,
    Accepted,
    Cancel,
    Offer,
    Receive,
    Refused,
    RegisterPool,
    UnregisterPool,
)

CallMessages = tuple[Offer | Receive | RegisterPool | UnregisterPool | Cancel, ...]


class Outgoing(NamedTuple):
    """One message for the agent's socket. Its descriptors are sent with it and stay open."""

    data: bytes
    descriptors: tuple[int, ...] = ()


class Call:
    """One call to the agent: its messages, and the answer when it has arrived.

    Attributes:
        number: unique in the client's life, so the call can be repeated to a new agent.
        message: the first of its messages; the others are further parts of the same request.
        outgoing: its messages as bytes; empty once it is settled.
        key: the half of an offer or a claim.
        again: True: repeats to a new agent what an earlier one accepted; no caller waits for it.
        given_up: the caller no longer waits.
        done: its half was reported as done before the answer arrived.
        answer: None: not yet, or never.
    """

    def __init__(
        self,
        messages: CallMessages,
        *,
        key: HalfKey | None = None,
        descriptors: tuple[int, ...] = (),
        again: bool = False,
    ) -> None:
        """Encode the messages. Raises CodecError if one is too long."""
        self.message = messages[0]
        self.messages = messages
        self.number = self.message.request
        self.descriptors = descriptors
        self.outgoing = [Outgoing(TO_AGENT.encode(message)) for message in messages]
        if descriptors:
            self.outgoing[0] = Outgoing(self.outgoing[0].data, descriptors)
        self.key = key
        self.again = again
        self.given_up = False
        self.done = False
        self.settled = False
        self.answer: Accepted | Refused | None = None

    @property
    def outlives_agent(self) -> bool:
        """Whether it must be repeated to a new agent. Otherwise the death of the worker fulfils it."""
        return not isinstance(self.message, UnregisterPool | Cancel)
