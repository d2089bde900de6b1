"""Everything that a decision on one deployment is made from, taken out of the world in one piece. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longshore_operator.reports import AgentReport
from longshore_operator.world import AgentPod, ChildKey, Key, World

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: its pod, and what it said of itself.

    Attributes:
        report: None: nothing, or too long ago.
        silent: it has been asked for so long in vain that this is a fact about it.
    """

    pod: AgentPod
    report: AgentReport | None
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another deployment with agents on some of our nodes. `body` is its DisaggDeployment."""

    key: Key
    nodes: tuple[str, ...]
    body: Body


@dataclass(frozen=True, slots=True)
class Refusal:
    """A child that the API server refused, and its answer; for the generation that was tried."""

    child: str
    message: str
    generation: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of one deployment.

    Attributes:
        body: the DisaggDeployment as the API server gives it.
        settled: versions of children that apply has left as they were, though they look different.
        nodes: labels by name; None: the operator may not look at nodes.
        now: RFC 3339, in seconds, for conditions whose status changes.
        keys_missing: the Secret that the status names is gone.
    """

    key: Key
    body: Body
    children: Mapping[ChildKey, Body]
    settled: Mapping[ChildKey, str]
    agents: tuple[Agent, ...]
    nodes: Mapping[str, Mapping[str, str]] | None
    neighbours: tuple[Neighbour, ...]
    refusal: Refusal | None
    now: str
    keys_missing: bool = False

    @property
    def uid(self) -> str:
        """The deployment's own."""
        return str(self.body["metadata"]["uid"])

    @property
    def generation(self) -> int:
        """Of the spec that is observed."""
        return int(self.body["metadata"]["generation"])

    @property
    def status(self) -> Body:
        """What was written last."""
        return self.body.get("status") or {}


@dataclass(frozen=True, slots=True)
class Moment:
    """When one looks: monotonic seconds, the same as text, and how old a report may be."""

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
) -> Observed | None:
    """Return what is known of a deployment, or None if it is gone or going."""
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
        nodes=world.nodes if sees_nodes else None,
        neighbours=tuple(
            Neighbour(other, tuple(sorted(nodes)), world.deployments[other])
            for other, nodes in sorted(world.neighbours(key).items())
        ),
        refusal=refusal if refusal is not None and refusal.generation == generation else None,
        now=moment.text,
        keys_missing=keys_missing,
    )


def _agent(world: World, pod: AgentPod, moment: Moment) -> Agent:
    poll = world.polls.get(pod.uid)
    if poll is None:
        return Agent(pod, None)
    if moment.monotonic_s - poll.answered_s > moment.stale_s:
        return Agent(pod, None, silent=True)
    return Agent(pod, poll.report)
