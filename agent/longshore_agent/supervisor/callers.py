"""Holds connections that have not sent Hello yet, and limits their number and time.

Called by the supervisor's loop, which gets each Hello with its connection. A silent connection cannot block others: it
is closed after `HELLO_LIMIT_S`, or at once if a new connection needs its place. Engines that are refused for good are logged, and
kept for the findings.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from longshore_agent.control.engine_link import EngineListener, process_of, read_message
from longshore_agent.errors import EngineClosedError, ListenError
from longshore_agent.status.metrics import Metrics
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import TO_AGENT, TO_ENGINE, Hello, Refused
from longshore_wire.errors import PASSING, CodecError, LongshoreError, Reason
from longshore_wire.names import TEST_INSTANCE_PREFIX, is_instance_name

_log = logging.getLogger(__name__)

# Connections without a Hello. An engine sends it at once, so the oldest of them is no engine.
WAITING_MAX = 256
HELLO_LIMIT_S = 5.0
# Pause while no descriptor is left. Engines wait in the socket's backlog until a connection or worker ends.
_ACCEPT_PAUSE_S = 1.0
# Hint for a refused engine to retry, if the cause is short-lived.
_RETRY_AFTER_S = 0.1
# A refused engine is a finding for this long after its last try, and at most so many of them are.
REFUSED_KEPT_S = 600.0
REFUSED_MAX = 64


class Refusal(NamedTuple):
    """The last refusal of an engine that no retry of its own ends. `hello`: None without a valid one."""

    text: str
    last_s: float
    hello: Hello | None

    def was_before(self, hello: Hello) -> bool:
        """Whether it was of the same rank at the same place, which was started again under another name since."""
        if self.hello is None or self.hello.instance == hello.instance:
            return False
        one, other = ((each.host, each.device, each.roles, each.layout.parallel) for each in (self.hello, hello))
        return bool(hello.host) and one == other


class Callers:
    """Connections before their Hello. `heard` gets Hello and connection; its LongshoreError refuses the engine."""

    def __init__(
        self,
        listener: EngineListener,
        selector: selectors.BaseSelector,
        metrics: Metrics,
        heard: Callable[[Hello, socket.socket], None],
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._metrics = metrics
        self._heard = heard
        self._since_s: dict[socket.socket, float] = {}  # oldest first
        self._accept_again_s: float | None = None
        # By the engine rank's name; of one without a valid name, by that of its process.
        self._refusals: dict[str, Refusal] = {}
        selector.register(listener, selectors.EVENT_READ, self._on_accept)

    def turn(self, now_s: float) -> None:
        """Close connections that were silent for too long; resume accepting after a pause. Call it once a second."""
        for connection, since_s in list(self._since_s.items()):
            if now_s - since_s < HELLO_LIMIT_S:
                break
            self._close_silent(connection, f"no Hello within {HELLO_LIMIT_S:g} s")
        if self._accept_again_s is not None and now_s >= self._accept_again_s:
            self._accept_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._on_accept)

    def refused(self, now_s: float) -> tuple[str, ...]:
        """Return who was refused lately, and why."""
        return tuple(each.text for each in self._refusals.values() if now_s - each.last_s < REFUSED_KEPT_S)

    def taken(self, hello: Hello) -> None:
        """Forget the refusals of an engine rank that has a worker now, and of other instances for the same roles.

        Whoever still wants to register tries again, and is refused again.
        """
        self._refusals.pop(PeerId.of(hello).path, None)
        for key, each in list(self._refusals.items()):
            if each.hello is not None and each.hello.instance != hello.instance and each.hello.roles == hello.roles:
                del self._refusals[key]

    def turn_away(
        self,
        connection: socket.socket,
        reason: Reason,
        text: str,
        retry_after_s: float = _RETRY_AFTER_S,
        hello: Hello | None = None,
    ) -> None:
        """Send an engine the reason of its refusal, and close its connection."""
        self._metrics.add("longshore_refused_messages_total", 1, reason=reason.label)
        if reason not in PASSING:
            self._note(connection, reason, text, hello)
        with contextlib.suppress(OSError):
            connection.send(TO_ENGINE.encode(Refused(0, reason, text, round(retry_after_s * 1e9))))
        connection.close()

    def close(self) -> None:
        """Stop accepting, and close all connections."""
        self._listener.close()
        for connection in list(self._since_s):
            self._forget(connection)
            connection.close()

    def _note(self, connection: socket.socket, reason: Reason, text: str, hello: Hello | None) -> None:
        """Log a refusal once, and keep it."""
        if hello is not None and is_instance_name(hello.instance):
            if hello.instance.startswith(TEST_INSTANCE_PREFIX):
                return  # `longshore verify` says it
            key = PeerId.of(hello).path
            who = f"engine {key} ({' and '.join(half.label for half in hello.roles)})"
            who += f" of host {hello.shown_host}" if hello.shown_host else ""
        else:
            key = who = process_of(connection).shown
            hello = None
        known, shown = self._refusals.pop(key, None), f"{who} is refused: {text}"
        if hello is not None:
            # An engine that is started again and again has a new name each time.
            for other in [name for name, each in self._refusals.items() if each.was_before(hello)]:
                del self._refusals[other]
        now_s = time.monotonic()
        self._refusals[key] = Refusal(shown, now_s, hello)
        while len(self._refusals) > REFUSED_MAX:
            del self._refusals[next(iter(self._refusals))]
        if known is None or known.text != shown or now_s - known.last_s >= REFUSED_KEPT_S:
            _log.warning("%s", shown, extra={"reason": reason.name})

    def _on_accept(self) -> None:
        try:
            connection = self._listener.accept()
        except ListenError as error:
            _log.warning("%s: engines that connect wait", error)
            self._metrics.add("longshore_starved_accepts_total")
            # Otherwise waiting connections would wake the loop continuously.
            self._selector.unregister(self._listener)
            self._accept_again_s = time.monotonic() + _ACCEPT_PAUSE_S
            return
        if connection is None:
            return
        if len(self._since_s) >= WAITING_MAX:
            text = f"{WAITING_MAX} connections have not said Hello, of which this one is the oldest: say it at once"
            self._close_silent(next(iter(self._since_s)), text)
        self._since_s[connection] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_readable(connection))

    def _on_readable(self, connection: socket.socket) -> None:
        hello = None
        try:
            data = read_message(connection)
            if data is None:
                return
            self._forget(connection)
            message = TO_AGENT.decode(data)
            if not isinstance(message, Hello):
                raise CodecError(f"{type(message).__name__} came before Hello")
            hello = message
            self._heard(hello, connection)
        except EngineClosedError:
            self._forget(connection)
            connection.close()
        except LongshoreError as error:
            self._forget(connection)
            self.turn_away(connection, error.reason, str(error), hello=hello)
        except Exception:  # noqa: BLE001 -- logged with its traceback
            # A bug that one engine's Hello meets must not end the agent, which serves others.
            _log.exception("a Hello could not be judged")
            self._forget(connection)
            self.turn_away(connection, Reason.INTERNAL, "the agent met a bug; its log has the traceback", hello=hello)

    def _close_silent(self, connection: socket.socket, text: str) -> None:
        self._forget(connection)
        self.turn_away(connection, Reason.BUSY, text)

    def _forget(self, connection: socket.socket) -> None:
        if self._since_s.pop(connection, None) is not None:
            self._selector.unregister(connection)
