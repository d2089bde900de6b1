"""Provides a layout, an endpoint, a client at a path, and events, for the tests of the client."""

from __future__ import annotations

import contextlib
import select
import time
from pathlib import Path

import msgspec
from fake_agent import WAIT_S

from longshore_client import Busy, Half, KVLayout, ModelShape, Parallel, Reason, RoomEvent, RoomEventKind, connect
from longshore_wire.engine_messages import Endpoint, RankAddress

LAYOUT = KVLayout(ModelShape.kv(2, 4, 8, 2), Parallel(tp=2, tp_rank=0), 4)
ENDPOINT = Endpoint("prefill-0", LAYOUT, (RankAddress(0, "10.0.0.1:7000", 5), RankAddress(1, "10.0.0.2:7000", 6)))
_LOOK_S = 0.01
_LEAK_S = 60.0
DONE, FAILED, RELEASED = RoomEventKind.DONE, RoomEventKind.FAILED, RoomEventKind.RELEASED


def client_at(path, **more):
    return connect(path, instance="prefill-0", layout=LAYOUT, **{"timeout_s": WAIT_S, **more})


def event(kind, room=7, half=Half.SOURCE, reason=Reason.NONE, instance="prefill-0"):
    return RoomEvent(half, instance, room, kind, reason)


def told(agent, *kinds):
    """Return the messages that the agent received, without request numbers."""
    return [msgspec.structs.replace(message, request=0) for message in agent.of(*kinds)]


def wait_until(client, predicate):
    """Wait until a condition on a client holds. Polls, since not every change causes an event."""
    end_s = time.monotonic() + WAIT_S
    with client._changed:
        while not predicate():
            assert time.monotonic() < end_s, "not in time"
            client._changed.wait(_LOOK_S)


def open_descriptors():
    """Return every open descriptor of this process: number and target."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.add((entry.name, str(entry.readlink())))
    return found


def left_open(before, expected=0):
    """Return the number of descriptors opened since that stay open. Threads of other tests' libraries open some briefly."""
    end_s = time.monotonic() + _LEAK_S
    while (left := len(open_descriptors() - before)) > expected and time.monotonic() < end_s:
        select.select([], [], [], _LOOK_S)
    return left


def refuse_the_first_cancel(monkeypatch, client):
    """Let a client have no place for its first cancellation."""
    real, refusals = client.cancel, [Busy("full", retry_after_s=0.0)]

    def cancel(*given, **named):
        if refusals:
            raise refusals.pop()
        real(*given, **named)

    monkeypatch.setattr(client, "cancel", cancel)
