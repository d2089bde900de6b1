"""Tests polling of agents over real sockets: when an agent counts as silent, and that an answer ends that."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import status_scene
from aiohttp import web
from operator_scene import KEY, PREFILL, Scene, said, settled

from longshore_agent.status.findings import findings
from longshore_operator import kinds, names
from longshore_operator.observe import Moment, observe
from longshore_operator.polling import Poller
from longshore_operator.settings import Settings
from longshore_operator.work_queue import WorkQueue
from longshore_spec.status import PoolStatus

HOST = "127.0.0.1"
BASELINE = Path(__file__).parents[2] / "e2e" / "baseline" / "operator.tar.gz"


class Clock:
    """The poller's clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Asked:
    """One deployment whose only agent is a page of this process.

    `answers` are its responses; None closes the connection.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.scene = settled()
        self.queue = WorkQueue()
        self.settings = dataclasses.replace(Settings(), poll_s=10.0, poll_stale_s=30.0)
        self.poller = Poller(self.scene.world, self.queue, None, self.settings)  # type: ignore[arg-type]
        self.answer: bytes | None = None
        self.elsewhere = ""  # where the page redirects to
        self.followed = 0
        self.port = 0

    async def page(self, request: web.Request) -> web.Response:
        if self.elsewhere:
            raise web.HTTPFound(self.elsewhere)
        if self.answer is None:
            assert request.transport is not None
            request.transport.close()
        return web.Response(body=self.answer or b"")

    async def other(self, request: web.Request) -> web.Response:
        self.followed += 1
        return web.Response(body=msgspec.json.encode(said(PREFILL)))

    def put_pod(self, *, ready: bool) -> None:
        ports = [{"name": "http", "containerPort": self.port}]
        status = {"podIP": HOST, "conditions": [{"type": "Ready", "status": str(ready)}]}
        metadata = {"name": "llama-a", "namespace": KEY.namespace, "labels": {names.DEPLOYMENT_LABEL: KEY.name}}
        spec = {"nodeName": "a", "containers": [{"name": names.CONTAINER, "ports": ports}]}
        self.scene.put(kinds.POD, {"metadata": metadata, "spec": spec, "status": status})

    async def fall_silent(self) -> None:
        """Let the agent answer once, have its deployment looked at, and let it answer no more."""
        self.put_pod(ready=True)
        self.answer = msgspec.json.encode(said(PREFILL))
        await self.sweep(10)
        self.queue.done(await self.queue.take(), failed=False)
        self.answer = None

    async def sweep(self, after_s: float) -> None:
        """Poll once, this long after the last poll."""
        self.clock.now_s += after_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            await self.poller.sweep(session)

    @property
    def silent(self) -> bool:
        found = observe(self.scene.world, KEY, Moment(self.clock.now_s, "", 30.0), sees_nodes=True)
        assert found is not None
        return found.agents[0].silent


def asked(monkeypatch: Any, scenario: Callable[[Asked], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario together with the agent's page."""

    async def run() -> None:
        one = Asked(clock)
        app = web.Application()
        app.router.add_get("/v1/status", one.page)
        app.router.add_get("/other", one.other)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        one.port = runner.addresses[0][1]
        try:
            await scenario(one)
        finally:
            await runner.cleanup()

    clock = Clock()
    monkeypatch.setattr("longshore_operator.polling.time", clock)
    asyncio.run(run())


def test_an_agent_that_starts_for_long_is_not_silent_and_has_the_whole_limit_once_it_is_ready(monkeypatch) -> None:
    async def scenario(one: Asked) -> None:
        one.put_pod(ready=False)
        for _ in range(6):
            await one.sweep(10)
            assert not one.silent
            assert one.poller.silent_count == 0
        one.put_pod(ready=True)
        one.clock.now_s += 25
        assert not one.silent
        await one.sweep(10)
        assert one.silent
        assert one.poller.silent_count == 1

    asked(monkeypatch, scenario)


def test_an_agent_that_answered_once_and_is_unready_now_is_silent_all_the_same(monkeypatch) -> None:
    async def scenario(one: Asked) -> None:
        one.put_pod(ready=True)
        one.answer = msgspec.json.encode(said(PREFILL))
        await one.sweep(10)
        one.answer = None
        one.put_pod(ready=False)
        for _ in range(4):
            await one.sweep(10)
        assert one.silent

    asked(monkeypatch, scenario)


def test_an_agent_that_sends_the_operator_elsewhere_is_not_followed_and_is_silent(monkeypatch) -> None:
    async def scenario(one: Asked) -> None:
        one.put_pod(ready=True)
        one.elsewhere = f"http://{HOST}:{one.port}/other"
        for _ in range(5):
            await one.sweep(10)
        assert one.followed == 0
        assert one.silent

    asked(monkeypatch, scenario)


def test_an_agent_that_says_the_same_after_a_silence_has_its_deployment_looked_at(monkeypatch) -> None:
    async def scenario(one: Asked) -> None:
        await one.fall_silent()
        await one.sweep(31)
        assert one.silent
        one.queue.done(await one.queue.take(), failed=False)
        assert len(one.queue) == 0
        one.answer = msgspec.json.encode(said(PREFILL))
        await one.sweep(10)
        assert not one.silent
        assert len(one.queue) == 1

    asked(monkeypatch, scenario)


def test_a_silence_is_looked_at_once_also_if_the_polls_were_so_late_that_it_is_long_over_the_limit(monkeypatch) -> None:
    async def scenario(one: Asked) -> None:
        await one.fall_silent()
        # A sweep of many silent agents takes minutes.
        await one.sweep(20)
        assert len(one.queue) == 0
        await one.sweep(120)
        assert one.silent
        assert len(one.queue) == 1
        one.queue.done(await one.queue.take(), failed=False)
        await one.sweep(10)
        assert len(one.queue) == 0

    asked(monkeypatch, scenario)


class Lease:
    """A mutex that this replica holds or not."""

    def __init__(self) -> None:
        self.is_held = True
        self.waits = asyncio.Event()

    async def held(self) -> None:
        self.waits.set()
        await asyncio.Event().wait()


def test_a_replica_that_loses_the_lease_counts_no_silent_agents(monkeypatch) -> None:
    async def scenario(one: Asked) -> None:
        lease = Lease()
        settings = dataclasses.replace(one.settings, poll_s=0.01)
        poller = Poller(one.scene.world, one.queue, lease, settings)  # type: ignore[arg-type]
        one.put_pod(ready=True)
        polling = asyncio.create_task(poller.run())
        await asyncio.wait_for(poller.swept.wait(), 60)
        assert poller.silent_count == 1
        lease.is_held = False
        await asyncio.wait_for(lease.waits.wait(), 60)
        assert poller.silent_count == 0
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)

    asked(monkeypatch, scenario)


def test_a_silent_agent_counts_whether_its_pod_is_ready_or_not() -> None:
    for ready in (True, False):
        scene = settled(prefill=_role("prefill", 4, instances=1))
        scene.put_agent("a", ready=ready, age_s=60)
        scene.put_agent("b", said=said())
        assert _reason(scene) == "AgentSilent"


def _role(name: str, tensor_parallel: int, **more: Any) -> dict[str, Any]:
    return {"tensorParallel": tensor_parallel, "pageSize": 64, "nodeSelector": {"role": name}} | more


def _reason(scene: Scene) -> str:
    return scene.reasons()["EnginesConnected"]


def test_what_changes_while_nothing_happens_is_no_change_and_a_finding_is(monkeypatch) -> None:
    async def scenario(one: Asked) -> None:
        one.put_pod(ready=True)
        for uptime_s, worker, new in (
            (1.0, status_scene.worker("w", silent_s=0.1), True),
            (11.0, status_scene.worker("w", silent_s=0.2, rooms=(status_scene.room(7),), rooms_open=1), False),
            (21.0, status_scene.worker("w", silent_s=10.2), True),
            (31.0, status_scene.worker("w", silent_s=20.2), False),
        ):
            snapshot = status_scene.agent(worker, uptime_s=uptime_s)
            one.answer = msgspec.json.encode(snapshot.status(findings(snapshot, status_scene.RULES)))
            await one.sweep(10)
            assert bool(len(one.queue)) is new, uptime_s
            if new:
                one.queue.done(await one.queue.take(), failed=False)

    asked(monkeypatch, scenario)


def test_the_operator_of_the_last_release_reads_the_status_of_an_agent(tmp_path: Path) -> None:
    """Each is replaced before the other in an upgrade, so that their releases differ by optional fields alone."""
    status = said(PREFILL)
    assert status is not None
    (worker,) = status.workers
    engines = tuple(
        msgspec.structs.replace(engine, pools=(PoolStatus(0, 96, 1 << 20), PoolStatus(1, 96, 1 << 20)))
        for engine in worker.engines
    )
    worker = msgspec.structs.replace(worker, engines=engines, oldest_rooms=(status_scene.room(5),))
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(status, workers=(worker,))))
    with tarfile.open(BASELINE) as packages:
        packages.extractall(tmp_path, filter="data")
    program = (
        "import msgspec, pathlib, longshore_spec.status as status; "
        "found = msgspec.json.decode(pathlib.Path('status.json').read_bytes(), type=status.AgentStatus); "
        "print(status.__file__, len(found.workers[0].engines[0].pools), len(found.workers[0].oldest_rooms))"
    )
    path = os.pathsep.join(str(tmp_path / name) for name in ("spec", "wire"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == [str(tmp_path / "spec" / "longshore_spec" / "status.py"), "2", "1"]
