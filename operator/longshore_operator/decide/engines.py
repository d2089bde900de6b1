"""Decides EnginesConnected, PeersConnected and TransportVerified from the agents' reports, whose findings say what is wrong.

If an agent is silent, a condition is Unknown unless the reports of the others decide it. Instances of `longshore verify`
do not count: they are no engines of the deployment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from longshore_operator.decide import unwell
from longshore_operator.decide.verdict import Verdict, some, verdict
from longshore_operator.observe import Agent, Observed
from longshore_spec.agent_config import AgentConfig
from longshore_spec.condition_reasons import ConditionType
from longshore_spec.names import PROTECTIONS
from longshore_spec.status import ATTACHED, AgentStatus, Finding, PeerStatus, WorkerStatus
from longshore_wire.names import TEST_INSTANCE_PREFIX, UNKNOWN_WIRE
from longshore_wire.ways import needs_wire

_ENGINES = ConditionType.ENGINES_CONNECTED
_PEERS = ConditionType.PEERS_CONNECTED
_WIRES = ConditionType.TRANSPORT_VERIFIED
# The roles as agents report them, and their engines' names in messages.
PREFILL, DECODE = "source", "target"
_ROLE_NAMES = {PREFILL: "prefill", DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Connections:
    """The agents' reports, combined.

    Attributes:
        instances: complete instances by half, each counted once however many nodes it spans.
        partial: instances with missing ranks.
        findings: of all agents, with their nodes.
        silent: nodes whose agents answered before and do not answer now, whether or not their pods are ready.
        hosts: the host names of registered ranks; empty for one that does not give it.
        answering: agents that answer.
        unheard: agents that should answer and were not heard yet.
    """

    instances: dict[str, frozenset[str]]
    partial: frozenset[str]
    peers: tuple[tuple[str, WorkerStatus, PeerStatus], ...]
    workers: tuple[WorkerStatus, ...]
    findings: tuple[tuple[str, Finding], ...]
    silent: tuple[str, ...]
    hosts: frozenset[str]
    answering: int
    unheard: int

    @property
    def any_engine(self) -> bool:
        """Whether any engine has registered."""
        return bool(self.partial or any(self.instances.values()))

    def told(self, *codes: str) -> list[str]:
        """Return the texts of findings, with their nodes."""
        return [f"{node}: {finding.text}" for node, finding in self.findings if finding.code in codes]

    def role_status(self, half: str) -> dict[str, object]:
        """Return what the status says of the engines of one half."""
        found: dict[str, object] = {"instances": len(self.instances[half])} if self.answering else {}
        if wires := self.wires(half):
            found["wires"] = wires
        if data_paths := self.data_paths(half):
            found["dataPaths"] = data_paths
        return found

    def wires(self, half: str) -> list[str]:
        """Return the wires that workers of one half use."""
        found = {
            peer.wire
            for _, worker, peer in self.peers
            if _known(peer) and needs_wire(peer.ways) and any(half in engine.roles for engine in worker.engines)
        }
        return sorted(found)

    def data_paths(self, half: str) -> list[str]:
        """Return the protection of the data ports of one half's workers, strongest first."""
        found = {worker.data_path for worker in self.workers if any(half in engine.roles for engine in worker.engines)}
        return [name for name in PROTECTIONS if name in found]


def connections(agents: tuple[Agent, ...]) -> Connections:
    """Combine the agents' reports."""
    answering = [(agent.pod.node, agent.report) for agent in agents if agent.report is not None]
    complete: dict[str, set[str]] = {PREFILL: set(), DECODE: set()}
    # (instance, memory): an engine whose ranks have pages in two memories needs all ranks' workers of both.
    seen: set[tuple[str, str]] = set()
    whole: set[tuple[str, str]] = set()
    for _, report in answering:
        for entry in report.instances:
            if entry.instance.startswith(TEST_INSTANCE_PREFIX):
                continue
            seen.add((entry.instance, entry.memory))
            if entry.complete:
                whole.add((entry.instance, entry.memory))
            for half in entry.roles:
                if entry.complete and half in complete:
                    complete[half].add(entry.instance)
    partial = {instance for instance, _ in seen - whole}
    return Connections(
        instances={half: frozenset(found - partial) for half, found in complete.items()},
        partial=frozenset(partial),
        peers=tuple(_peers(answering)),
        workers=tuple(worker for _, worker in _workers(answering)),
        findings=tuple((node, finding) for node, report in answering for finding in report.findings),
        silent=tuple(agent.pod.node for agent in agents if agent.silent and not agent.pod.ending),
        hosts=frozenset(rank.host for _, report in answering for entry in report.instances for rank in entry.ranks),
        answering=len(answering),
        unheard=sum(agent.unheard for agent in agents),
    )


def _workers(answering: list[tuple[str, AgentStatus]]) -> Iterator[tuple[str, WorkerStatus]]:
    for node, report in answering:
        for worker in report.workers:
            if not worker.worker.startswith(TEST_INSTANCE_PREFIX):
                yield node, worker


def _peers(answering: list[tuple[str, AgentStatus]]) -> Iterator[tuple[str, WorkerStatus, PeerStatus]]:
    for node, worker in _workers(answering):
        for peer in worker.peers:
            if not peer.instance.startswith(TEST_INSTANCE_PREFIX):
                yield node, worker, peer


def judge(observed: Observed, found: Connections, config: AgentConfig | None) -> list[Verdict]:
    """Return the three conditions."""
    early = _nothing_to_judge(found)
    if early is not None:
        name, text = early
        said = [verdict(condition, name, text) for condition in (_ENGINES, _PEERS, _WIRES)]
    else:
        said = [_engines(found, config), _attached(found), _verified(found)]
    said[0] = _with_pods(observed, found, config, said[0])
    if refused := found.told("EngineRefused"):
        said[0] = verdict(_ENGINES, "EnginesRefused", some(refused))
    return said


def _nothing_to_judge(found: Connections) -> tuple[str, str] | None:
    if found.any_engine:
        return None
    if found.silent:
        return "AgentSilent", _silence(found)
    return "NoEngines", "no engine has registered yet"


def _silence(found: Connections) -> str:
    return f"{len(found.silent)} agents do not answer: {some(found.silent)}"


def _engines(found: Connections, config: AgentConfig | None) -> Verdict:
    expected = _expected(config)
    counts = {half: len(names) for half, names in found.instances.items()}
    text = ", ".join(f"{counts[half]} of {_told(expected[half])} {_ROLE_NAMES[half]}" for half in (PREFILL, DECODE))
    missing = any(counts[half] < (expected[half] or 0) for half in counts)
    if (missing or found.partial) and found.silent:
        return verdict(_ENGINES, "AgentSilent", f"{text}; {_silence(found)}")
    if found.partial:
        return verdict(_ENGINES, "RanksMissing", f"{text}; ranks are missing of {some(found.partial)}")
    if missing:
        return verdict(_ENGINES, "EnginesMissing", f"{text} instances have registered")
    return verdict(_ENGINES, "EnginesConnected", f"{text} instances have registered")


def _expected(config: AgentConfig | None) -> dict[str, int | None]:
    if config is None:
        return {PREFILL: None, DECODE: None}
    return {PREFILL: config.prefill.instances, DECODE: config.decode.instances}


def _with_pods(observed: Observed, found: Connections, config: AgentConfig | None, judged: Verdict) -> Verdict:
    """Add what the pods of engines show, if their role has fewer instances than expected, or none."""
    lacking = {
        _ROLE_NAMES[half] for half, count in _expected(config).items() if len(found.instances[half]) < (count or 1)
    }
    pods = [
        pod for pod in observed.engine_pods if pod.role in lacking and pod.host not in found.hosts and not pod.ending
    ]
    failing = unwell.engine_pods(observed, pods)
    starting = [pod.name for pod in pods if pod.starting and pod.name not in failing]
    running = [pod.name for pod in pods if not (pod.starting or pod.name in failing or "" in found.hosts)]
    groups = {
        "failing": [f"pod {name} ({cause})" for name, cause in failing.items()],
        "starting": starting,
        "running but not registered": running,
    }
    parts = [judged.message, *(f"{name}: {some(group)}" for name, group in groups.items() if group)]
    name = "EnginesFailing" if failing and not found.silent else judged.reason
    return verdict(_ENGINES, name, "; ".join(parts))


def _told(expected: int | None) -> str:
    return "any" if expected is None else str(expected)


def _attached(found: Connections) -> Verdict:
    if lost := found.told("PeerLost", "PeerRefused"):
        return verdict(_PEERS, "PeersLost", some(lost))
    waiting = [
        f"{worker.worker} on {node}: {peer.name}" for node, worker, peer in found.peers if peer.state != ATTACHED
    ]
    if waiting:
        return verdict(_PEERS, "PeersConnecting", some(waiting))
    if found.silent:
        return verdict(_PEERS, "AgentSilent", _silence(found))
    if not found.peers:
        return verdict(_PEERS, "NoPeers", "no worker knows of a peer yet")
    return verdict(_PEERS, "PeersConnected", f"{len(found.peers)} ends of links are attached")


def _verified(found: Connections) -> Verdict:
    if barred := found.told("PeerWireNotAllowed"):
        return verdict(_WIRES, "WireNotAllowed", f"{some(barred)}; rooms of these fail")
    if unknown := found.told("WireUnknown"):
        return verdict(_WIRES, "WireUnknown", some(unknown))
    if found.silent:
        return verdict(_WIRES, "AgentSilent", _silence(found))
    attached = [peer for _, _, peer in found.peers if peer.state == ATTACHED]
    if not attached:
        return verdict(_WIRES, "NoPeers", "no peer is attached yet")
    wires = {peer.wire for peer in attached if needs_wire(peer.ways)}
    if not wires:
        return verdict(_WIRES, "WireVerified", "none is used: engines of one agent copy directly")
    return verdict(_WIRES, "WireVerified", some(wires))


def _known(peer: PeerStatus) -> bool:
    return peer.wire not in ("", UNKNOWN_WIRE)
