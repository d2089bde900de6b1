"""Prints the findings of a deployment's agents, and judges what one agent cannot: what needs the manifest or other agents. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from longshore_cli.agent_report import Report
from longshore_cli.check.lines import Line, error, ok, some, warning
from longshore_cli.cluster import AgentPod, DeniedError
from longshore_cli.words import count
from longshore_spec import pod_settings
from longshore_spec.findings import KINDS, Subject
from longshore_spec.manifest import Spec
from longshore_spec.names import PROTECTIONS
from longshore_spec.status import ATTACHED, Finding, PeerStatus, Severity, WorkerStatus
from longshore_wire.ways import needs_wire

_TROUBLE = "docs/troubleshooting.md"
_SECURITY = "docs/security.md#what-protects-the-data-ports"
_WIRES = "docs/how-to/wires.md"
# The name of the check that shows the findings about a subject.
_CHECKS = {
    Subject.SUPERVISOR: "readyz",
    Subject.ACCEPTING: "readyz",
    Subject.SELF_TEST: "readyz",
    Subject.WORKERS: "workers",
    Subject.ENGINES: "engines",
    Subject.PEERS: "peers",
    Subject.WIRES: "wires",
    Subject.DIGESTS: "digests",
    Subject.QUARANTINE: "quarantine",
    Subject.MPS: "mps",
    Subject.PEER_ACCESS: "peer-access",
    Subject.ROOMS: "rooms",
    Subject.LIMITS: "limits",
}
# Of findings that only agents of a newer release know.
_OTHER_CHECK = "findings"
_GPU_WIRES = frozenset({"CudaIPC", "NVLink"})

Answers = Sequence[tuple[AgentPod, Report]]


class Reached(NamedTuple):
    """An agent and its report, or why there is none."""

    agent: AgentPod
    page: Report | Exception


class _Worker(NamedTuple):
    node: str
    body: WorkerStatus

    def __str__(self) -> str:
        return f"{self.body.worker} on {self.node}"


class _Link(NamedTuple):
    """A peer of a worker, attached over a wire. `far` is the peer's own worker; None: its agent was not reached."""

    worker: _Worker
    peer: PeerStatus
    far: _Worker | None

    def __str__(self) -> str:
        return f"{self.worker} to {self.peer.name}"


def lines(section: str, spec: Spec, reached: Sequence[Reached], release: str) -> list[Line]:
    """Return what is said of the agents that answer, and of those that do not.

    Args:
        release: the version of the operator; empty: unknown.
    """
    answers = [(one.agent, one.page) for one in reached if not isinstance(one.page, Exception)]
    said = [_reached(section, reached)]
    if not answers:
        return said
    workers = [_Worker(agent.node, worker) for agent, page in answers for worker in page.workers]
    said += [_versions(section, answers, release), *_findings(section, answers)]
    bad = {line.check for line in said}
    said += [line for line in _all_well(section, spec, answers, workers) if line.check not in bad]
    said += [_ports(section, answers, workers, spec), _devices(section, answers, spec)]
    if _CHECKS[Subject.WIRES] not in bad:
        said.append(_wires(section, workers, answers, spec))
    return said


def _findings(section: str, answers: Answers) -> Iterator[Line]:
    """Yield a line for each code of the agents' findings, the worst first."""
    by_code: dict[str, list[tuple[str, Finding]]] = {}
    for agent, page in answers:
        for finding in page.findings:
            by_code.setdefault(finding.code, []).append((agent.node, finding))
    order = tuple(Severity)
    for code, found in sorted(by_code.items(), key=lambda item: min(order.index(f.severity) for _, f in item[1])):
        make = warning if found[0][1].severity is Severity.WARNING else error
        check = _CHECKS[KINDS[code].subject] if code in KINDS else _OTHER_CHECK
        text = f"{code}: {some(f'{node}: {finding.text}' for node, finding in found)}"
        yield make(section, check, text, found[0][1].way_out, found[0][1].link)


def _all_well(section: str, spec: Spec, answers: Answers, workers: Sequence[_Worker]) -> Iterator[Line]:
    """Yield the lines of all checks of findings, as they are without any."""
    yield ok(section, "readyz", f"{count(len(answers), 'agent')} passed the self-test and take engines")
    yield ok(section, "workers", f"{count(len(workers), 'worker')} serve engines, and none was restarted lately")
    yield ok(section, "engines", "no engine was refused lately")
    pairs = sum(len(one.body.peers) for one in workers)
    yield ok(section, "peers", f"none of {count(pairs, 'end')} of links is lost or refused")
    yield ok(section, "digests", "no digests differed")
    held = max((one.body.ring.held_share for one in workers if one.body.ring), default=0.0)
    yield ok(section, "quarantine", f"at most {held:.0%} of a ring is in quarantine")
    yield ok(section, "rooms", "no room is open for long")
    gpu_count = sum(one.body.device != "cpu" for one in workers)
    on_gpus = count(gpu_count, "worker")
    if spec.gpu.mps and not gpu_count:
        text = "gpu.mps is true, and no worker has a GPU yet"
        link = KINDS["GpuNotShared"].link
        yield warning(section, "mps", text, "check again when engines have registered", link)
    elif spec.gpu.mps:
        yield ok(section, "mps", f"the GPUs of {on_gpus} are shared by MPS")
    if gpu_count:
        yield ok(section, "peer-access", f"the GPUs of {on_gpus} can be written by all others of their node")
    descriptors = min(page.node_facts.descriptors for _, page in answers)
    with_rdma = any(page.node_facts.infiniband for _, page in answers)
    locks = ", and those with RDMA devices may lock their staging" if with_rdma else ""
    yield ok(section, "limits", f"agents may open {descriptors} files or more{locks}")


def _reached(section: str, reached: Sequence[Reached]) -> Line:
    check = "pages"
    failures = {one.agent.node or one.agent.name: one.page for one in reached if isinstance(one.page, Exception)}
    if not failures:
        return ok(section, check, f"the pages of all {count(len(reached), 'agent')} that run can be read")
    first = next(iter(failures.values()))
    text = f"the pages of {len(failures)} of {count(len(reached), 'agent')} cannot be read ({some(failures)}): {first}"
    text += "; workers, ports, wires and limits are checked only for agents that answer"
    if all(isinstance(failure, DeniedError) for failure in failures.values()):
        return warning(section, check, text, "get the right to get pods/proxy", "docs/how-to/check.md#rights")
    way_out = "see the agent's log, and NetworkPolicies between the API server and its HTTP port"
    return error(section, check, text, way_out, "docs/runbooks.md#longshoreagentdown")


def _versions(section: str, answers: Answers, release: str) -> Line:
    found = {agent.node: page.version for agent, page in answers}
    shown = some(found.values())
    other = [node for node, version in found.items() if version != release]
    link = "docs/how-to/kubernetes.md#upgrade-and-roll-back"
    if len(set(found.values())) > 1 or (release and other):
        of = f"the operator is of {release}" if release else "the operator's release is not known"
        text = f"agents are of release {shown}, and {of}: others are on {some(other)}"
        return warning(
            section, "versions", text, "wait for the rollout, or set agent.image to the operator's release", link
        )
    if not release:
        text = f"agents are of release {shown}, and the operator's release is not known"
        return warning(section, "versions", text, "get the right to list deployments of the operator's namespace", link)
    return ok(section, "versions", f"all agents that answer are of the operator's release {release}")


def _ports(section: str, answers: Answers, workers: Sequence[_Worker], spec: Spec) -> Line:
    check = "ports"
    first = spec.agents.control.worker_port
    if first:
        strange = [
            f"{rank.address} on {agent.node}"
            for agent, page in answers
            for instance in page.instances
            for rank in instance.ranks
            if not first <= _port(rank.address) < first + max(1, len(page.workers) + page.restarts)
        ]
        if strange:
            text = f"workers listen on other ports than agents.workerPort and those after it: {some(strange)}"
            return warning(
                section,
                check,
                text,
                "see whether another process has these ports",
                f"{_TROUBLE}#the-agent-does-not-start",
            )
    found = Counter(one.body.data_path for one in workers if one.body.data_path)
    reach_all = [one for one in workers if one.body.data_path == "Open"]
    if not spec.agents.network_policy or spec.agents.host_network:
        reach_all += [one for one in workers if one.body.data_path == "Bound"]
    if reach_all:
        how = some(one.body.data_path for one in reach_all)
        text = f"data ports without authentication are {how}: {some(map(str, reach_all))}"
        way_out = "keep networkPolicy on and hostNetwork off with a CNI that enforces policies, or allow wires that need no port"
        return warning(section, check, text, way_out, _SECURITY)
    if not found:
        return ok(section, check, "no worker has data ports, because no engine has registered")
    shown = ", ".join(f"{number} {name}" for name in PROTECTIONS if (number := found[name]))
    policy = "; the CNI must enforce the NetworkPolicy" if found["Bound"] else ""
    return ok(section, check, f"the protection of data ports by workers: {shown}{policy}")


def _port(address: str) -> int:
    text = address.rpartition(":")[2]
    return int(text) if text.isdecimal() else 0


def _links(workers: Sequence[_Worker]) -> Iterator[_Link]:
    """Yield the attached peers whose bytes take a wire."""
    where: dict[tuple[str, int, int, str], _Worker] = {}
    for one in workers:
        for engine in one.body.engines:
            where[engine.instance, engine.layout.dp_rank, engine.rank, engine.memory] = one
    for one in workers:
        for peer in one.body.peers:
            if peer.state == ATTACHED and needs_wire(peer.ways):
                far = where.get((peer.instance, peer.dp_rank, peer.rank, peer.memory))
                yield _Link(one, peer, far)


def _wires(section: str, workers: Sequence[_Worker], answers: Answers, spec: Spec) -> Line:
    check = _CHECKS[Subject.WIRES]
    devices = {agent.node: page.node_facts.infiniband for agent, page in answers}
    if {wire.value for wire in spec.transfer.wires} == {"RDMA"} and not any(devices.values()):
        text = "no room can move: transfer.wires allows only RDMA, and agents see RDMA devices on no node"
        give = "give the agents what that needs (its NIC), or allow another wire, such as TCP"
        return error(section, check, text, give, _WIRES)
    links = [(link, link.peer.wire) for link in _links(workers)]
    slow = [f"{link} over {wire}: {why}" for link, wire in links if (why := _slower(link, wire, devices))]
    if slow:
        text = f"these could have a faster wire: {some(slow)}"
        return warning(
            section, check, text, "see what the page asks for the faster wire", "docs/runbooks.md#longshorewireslow"
        )
    if not links:
        return ok(section, check, "no wire is in use: no peers are attached, or engines of one agent copy directly")
    shown = ", ".join(f"{number} {name}" for name, number in sorted(Counter(wire for _, wire in links).items()))
    return ok(section, check, f"the wires of {count(len(links), 'end')} of links are found and allowed: {shown}")


def _slower(link: _Link, wire: str, devices: Mapping[str, Sequence[str]]) -> str:
    """Return which faster wire the two could have; empty if none is known."""
    far = link.far
    if far is None:
        return ""
    on_gpus = link.worker.body.device != "cpu" and far.body.device != "cpu"
    if far.node == link.worker.node:
        if on_gpus and wire not in _GPU_WIRES:
            return "two GPUs of one node reach each other by CUDA IPC if they have peer access"
        return "two workers of one node may share memory" if wire == "TCP" and not on_gpus else ""
    if wire == "TCP" and devices.get(far.node) and devices.get(link.worker.node):
        return "both agents have RDMA devices"
    return ""


def _devices(section: str, answers: Answers, spec: Spec) -> Line:
    facts = {agent.node: page.node_facts for agent, page in answers}
    gpus = {node: found.gpus for node, found in facts.items() if found.gpus}
    blind = [agent.node for agent, _ in answers if agent.node not in gpus and _asks_for_gpus(agent, spec)]
    if blind:
        text = f"the manifest gives agents access to GPUs, and these see none: {some(blind)}"
        way_out = "see the runtime of these nodes, and agents.gpuAccess"
        return warning(section, "devices", text, way_out, "docs/how-to/gpus.md#in-pods")
    seen = f"{sum(gpus.values())} GPUs on {some(gpus)}" if gpus else "no GPUs"
    rdma = [node for node, found in facts.items() if found.infiniband]
    return ok(section, "devices", f"agents see {seen}, and RDMA devices on {some(rdma) or 'no node'}")


def _asks_for_gpus(agent: AgentPod, spec: Spec) -> bool:
    roles = {"prefill": spec.prefill.agents, "decode": spec.decode.agents}
    own = [roles[agent.roles]] if agent.roles in roles else list(roles.values())
    return bool(pod_settings.merged([spec.agents, *own], "")["gpus"])
