"""Every fault, the stage of a room that it strikes, and what both engines see: the rows of `docs/reference/faults.md`.

The tests of faults compare what they observe with these rows (`fault_judge`), and a row that no test carries fails
`test_fault_table`. Makes the page: `make reference`, or `python tests/agent/fault_table.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from longshore_wire.errors import Reason

PREFILL, DECODE = "prefill", "decode"
LOOPBACK, NIXL, MOONCAKE = "Loopback", "NIXL", "Mooncake"
# Where no wire needs TCP, and UCX tells NIXL less of dead peers.
NIXL_ALONE = "NIXL without TCP"

# -- what an engine sees of its half of a room -------------------------------------------------------------------------

DONE = "DONE"
DEAD = "dead"
LEFT_OPEN = "open until it cancels"


def failed(reason: Reason) -> str:
    """The half was open, and ended by an event."""
    return f"FAILED {reason.name}"


def refused(reason: Reason) -> str:
    """The half was not open yet: the call that would open it is refused."""
    return f"refused {reason.name}"


# -- the stages of a room ----------------------------------------------------------------------------------------------

OFFERED, CLAIMED, WAITING, GRANTED = "offered", "claimed", "waiting for a grant", "granted"
IN_PLACE, WRITING, ARRIVED, PARTLY, OVER = "write in place", "staged write", "arrived", "partly acknowledged", "done"

STAGES: Mapping[str, str] = {
    OFFERED: "prefill has offered, decode has not claimed",
    CLAIMED: "decode has claimed, prefill has not offered",
    WAITING: "both are there, and the ring is full",
    GRANTED: "ring memory is granted; every lane is busy, so the slab is not gathered yet",
    IN_PLACE: "a write straight into decode's pages is open",
    WRITING: "a slab is gathered and its write into decode's ring is open",
    ARRIVED: "a slab's bytes are in decode's ring; decode has not heard of it, nothing is scattered",
    PARTLY: "one slab is in decode's pages and acknowledged, the other is not computed yet",
    OVER: "both engines have been told DONE",
}
# What can be held still on a transport that commits no faults on demand.
UNHELD = (OFFERED, CLAIMED, PARTLY, OVER)


@dataclass(frozen=True)
class Row:
    """What one fault does to a room in one stage.

    Attributes:
        prefill, decode: what the two engines see.
    """

    stage: str
    prefill: str
    decode: str


@dataclass(frozen=True)
class Scene:
    """One fault on one side, with a row for each stage.

    Attributes:
        side: which of the two is struck.
        bound_s: within which both engines have seen what the rows say: from the fault on, or from the return of what
            was away.
        transports: over which it is shown; over others than Loopback in the stages of UNHELD.
        restarts: workers that `longshore_worker_restarts_total` counts on that side.
        kept_descriptors: that a decode worker may keep for a while, see the text.
    """

    fault: str
    side: str
    text: str
    bound_s: float
    rows: tuple[Row, ...]
    transports: tuple[str, ...] = (LOOPBACK,)
    restarts: int = 0
    kept_descriptors: int = 0

    @property
    def name(self) -> str:
        """Of the scene in tests."""
        return f"{self.fault} {self.side}".replace(" ", "-")

    def rows_over(self, transport: str) -> tuple[Row, ...]:
        """The rows that are shown over a transport."""
        return tuple(row for row in self.rows if transport == LOOPBACK or row.stage in UNHELD)


@dataclass(frozen=True)
class Wrong:
    """One thing that nobody should do, and how it ends.

    Attributes:
        prefill, decode: what the two engines of the room see; of what concerns no room, what the sender sees.
        counted: the metric and its labels that count it, on the agent of `at`; empty: none does, `why_not` says why.
    """

    fault: str
    prefill: str
    decode: str
    counted: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    at: str = PREFILL
    why_not: str = ""

    @property
    def name(self) -> str:
        """Of the fault in tests."""
        return self.fault.replace(" ", "-")


def _rows(
    each: Reason, struck: str, *, offered: tuple[str, str], claimed: tuple[str, str] | None = None, dead: bool = False
) -> tuple[Row, ...]:
    """Rows of a fault that ends every open room with `each`, by stage; `dead`: the struck engine sees nothing."""

    def seen(prefill: str, decode: str) -> tuple[str, str]:
        if dead:
            return (DEAD, decode) if struck == PREFILL else (prefill, DEAD)
        return prefill, decode

    found = dict.fromkeys(STAGES, seen(failed(each), failed(each)))
    found[OFFERED] = offered
    found[CLAIMED] = claimed or seen(refused(each), failed(each))
    found[OVER] = seen(DONE, DONE)
    return tuple(Row(stage, *words) for stage, words in found.items())


_BOTH_DONE = (DONE, DONE)
_EVERYWHERE = (LOOPBACK, NIXL, NIXL_ALONE, MOONCAKE)

SCENES: tuple[Scene, ...] = (
    Scene(
        "engine killed",
        PREFILL,
        "SIGKILL. The engine's memory is free within 2 s. A later claim finds nobody; decode's worker probes for the "
        "engine's next life for two leases and a minute, over one connection.",
        10,
        _rows(Reason.ENGINE_LOST, PREFILL, offered=(DEAD, failed(Reason.PEER_LOST)), dead=True),
        _EVERYWHERE,
        kept_descriptors=1,
    ),
    Scene(
        "engine killed",
        DECODE,
        "SIGKILL. The engine's memory is free within 2 s. Nobody is left to claim what was only offered.",
        10,
        _rows(Reason.ENGINE_LOST, DECODE, offered=(LEFT_OPEN, DEAD), dead=True),
        _EVERYWHERE,
    ),
    Scene(
        "engine stopped",
        PREFILL,
        "SIGSTOP for longer than the lease (here 2 s), then SIGCONT: the events arrive then. When the engine has ended, "
        "decode's worker probes for its next life, as above.",
        15,
        _rows(Reason.LEASE_EXPIRED, PREFILL, offered=(failed(Reason.LEASE_EXPIRED), failed(Reason.LEASE_EXPIRED))),
        _EVERYWHERE,
        kept_descriptors=1,
    ),
    Scene(
        "engine stopped",
        DECODE,
        "The same.",
        15,
        _rows(Reason.LEASE_EXPIRED, DECODE, offered=_BOTH_DONE),
        _EVERYWHERE,
    ),
    Scene(
        "worker killed",
        PREFILL,
        "SIGKILL. The engine gets another worker; offers that nobody had claimed are repeated to it and go on.",
        20,
        _rows(Reason.PEER_LOST, PREFILL, offered=_BOTH_DONE),
        _EVERYWHERE,
        restarts=1,
    ),
    Scene(
        "worker killed",
        DECODE,
        "SIGKILL. The engine gets another worker.",
        20,
        _rows(Reason.PEER_LOST, DECODE, offered=_BOTH_DONE),
        _EVERYWHERE,
        restarts=1,
    ),
    Scene(
        "peer silent",
        PREFILL,
        "SIGSTOP to the worker for longer than the peer timeout (here 4 s), then SIGCONT: it listens and is silent, as "
        "behind a broken network.",
        20,
        _rows(Reason.PEER_LOST, PREFILL, offered=_BOTH_DONE),
        _EVERYWHERE,
    ),
    Scene(
        "peer silent",
        DECODE,
        "The same. Not shown over NIXL with TCP: rooms end there in the same way, but both workers keep the two sockets "
        "of the connection that was given up until one of them ends.",
        20,
        _rows(Reason.PEER_LOST, DECODE, offered=_BOTH_DONE),
        (LOOPBACK, NIXL_ALONE, MOONCAKE),
    ),
    Scene(
        "agent killed and back",
        PREFILL,
        "SIGKILL; the agent's workers end with it. Then the agent starts again: engines are not restarted, the client's "
        "ledger repeats offers that nobody had claimed, and nothing is done or reported twice.",
        20,
        _rows(Reason.PEER_LOST, PREFILL, offered=_BOTH_DONE),
        _EVERYWHERE,
    ),
    Scene(
        "agent killed and back",
        DECODE,
        "The same.",
        20,
        _rows(Reason.PEER_LOST, DECODE, offered=_BOTH_DONE),
        _EVERYWHERE,
    ),
    Scene(
        "cancelled",
        PREFILL,
        "The engine cancels its half. Decode is told even if prefill has not offered the room.",
        10,
        _rows(
            Reason.CANCELLED,
            PREFILL,
            offered=(failed(Reason.CANCELLED), failed(Reason.CANCELLED)),
        ),
        _EVERYWHERE,
    ),
    Scene(
        "cancelled",
        DECODE,
        "The engine cancels its half.",
        10,
        _rows(Reason.CANCELLED, DECODE, offered=_BOTH_DONE),
        _EVERYWHERE,
    ),
)


def scenes(fault: str) -> tuple[Scene, ...]:
    """The scenes of one fault, of both sides."""
    found = tuple(scene for scene in SCENES if scene.fault == fault)
    assert found, f"no scene is of {fault!r}"
    return found


_REFUSED = "longshore_refused_messages_total"
_CLIENT = "the client refuses it before anything is sent"
_WORKER = {"worker": "one/0/0"}


def _refusal(fault: str, reason: Reason, *, at: str, why_not: str = "", other: str = DONE) -> Wrong:
    """A call that is refused, while its room goes on."""
    seen = (refused(reason), other) if at == PREFILL else (other, refused(reason))
    if why_not:
        return Wrong(fault, *seen, at=at, why_not=why_not)
    return Wrong(fault, *seen, _REFUSED, {"reason": reason.name.lower()}, at)


NOTHING = "nothing"
WRONGS: tuple[Wrong, ...] = (
    _refusal("a room offered again after it was done", Reason.ROOM_REUSED, at=PREFILL),
    _refusal("a room claimed again after it was done", Reason.ROOM_REUSED, at=DECODE),
    _refusal("a room claimed twice at once", Reason.ROOM_REUSED, at=DECODE, why_not=_CLIENT),
    Wrong(
        "a room claimed by a second engine",
        DONE,
        f"the first {DONE}, the second {failed(Reason.ROOM_REUSED)}",
        "longshore_rooms_total",
        {"half": "target", "outcome": "failed", "reason": "room_reused"},
        DECODE,
    ),
    _refusal("overlapping chunks", Reason.TOKENS_OVERLAP, at=PREFILL),
    _refusal("a chunk that is missing", Reason.TOKENS_MISSING, at=PREFILL),
    _refusal("a chunk after last", Reason.OFFER_AFTER_LAST, at=PREFILL),
    _refusal("a page id out of range in an offer", Reason.PAGE_OUT_OF_RANGE, at=PREFILL),
    _refusal("a page id out of range in a claim", Reason.PAGE_OUT_OF_RANGE, at=DECODE),
    _refusal("one page twice in a claim", Reason.TOKENS_OVERLAP, at=DECODE),
    Wrong(
        "halves that state different totals",
        failed(Reason.TOTAL_MISMATCH),
        failed(Reason.TOTAL_MISMATCH),
        "longshore_rooms_total",
        {"outcome": "failed", "reason": "total_mismatch"},
        PREFILL,
    ),
    _refusal("wrong layout of a claimed instance", Reason.LAYOUT_MISMATCH, at=DECODE),
    Wrong(
        "wrong layout of an engine rank",
        refused(Reason.LAYOUT_MISMATCH),
        NOTHING,
        _REFUSED,
        {"worker": "supervisor", "reason": "layout_mismatch"},
    ),
    Wrong(
        "wrong layout of a peer",
        refused(Reason.LAYOUT_MISMATCH),
        NOTHING,
        _REFUSED,
        {**_WORKER, "reason": "layout_mismatch"},
    ),
    Wrong(
        "unknown version of an engine",
        refused(Reason.UNKNOWN_VERSION),
        NOTHING,
        _REFUSED,
        {"worker": "supervisor", "reason": "unknown_version"},
    ),
    Wrong("unknown version of a peer", NOTHING, NOTHING, _REFUSED, {**_WORKER, "reason": "unknown_version"}),
    Wrong("unknown client key", NOTHING, NOTHING, "longshore_authentication_failures_total", _WORKER),
    Wrong(
        "a message of 1 GiB from a peer",
        "its connection is closed",
        NOTHING,
        why_not="ZeroMQ ends the connection at the length, before a byte of it is kept",
    ),
    Wrong(
        "a message of 1 GiB from an engine",
        "the kernel refuses to send it",
        NOTHING,
        why_not="it never leaves the engine",
    ),
    Wrong(
        "a message above 64 KiB from an engine",
        refused(Reason.MALFORMED_MESSAGE),
        NOTHING,
        _REFUSED,
        {"worker": "supervisor", "reason": "malformed_message"},
    ),
)

# What is no fault, and must pass.
PASSES: tuple[Wrong, ...] = (
    Wrong("the room ids 2^63 and 2^64 - 1", DONE, DONE, "longshore_rooms_total", {"half": "source", "outcome": "done"}),
    Wrong(
        "200 rooms while a stalled one holds 1 % of the ring",
        DONE,
        DONE,
        "longshore_rooms_total",
        {"half": "target", "outcome": "done"},
        DECODE,
    ),
    Wrong(
        "lists of 131,072 pages through sockets with default buffers",
        DONE,
        DONE,
        "longshore_rooms_total",
        {"half": "target", "outcome": "done"},
        DECODE,
    ),
)


def wrong(fault: str) -> Wrong:
    """The row of one thing."""
    (found,) = (row for row in (*WRONGS, *PASSES) if row.fault == fault)
    return found


# Connections that a library keeps after a peer of a worker has died, by transport; the page says for how long.
LIBRARY_KEEPS: Mapping[str, int] = {LOOPBACK: 0, NIXL: 1, NIXL_ALONE: 0, MOONCAKE: 1}

# -- the page ----------------------------------------------------------------------------------------------------------

_HEAD = """\
# Faults, and what both sides see

Made from `tests/agent/fault_table.py` by `make reference`; do not edit. `tests/agent/test_faults_*.py` compare what
they observe with each row; a row that no test shows fails the run.

An engine sees `DONE`, or `FAILED` with a reason, and then `RELEASED`; a call may be refused with a reason. *Within* is
the limit of the tests on two busy cores, with a peer timeout of 4 s and a heartbeat of 0.2 s, from the fault on, or
from the return of what was away. After each scene:

- the rings are empty, other rooms have arrived, no other page has changed, every page has been released, and nothing
  was reported twice;
- every process holds the descriptors, mapped pages and memory that it held at the start, with two exceptions of the
  libraries. After the death of a peer NIXL with TCP keeps one connection until the next peer dies. Mooncake keeps one
  to each dead decode worker until the prefill worker that wrote to it ends.

A worker that does not run counts that time as `longshore_absent_seconds_total`, and not as a silence of its peers or
its engine: rooms between workers that stood still together go on (`test_agent_faults.py`).

`longshore_rooms_total` (`half`, `outcome`, `reason`) counts a room's end, and `longshore_refused_messages_total`
(`reason`) a refused call, each at the worker that said so. The next worker of an engine counts from 0.

## Stages

Rooms are held in all stages at one time, `/v1/rooms/{room}` of both agents shows each stage, and only then the fault
strikes. Nothing can be held still over NIXL and Mooncake.

| stage | meaning | shown over |
|---|---|---|
"""


def reference() -> str:
    """Return the reference page, in Markdown."""
    lines = [_HEAD.rstrip("\n")]
    for stage, meaning in STAGES.items():
        lines.append(f"| {stage} | {meaning} | {'all transports' if stage in UNHELD else LOOPBACK} |")
    for fault in dict.fromkeys(scene.fault for scene in SCENES):
        lines += ["", f"## {fault.capitalize()}", "", *_fault_lines(scenes(fault))]
    lines += ["", "## What nobody should do", "", "Where a call is refused, its room goes on with the right call.", ""]
    lines += ["| fault | prefill sees | decode sees | counted by |", "|---|---|---|---|"]
    lines += [_wrong_line(row) for row in WRONGS]
    lines += ["", "## What must pass", "", "| case | prefill sees | decode sees | counted by |", "|---|---|---|---|"]
    lines += [_wrong_line(row) for row in PASSES]
    return "\n".join(lines) + "\n"


def _fault_lines(both: tuple[Scene, ...]) -> Iterator[str]:
    for scene in both:
        counted = " `longshore_worker_restarts_total` counts it." if scene.restarts else ""
        yield f"- At {scene.side}: {scene.text}{counted} Within {scene.bound_s:g} s."
    yield ""
    titles = [f"at {scene.side}: {side} sees" for scene in both for side in (PREFILL, DECODE)]
    yield f"| stage | {' | '.join(titles)} |"
    yield f"|---|{'---|' * len(titles)}"
    for rows in zip(*(scene.rows for scene in both), strict=True):
        seen = [word for row in rows for word in (row.prefill, row.decode)]
        yield f"| {rows[0].stage} | {' | '.join(seen)} |"


def _wrong_line(row: Wrong) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in row.labels.items() if name != "worker")
    counted = f"`{row.counted}{f'{{{labels}}}' if labels else ''}`" if row.counted else f"nothing: {row.why_not}"
    return f"| {row.fault} | {row.prefill} | {row.decode} | {counted} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
