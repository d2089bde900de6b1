"""Asks agents for their status, many at once and each within a time limit. Called by `main`; changes nothing at agents."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from longshore_operator import reports
from longshore_operator.lease import Mutex
from longshore_operator.settings import Settings
from longshore_operator.work_queue import WorkQueue
from longshore_operator.world import AgentPod, Poll, World

# A status page of an agent with many workers takes some 100 KiB; more is not read.
ANSWER_BYTES_MAX = 8 << 20


class Poller:
    """Keeps what agents said last. `swept` is set once every agent was asked since this replica became active."""

    def __init__(self, world: World, queue: WorkQueue, mutex: Mutex, settings: Settings) -> None:
        self._world = world
        self._queue = queue
        self._mutex = mutex
        self._settings = settings
        self._silent: set[str] = set()
        self.swept = asyncio.Event()

    @property
    def silent_count(self) -> int:
        """Agents that did not answer when last asked."""
        return len(self._silent)

    async def run(self) -> None:
        """Ask every agent now and then, while this replica is the active one; for ever."""
        timeout = aiohttp.ClientTimeout(total=self._settings.poll_timeout_s)
        connector = aiohttp.TCPConnector(limit=self._settings.poll_count_max, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                await self._mutex.held()
                started_s = time.monotonic()
                await self.sweep(session)
                self.swept.set()
                await asyncio.sleep(max(0.0, self._settings.poll_s - (time.monotonic() - started_s)))

    async def sweep(self, session: aiohttp.ClientSession) -> None:
        """Ask every agent once."""
        pods = [pod for pod in self._world.pods.values() if pod.address and pod.http_port and not pod.ending]
        self._silent &= {pod.uid for pod in pods}
        line = iter(pods)
        workers = min(self._settings.poll_count_max, len(pods))
        await asyncio.gather(*(self._ask_all(session, line) for _ in range(workers)))

    async def _ask_all(self, session: aiohttp.ClientSession, pods: object) -> None:
        for pod in pods:  # type: ignore[attr-defined]
            await self._ask(session, pod)

    async def _ask(self, session: aiohttp.ClientSession, pod: AgentPod) -> None:
        host = f"[{pod.address}]" if ":" in pod.address else pod.address
        try:
            async with session.get(f"http://{host}:{pod.http_port}/v1/status") as answer:
                data = await answer.content.read(ANSWER_BYTES_MAX)
                report = reports.read(data)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            self._missed(pod)
            return
        changed = self._world.answered(pod.uid, Poll(time.monotonic(), report))
        # What it says may be what it said before its silence, and its deployment has to hear of that, too.
        if changed is not None or pod.uid in self._silent:
            self._queue.add([pod.key])
        self._silent.discard(pod.uid)

    def _missed(self, pod: AgentPod) -> None:
        """Take note of an agent that did not answer; once that is too long ago, its deployment is looked at."""
        self._silent.add(pod.uid)
        now_s = time.monotonic()
        poll = self._world.polls.setdefault(pod.uid, Poll(now_s, None))
        if poll.report is None and not pod.ready:
            # It starts: nobody can call it silent before it has once been ready to speak.
            poll = self._world.polls[pod.uid] = Poll(now_s, None)
        age_s = now_s - poll.answered_s
        if self._settings.poll_stale_s < age_s <= self._settings.poll_stale_s + 2 * self._settings.poll_s:
            self._queue.add([pod.key])
