"""Takes the input of one decision, a consistent snapshot of one deployment, out of the world. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from longshore_operator.served import Served
from longshore_operator.world import AgentPod, ChildKey, EnginePod, Key, Node, World
from longshore_spec.names import HARMLESS_WARNINGS
from longshore_spec.status import AgentStatus

Body = dict[str, Any]
# Warnings that are no cause. An agent that starts fails some probes, and its status has better words.
_NO_CAUSES = HARMLESS_WARNINGS | {"Unhealthy", "ProbeWarning"}


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: its pod and its last report.

    Attributes:
        report: None if there is none or it is too old.
        silent: it has not answered for `LONGSHORE_POLL_STALE_S`.
    """

    pod: AgentPod
    report: AgentStatus | None
    silent: bool = False

    @property
    def unheard(self) -> bool:
        """Whether it should answer and has not answered this operator yet, which is not long enough to be silent."""
        return self.report is None and not self.silent and self.pod.ready and not self.pod.ending


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another deployment with agents on some of our nodes. `body` is its DisaggDeployment."""

    key: Key
    nodes: tuple[str, ...]
    body: Body


@dataclass(frozen=True, slots=True)
class Refusal:
    """A child that the API server refused, its response, and the generation that was applied."""

    child: str
    message: str
    generation: int


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning event of the cluster: its words, and when it was last repeated (RFC 3339)."""

    text: str
    last: str


def newest_warnings(events: Iterable[Body], uids: Collection[str]) -> dict[str, Warned]:
    """Return the newest warning about each of these objects that may be the cause of a failure, by uid."""
    found: dict[str, Warned] = {}
    for event in events:
        uid, reason = str(event["involvedObject"].get("uid")), str(event.get("reason") or "")
        last = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
        if uid in uids and reason not in _NO_CAUSES and (uid not in found or found[uid].last <= last):
            found[uid] = Warned(": ".join(filter(None, (reason, event.get("message") or ""))), last)
    return found


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed state of one deployment.

    Attributes:
        body: the DisaggDeployment as the API server returns it.
        settled: versions of children that differ from their rendering although an apply leaves them unchanged.
        nodes: by name; None if the operator may not read nodes.
        engine_pods: of both roles, in any order.
        warnings: the cluster's warning events about DaemonSets and pods, the newest of each object, by its uid. Read
            only while agents are missing or not ready, or pods of engines start.
        now: RFC 3339 with whole seconds, for conditions whose status changes.
        keys_missing: the Secret that the status names is gone.
        served: what the CRD has.
        failure: the last error of requests to the API server, if they have failed for long.
    """

    key: Key
    body: Body
    children: Mapping[ChildKey, Body]
    settled: Mapping[ChildKey, str]
    agents: tuple[Agent, ...]
    engine_pods: tuple[EnginePod, ...]
    nodes: Mapping[str, Node] | None
    neighbours: tuple[Neighbour, ...]
    refusal: Refusal | None
    now: str
    keys_missing: bool = False
    failure: str = ""
    warnings: Mapping[str, Warned] = field(default_factory=dict)
    served: Served = field(default_factory=Served)

    @property
    def uid(self) -> str:
        """The deployment's uid."""
        return str(self.body["metadata"]["uid"])

    @property
    def generation(self) -> int:
        """Generation of the observed spec."""
        return int(self.body["metadata"]["generation"])

    @property
    def status(self) -> Body:
        """The status that was written last."""
        return self.body.get("status") or {}


@dataclass(frozen=True, slots=True)
class Moment:
    """The time of an observation: monotonic seconds, the same as text, and the maximum age of a report."""

    monotonic_s: float
    text: str
    stale_s: float


def observe(
    world: World,
    key: Key,
    moment: Moment,
    *,
    sees_nodes: bool,
    refusal: Refusal | None = None,
    keys_missing: bool = False,
    failure: str = "",
    warnings: Mapping[str, Warned] | None = None,
) -> Observed | None:
    """Return the state of a deployment, or None if it is deleted or being deleted."""
    body = world.deployments.get(key)
    if body is None or body["metadata"].get("deletionTimestamp"):
        return None
    generation = int(body["metadata"]["generation"])
    return Observed(
        key=key,
        body=body,
        children=dict(world.children.get(key, {})),
        settled={child: version for (owner, child), version in world.settled.items() if owner == key},
        agents=tuple(_agent(world, pod, moment) for pod in world.pods_of(key)),
        engine_pods=tuple(world.engine_pods.get(key, {}).values()),
        nodes=world.nodes if sees_nodes else None,
        neighbours=tuple(
            Neighbour(other, tuple(sorted(nodes)), world.deployments[other])
            for other, nodes in sorted(world.neighbours(key).items())
        ),
        refusal=refusal if refusal is not None and refusal.generation == generation else None,
        now=moment.text,
        keys_missing=keys_missing,
        failure=failure,
        warnings=warnings or {},
        served=world.served,
    )


def _agent(world: World, pod: AgentPod, moment: Moment) -> Agent:
    poll = world.polls.get(pod.uid)
    if poll is None:
        return Agent(pod, None)
    if moment.monotonic_s - poll.answered_s > moment.stale_s:
        return Agent(pod, None, silent=True)
    return Agent(pod, poll.report)
