"""Simulates the status pages of all agents by one HTTP server, since KWOK's pods have loopback addresses and no process."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec

from longshore_agent.status.findings import Rules, findings
from longshore_agent.status.snapshot import AgentSnapshot, WorkerSnapshot
from longshore_spec.status import (
    EngineStatus,
    InstanceStatus,
    LayoutStatus,
    PeerStatus,
    RankStatus,
    SelfTest,
    WorkerState,
)
from longshore_wire.layout import KVLayout, ModelShape, Parallel

Body = dict[str, Any]
_STOP_LIMIT_S = 10.0
_BACKLOG = 512


class AgentResponder:
    """Answers on every loopback address. `answers` are by address; `silent` addresses read requests and never answer, others redirect."""

    def __init__(self, port: int) -> None:
        self.answers: dict[str, Body] = {}
        self.silent: set[str] = set()
        self.redirects: dict[str, str] = {}
        self.asked: set[str] = set()
        self.port = port
        self._loop = asyncio.new_event_loop()
        making = self._loop.create_server(lambda: _Connection(self), "0.0.0.0", port, backlog=_BACKLOG)
        self._server = self._loop.run_until_complete(making)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def answer(self, address: str) -> bytes | None:
        """Return the answer of the agent at `address`; None for no answer."""
        self.asked.add(address)
        if address in self.silent:
            return None
        if address in self.redirects:
            return b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % self.redirects[address].encode()
        data = json.dumps(self.answers.get(address, _NOTHING)).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data

    def reset(self) -> None:
        """Reset all answers. The next test's pods may have the same addresses."""
        for chosen in (self.answers, self.silent, self.redirects):
            chosen.clear()

    def stop(self) -> None:
        """Stop the server."""

        def end() -> None:
            self._server.close()
            self._loop.stop()

        self._loop.call_soon_threadsafe(end)
        self._thread.join(_STOP_LIMIT_S)
        self._loop.close()


class _Connection(asyncio.Protocol):
    """One connection with sequential requests."""

    def __init__(self, responder: AgentResponder) -> None:
        self._responder = responder
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard += data
        while b"\r\n\r\n" in self._heard:
            _, _, self._heard = self._heard.partition(b"\r\n\r\n")
            answer = self._responder.answer(self._transport.get_extra_info("sockname")[0])
            if answer is not None:
                self._transport.write(answer)


# The layout of all engines: the operator does not read it.
_LAYOUT = LayoutStatus.of(KVLayout(ModelShape.kv(layers=4, kv_heads=8, head_dim=64, element_bytes=2), Parallel(), 16))
_PASSED = SelfTest(backend="Loopback", wire="Loopback", bytes_moved=1 << 20, seconds=0.01)


def report(*instances: InstanceStatus, peers: tuple[PeerStatus, ...] = ()) -> Body:
    """Return an agent's report with these instances, one worker with these peers if there are any, and what an agent finds wrong."""
    engines = tuple(EngineStatus(entry.instance, 0, entry.roles, _LAYOUT) for entry in instances)
    worker = WorkerSnapshot(
        worker="w/0/0", pid=1, epoch="1", state=WorkerState.READY, engines=engines, peers=peers, self_test=_PASSED
    )
    snapshot = AgentSnapshot(
        deployment="x/y",
        node="n",
        version="0.1.0",
        backend="Loopback",
        started_unix_s=0.0,
        uptime_s=1.0,
        self_test=_PASSED,
        instances=instances,
        workers=(worker,) if instances or peers else (),
    )
    status = snapshot.status(findings(snapshot, Rules("Loopback", 1 << 20)))
    body: Body = msgspec.json.decode(msgspec.json.encode(status))
    return body


def instance(name: str, role: str, *, complete: bool = True, host: str = "") -> InstanceStatus:
    """Return one instance of a report with one rank; `role` is source or target."""
    return InstanceStatus(name, (role,), _LAYOUT, (RankStatus(0, "127.0.0.1:1", "1", host=host),), complete=complete)


def peer(name: str, wire: str, state: str = "attached", error: str = "") -> PeerStatus:
    """Return one peer of a report's worker."""
    return PeerStatus(name, 0, 0, state, wire, "1", error)


_NOTHING = report()
