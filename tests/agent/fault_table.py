"""The table of faults: for each fault and stage of a room, both engines' observations. Makes `docs/reference/faults.md`.

The fault tests compare their observations with these rows (`fault_judge`). A row without a test fails `test_fault_table`.
`make reference`, or `python tests/agent/fault_table.py`, makes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from longshore_wire.errors import Reason

PREFILL, DECODE = "prefill", "decode"
LOOPBACK, NIXL, MOONCAKE = "Loopback", "NIXL", "Mooncake"
# Without a wire over TCP, UCX reports fewer deaths of peers to NIXL.
NIXL_ALONE = "NIXL without TCP"

# -- what an engine sees of its half of a room -------------------------------------------------------------------------

DONE = "DONE"
DEAD = "dead"
LEFT_OPEN = "open until it cancels"


def failed(reason: Reason) -> str:
    """The half was open and ended by an event."""
    return f"FAILED {reason.name}"


def refused(reason: Reason) -> str:
    """The half was not open yet, and the call that would open it is refused."""
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
# Stages that can be held on transports without injected faults.
UNHELD = (OFFERED, CLAIMED, PARTLY, OVER)


# How many times as slow as two busy cores a machine may be.
SLOWNESS_MAX = 6


@dataclass(frozen=True)
class Row:
    """The effect of one fault on a room in one stage.

    Attributes:
        prefill, decode: the two engines' observations.
    """

    stage: str
    prefill: str
    decode: str


@dataclass(frozen=True)
class Scene:
    """One fault on one side, with a row for each stage.

    Attributes:
        side: the struck side.
        bound_s: time limit for both engines' observations, from the fault, or from its end if the process comes back, on two
            busy cores.
        transports: transports that are tested; over those other than Loopback only the stages of UNHELD.
        restarts: workers that `longshore_worker_restarts_total` counts on that side.
        kept_descriptors: descriptors that a decode worker may keep for a while, see the text.
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
        """The scene's name in tests."""
        return f"{self.fault} {self.side}".replace(" ", "-")

    @property
    def limit_s(self) -> float:
        """The time limit on any machine."""
        return SLOWNESS_MAX * self.bound_s

    def rows_over(self, transport: str) -> tuple[Row, ...]:
        """Return the rows that are tested over a transport."""
        return tuple(row for row in self.rows if transport == LOOPBACK or row.stage in UNHELD)


@dataclass(frozen=True)
class Wrong:
    """One invalid request and its outcome.

    Attributes:
        prefill, decode: observations of the room's two engines; without a room, those of the sender.
        counted: the metric that counts it on the agent of `at`, with labels; empty if none does, for the reason `why_not`.
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
        """The fault's name in tests."""
        return self.fault.replace(" ", "-")


def _rows(
    each: Reason, struck: str, *, offered: tuple[str, str], claimed: tuple[str, str] | None = None, dead: bool = False
) -> tuple[Row, ...]:
    """Return the rows of a fault that ends every open room with `each`. `dead`: the struck engine observes nothing."""

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
        "SIGKILL. The engine's memory is free within 2 s. A later claim finds no worker; decode's worker probes for the "
        "engine's next life for two leases and a minute, over one connection.",
        10,
        _rows(Reason.ENGINE_LOST, PREFILL, offered=(DEAD, failed(Reason.PEER_LOST)), dead=True),
        _EVERYWHERE,
        kept_descriptors=1,
    ),
    Scene(
        "engine killed",
        DECODE,
        "SIGKILL. The engine's memory is free within 2 s. No engine is left to claim rooms that were only offered.",
        10,
        _rows(Reason.ENGINE_LOST, DECODE, offered=(LEFT_OPEN, DEAD), dead=True),
        _EVERYWHERE,
    ),
    Scene(
        "engine stopped",
        PREFILL,
        "SIGSTOP for longer than the lease (here 6 s), then SIGCONT: the events arrive then. When the engine has ended, "
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
        "SIGKILL. The engine gets another worker. Offers without a claim are repeated to it and continue.",
        20,
        _rows(Reason.PEER_LOST, PREFILL, offered=_BOTH_DONE),
        _EVERYWHERE,
        restarts=1,
    ),
    Scene(
        "worker killed",
        DECODE,
        "SIGKILL. The engine gets another worker. If its ranks have pages in two memories, the other memory's worker goes on.",
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
        "ledger repeats offers without a claim, and nothing is done or reported twice.",
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
    """Return the scenes of one fault, of both sides."""
    found = tuple(scene for scene in SCENES if scene.fault == fault)
    assert found, f"no scene is of {fault!r}"
    return found


_REFUSED = "longshore_refused_messages_total"
_CLIENT = "the client refuses it before anything is sent"
_WORKER = {"worker": "one/0/0"}


def _refusal(fault: str, reason: Reason, *, at: str, why_not: str = "", other: str = DONE) -> Wrong:
    """Return the row of a refused call whose room continues."""
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

# A bit that changes between two pages.
_DIFFER = (failed(Reason.DIGEST_MISMATCH), failed(Reason.DIGEST_MISMATCH), "longshore_digests_total")
DAMAGES: tuple[Wrong, ...] = (
    Wrong("a bit changes on the wire, staged, with digests", *_DIFFER, {"result": "different"}, DECODE),
    Wrong("a bit changes on the wire, in place, with digests", *_DIFFER, {"result": "different"}, DECODE),
    Wrong("a bit changes on the wire, without digests", DONE, DONE, at=DECODE, why_not="nothing compares the pages"),
)

# Cases that are valid and must succeed.
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
    """Return the row of one invalid request."""
    (found,) = (row for row in (*WRONGS, *DAMAGES, *PASSES) if row.fault == fault)
    return found


# Connections that a library keeps after the death of a worker's peer, by transport. The page says for how long.
LIBRARY_KEEPS: Mapping[str, int] = {LOOPBACK: 0, NIXL: 1, NIXL_ALONE: 0, MOONCAKE: 1}

# -- the page ----------------------------------------------------------------------------------------------------------

_HEAD = """\
# Faults, and what both sides see

Made from `tests/agent/fault_table.py` by `make reference`; do not edit. `tests/agent/test_faults_*.py` test each row.

An engine sees `DONE`, or `FAILED` with a reason, and then `RELEASED`; a call may be refused with a reason. *Within* is
the time on two busy cores, with a peer timeout of 4 s and a heartbeat of 0.2 s, from the fault, or from the return of
the process. The tests allow six times as much, for slower machines. After each scene:

- the rings are empty, other rooms have arrived, no other page has changed, every page has been released, and nothing
  was reported twice;
- every process holds the descriptors, mapped pages and memory that it held at the start, with two exceptions of the
  libraries. After the death of a peer NIXL with TCP keeps one connection until the next peer dies. Mooncake keeps one
  to each dead decode worker until the prefill worker that wrote to it ends.

A worker counts time in which it did not run as `longshore_absent_seconds_total`, and not as silence of its peers or its
engine: rooms between workers that were stopped together continue (`test_agent_faults.py`).

`longshore_rooms_total` (`half`, `outcome`, `reason`) counts a room's end, and `longshore_refused_messages_total`
(`reason`) a refused call, each at the worker that reported it. The next worker of an engine counts from 0.

## Stages

The fault strikes when `/v1/rooms/{room}` of both agents shows a room in each stage. Over NIXL and Mooncake no open
write can be held.

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
    lines += ["", "## Invalid requests", "", "After a refused call the room continues with the correct call.", ""]
    lines += ["| fault | prefill sees | decode sees | counted by |", "|---|---|---|---|"]
    lines += [_wrong_line(row) for row in WRONGS]
    lines += ["", "## Damage", "", "The room fails alone, and its text names layer, head, ranks and slab.", ""]
    lines += ["| fault | prefill sees | decode sees | counted by |", "|---|---|---|---|"]
    lines += [_wrong_line(row) for row in DAMAGES]
    lines += ["", "## Valid edge cases", "", "| case | prefill sees | decode sees | counted by |", "|---|---|---|---|"]
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
