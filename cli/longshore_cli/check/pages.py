"""Judges what the agents of a deployment say on `/v1/status`: workers, ports, wires, memory and limits of their nodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from longshore_cli.agent_report import ATTACHED, NodeFacts, Pair, Report, Worker
from longshore_cli.check.lines import Line, error, ok, some, warning
from longshore_cli.cluster import AgentPod, DeniedError
from longshore_cli.faults import QUARANTINE_SHARE
from longshore_cli.words import count
from longshore_spec import pod_settings
from longshore_spec.manifest import Spec
from longshore_spec.names import PROTECTIONS
from longshore_wire.allowed_wires import AllowedWires, needs_wire
from longshore_wire.names import UNKNOWN_WIRE

_TROUBLE = "docs/troubleshooting.md"
_SECURITY = "docs/security.md#what-protects-the-data-ports"
_WIRES = "docs/how-to/wires.md"
_LIMITS = "docs/how-to/check.md#limits-of-a-node"
# The fields that the checks judge, in all items of a list. An agent of another release may tell less.
NEEDED = (
    "version", "unready", "dying", "restarts", "instances.ranks.address", "workers.worker", "workers.error", "workers.silent_s",
    "workers.data_path", "workers.device", "workers.mps", "workers.mismatches", "workers.mismatch",
    "workers.ring.capacity_bytes", "workers.ring.held_bytes",
    "workers.engines.instance", "workers.engines.rank", "workers.engines.memory", "workers.engines.layout.dp_rank",
    "workers.peers.instance", "workers.peers.dp_rank", "workers.peers.rank", "workers.peers.state", "workers.peers.ways",
    "workers.peers.wire",
)  # fmt: skip
# Descriptors of a worker: some ten for each peer and each lane. Below this, some hundred peers are too many.
DESCRIPTORS_MIN = 4096
# What an agent says of a process that SIGKILL ended.
_KILLED = "ended with -9"
# A worker that is silent for this long makes its agent unready.
_SILENT_S = 10.0
_GPU_WIRES = frozenset({"CudaIPC", "NVLink"})

Answers = Sequence[tuple[AgentPod, Report]]


class Reached(NamedTuple):
    """An agent and its report, or why there is none."""

    agent: AgentPod
    page: Report | Exception


class _Worker(NamedTuple):
    node: str
    body: Worker

    def __str__(self) -> str:
        return f"{self.body.name} on {self.node}"


class _Link(NamedTuple):
    """A peer of a worker, attached over a wire. `far` is the peer's own worker; None: its agent was not reached."""

    worker: _Worker
    peer: Pair
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
    said += [_versions(section, answers, release), _unready(section, answers), _workers(section, answers, workers)]
    said += [_ports(section, answers, workers, spec), _wires(section, workers, answers, spec)]
    said += [_quarantine(section, workers), _digests(section, workers)]
    said += [_mps(section, workers)] if spec.gpu.mps else []
    said += (
        [_peer_access(section, on_gpus)] if (on_gpus := [one for one in workers if one.body.device != "cpu"]) else []
    )
    return [*said, *_limits(section, answers, spec)]


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


def _unready(section: str, answers: Answers) -> Line:
    found = [f"{agent.node}: {fault}" for agent, page in answers for fault in page.unready]
    if found:
        link = f"{_TROUBLE}#readyz-says-503"
        return error(
            section,
            "readyz",
            f"agents say that they are not ready: {some(found)}",
            _of_killed(found, answers) or "as the page says of the reason",
            link,
        )
    return ok(section, "readyz", f"{count(len(answers), 'agent')} passed the self-test and take engines")


def _workers(section: str, answers: Answers, workers: Sequence[_Worker]) -> Line:
    link = f"{_TROUBLE}#readyz-says-503"
    dying = [f"{agent.node}: {text}" for agent, page in answers for text in page.dying]
    failed = [f"{one}: {one.body.error}" for one in workers if one.body.error]
    failed += [f"{one} is silent" for one in workers if one.body.silent_s > _SILENT_S]
    if bad := [*dying, *failed]:
        way_out = _of_killed(bad, answers) or "see the agent's log"
        return error(section, "workers", f"workers fail: {some(bad)}", way_out, link)
    restarted = [f"{count(page.restarts, 'time')} on {agent.node}" for agent, page in answers if page.restarts]
    if restarted:
        text = f"workers were restarted {some(restarted)} since their agents started"
        return warning(section, "workers", text, "see the agents' logs", "docs/runbooks.md#longshoreworkersrestart")
    return ok(section, "workers", f"{count(len(workers), 'worker')} serve engines, and none was restarted")


def _of_killed(texts: Sequence[str], answers: Answers) -> str:
    """Return the way out if a text tells of a process that was killed, as the kernel does for want of memory; else empty."""
    if not any(_KILLED in text for text in texts):
        return ""
    limits = [page.node_facts.memory_limit_bytes for _, page in answers if page.node_facts]
    least = min((limit for limit in limits if limit), default=None)
    known = f", and their limit is {least >> 20} MiB" if least else ""
    return f"-9: killed, most likely because the agent's container is out of memory{known}: raise the memory of agents.resources"


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
        for peer in one.body.pairs:
            if peer.state == ATTACHED and needs_wire(peer.ways):
                far = where.get((peer.instance, peer.dp_rank, peer.rank, peer.memory))
                yield _Link(one, peer, far)


def _wires(section: str, workers: Sequence[_Worker], answers: Answers, spec: Spec) -> Line:
    check = "wires"
    allowed = AllowedWires(tuple(wire.value for wire in spec.transfer.wires))
    found = [(link, link.peer.wire or UNKNOWN_WIRE) for link in _links(workers)]
    barred = [f"{link} over {wire}" for link, wire in found if not allowed.holds(wire) and wire != UNKNOWN_WIRE]
    if barred:
        text = f"transfer.wires allows only {allowed}, and these have another wire, so that their rooms fail: {some(barred)}"
        way_out = "give the agents what an allowed wire needs (its NIC or GPUs), or allow the wire that was found"
        return error(section, check, text, way_out, f"{_WIRES}#when-a-pair-is-refused")
    refused = [
        f"{_Link(one, peer, None)}: {peer.error}"
        for one in workers
        for peer in one.body.pairs
        if peer.state != "lost" and peer.error
    ]
    devices = {agent.node: page.node_facts.infiniband if page.node_facts else () for agent, page in answers}
    give = f"transfer.wires allows only {allowed}: give the agents what that needs (its NIC or GPUs), or allow another wire, such as TCP"
    if refused:
        way_out = give if spec.transfer.wires else "see the logs of both agents"
        text = f"no bytes can be sent between these, so that their rooms fail: {some(refused)}"
        return error(section, check, text, way_out, f"{_WIRES}#when-a-pair-is-refused")
    told = all(page.node_facts for _, page in answers)
    if told and {wire.value for wire in spec.transfer.wires} == {"RDMA"} and not any(devices.values()):
        text = "no room can move: transfer.wires allows only RDMA, and agents see RDMA devices on no node"
        return error(section, check, text, give, _WIRES)
    unknown = [str(link) for link, wire in found if wire == UNKNOWN_WIRE]
    if unknown:
        text = f"the wire of these is not known: {some(unknown)}"
        return warning(section, check, text, "wait some seconds; then see the agents' logs", _WIRES)
    slow = [f"{link} over {wire}: {why}" for link, wire in found if (why := _slower(link, wire, devices))]
    if slow:
        text = f"these could have a faster wire: {some(slow)}"
        return warning(
            section, check, text, "see what the page asks for the faster wire", "docs/runbooks.md#longshorewireslow"
        )
    if not found:
        return ok(section, check, "no wire is in use: no peers are attached, or engines of one agent copy directly")
    shown = ", ".join(f"{number} {name}" for name, number in sorted(Counter(wire for _, wire in found).items()))
    return ok(section, check, f"the wires of {count(len(found), 'end')} of links are found and allowed: {shown}")


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


def _quarantine(section: str, workers: Sequence[_Worker]) -> Line:
    shares = {str(one): one.body.ring.held_share for one in workers if one.body.ring and one.body.ring.capacity_bytes}
    bad = [f"{name} ({share:.0%})" for name, share in shares.items() if share > QUARANTINE_SHARE]
    if bad:
        text = f"much of these rings is in quarantine, because lost writers may still write: {some(bad)}"
        way_out = "bring the lost agent back, or wait for the worker's replacement"
        return warning(section, "quarantine", text, way_out, "docs/runbooks.md#longshorequarantinehigh")
    return ok(section, "quarantine", f"at most {max(shares.values(), default=0):.0%} of a ring is in quarantine")


def _digests(section: str, workers: Sequence[_Worker]) -> Line:
    bad = [f"{one}: {one.body.mismatch}" for one in workers if one.body.mismatches]
    if bad:
        total = sum(one.body.mismatches for one in workers)
        text = f"the digests of {count(total, 'slab')} differed: {some(bad)}"
        way_out = "check the memory and the wire that the message names, and report it"
        return error(section, "digests", text, way_out, "docs/runbooks.md#longshoredigestsdiffer")
    return ok(section, "digests", "no digests differed")


def _mps(section: str, workers: Sequence[_Worker]) -> Line:
    link = "docs/how-to/mps.md#see-whether-it-works"
    on_gpus = [one for one in workers if one.body.device != "cpu"]
    alone = [str(one) for one in on_gpus if one.body.mps is False]
    if alone:
        text = f"gpu.mps is true, and the GPU of these is not shared by MPS: {some(alone)}"
        return error(section, "mps", text, "start the daemon on these nodes", link)
    unknown = [str(one) for one in on_gpus if one.body.mps is None]
    if unknown:
        text = f"gpu.mps is true, and the driver does not tell whether the GPU of these is shared: {some(unknown)}"
        return warning(section, "mps", text, "update the driver to CUDA 12.4 or newer", link)
    if not on_gpus:
        text = "gpu.mps is true, and no worker has a GPU yet"
        return warning(section, "mps", text, "check again when engines have registered", link)
    return ok(section, "mps", f"the GPUs of all {count(len(on_gpus), 'worker')} are shared by MPS")


def _peer_access(section: str, on_gpus: Sequence[_Worker]) -> Line:
    link = "docs/how-to/check.md#limits-of-a-node"
    apart = [str(one) for one in on_gpus if one.body.peer_access is False]
    if apart:
        text = f"not all GPUs of the node can write the GPU's memory of these, so engines of one agent do not copy directly: {some(apart)}"
        way_out = "see `nvidia-smi topo -p2p w` there: IOMMU, ACS and virtual machines prevent peer access"
        return warning(section, "peer-access", text, way_out, link)
    if unknown := [str(one) for one in on_gpus if one.body.peer_access is None]:
        text = f"not checked: {some(unknown)} are of an earlier release and do not tell peer access"
        return warning(section, "peer-access", text, "update the agents", link)
    return ok(
        section,
        "peer-access",
        f"the GPUs of {count(len(on_gpus), 'worker')} can be written by all others of their node",
    )


def _limits(section: str, answers: Answers, spec: Spec) -> list[Line]:
    facts = {agent.node: page.node_facts for agent, page in answers if page.node_facts}
    said = []
    if old := sorted({agent.node for agent, _ in answers} - facts.keys()):
        text = f"not checked on {some(old)}: agents of an earlier release do not tell the limits of their nodes"
        said.append(warning(section, "limits", text, "update them", _LIMITS))
    if not facts:
        return said
    few = [f"{node} ({found.descriptors})" for node, found in facts.items() if found.descriptors < DESCRIPTORS_MIN]
    said.append(
        warning(
            section, "descriptors", f"agents may open fewer than {DESCRIPTORS_MIN} files: {some(few)}",
            "raise the limit of the container runtime (LimitNOFILE)", _LIMITS,
        )
        if few
        else ok(section, "descriptors", f"agents may open {min(f.descriptors for f in facts.values())} files or more")
    )  # fmt: skip
    staging = max(spec.decode.staging.pool_size, spec.prefill.staging.lanes * spec.prefill.staging.buffer_size)
    with_rdma = {node: found for node, found in facts.items() if found.infiniband}
    locked = [
        f"{node} ({found.memlock_bytes} bytes)"
        for node, found in with_rdma.items()
        if found.memlock_bytes is not None and found.memlock_bytes < staging
    ]
    if locked:
        text = (
            f"agents with RDMA devices may lock less memory than one rank's staging of {staging} bytes: {some(locked)}"
        )
        way_out = "raise the memlock limit of the container runtime (LimitMEMLOCK=infinity)"
        said.append(warning(section, "memlock", text, way_out, _LIMITS))
    elif with_rdma:
        said.append(ok(section, "memlock", f"agents with RDMA devices on {some(with_rdma)} may lock their staging"))
    return [*said, _devices(section, answers, spec, facts)]


def _devices(section: str, answers: Answers, spec: Spec, facts: Mapping[str, NodeFacts]) -> Line:
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
