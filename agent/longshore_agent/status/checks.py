"""Decides liveness and readiness from a snapshot. Pure. HTTP and the operator show the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from longshore_agent.settings import Settings
from longshore_agent.status.snapshot import AgentSnapshot, SelfTest, WorkerSnapshot, WorkerState
from longshore_wire.allowed_wires import AllowedWires

# The supervisor's loop turns at least every second. If it has not for this long, it hangs and must be restarted.
LOOP_AGE_LIMIT_S = 30.0
# A worker answers within milliseconds, between two slabs. If it is silent for this long, it moves nothing.
SILENCE_LIMIT_S = 10.0


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
    """The requirements of readiness. `wires` are those of `transfer.wires`."""

    backend: str
    self_test_bytes: int
    wires: AllowedWires = AllowedWires()
    start_limit_s: float = 60.0

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """Return the rules of these settings."""
        return cls(
            backend=settings.backend.value,
            self_test_bytes=settings.self_test_bytes,
            wires=settings.allowed_wires,
            start_limit_s=settings.start_limit_s,
        )


def liveness(snapshot: AgentSnapshot) -> Verdict:
    """Return whether the supervisor works. Dead workers do not count: the supervisor replaces them."""
    hangs = snapshot.loop_age_s > LOOP_AGE_LIMIT_S
    if hangs:
        text = f"the supervisor's loop has not turned for more than {LOOP_AGE_LIMIT_S:g} s"
        return Verdict.of([Check("Supervisor", False, "LoopHangs", text)])
    text = f"the supervisor's loop turned {snapshot.loop_age_s:.1f} s ago, the limit is {LOOP_AGE_LIMIT_S:g} s"
    return Verdict.of([Check("Supervisor", True, "LoopTurns", text)])


def readiness(snapshot: AgentSnapshot, rules: Rules) -> Verdict:
    """Return whether engines may use this agent, with all checks."""
    return Verdict.of(
        [*liveness(snapshot).checks, _accepting(snapshot), _self_test(snapshot, rules), _workers(snapshot, rules)]
    )


def unready(snapshot: AgentSnapshot, rules: Rules) -> tuple[str, ...]:
    """Return each failed check of readiness as "reason: message"; empty if the agent is ready."""
    return tuple(f"{check.reason}: {check.message}" for check in readiness(snapshot, rules).checks if not check.ok)


def _accepting(snapshot: AgentSnapshot) -> Check:
    if snapshot.draining:
        return Check("Accepting", False, "Draining", "the agent stops and takes no new engines or rooms")
    return Check("Accepting", True, "Accepting", "the agent takes engines")


def _self_test(snapshot: AgentSnapshot, rules: Rules) -> Check:
    """Pass if any self-test passed; else return the fault of the one that came furthest."""
    found = [test for test in (snapshot.self_test, *(w.self_test for w in snapshot.workers)) if test is not None]
    if not found:
        text = f"no self-test has ended yet; it moves {rules.self_test_bytes} bytes by {rules.backend}"
        return Check("SelfTest", False, "SelfTestPending", text)
    verdicts = [judge(test, rules) for test in found]
    return next((check for check in verdicts if check.ok), max(verdicts, key=lambda check: _PROGRESS[check.reason]))


# Progress of a self-test, by its fault.
_PROGRESS = {"OtherBackend": 0, "SelfTestFailed": 1, "SelfTestTooSmall": 2, "WireNotAllowed": 3, "SelfTestPassed": 4}


def judge(test: SelfTest, rules: Rules) -> Check:
    """Return the check of one self-test. The supervisor logs it."""
    if test.backend != rules.backend:
        text = f"the self-test moved bytes by {test.backend}, the backend is {rules.backend}"
        return Check("SelfTest", False, "OtherBackend", text)
    if test.error:
        return Check("SelfTest", False, "SelfTestFailed", f"{test.backend}: {test.error}")
    if test.bytes_moved < rules.self_test_bytes:
        text = f"{test.backend} has moved {test.bytes_moved} of {rules.self_test_bytes} bytes"
        return Check("SelfTest", False, "SelfTestTooSmall", text)
    text = f"{test.backend} moved {test.bytes_moved} bytes over {test.wire} inside this host in {test.seconds:.3f} s"
    if fault := rules.wires.self_test_fault(test.wire):
        return Check("SelfTest", False, "WireNotAllowed", f"{test.backend}: {fault}")
    if not rules.wires.holds(test.wire):
        text += f"; between peers transfer.wires allows only {rules.wires}, which is seen to where they attach"
    return Check("SelfTest", True, "SelfTestPassed", text)


def _workers(snapshot: AgentSnapshot, rules: Rules) -> Check:
    faults = [("WorkersDying", text) for text in snapshot.dying]
    faults += [fault for worker in snapshot.workers for fault in _worker_faults(worker, rules)]
    if not faults:
        return Check("Workers", True, "WorkersReady", f"{len(snapshot.workers)} workers")
    return Check("Workers", False, faults[0][0], "; ".join(text for _, text in faults))


def _worker_faults(worker: WorkerSnapshot, rules: Rules) -> Iterator[tuple[str, str]]:
    """Yield (reason, text) for each fault of this worker. A worker between two lives has the start limit."""
    if worker.state is WorkerState.FAILED:
        yield "WorkerFailed", f"worker {worker.worker} failed: {worker.error or 'no reason was given'}"
    elif worker.state in (WorkerState.STARTING, WorkerState.SELF_TESTING):
        if worker.error:
            yield "WorkerFailed", f"worker {worker.worker} failed and is being replaced: {worker.error}"
        if worker.state_age_s > rules.start_limit_s:
            text = f"worker {worker.worker} is {worker.state.value} for more than {rules.start_limit_s:g} s"
            yield "WorkerStarting", text
    elif worker.silent_s > SILENCE_LIMIT_S:
        yield "WorkerSilent", f"worker {worker.worker} has not answered for more than {SILENCE_LIMIT_S:g} s"
