"""Makes calls to the agent in a thread of its own, one after the other, so that an engine's threads never wait for it.

Used by `halves` and by connectors, for calls that may block. Knows no engine and no tensors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from longshore_client.client import Client
from longshore_client.errors import AgentLost, Busy, CallTimeout, ClientClosed
from longshore_wire.engine_messages import Half

_log = logging.getLogger("longshore.engines")

# Pause between two attempts while the agent is away. Its restart takes seconds.
AWAY_PAUSE_S = 0.1
# The shortest timeout of a call, even if earlier attempts have used up its time.
CALL_TIMEOUT_MIN_S = 0.1


class CallThread:
    """A thread that makes the calls given to it, in their order."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._call_all, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Make a call after all earlier ones; return at once."""
        self._calls.put(call)

    def close(self) -> None:
        """Return when all calls are made."""
        self._calls.put(None)
        self._thread.join()

    def _call_all(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001 -- logged with its traceback
                # The thread must survive, because it makes the calls of every other request. Expected errors are
                # handled in the call.
                _log.exception("a call to the agent or to a peer failed")


def insist(call: Callable[[float], None], limit_s: float) -> None:
    """Make a call, and repeat it while the agent is busy or away.

    Args:
        call: gets the time that is left, in seconds, as its timeout.
    Raises:
        Busy, AgentLost: the agent was still busy or away after `limit_s`.
        LongshoreError: another error of the call.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            call(max(CALL_TIMEOUT_MIN_S, deadline_s - time.monotonic()))
        except (Busy, AgentLost) as error:
            pause_s = error.retry_after_s if isinstance(error, Busy) else AWAY_PAUSE_S
            if time.monotonic() + pause_s > deadline_s:
                raise
            time.sleep(pause_s)
        else:
            return


def cancel(client: Client, half: Half, instance: str, room: int) -> None:
    """Cancel a half of a room. If the client has no place for the call, wait for one, since no other call does it."""
    while True:
        try:
            client.cancel(room, half, instance=instance, timeout_s=CALL_TIMEOUT_MIN_S)
        except Busy as error:
            time.sleep(error.retry_after_s)
            continue
        except (AgentLost, CallTimeout, ClientClosed):
            # The client repeats the cancellation to the next agent. A closed client has released everything.
            pass
        return
