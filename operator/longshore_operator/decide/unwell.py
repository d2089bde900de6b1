"""Names the agents and pods of engines that do not start or are not ready, with the cluster's own words. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

from longshore_operator.decide.verdict import some
from longshore_operator.observe import Agent, Observed, Warned
from longshore_operator.timestamps import seconds
from longshore_operator.world import EnginePod, Pod
from longshore_spec.condition_reasons import ConditionType

# Of one agent's causes in a condition's message, which may name five agents. `/readyz` has the whole text.
_WORDS_CHARACTERS_MAX = 400
# Mounts and sandboxes often fail once while a pod starts. A failure that lasts is repeated after this, and until now.
_SETTLED_S = 15.0
_REPEATED_S = 150.0
# A condition has whole seconds of this machine's clock, and an event those of the controller's.
_CLOCKS_S = 5.0
# A pod that has not started for this long is reported without a failure. Pulling an image of some GB takes minutes.
START_LIMIT_S = 600.0
# The kubelet starts an agent within this time or restarts it, and asks then whether it is ready.
PROBE_LIMIT_S = 150.0
# A pod's name ends in five random characters.
_RANDOM_END = re.compile(r"(-agent(?:-[a-z]+)?)-[a-z0-9]{5}\b")


def missing(observed: Observed, no_pod: Collection[str], daemon_sets: Collection[str]) -> list[str]:
    """Return why nodes have no pod, if the DaemonSet controller says so or it has lasted for long."""
    if not no_pod and observed.nodes is not None:
        return []
    nodes = f"no pod on {some(no_pod)}" if no_pod else "a pod is missing"
    since = _unready_since(observed)
    told = [observed.warnings[uid] for uid in daemon_sets if uid in observed.warnings]
    words = {
        _short(_RANDOM_END.sub(r"\1", entry.text))
        for entry in told
        if since and seconds(since, entry.last) >= -_CLOCKS_S
    }
    if words:
        return [f"{nodes} ({'; '.join(sorted(words))})"]
    if no_pod and since and seconds(since, observed.now) > START_LIMIT_S:
        return [f"{nodes} (not created within {START_LIMIT_S:g} s)"]
    return []


def agents(observed: Observed, left_out: Collection[str]) -> list[str]:
    """Return the agents that are not ready although they are neither starting nor ending, each with the cause."""
    found = []
    for agent in observed.agents:
        if agent.pod.ready or agent.pod.ending or agent.pod.node in left_out:
            continue
        words = _warned(agent.pod, observed.warnings.get(agent.pod.uid), observed.now)
        late = bool(agent.pod.created) and seconds(agent.pod.created, observed.now) > START_LIMIT_S
        if (agent.pod.starting or _is_unprobed(agent, observed.now)) and not words and not late:
            continue
        cause = "; ".join(filter(None, (agent.pod.trouble, words, _own_words(agent))))
        cause = cause or (f"not started within {START_LIMIT_S:g} s" if agent.pod.starting else "not ready")
        found.append(f"{agent.pod.node or agent.pod.name} ({_short(cause)})")
    return found


def engine_pods(observed: Observed, pods: Collection[EnginePod]) -> dict[str, str]:
    """Return which of these pods cannot start or fail, by name, with the cause."""
    causes = {pod.name: pod.trouble or _warned(pod, observed.warnings.get(pod.uid), observed.now) for pod in pods}
    return {name: _short(cause) for name, cause in causes.items() if cause}


def _is_unprobed(agent: Agent, now: str) -> bool:
    """Whether an agent has just started and neither a probe nor the agent itself has said how it is."""
    since = agent.pod.unprobed_since
    return bool(since) and not _own_words(agent) and seconds(since, now) <= PROBE_LIMIT_S


def _warned(pod: Pod, warned: Warned | None, now: str) -> str:
    """Return the cluster's warning about a pod if it has lasted and still does."""
    if warned is None or not pod.created:
        return ""
    lasts = seconds(pod.created, warned.last) >= _SETTLED_S and seconds(warned.last, now) <= _REPEATED_S
    return warned.text if lasts else ""


def _unready_since(observed: Observed) -> str:
    """Return since when AgentsReady is not True; empty if it is True or not written yet."""
    listed = observed.status.get("conditions") or ()
    found = next((entry for entry in listed if entry["type"] == ConditionType.AGENTS_READY.value), None)
    return "" if found is None or found["status"] == "True" else str(found["lastTransitionTime"])


def _own_words(agent: Agent) -> str:
    """Return the agent's own reasons for not being ready; empty if it gives none."""
    return "; ".join(map(str, agent.report.unready)) if agent.report is not None else ""


def _short(text: str) -> str:
    return text if len(text) <= _WORDS_CHARACTERS_MAX else f"{text[:_WORDS_CHARACTERS_MAX]}…"
