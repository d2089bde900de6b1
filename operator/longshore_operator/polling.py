"""Polls the agents' status pages concurrently, each with a time limit. Called by `main`. Never changes an agent."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from http import HTTPStatus

import aiohttp
import msgspec

from longshore_operator.lease import Mutex
from longshore_operator.settings import Settings
from longshore_operator.work_queue import WorkQueue
from longshore_operator.world import AgentPod, Poll, World
from longshore_spec.status import AgentStatus

# Limits the delay of the first reconciles by agents that hang. The status of these stays as it was, see `engines`.
FIRST_SWEEP_LIMIT_S = 15.0
# A status page of an agent with many workers takes about 100 KiB. A longer one is refused.
ANSWER_BYTES_MAX = 8 << 20


class Poller:
    """Keeps the agents' last reports. `swept` is set once every agent was polled since this replica became active."""

    def __init__(self, world: World, queue: WorkQueue, mutex: Mutex, settings: Settings) -> None:
        self._world = world
        self._queue = queue
        self._mutex = mutex
        self._settings = settings
        self._silent: set[str] = set()
        # Agents whose deployments were queued since their answers became too old.
        self._stale: set[str] = set()
        self.swept = asyncio.Event()

    @property
    def silent_count(self) -> int:
        """Number of agents that did not answer the last poll. One that was never ready does not count."""
        return len(self._silent)

    async def run(self) -> None:
        """Poll every agent periodically while this replica is active. Never returns."""
        timeout = aiohttp.ClientTimeout(total=self._settings.poll_timeout_s)
        connector = aiohttp.TCPConnector(limit=self._settings.poll_count_max, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                if not self._mutex.is_held:
                    # Earlier reports may be old when this replica is active again.
                    self.swept.clear()
                    self._silent.clear()
                    self._stale.clear()
                    await self._mutex.held()
                started_s = time.monotonic()
                await self.sweep(session)
                self.swept.set()
                await asyncio.sleep(max(0.0, self._settings.poll_s - (time.monotonic() - started_s)))

    async def ready(self) -> None:
        """Return when this replica is active and has polled every agent since."""
        await self._mutex.held()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.swept.wait(), FIRST_SWEEP_LIMIT_S)

    async def sweep(self, session: aiohttp.ClientSession) -> None:
        """Poll every agent once."""
        left = self._world.left
        pods = [
            pod
            for pod in self._world.pods.values()
            if pod.address and pod.http_port and not pod.ending and pod.key not in left
        ]
        uids = {pod.uid for pod in pods}
        self._silent &= uids
        self._stale &= uids
        line = iter(pods)
        workers = min(self._settings.poll_count_max, len(pods))
        await asyncio.gather(*(self._ask_all(session, line) for _ in range(workers)))

    async def _ask_all(self, session: aiohttp.ClientSession, pods: object) -> None:
        for pod in pods:  # type: ignore[attr-defined]
            await self._ask(session, pod)

    async def _ask(self, session: aiohttp.ClientSession, pod: AgentPod) -> None:
        host = f"[{pod.address}]" if ":" in pod.address else pod.address
        try:
            url = f"http://{host}:{pod.http_port}/v1/status"
            # An agent never redirects. Following would let its pod choose whom the operator asks.
            async with session.get(url, allow_redirects=False) as answer:
                if answer.status != HTTPStatus.OK:
                    raise ValueError(f"{url}: {answer.status}")
                data = await answer.content.read(ANSWER_BYTES_MAX)
                report = msgspec.json.decode(data, type=AgentStatus).without_measures()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.DecodeError):
            self._missed(pod)
            return
        changed = self._world.answered(pod.uid, Poll(time.monotonic(), report))
        # An agent that answers again may report the same as before. The end of its silence is a change, too.
        if changed is not None or pod.uid in self._silent:
            self._queue.add([pod.key])
        self._silent.discard(pod.uid)
        self._stale.discard(pod.uid)

    def _missed(self, pod: AgentPod) -> None:
        """Record a missed answer. If the last answer is too old, queue the agent's deployment."""
        now_s = time.monotonic()
        poll = self._world.polls.setdefault(pod.uid, Poll(now_s, None))
        if poll.report is None and not pod.ready:
            # It is still starting: an agent is silent only after it was ready once.
            self._world.polls[pod.uid] = Poll(now_s, None)
            self._silent.discard(pod.uid)
            return
        self._silent.add(pod.uid)
        # Sweeps of many silent agents are far apart, so the age may exceed the limit by any time.
        if now_s - poll.answered_s > self._settings.poll_stale_s and pod.uid not in self._stale:
            self._stale.add(pod.uid)
            self._queue.add([pod.key])
