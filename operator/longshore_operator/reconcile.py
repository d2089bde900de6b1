"""The one function for every event and for the timer: observe, decide, apply. Level-based: it asks what is, not what came.

`Reconciler.work` runs in several tasks. Called by `main`; knows no kopf.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time

from longshore_operator.api import Api
from longshore_operator.apply import Applier, ChangedError, GoneError
from longshore_operator.decide.decision import Decision, decide
from longshore_operator.errors import ApiError
from longshore_operator.lease import LostLeaseError, Mutex
from longshore_operator.metrics import Metrics
from longshore_operator.observe import Moment, Observed, Refusal, observe
from longshore_operator.render.wanted import ImageChoice
from longshore_operator.settings import Settings
from longshore_operator.work_queue import WorkQueue
from longshore_operator.world import Key, World

_log = logging.getLogger(__name__)
# A child that was refused is tried again after this: a quota may have been raised.
REFUSED_AGAIN_S = 30.0
# While agents do not become ready, one looks this often whether their keys are still there.
PROBE_EVERY_S = 30.0


class Reconciler:
    """What is remembered between two looks is only what spares work: losing it costs nothing but that."""

    def __init__(
        self, world: World, api: Api, queue: WorkQueue, mutex: Mutex, settings: Settings, metrics: Metrics
    ) -> None:
        self._world = world
        self._queue = queue
        self._mutex = mutex
        self._settings = settings
        self._metrics = metrics
        self._applier = Applier(api, world, mutex.check)
        self._images = ImageChoice(
            image=settings.agent_image,
            pull_policy=settings.agent_image_pull_policy,
            pull_secrets=tuple(filter(None, (name.strip() for name in settings.agent_image_pull_secrets.split(",")))),
            runtime_class=settings.agent_runtime_class,
        )
        self._refusals: dict[Key, Refusal] = {}
        self._probed_s: dict[Key, float] = {}
        # Deployments that were looked at since this process began, by uid.
        self._known: dict[Key, str] = {}

    async def work(self) -> None:
        """Look at deployments as they come, while this replica is the active one."""
        while True:
            key = await self._queue.take()
            await self._mutex.held()
            started_s = time.monotonic()
            failed = False
            self._applier.written.discard(key)
            try:
                await self.reconcile(key)
            except (GoneError, LostLeaseError) as error:
                _log.info("%s/%s: left: %s", *key, error)
            except ChangedError as error:
                failed = True
                _log.info("%s/%s: changed meanwhile: %s", *key, error)
            except ApiError as error:
                failed = True
                self._metrics.failed(error.error_class)
                _log.warning("%s/%s: %s", *key, error)
            except Exception:  # noqa: BLE001 - see below
                # A mistake of ours in one deployment must not end the work on others; it is counted and logged whole.
                failed = True
                self._metrics.failed("internal")
                _log.exception("%s/%s: a mistake of the operator", *key)
            again_s = REFUSED_AGAIN_S if key in self._refusals else None
            self._queue.done(key, failed=failed, progress=key in self._applier.written, again_s=again_s)
            self._metrics.reconciled(time.monotonic() - started_s)

    async def reconcile(self, key: Key) -> None:
        """Bring one deployment and its status to what its spec says."""
        observed = self._observe(key)
        if observed is None:
            self._refusals.pop(key, None)
            self._probed_s.pop(key, None)
            self._known.pop(key, None)
            self._applier.forget(key)
            return
        if self._known.get(key) != observed.uid:
            await self._applier.look_for_monitor(observed)
            self._known[key] = observed.uid
        missing = await self._keys_are_missing(observed)
        observed = self._observe(key, keys_missing=missing) or observed
        decision = decide(observed, self._images)
        if decision.keys is not None:
            await self._applier.make_keys(observed, decision.keys)
            observed, decision = self._again(key)
        if decision.apply or decision.delete:
            await self._apply(observed, decision)
            observed, decision = self._again(key)
        if decision.status is not None:
            await self._applier.write_status(observed, decision.status)
            await self._applier.tell(observed, decision.transitions)

    async def _apply(self, observed: Observed, decision: Decision) -> None:
        refusal = await self._applier.apply_children(observed, decision.apply)
        if refusal is None:
            self._refusals.pop(observed.key, None)
            await self._applier.delete_children(observed, decision.delete)
        else:
            self._refusals[observed.key] = refusal
            self._metrics.failed("refused")

    def _again(self, key: Key) -> tuple[Observed, Decision]:
        """Look and decide again, with what was just written."""
        observed = self._observe(key)
        if observed is None:
            raise GoneError(f"{key.namespace}/{key.name} was deleted meanwhile")
        return observed, decide(observed, self._images)

    def _observe(self, key: Key, *, keys_missing: bool = False) -> Observed | None:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return observe(
            self._world,
            key,
            Moment(time.monotonic(), now, self._settings.poll_stale_s),
            sees_nodes=self._settings.watch_nodes,
            refusal=self._refusals.get(key),
            keys_missing=keys_missing,
        )

    async def _keys_are_missing(self, observed: Observed) -> bool:
        """Whether the Secret is gone; asked only while agents stay unready, which is what its loss leads to."""
        conditions = {entry["type"]: entry for entry in observed.status.get("conditions") or ()}
        agents = conditions.get("AgentsReady")
        waiting = any(not agent.pod.ready for agent in observed.agents)
        if agents is None or agents["status"] == "True" or not waiting:
            return False
        now_s = time.monotonic()
        if now_s - self._probed_s.get(observed.key, -PROBE_EVERY_S) < PROBE_EVERY_S:
            return False
        self._probed_s[observed.key] = now_s
        return await self._applier.secret_is_missing(observed)


async def look_at_all(world: World, queue: WorkQueue, every_s: float) -> None:
    """The timer: have every deployment looked at now and then, whatever happened."""
    while True:
        queue.add(world.deployments)
        await asyncio.sleep(every_s)
