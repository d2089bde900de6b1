"""A fake agent with real sockets and descriptors that answers by script and moves no bytes.

Runs in a thread, or as a program that can be killed (`fake_agent.py PATH EPOCH`).
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Self

from longshore_agent.control.engine_link import EngineLink, EngineListener
from longshore_agent.errors import EngineClosedError
from longshore_wire.engine_messages import (
    ENGINE_PROTOCOL_VERSION,
    Accepted,
    EngineSteps,
    Hello,
    Receive,
    Renew,
    ToAgent,
    ToEngine,
    Welcome,
)

WAIT_S = 60.0


def accept_all(message: ToAgent) -> ToEngine | None:
    """Accept each message with a request number; a claim once its page list is complete."""
    if isinstance(message, EngineSteps | Hello | Renew):
        return None
    if isinstance(message, Receive):
        last = message.caches[-1]
        return Accepted(message.request) if last.page_offset + len(last.pages) // 4 == last.page_count else None
    return Accepted(message.request)


class FakeAgent:
    """Serves one path until `stop` (removes the socket) or `die` (leaves the socket, like a killed agent)."""

    def __init__(
        self,
        path: str,
        *,
        epoch: int = 1,
        answer: Callable[[ToAgent], ToEngine | None] = accept_all,
        greet: Callable[[Hello], ToEngine | bytes] | None = None,
    ) -> None:
        self.path = path
        self.answer = answer
        self.greet = greet or (lambda hello: Welcome(ENGINE_PROTOCOL_VERSION, epoch, "demo", 60_000_000_000))
        self.heard: list[ToAgent] = []
        self.descriptors: dict[int, list[int]] = {}  # by request
        self.links: list[EngineLink] = []
        self.gone_count = 0
        self.changed = threading.Condition()
        self._listener = EngineListener(path)
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._reading = threading.Event()
        self._reading.set()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def of(self, *kinds: type) -> list[ToAgent]:
        """Return the received messages of these kinds, in order."""
        with self.changed:
            return [message for message in self.heard if isinstance(message, kinds)]

    def expect(self, predicate: Callable[[], bool]) -> None:
        """Wait until a condition on the received messages holds."""
        with self.changed:
            assert self.changed.wait_for(predicate, WAIT_S), f"not heard in time; heard {self.heard}"

    def say(self, message: ToEngine) -> None:
        """Send to every connected engine."""
        with self.changed:
            for link in self.links:
                link.send(message)

    def say_raw(self, data: bytes) -> None:
        """Send bytes that need not be a message."""
        with self.changed:
            for link in self.links:
                link._socket.send(data)

    def hang_up(self, index: int) -> None:
        """Close one engine's connection, by its place among the connected ones."""
        with self.changed:
            self.links.pop(index).close()
        os.eventfd_write(self._wake, 1)

    def read_nothing(self) -> None:
        """Stop reading until `read_on`."""
        self._reading.clear()
        os.eventfd_write(self._wake, 1)

    def read_on(self) -> None:
        self._reading.set()

    def stop(self) -> None:
        """End in an orderly way. Idempotent."""
        self._end()
        self._listener.close()

    def die(self) -> None:
        """End like a killed process: the path stays, without a listener."""
        self._end()
        self._listener._socket.close()

    def _end(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._reading.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        for link in self.links:
            link.close()
        for descriptors in self.descriptors.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self.descriptors.clear()

    def _serve(self) -> None:
        while not self._stopping:
            poller = select.poll()
            for descriptor in (self._listener.fileno(), self._wake):
                poller.register(descriptor, select.POLLIN)
            for link in self.links:
                poller.register(link.fileno(), select.POLLIN | (select.POLLOUT if link.outbox_count else 0))
            if self._wake in dict(poller.poll()):
                os.eventfd_read(self._wake)
            self._reading.wait()
            with self.changed:
                connected = None if self._stopping else self._listener.accept()
                if connected is not None:
                    self.links.append(EngineLink(connected))
                for link in list(self.links):
                    self._read(link)
                self.changed.notify_all()

    def _read(self, link: EngineLink) -> None:
        try:
            link.flush()
            for message, descriptors in link.receive():
                self.heard.append(message)
                if descriptors:
                    self.descriptors[message.request] = descriptors
                reply = self.greet(message) if isinstance(message, Hello) else self.answer(message)
                if isinstance(reply, bytes):
                    link._socket.send(reply)
                elif reply is not None:
                    link.send(reply)
        except EngineClosedError:
            self.links.remove(link)
            link.close()
            self.gone_count += 1


if __name__ == "__main__":
    with FakeAgent(sys.argv[1], epoch=int(sys.argv[2])):
        sys.stdin.read()
