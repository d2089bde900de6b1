"""Judges a snapshot: the findings of an agent, and the verdicts of `/healthz` and `/readyz`, which follow from them. Called by HTTP.

`longshore_spec.findings` has the table of all findings. No other place judges the health of one agent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from longshore_agent.settings import Settings
from longshore_agent.status.snapshot import LATELY_S, AgentSnapshot, WorkerSnapshot
from longshore_spec.findings import KINDS, Subject
from longshore_spec.status import ATTACHED, LOST, REFUSED, Finding, PeerStatus, SelfTest, Severity, WorkerState
from longshore_wire.names import TEST_INSTANCE_PREFIX, UNKNOWN_WIRE
from longshore_wire.ways import AllowedWires, needs_wire

# The supervisor's loop turns at least every second. If it has not for this long, it hangs and must be restarted.
LOOP_AGE_LIMIT_S = 30.0
# A worker answers within milliseconds, between two slabs. If it is silent for this long, it moves nothing.
SILENCE_LIMIT_S = 10.0
# The share of a ring in quarantine from which on it is a finding.
QUARANTINE_SHARE_MAX = 0.1
# A room of this age is a finding. An agent ends rooms only after LONGSHORE_ROOM_TIMEOUT_S.
OLD_ROOM_S = 60.0
# Descriptors of a worker: some ten for each peer and each lane. Below this, some hundred peers are too many.
DESCRIPTORS_MIN = 4096
# The exit status of a process that SIGKILL ended, in the texts of its death.
_KILLED = "ended with -9"
_SEVERITIES = tuple(Severity)


class Check(msgspec.Struct, frozen=True):
    """One check. `reason` is a CamelCase word; `message` states the observation and the remedy."""

    name: str
    ok: bool
    reason: str
    message: str


class Verdict(msgspec.Struct, frozen=True):
    """All checks. `ok` if all of them are."""

    ok: bool
    checks: tuple[Check, ...]

    @classmethod
    def of(cls, checks: Iterable[Check]) -> Verdict:
        """Return the combined verdict of `checks`."""
        found = tuple(checks)
        return cls(all(check.ok for check in found), found)


class Rules(msgspec.Struct, frozen=True):
    """The requirements by which an agent is judged.

    Attributes:
        wires: those of `transfer.wires`.
        staging_bytes: of one rank.
        mps: GPUs must be shared by the Multi-Process Service.
    """

    backend: str
    self_test_bytes: int
    wires: AllowedWires = AllowedWires()
    start_limit_s: float = 60.0
    staging_bytes: int = 0
    mps: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """Return the rules of these settings."""
        return cls(
            backend=settings.backend.value,
            self_test_bytes=settings.self_test_bytes,
            wires=settings.allowed_wires,
            start_limit_s=settings.start_limit_s,
            staging_bytes=max(settings.ring_bytes, settings.lane_count * settings.lane_bytes),
            mps=settings.gpu_mps,
        )


class Judge:
    """Judges the snapshots of one agent, and remembers since when each finding holds. Any thread may call it.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, rules: Rules, clock: Callable[[], float] = time.time) -> None:
        self._rules = rules
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s: dict[tuple[str, str, str], float] = {}

    def findings(self, snapshot: AgentSnapshot) -> tuple[Finding, ...]:
        """Return what is wrong, the worst first."""
        now_s = self._clock()
        with self._lock:
            before, self._since_s = self._since_s, {}
            dated = []
            for finding in findings(snapshot, self._rules):
                key = finding.code, finding.worker, finding.text
                self._since_s[key] = before.get(key, now_s)
                dated.append(msgspec.structs.replace(finding, since_unix_s=self._since_s[key]))
        return tuple(dated)

    def readiness(self, snapshot: AgentSnapshot) -> Verdict:
        """Return whether engines may use this agent, with all checks."""
        return readiness(snapshot, self._rules)


def findings(snapshot: AgentSnapshot, rules: Rules) -> tuple[Finding, ...]:
    """Return what is wrong with an agent, the worst first. Workers and peers of `longshore verify` count only as workers."""
    listed = [*_of_agent(snapshot, rules), *_dying(snapshot), *_of_workers(snapshot, rules)]
    for worker in snapshot.workers:
        if not worker.worker.startswith(TEST_INSTANCE_PREFIX):
            listed += _of_bytes(worker, rules)
    return tuple(sorted(listed, key=lambda finding: _SEVERITIES.index(finding.severity)))


def liveness(snapshot: AgentSnapshot) -> Verdict:
    """Return whether the supervisor works. Dead workers do not count: the supervisor replaces them."""
    return Verdict.of([_supervisor(snapshot)])


def readiness(snapshot: AgentSnapshot, rules: Rules) -> Verdict:
    """Return whether engines may use this agent, with all checks."""
    served = _check(Subject.WORKERS, "WorkersReady", f"{len(snapshot.workers)} workers")
    if faults := [*_dying(snapshot), *_of_workers(snapshot, rules)]:
        served = _check(Subject.WORKERS, faults[0].code, "; ".join(finding.text for finding in faults), ok=False)
    return Verdict.of([*_checks(snapshot, rules), served])


def _check(subject: Subject, reason: str, message: str, *, ok: bool = True) -> Check:
    return Check(subject.value, ok, reason, message)


def _finding(code: str, text: str, worker: str = "", way_out: str = "") -> Finding:
    kind = KINDS[code]
    return Finding(code, kind.severity, text, way_out or kind.remedy, kind.link, worker)


def _supervisor(snapshot: AgentSnapshot) -> Check:
    if snapshot.loop_age_s > LOOP_AGE_LIMIT_S:
        text = f"the supervisor's loop has not turned for more than {LOOP_AGE_LIMIT_S:g} s"
        return _check(Subject.SUPERVISOR, "LoopHangs", text, ok=False)
    text = f"the supervisor's loop turned {snapshot.loop_age_s:.1f} s ago, the limit is {LOOP_AGE_LIMIT_S:g} s"
    return _check(Subject.SUPERVISOR, "LoopTurns", text)


def _accepting(snapshot: AgentSnapshot) -> Check:
    if snapshot.draining:
        text = "the agent stops and takes no new engines or rooms"
        return _check(Subject.ACCEPTING, "Draining", text, ok=False)
    return _check(Subject.ACCEPTING, "Accepting", "the agent takes engines")


def _checks(snapshot: AgentSnapshot, rules: Rules) -> tuple[Check, ...]:
    """Return the checks of the agent itself."""
    return _supervisor(snapshot), _accepting(snapshot), _self_test(snapshot, rules)


def _dying(snapshot: AgentSnapshot) -> Iterator[Finding]:
    for text in snapshot.dying:
        yield _finding("WorkersDying", text, way_out=_out_of_memory(text, snapshot))


def _of_agent(snapshot: AgentSnapshot, rules: Rules) -> Iterator[Finding]:
    """Yield the findings that are about no worker."""
    for check in _checks(snapshot, rules):
        if not check.ok:
            yield _finding(check.reason, check.message, way_out=_out_of_memory(check.message, snapshot))
    for text in snapshot.refused:
        yield _finding("EngineRefused", text)
    if count := snapshot.restarts_lately:
        yield _finding("WorkersRestarted", f"{count} workers were restarted in the last {LATELY_S / 60:.0f} minutes")
    facts = snapshot.node_facts
    if 0 < facts.descriptors < DESCRIPTORS_MIN:
        yield _finding("FewDescriptors", f"the agent may open {facts.descriptors} files")
    if facts.infiniband and facts.memlock_bytes is not None and facts.memlock_bytes < rules.staging_bytes:
        text = f"the agent may lock {facts.memlock_bytes} bytes, and one rank's staging has {rules.staging_bytes}"
        yield _finding("LowMemlock", text)


def _of_workers(snapshot: AgentSnapshot, rules: Rules) -> Iterator[Finding]:
    for worker in snapshot.workers:
        yield from _of_worker(worker, snapshot, rules)


def _of_worker(worker: WorkerSnapshot, snapshot: AgentSnapshot, rules: Rules) -> Iterator[Finding]:
    """Yield what keeps a worker from serving. A worker between two lives has the start limit."""
    name = worker.worker
    if worker.state is WorkerState.FAILED:
        text = f"worker {name} failed: {worker.error or 'no reason was given'}"
        yield _finding("WorkerFailed", text, name, _out_of_memory(text, snapshot))
    elif worker.state in (WorkerState.STARTING, WorkerState.SELF_TESTING):
        if worker.error:
            text = f"worker {name} failed and is being replaced: {worker.error}"
            yield _finding("WorkerFailed", text, name, _out_of_memory(text, snapshot))
        if worker.state_age_s > rules.start_limit_s:
            text = f"worker {name} is {worker.state.value} for more than {rules.start_limit_s:g} s"
            yield _finding("WorkerStarting", text, name)
    elif worker.silent_s > SILENCE_LIMIT_S:
        yield _finding("WorkerSilent", f"worker {name} has not answered for more than {SILENCE_LIMIT_S:g} s", name)


def _of_bytes(worker: WorkerSnapshot, rules: Rules) -> Iterator[Finding]:
    """Yield what fails or slows the rooms of a worker."""
    name = worker.worker
    for peer in worker.peers:
        if not peer.instance.startswith(TEST_INSTANCE_PREFIX):
            yield from _of_peer(name, peer)
    if worker.mismatches:
        yield _finding(
            "DigestsDiffer", f"worker {name}: {worker.mismatches} slabs with differing digests: {worker.mismatch}", name
        )
    if worker.ring is not None and worker.ring.held_share > QUARANTINE_SHARE_MAX:
        text = f"worker {name}: more than {QUARANTINE_SHARE_MAX:.0%} of its ring is in quarantine"
        yield _finding("QuarantineHigh", text, name)
    if worker.device != "cpu" and rules.mps and worker.mps is False:
        yield _finding("GpuNotShared", f"worker {name}: its GPU {worker.device} is not shared by MPS", name)
    if worker.device != "cpu" and rules.mps and worker.mps is None:
        yield _finding("GpuSharingUnknown", f"worker {name}: the driver does not tell whether MPS shares its GPU", name)
    if worker.peer_access is False:
        text = f"worker {name}: not all GPUs of the node can write the memory of its GPU {worker.device}"
        yield _finding("NoPeerAccess", text, name)
    oldest = max(worker.rooms, key=lambda room: room.age_s, default=None)
    if oldest is not None and oldest.age_s > OLD_ROOM_S:
        text = (
            f"worker {name}: room {oldest.room} of {oldest.instance} is {oldest.state} for more than {OLD_ROOM_S:g} s"
        )
        yield _finding("RoomOld", text, name)


def _of_peer(name: str, peer: PeerStatus) -> Iterator[Finding]:
    text = f"worker {name}: {peer.name} is {peer.state}" + (f": {peer.error}" if peer.error else "")
    if peer.state == LOST:
        yield _finding("PeerLost", text, name)
    elif peer.state == REFUSED:
        yield _finding("PeerRefused", text, name)
    elif peer.error:
        yield _finding("PeerWireNotAllowed", f"worker {name} to {peer.name}: {peer.error}", name)
    elif peer.state == ATTACHED and needs_wire(peer.ways) and peer.wire in ("", UNKNOWN_WIRE):
        yield _finding("WireUnknown", f"worker {name} to {peer.name}: the wire is not known", name)


def _out_of_memory(text: str, snapshot: AgentSnapshot) -> str:
    """Return the way out if a text tells of a process that was killed, as the kernel does for want of memory; else empty."""
    if _KILLED not in text:
        return ""
    limit = snapshot.node_facts.memory_limit_bytes
    known = f", and its limit is {limit >> 20} MiB" if limit else ""
    return f"-9: killed, most likely because the agent's container is out of memory{known}: raise the memory of agents.resources"


def _self_test(snapshot: AgentSnapshot, rules: Rules) -> Check:
    """Pass if any self-test passed; else return the fault of the one that came furthest."""
    tests = [test for test in (snapshot.self_test, *(w.self_test for w in snapshot.workers)) if test is not None]
    if not tests:
        text = f"no self-test has ended yet; it moves {rules.self_test_bytes} bytes by {rules.backend}"
        return _check(Subject.SELF_TEST, "SelfTestPending", text, ok=False)
    verdicts = [judge(test, rules) for test in tests]
    return next((check for check in verdicts if check.ok), max(verdicts, key=lambda check: _PROGRESS[check.reason]))


# Progress of a self-test, by its fault.
_PROGRESS = {"OtherBackend": 0, "SelfTestFailed": 1, "SelfTestTooSmall": 2, "WireNotAllowed": 3, "SelfTestPassed": 4}


def judge(test: SelfTest, rules: Rules) -> Check:
    """Return the check of one self-test. The supervisor logs it."""
    if test.backend != rules.backend:
        text = f"the self-test moved bytes by {test.backend}, the backend is {rules.backend}"
        return _check(Subject.SELF_TEST, "OtherBackend", text, ok=False)
    if test.error:
        return _check(Subject.SELF_TEST, "SelfTestFailed", f"{test.backend}: {test.error}", ok=False)
    if test.bytes_moved < rules.self_test_bytes:
        text = f"{test.backend} has moved {test.bytes_moved} of {rules.self_test_bytes} bytes"
        return _check(Subject.SELF_TEST, "SelfTestTooSmall", text, ok=False)
    text = f"{test.backend} moved {test.bytes_moved} bytes over {test.wire} inside this host in {test.seconds:.3f} s"
    if fault := rules.wires.self_test_fault(test.wire):
        return _check(Subject.SELF_TEST, "WireNotAllowed", f"{test.backend}: {fault}", ok=False)
    if not rules.wires.holds(test.wire):
        text += f"; between peers transfer.wires allows only {rules.wires}, which is seen to where they attach"
    return _check(Subject.SELF_TEST, "SelfTestPassed", text)
