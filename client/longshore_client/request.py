"""A call to the agent on its way. Made by `client`, carried by `link`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from longshore_wire.engine_codec import TO_AGENT
from longshore_wire.engine_messages import Accepted, Refused, ToAgent


class Request:
    """One call to the agent: what it says, and the answer once there is one. Changed under the link's lock only.

    Attributes:
        number: unique in the client's life, so it may be said again to a new agent.
        outlives_agent: False: once the worker is dead there is nothing to ask for, and the call has succeeded.
        given_up: the caller no longer waits.
    """

    def __init__(
        self,
        number: int,
        messages: tuple[ToAgent, ...],
        *,
        descriptors: tuple[int, ...] = (),
        outlives_agent: bool = True,
        on_answer: Callable[[Accepted | Refused | None], None] | None = None,
    ) -> None:
        """Encode the messages; `on_answer` is called once, under the lock, with None if there never is an answer.

        Raises:
            CodecError: a message is too long.
        """
        self.number = number
        self.data = tuple(TO_AGENT.encode(message) for message in messages)
        self.descriptors = descriptors
        self.outlives_agent = outlives_agent
        self.given_up = False
        self.answer: Accepted | Refused | None = None
        self.settled = threading.Event()
        self._on_answer = on_answer

    def settle(self, answer: Accepted | Refused | None) -> None:
        """Give the call its answer, once."""
        if self.settled.is_set():
            return
        self.answer = answer
        if self._on_answer is not None:
            self._on_answer(answer)
        self.data = ()
        self.settled.set()
