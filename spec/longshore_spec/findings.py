"""The table of findings: everything that an agent can find wrong with itself, with meaning and remedy.

An agent publishes findings on `/v1/status` and counts them in its metrics. The operator folds them into conditions, the command
line and the web page print them, alerts count them, and their part of the runbooks is generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from longshore_spec.status import Severity

RUNBOOKS = "docs/runbooks.md"


class Subject(StrEnum):
    """The subject of a finding. The subjects of CRITICAL findings are the checks of `/readyz`."""

    SUPERVISOR = "Supervisor"
    ACCEPTING = "Accepting"
    SELF_TEST = "SelfTest"
    WORKERS = "Workers"
    ENGINES = "Engines"
    PEERS = "Peers"
    WIRES = "Wires"
    DIGESTS = "Digests"
    QUARANTINE = "Quarantine"
    MPS = "MPS"
    PEER_ACCESS = "PeerAccess"
    ROOMS = "Rooms"
    LIMITS = "Limits"


@dataclass(frozen=True, slots=True)
class Kind:
    """One row.

    Attributes:
        page: the page about it, below the documentation's root; empty: its section of the runbooks.
    """

    code: str
    subject: Subject
    severity: Severity
    meaning: str
    remedy: str
    page: str = ""

    @property
    def link(self) -> str:
        """The page about it."""
        return self.page or f"{RUNBOOKS}#{self.code.lower()}"


_CRITICAL, _ERROR, _WARNING = Severity.CRITICAL, Severity.ERROR, Severity.WARNING
_S = Subject
_READ_LOG = "Read the worker's lines in the agent's log, and look at processors and memory of the node."
_KILLED = (
    "An exit status of -9 is a kill for memory: raise the memory of agents.resources. -6 or -11 is a crash in a library after "
    "malformed data at a data port or lost memory: check which hosts reach the data ports (docs/security.md). Others are errors "
    "of the GPU or the transport: read the agent's log, `nvidia-smi` and the node's kernel log."
)

TABLE = (
    Kind(
        "LoopHangs", _S.SUPERVISOR, _CRITICAL,
        "The supervisor's loop has not turned for 30 s. The agent takes no engines.",
        "Kubernetes restarts the agent. Report it with the agent's log.",
    ),
    Kind(
        "Draining", _S.ACCEPTING, _CRITICAL,
        "The agent was told to end. It finishes open rooms and takes no new engines.",
        "Wait for the next agent.",
    ),
    Kind(
        "SelfTestPending", _S.SELF_TEST, _CRITICAL,
        "The self-test has not ended. With NIXL it takes seconds, and more on a busy machine.",
        "Wait. If it lasts, read the agent's log.",
    ),
    Kind(
        "OtherBackend", _S.SELF_TEST, _CRITICAL,
        "The self-test moved bytes by another backend than the configured one.",
        "Report it with the agent's log.",
    ),
    Kind(
        "SelfTestFailed", _S.SELF_TEST, _CRITICAL,
        "Two processes of the agent could not move bytes by the backend.",
        "If a library is missing or does not load, install the extra that the text names, or set LONGSHORE_BACKEND. If NIXL does "
        "not start beside a GPU, unset UCX_TLS or add cuda_copy,cuda_ipc to it. Otherwise read the library's lines in the agent's log.",
    ),
    Kind(
        "SelfTestTooSmall", _S.SELF_TEST, _CRITICAL,
        "The self-test moved fewer bytes than LONGSHORE_SELF_TEST_BYTES.",
        "Report it with the agent's log.",
    ),
    Kind(
        "WireNotAllowed", _S.SELF_TEST, _CRITICAL,
        "The self-test took a wire which shows that no wire of transfer.wires is there.",
        "Give the agent what an allowed wire needs (its NIC or GPUs), or allow the wire that the text names.",
        "docs/how-to/wires.md#what-readiness-says",
    ),
    Kind("WorkersDying", _S.WORKERS, _CRITICAL, "A worker died three times within a minute.", _KILLED),
    Kind(
        "WorkerFailed", _S.WORKERS, _CRITICAL,
        "A worker failed or hangs, such as by its GPU. It is replaced.",
        "Read the worker's lines in the agent's log. If it fails again, look at `nvidia-smi` and the node's kernel log.",
    ),
    Kind("WorkerStarting", _S.WORKERS, _CRITICAL, "A worker starts for longer than LONGSHORE_START_LIMIT_S.", _READ_LOG),
    Kind("WorkerSilent", _S.WORKERS, _CRITICAL, "A worker has not answered for 10 s. It moves nothing.", _READ_LOG),
    Kind(
        "WorkersRestarted", _S.WORKERS, _WARNING,
        "Workers were restarted in the last 15 minutes. Each death fails the rooms of that engine rank with `worker_lost`.",
        _KILLED,
    ),
    Kind(
        "EngineRefused", _S.ENGINES, _ERROR,
        "An engine has tried to register in the last 10 minutes, and the agent refuses it: its layout is not the declared one, its "
        "client is of another release, or it lacks something that the text names. Once another instance has registered for its role "
        "this is over, until it tries again.",
        "Change the field that the text names at the engine, or in the deployment.",
        "docs/troubleshooting.md#an-engine-does-not-come-in",
    ),
    Kind(
        "PeerLost", _S.PEERS, _ERROR,
        "A worker's peer has ended or does not answer. Rooms with it fail until it is back.",
        "See the peer's agent, and NetworkPolicies and routes to the ports of its workers.",
    ),
    Kind(
        "PeerRefused", _S.PEERS, _ERROR,
        "A worker and its peer cannot exchange pages, such as for their layouts. All rooms between them fail.",
        "Change the side that the text names.",
    ),
    Kind(
        "PeerWireNotAllowed", _S.WIRES, _ERROR,
        "No allowed wire connects a worker with its peer, so that their rooms fail with `wire_not_allowed`.",
        "Give both agents what an allowed wire needs (its NIC or GPUs), or allow the wire that the text names.",
        "docs/how-to/wires.md#when-a-pair-is-refused",
    ),
    Kind(
        "WireUnknown", _S.WIRES, _WARNING,
        "A worker does not know which wire carries its bytes to a peer.",
        "Wait some seconds. Then see the logs of both agents.",
        "docs/how-to/wires.md",
    ),
    Kind(
        "DigestsDiffer", _S.DIGESTS, _ERROR,
        "The digests of prefill's and decode's pages of a slab differed: bytes changed on the way. The room failed with "
        "`digest_mismatch`, and decode did not use the pages.",
        "If it is the same layer and rank each time, take that GPU or host out of service. If it is one pair of hosts, test the "
        "link between them. Otherwise report it with the text.",
    ),
    Kind(
        "QuarantineHigh", _S.QUARANTINE, _WARNING,
        "More than 10 % of a worker's staging ring is in quarantine: a lost writer may still write it, so it is not granted again. "
        "Above LONGSHORE_QUARANTINE_PERCENT (25 % by default) the worker drains and is replaced.",
        "Bring the lost prefill agent back or delete its pod: its end proves that it writes no more, and the memory is free. If "
        "its host is gone, wait for the worker's replacement, or delete the pod of this agent at a quiet time.",
    ),
    Kind(
        "GpuNotShared", _S.MPS, _ERROR,
        "gpu.mps is true, and the GPU of a worker is not shared by CUDA's Multi-Process Service.",
        "Start the daemon on the node.",
        "docs/how-to/mps.md#see-whether-it-works",
    ),
    Kind(
        "GpuSharingUnknown", _S.MPS, _WARNING,
        "gpu.mps is true, and the driver does not tell whether the GPU of a worker is shared.",
        "Update the driver to CUDA 12.4 or newer.",
        "docs/how-to/mps.md#see-whether-it-works",
    ),
    Kind(
        "NoPeerAccess", _S.PEER_ACCESS, _WARNING,
        "Not all GPUs of the node can write the memory of a worker's GPU, so engines of one agent do not copy directly.",
        "See `nvidia-smi topo -p2p w` on the node: IOMMU, ACS and virtual machines prevent peer access.",
        "docs/how-to/check.md#limits-of-a-node",
    ),
    Kind(
        "RoomOld", _S.ROOMS, _WARNING,
        "A room has been open for more than 60 s. It ends after LONGSHORE_ROOM_TIMEOUT_S at the latest.",
        "`longshore rooms` with the room's number shows the step for which it waits.",
        "docs/troubleshooting.md#a-room-fails",
    ),
    Kind(
        "FewDescriptors", _S.LIMITS, _WARNING,
        "The agent may open fewer than 4,096 files. Each peer and each lane needs some ten.",
        "Raise the limit of the container runtime (LimitNOFILE).",
        "docs/how-to/check.md#limits-of-a-node",
    ),
    Kind(
        "LowMemlock", _S.LIMITS, _WARNING,
        "The agent has RDMA devices and may lock less memory than the staging of one rank.",
        "Raise the memlock limit of the container runtime (LimitMEMLOCK=infinity).",
        "docs/how-to/check.md#limits-of-a-node",
    ),
)  # fmt: skip

KINDS = {kind.code: kind for kind in TABLE}
CODES = tuple(KINDS)


def reference() -> str:
    """Return a section of Markdown for each kind."""
    sections = [
        f"### {kind.code}\n\n{kind.subject}, {kind.severity.value}. {kind.meaning}\n\n**Remedy:** {kind.remedy}"
        + (f" See [{kind.page.removeprefix('docs/')}]({kind.page.removeprefix('docs/')})." if kind.page else "")
        for kind in TABLE
    ]
    return "\n\n".join(sections)
