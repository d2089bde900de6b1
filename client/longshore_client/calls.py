"""A call to the agent on its way: what it says, and its answer. Pure: no I/O, no clock.

Made by `client.Client`, carried by `core.Core`.
"""

from __future__ import annotations

from typing import NamedTuple

from longshore_client.ledger import HalfKey
from longshore_wire.engine_codec import TO_AGENT
from longshore_wire.engine_messages import (
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
    """One message for the agent's socket; the descriptors travel with it and stay open."""

    data: bytes
    descriptors: tuple[int, ...] = ()


class Call:
    """One call to the agent: what it says, and the answer once there is one.

    Attributes:
        number: unique in the client's life, so it may be said again to a new agent.
        message: the first of its messages; the others are further parts of the same.
        outgoing: its messages as bytes; empty once it is settled.
        key: the half that an offer or a claim speaks of.
        again: what an earlier agent accepted, said to a new one; nobody waits for it.
        given_up: the caller no longer waits.
        done: its half was reported as done before the answer came.
        answer: None also where there never is one.
    """

    def __init__(
        self,
        messages: CallMessages,
        *,
        key: HalfKey | None = None,
        descriptors: tuple[int, ...] = (),
        again: bool = False,
    ) -> None:
        """Encode the messages. Raises CodecError: one is too long."""
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
        """Whether a new agent has to hear it; otherwise it has succeeded once the worker is dead."""
        return not isinstance(self.message, UnregisterPool | Cancel)
