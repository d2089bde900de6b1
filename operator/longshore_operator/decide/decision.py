"""Decides which objects of one deployment to write and what its status says. Called by `reconcile` alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longshore_operator import kinds, names
from longshore_operator.decide import engines, keep, rollout, sharing, spec
from longshore_operator.decide.drift import differs
from longshore_operator.decide.placement import Placed, place
from longshore_operator.decide.verdict import Verdict, some, verdict
from longshore_operator.kinds import Kind
from longshore_operator.observe import Observed
from longshore_operator.render.children import render
from longshore_operator.render.wanted import ImageChoice, Wanted, is_ours
from longshore_operator.world import ChildKey
from longshore_spec.condition_reasons import ConditionType, Truth, is_known
from longshore_spec.manifest import DisaggDeployment
from longshore_wire.plan import Summary

Body = dict[str, Any]
_WAITING = frozenset({"AgentsUpdating", "AgentsNotReady"})


@dataclass(frozen=True, slots=True)
class NewKeys:
    """A request for keys of `revision` that still accept these clients. `previous` names the Secret before, if any."""

    revision: int
    accepted: tuple[str, ...]
    previous: str = ""


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition whose status or reason changed, for an event.

    Attributes:
        shown: the CRD has this condition; if not, each decision has the transition anew.
    """

    before: str | None
    verdict: Verdict
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """The writes to make, in this order: keys, children, status, events.

    Attributes:
        keys: None if the keys in the status are valid. Otherwise make these and decide again; the rest is provisional.
        apply: children that differ from what the spec renders to.
        delete: children that were switched off.
        status: the whole status; None if it is unchanged.
        waits: agents are missing, not ready or not current, and the cluster's events may say why.
    """

    keys: NewKeys | None = None
    apply: tuple[tuple[Kind, Body], ...] = ()
    delete: tuple[ChildKey, ...] = ()
    status: Body | None = None
    transitions: tuple[Transition, ...] = field(default=())
    waits: bool = False

    @property
    def at_rest(self) -> bool:
        """Whether there is nothing to write."""
        return self.keys is None and not self.apply and not self.delete and self.status is None


def decide(observed: Observed, images: ImageChoice) -> Decision:
    """Return the decision on one deployment."""
    judged = spec.permitted(spec.judge(observed.body), images)
    keys = _made_keys(observed)
    new = None
    if judged.config is not None and judged.manifest is not None:
        new = _new_keys(observed, judged.manifest, keys)
        if new is not None and not judged.paused and not observed.failure:
            return Decision(keys=new)
    children = keep.keep(observed, _render(observed, judged, images, keys))
    apply = tuple((kind, body) for kind, body in children if _is_due(observed, kind, body))
    delete = _unwanted(observed, children) if children else ()
    held: tuple[str, ...] = ()
    if judged.paused:
        held = tuple(f"{kind.name} {body['metadata']['name']}" for kind, body in apply)
        held += tuple(f"{child.kind} {child.name}" for child in delete)
        held += () if new is None else (f"keys of revision {new.revision}",)
        apply, delete = (), ()
    verdicts, status = _judge(observed, judged, children, held)
    status |= {name: observed.status[name] for name in ("keys", "operator") if observed.status.get(name)}
    # `reconcile` claims it before this, if the CRD has the field.
    status, unserved = observed.served.part({"operator": {}} | status)
    if not status.get("operator"):
        status.pop("operator", None)
    matches = _definition(judged.unread, unserved)
    verdicts.append(matches)
    shown, _ = observed.served.part({"conditions": [_condition(observed, matches)]})
    status["conditions"] += shown["conditions"]
    changed = {name: status[name] for name in status} != {name: observed.status.get(name) for name in status}
    gone = any(name not in status for name in observed.status)
    return Decision(
        apply=apply,
        delete=delete,
        status=status if changed or gone else None,
        transitions=_transitions(observed, verdicts, status["conditions"]),
        waits=any(entry.reason in _WAITING for entry in verdicts) or any(pod.starting for pod in observed.engine_pods),
    )


def _made_keys(observed: Observed) -> Body:
    """Return the status's entry of the keys. It is empty until there are some, even if the first are being made."""
    keys = observed.status.get("keys") or {}
    return keys if keys.get("secret") else {}


def _new_keys(observed: Observed, manifest: DisaggDeployment, keys: Body) -> NewKeys | None:
    revision, accepted = manifest.spec.agents.keys_revision, tuple(keys.get("accepted") or ())
    if observed.keys_missing or not keys.get("secret"):
        return NewKeys(revision, accepted)
    if keys.get("revision") == revision or _older_keys(observed, keys):
        return None
    return NewKeys(revision, accepted, keys["secret"])


def _fingerprint(secret: str) -> str:
    return secret.rpartition("-")[2]


def _older_keys(observed: Observed, keys: Body) -> list[str]:
    """Return the nodes whose agents have older keys. Those accept the current keys and would refuse the next."""
    pods = [agent.pod for agent in observed.agents]
    return [pod.node or pod.name for pod in pods if pod.keys and pod.keys != _fingerprint(keys["secret"])]


def _keys_wait(observed: Observed, manifest: DisaggDeployment | None, keys: Body) -> str:
    """Return why new keys must wait; empty if they need not."""
    if manifest is None or not keys or keys.get("revision") == manifest.spec.agents.keys_revision:
        return ""
    revision, older = manifest.spec.agents.keys_revision, some(_older_keys(observed, keys))
    return f"keys of revision {revision} wait until all agents have those of revision {keys['revision']}: {older}"


def _render(observed: Observed, judged: spec.Judged, images: ImageChoice, keys: Body) -> tuple[tuple[Kind, Body], ...]:
    if judged.manifest is None or judged.config is None or not keys.get("secret"):
        return ()
    return _rendered(spec.text_of(observed.body), observed.uid, images, keys["secret"], keys.get("previous") or "")


# Cached like `spec.judge_text`. All callers share the result, so it must not be modified.
@functools.lru_cache(maxsize=spec.KEPT_COUNT_MAX)
def _rendered(
    text: str, uid: str, images: ImageChoice, secret: str, previous_secret: str
) -> tuple[tuple[Kind, Body], ...]:
    judged = spec.judge_text(text)
    assert judged.manifest is not None
    assert judged.config is not None
    wanted = Wanted(
        manifest=judged.manifest,
        config=judged.config,
        uid=uid,
        images=images,
        keys_secret=secret,
        keys_fingerprint=_fingerprint(secret),
        previous_keys_secret=previous_secret,
    )
    return tuple(render(wanted))


def _is_due(observed: Observed, kind: Kind, body: Body) -> bool:
    child = ChildKey(kind.name, body["metadata"]["name"])
    found = observed.children.get(child)
    if found is None or not is_ours(found, observed.uid):
        # Applying tells about an object that is not ours, and leaves it.
        return True
    if observed.settled.get(child) == found["metadata"]["resourceVersion"]:
        rendered = (found["metadata"].get("annotations") or {}).get(names.RENDERED_ANNOTATION)
        return bool(rendered != body["metadata"]["annotations"][names.RENDERED_ANNOTATION])
    return differs(body, found)


def _unwanted(observed: Observed, children: tuple[tuple[Kind, Body], ...]) -> tuple[ChildKey, ...]:
    """Return our children that are no longer rendered. Objects of other owners are ignored, even under our names."""
    wanted = {ChildKey(kind.name, body["metadata"]["name"]) for kind, body in children}
    return tuple(
        child for child, body in observed.children.items() if child not in wanted and is_ours(body, observed.uid)
    )


def _judge(
    observed: Observed, judged: spec.Judged, children: Sequence[tuple[Kind, Body]], held: Sequence[str]
) -> tuple[list[Verdict], Body]:
    """Return all verdicts and the resulting status."""
    daemon_sets = [body for kind, body in children if kind is kinds.DAEMON_SET]
    templates = [body["spec"]["template"]["metadata"] for body in daemon_sets]
    configs = {entry["labels"][names.ROLES_LABEL]: entry["annotations"][names.CONFIG_ANNOTATION] for entry in templates}
    placed = _placed(observed, judged.manifest, daemon_sets) if judged.manifest is not None else ()
    seen = rollout.look(observed, daemon_sets, placed, configs)
    found = engines.connections(observed.agents)
    compatible = _compatible(judged)
    wait = _keys_wait(observed, judged.manifest, _made_keys(observed))
    agents = rollout.judge_agents(observed, seen, can_work=compatible.holds, keys_wait=wait, held=held)
    verdicts = [
        _ready(compatible, agents),
        compatible,
        agents,
        *(
            _kept(observed, entry) if found.unheard else entry
            for entry in engines.judge(observed, found, judged.config)
        ),
        sharing.judge(observed, judged.config),
        rollout.judge_progress(seen, compatible, agents, paused=judged.paused),
    ]
    status: Body = {
        "observedGeneration": observed.generation,
        "conditions": [_condition(observed, entry) for entry in verdicts],
        "agents": seen.counts.status(),
    }
    if judged.plan is not None:
        status["plan"] = _numbers(judged.plan)
        if len(judged.caches) > 1:
            status["plan"]["caches"] = [{"name": name, **_numbers(part)} for name, part in judged.caches.items()]
    if judged.manifest is not None:
        status |= _roles(observed, judged.manifest, found, placed, configs)
    return verdicts, status


def _numbers(plan: Summary) -> Body:
    found = {
        "way": plan.way,
        "pairs": plan.pairs,
        "bytesPerToken": plan.bytes_per_token,
        "writesPerChunk": plan.writes_per_chunk,
        "slicesPerChunk": plan.slices_per_chunk,
    }
    return found | ({"slotBytes": plan.slot_bytes} if plan.slot_bytes else {})


def _ready(compatible: Verdict, agents: Verdict) -> Verdict:
    condition = ConditionType.READY
    if not compatible.holds:
        return verdict(condition, "Incompatible", compatible.message)
    if not agents.holds:
        return verdict(condition, "AgentsNotReady", f"{agents.reason}: {agents.message}")
    return verdict(condition, "Ready", agents.message)


def _compatible(judged: spec.Judged) -> Verdict:
    condition = ConditionType.COMPATIBLE
    if judged.plan is None:
        return verdict(condition, judged.reason, spec.message(judged.faults))
    plan = judged.plan
    text = f"{plan.way}: {plan.pairs} pairs, {plan.writes_per_chunk} writes a chunk instead of {plan.slices_per_chunk}"
    return verdict(condition, "PlanMade", text)


def _definition(unread: Sequence[str], unserved: Sequence[str]) -> Verdict:
    parts = []
    if unread:
        parts.append(f"this operator does not know {some(unread)}")
    if unserved:
        parts.append(f"the CRD does not have {some(unserved)}")
    name = "FieldsUnknown" if parts else "FieldsKnown"
    text = "; ".join(parts) or "the operator and the CRD know the same fields"
    return verdict(ConditionType.DEFINITION_MATCHES, name, text)


def _placed(observed: Observed, manifest: DisaggDeployment, daemon_sets: Sequence[Body]) -> tuple[Placed, ...]:
    roles = ((names.PREFILL, manifest.spec.prefill), (names.DECODE, manifest.spec.decode))
    running = {agent.pod.node for agent in observed.agents if not agent.pod.ending}
    return tuple(place(name, role.node_selector, observed.nodes or {}, daemon_sets, running) for name, role in roles)


def _roles(
    observed: Observed,
    manifest: DisaggDeployment,
    found: engines.Connections,
    placed: Sequence[Placed],
    configs: dict[str, str],
) -> Body:
    roles: Body = {}
    halves = ((engines.PREFILL, manifest.spec.prefill), (engines.DECODE, manifest.spec.decode))
    for (half, role), nodes in zip(halves, placed, strict=True):
        name = nodes.role
        entry = rollout.role_counts(observed, nodes, configs)
        layout = f"TP{role.tensor_parallel}"
        entry["summary"] = f"{entry['readyAgents']}/{entry['nodes']} {layout}" if entry else layout
        if role.instances is not None:
            entry["expectedInstances"] = role.instances
        if found.unheard:
            before = observed.status.get(name) or {}
            entry |= {key: before[key] for key in ("instances", "wires", "dataPaths") if key in before}
        else:
            entry |= found.role_status(half)
        roles[name] = entry
    return roles


def _condition(observed: Observed, entry: Verdict) -> Body:
    before = _before(observed, entry.condition) or {}
    since = before.get("lastTransitionTime") if before.get("status") == entry.truth.value else None
    return {
        "type": entry.condition.value,
        "status": entry.truth.value,
        "reason": entry.reason,
        "message": entry.message,
        "lastTransitionTime": since or observed.now,
        "observedGeneration": observed.generation,
    }


def _kept(observed: Observed, entry: Verdict) -> Verdict:
    """Return the verdict in the status while agents were not heard yet, for example after a start of the operator."""
    before = _before(observed, entry.condition)
    if before is None or not is_known(entry.condition, before["reason"]):
        return entry
    return verdict(entry.condition, before["reason"], before["message"])


def _before(observed: Observed, condition: ConditionType) -> Body | None:
    listed = observed.status.get("conditions") or ()
    return next((entry for entry in listed if entry["type"] == condition.value), None)


def _transitions(observed: Observed, verdicts: list[Verdict], shown: Sequence[Body]) -> tuple[Transition, ...]:
    """Return the conditions whose status or reason changed. A new condition counts unless it is Unknown."""
    found = []
    for entry in verdicts:
        before = _before(observed, entry.condition)
        if before is None:
            changed = entry.truth is not Truth.UNKNOWN
        else:
            changed = (before["status"], before["reason"]) != (entry.truth.value, entry.reason)
        if changed:
            before_status = None if before is None else before["status"]
            is_shown = any(each["type"] == entry.condition.value for each in shown)
            found.append(Transition(before_status, entry, is_shown))
    return tuple(found)
