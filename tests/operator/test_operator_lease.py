"""Tests leader election by the Lease: never two writers, and the next replica starts when the first has ended."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from longshore_operator import lease
from longshore_operator.errors import ConflictError, NotFoundError, UnavailableError
from longshore_operator.lease import LostLeaseError, Mutex
from longshore_operator.settings import Settings

SETTINGS = Settings(lease_s=15.0, lease_renew_s=5.0)


class Server:
    """A fake API server with one Lease."""

    def __init__(self) -> None:
        self.body: dict[str, Any] | None = None
        self.away = False

    async def get(self, *_: object) -> dict[str, Any]:
        if self.away:
            raise UnavailableError("away")
        if self.body is None:
            raise NotFoundError("no lease", 404)
        return copy.deepcopy(self.body)

    async def create(self, _kind: object, body: dict[str, Any]) -> dict[str, Any]:
        if self.body is not None:
            raise ConflictError("there already", 409)
        self.body = copy.deepcopy(body)
        self.body["metadata"]["resourceVersion"] = "1"
        return self.body

    async def replace(self, _kind: object, body: dict[str, Any]) -> dict[str, Any]:
        assert self.body is not None
        if body["metadata"]["resourceVersion"] != self.body["metadata"]["resourceVersion"]:
            raise ConflictError("changed meanwhile", 409)
        self.body = copy.deepcopy(body)
        self.body["metadata"]["resourceVersion"] = str(int(body["metadata"]["resourceVersion"]) + 1)
        return self.body


class Clock:
    """A clock that a test moves. Mutexes also sleep on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(lease.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def two(server: Server) -> tuple[Mutex, Mutex]:
    return Mutex(server, SETTINGS, "one"), Mutex(server, SETTINGS, "two")  # type: ignore[arg-type]


@pytest.mark.shows("operator.lease_s")
def test_the_second_one_waits_until_it_has_seen_the_lease_unchanged_for_its_duration(clock: Clock) -> None:
    async def play() -> None:
        one, other = two(Server())
        await one.turn()
        await other.turn()
        assert (one.is_held, other.is_held) == (True, False)
        clock.now_s += 14.9
        await one.turn()
        clock.now_s += 14.9
        await other.turn()
        assert (one.is_held, other.is_held) == (True, False)
        clock.now_s += 15.1
        await other.turn()
        assert (one.is_held, other.is_held) == (False, True)

    asyncio.run(play())


def test_one_that_cannot_renew_stops_before_the_other_may_begin(clock: Clock) -> None:
    async def play() -> None:
        server = Server()
        one, other = two(server)
        await one.turn()
        await other.turn()
        server.away = True
        for _ in range(30):
            clock.now_s += 0.5
            await one.turn()
        assert not one.is_held
        with pytest.raises(LostLeaseError):
            one.check()
        server.away = False
        await other.turn()
        assert not other.is_held
        clock.now_s += 0.1
        await other.turn()
        assert other.is_held
        await one.turn()
        assert not one.is_held

    asyncio.run(play())


def test_one_that_ends_in_order_hands_it_over(clock: Clock) -> None:
    async def play() -> None:
        server = Server()
        one, other = two(server)
        await one.turn()
        await other.turn()
        await one.release()
        assert not one.is_held
        await other.turn()
        assert other.is_held
        assert server.body is not None
        assert server.body["spec"]["leaseTransitions"] == 1
        await one.release()
        assert server.body["spec"]["holderIdentity"] == "two"

    asyncio.run(play())


def test_of_two_that_begin_at_once_one_gets_it(clock: Clock) -> None:
    async def play() -> None:
        one, other = two(Server())
        await asyncio.gather(one.turn(), other.turn())
        assert [one.is_held, other.is_held].count(True) == 1

    asyncio.run(play())
