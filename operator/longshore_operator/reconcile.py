"""Reconciles one deployment: observe, decide, apply. Level-based: it uses the current state, not the event.

`main` runs `Reconciler.work` in several tasks. This module does not import kopf.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from longshore_operator import timestamps
from longshore_operator.api import Api
from longshore_operator.apply import Applier, ChangedError, GoneError
from longshore_operator.decide.decision import Decision, decide
from longshore_operator.errors import ApiError
from longshore_operator.lease import LostLeaseError, Mutex
from longshore_operator.metrics import Metrics
from longshore_operator.observe import Moment, Observed, Refusal, Warned, observe
from longshore_operator.ownership import Claim, LeaseWatch, may_claim
from longshore_operator.render.wanted import ImageChoice, MpsDirectory
from longshore_operator.settings import TEXTS, Settings, listed
from longshore_operator.work_queue import WorkQueue
from longshore_operator.world import Key, World
from longshore_spec.environment import from_json
from longshore_spec.permission import Allowed

_log = logging.getLogger(__name__)
# A refused child is retried after this, since its quota may have been raised; a deployment of another operator is
# looked at again.
REFUSED_AGAIN_S = 30.0
# Requests that have failed for this long are told in the status. With the backoffs of the queue and requests that end
# by their time limit, they are told within 25 s. A restart of an API server takes less.
FAILING_S = 8.0
# While agents wait, the cluster's events about them are read at this interval, and the deployment is looked at again.
EVENTS_EVERY_S = 10.0
# While agents are not ready, the existence of their keys is checked at this interval.
PROBE_EVERY_S = 30.0


@dataclass(slots=True)
class _Kept:
    """This process's state of one deployment between its reconciles. Times are monotonic seconds.

    Attributes:
        refusal: of a child, by the API server.
        warnings: the cluster's about agents that wait; None if none wait.
        warned_s: when they were read; None: not since agents wait.
        failing_s: since when requests have failed; None: they succeed.
        probed_s: when the existence of its keys was checked.
        uid: of the deployment whose PodMonitor was read, at `monitor_s`.
        mismatches: slabs with differing digests that events have told of, by node and worker.
    """

    refusal: Refusal | None = None
    warnings: dict[str, Warned] | None = None
    warned_s: float | None = None
    failing_s: float | None = None
    probed_s: float = float("-inf")
    uid: str = ""
    monitor_s: float = 0.0
    mismatches: dict[tuple[str, str], int] = field(default_factory=dict)


class Reconciler:
    """Reconciles queued deployments. Its state is only a cache: a restart loses nothing else."""

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
            pull_secrets=listed(settings.agent_image_pull_secrets),
            runtime_class=settings.agent_runtime_class,
            operator_image=settings.operator_image,
            log_format=settings.log_format,
            allowed=from_json(settings.allow, Allowed),
            pod_labels=tuple(from_json(settings.agent_pod_labels, TEXTS).items()),
            pod_annotations=tuple(from_json(settings.agent_pod_annotations, TEXTS).items()),
            mps=MpsDirectory(settings.mps_host_directory, settings.mps_pipe_directory or settings.mps_host_directory),
        )
        self._claim = Claim.of(settings)
        self._leases = LeaseWatch(api)
        self._kept: dict[Key, _Kept] = {}

    async def work(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Reconcile deployments from the queue. Never returns. `ready` returns when this replica may and can do so."""
        while True:
            key = await self._queue.take()
            await ready()
            started_s = time.monotonic()
            failed = True
            self._applier.written.discard(key)
            try:
                failed = await self._fails(key)
            except Exception:  # noqa: BLE001 - see below
                # A bug must not stop the reconciles of other deployments. It is counted and logged with its traceback.
                self._metrics.failed("internal")
                _log.exception("%s/%s: internal error of the operator", *key, extra=key.about())
            kept = self._of(key)
            again_s = REFUSED_AGAIN_S if kept.refusal is not None or key in self._world.left else None
            if kept.warned_s is not None:
                again_s = EVENTS_EVERY_S
            self._queue.done(key, failed=failed, progress=key in self._applier.written, again_s=again_s)
            self._metrics.reconciled(time.monotonic() - started_s)
            if key not in self._world.deployments:
                self._kept.pop(key, None)

    async def _fails(self, key: Key) -> bool:
        """Reconcile one deployment, and return whether requests failed. If they do for long, the status tells it."""
        try:
            await self.reconcile(key)
            self._of(key).failing_s = None
        except (GoneError, LostLeaseError) as error:
            _log.info("%s/%s: left: %s", *key, error, extra=key.about())
        except ChangedError as error:
            _log.info("%s/%s: changed meanwhile: %s", *key, error, extra=key.about())
            await self._tell_failure(key, error)
            return True
        except ApiError as error:
            self._metrics.failed(error.error_class)
            _log.warning("%s/%s: %s", *key, error, extra=key.about(error.error_class))
            await self._tell_failure(key, error)
            return True
        return False

    async def reconcile(self, key: Key) -> None:
        """Make one deployment and its status match its spec."""
        observed = self._observe(key)
        if observed is None:
            self._applier.forget(key)
            self._world.left.discard(key)
            return
        await self._look_for_monitor(observed)
        if not await self._is_ours(observed):
            return
        observed = self._observe(key) or observed
        missing = await self._keys_are_missing(observed)
        observed = self._observe(key, keys_missing=missing) or observed
        decision = decide(observed, self._images)
        if decision.keys is not None:
            await self._applier.make_keys(observed, decision.keys)
            observed, decision = self._again(key)
        if decision.apply or decision.delete:
            await self._apply(observed, decision)
            observed, decision = self._again(key)
        if await self._read_warnings(observed, waits=decision.waits):
            observed, decision = self._again(key)
        if decision.status is not None:
            await self._applier.write_status(observed, decision.status)
            await self._applier.tell(observed, decision.transitions)
        await self._applier.tell_mismatches(observed, self._of(key).mismatches)

    async def _look_for_monitor(self, observed: Observed) -> None:
        """Read the PodMonitor of a new deployment, and at each resync of one that has it, since no watch covers it."""
        now_s, kept = time.monotonic(), self._of(observed.key)
        asked = (observed.body["spec"].get("agents") or {}).get("podMonitor")
        if kept.uid != observed.uid or (asked and now_s - kept.monitor_s >= self._settings.resync_s):
            await self._applier.look_for_monitor(observed)
            kept.uid, kept.monitor_s = observed.uid, now_s

    async def _read_warnings(self, observed: Observed, *, waits: bool) -> bool:
        """Read the cluster's warnings about agents that wait, if it is time to; return whether there are new ones."""
        now_s, kept = time.monotonic(), self._of(observed.key)
        before = kept.warnings
        if not waits:
            kept.warnings = kept.warned_s = None
            return before is not None
        if kept.warned_s is not None and now_s - kept.warned_s < EVENTS_EVERY_S:
            return False
        kept.warned_s = now_s
        kept.warnings = await self._applier.warnings(observed)
        return before != kept.warnings

    async def _tell_failure(self, key: Key, error: Exception) -> None:
        """Report in the status that requests have failed for long. The next success replaces that status."""
        now_s, kept = time.monotonic(), self._of(key)
        kept.failing_s = now_s if kept.failing_s is None else kept.failing_s
        if now_s - kept.failing_s < FAILING_S:
            return
        observed = self._observe(key, failure=str(error))
        if observed is None:
            return
        decision = decide(observed, self._images)
        if decision.status is None:
            return
        try:
            await self._applier.write_status(observed, decision.status)
            await self._applier.tell(observed, decision.transitions)
        except (ApiError, ChangedError, GoneError, LostLeaseError) as another:
            _log.warning("%s/%s: the failure is not told: %s", *key, another, extra=key.about())

    async def _is_ours(self, observed: Observed) -> bool:
        """Whether this operator serves the deployment; claim it if no other one does."""
        found = Claim.read(observed.status)
        another = found if found != self._claim else None
        if another is not None and not may_claim(
            self._claim, another, alive=await self._leases.is_alive(another.lease)
        ):
            if observed.key not in self._world.left:
                self._world.left.add(observed.key)
                text = (
                    f"the operator of the Lease {self._claim.lease} leaves this deployment to that of {another.lease}"
                )
                _log.info("%s/%s: %s", *observed.key, text, extra=observed.key.about())
                await self._applier.tell_left(observed, text)
            return False
        self._world.left.discard(observed.key)
        if found != self._claim:
            status, _ = observed.served.part({**observed.status, "operator": self._claim.status()})
            if "operator" in status:
                await self._applier.write_status(observed, status)
        return True

    async def _apply(self, observed: Observed, decision: Decision) -> None:
        refusal = await self._applier.apply_children(observed, decision.apply)
        if refusal is None:
            self._of(observed.key).refusal = None
            await self._applier.delete_children(observed, decision.delete)
        else:
            self._of(observed.key).refusal = refusal
            self._metrics.failed("refused")

    def _again(self, key: Key) -> tuple[Observed, Decision]:
        """Observe and decide again, after a write."""
        observed = self._observe(key)
        if observed is None:
            raise GoneError(f"{key.namespace}/{key.name} was deleted meanwhile")
        return observed, decide(observed, self._images)

    def _of(self, key: Key) -> _Kept:
        return self._kept.setdefault(key, _Kept())

    def _observe(self, key: Key, *, keys_missing: bool = False, failure: str = "") -> Observed | None:
        kept = self._of(key)
        return observe(
            self._world,
            key,
            Moment(time.monotonic(), timestamps.now(), self._settings.poll_stale_s),
            sees_nodes=self._settings.watch_nodes,
            refusal=kept.refusal,
            keys_missing=keys_missing,
            failure=failure,
            warnings=kept.warnings,
        )

    async def _keys_are_missing(self, observed: Observed) -> bool:
        """Whether the Secret is gone. Checked only while agents are not ready, since its loss makes them unready."""
        conditions = {entry["type"]: entry for entry in observed.status.get("conditions") or ()}
        agents = conditions.get("AgentsReady")
        waiting = any(not agent.pod.ready for agent in observed.agents)
        if agents is None or agents["status"] == "True" or not waiting:
            return False
        now_s, kept = time.monotonic(), self._of(observed.key)
        if now_s - kept.probed_s < PROBE_EVERY_S:
            return False
        kept.probed_s = now_s
        return await self._applier.secret_is_missing(observed)


async def look_at_all(world: World, queue: WorkQueue, every_s: float) -> None:
    """Queue every deployment each `every_s` seconds. Never returns."""
    while True:
        queue.add(world.deployments)
        await asyncio.sleep(every_s)
