"""Answers `/v1/rooms` (bounded pages) and `/v1/rooms/{id}` (one room in full) from a snapshot. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

import msgspec

from longshore_agent.status.room_report import trace_id
from longshore_agent.status.snapshot import AgentSnapshot
from longshore_agent.status.spans import Span
from longshore_spec.status import RoomStatus

PAGE_MAX = 1000
# A page's cursor is a room's key. Instances have short names, so a longer cursor is not ours.
_CURSOR_CHARACTERS_MAX = 4096

_Key = tuple[int, str, str, str, str, bool]


_CURSOR: msgspec.msgpack.Decoder[_Key] = msgspec.msgpack.Decoder(_Key)


class RoomEntry(msgspec.Struct, frozen=True):
    """One half of a room and its worker.

    Attributes:
        ended: only its outcome is kept.
        trace_id: of its trace in OpenTelemetry, in hexadecimal digits; empty unless the agent has LONGSHORE_OTEL.
    """

    worker: str
    ended: bool
    room: RoomStatus
    trace_id: str = ""


class RoomList(msgspec.Struct, frozen=True):
    """A page of rooms, by id, also of the engines that have left last.

    Attributes:
        open_count, ended_count: exact counts over all workers, even if lists of a worker are cut.
        next: the value of `after` for the next page; empty if there is none.
    """

    rooms: tuple[RoomEntry, ...]
    open_count: int
    ended_count: int
    next: str = ""


class Clock(msgspec.Struct, frozen=True):
    """The clock of all spans of an answer: the monotonic clock of the agent's host.

    Attributes:
        boot_id: equal exactly for processes with one such clock; empty if the host does not tell.
        received_ns, answered_ns: when the agent read the request, and when it answered.
    """

    boot_id: str
    received_ns: int
    answered_ns: int


class RoomDetail(msgspec.Struct, frozen=True):
    """All halves of a room at this agent, with the spans of its slabs and messages sorted by start.

    Attributes:
        incomplete: workers that have recorded earlier spans of the room, which are not here.
    """

    room: str
    halves: tuple[RoomEntry, ...]
    spans: tuple[Span, ...]
    clock: Clock | None = None
    incomplete: tuple[str, ...] = ()


def page(snapshot: AgentSnapshot, *, limit: int, after: str, half: str | None, ended: bool | None) -> RoomList:
    """Return at most `limit` rooms after the cursor `after`, without their pairs.

    Args:
        half, ended: filters; None for all rooms.
    Raises:
        ValueError: `after` is not a cursor of an earlier page.
    """
    assert 0 < limit <= PAGE_MAX, limit
    start = _decode(after) if after else None
    chosen = sorted(
        (
            entry
            for entry in _entries(snapshot)
            if half in (None, entry.room.half)
            and ended in (None, entry.ended)
            and (start is None or _key(entry) > start)
        ),
        key=_key,
    )
    shown = tuple(
        msgspec.structs.replace(_traced(snapshot, entry), room=msgspec.structs.replace(entry.room, pairs=()))
        for entry in chosen[:limit]
    )
    return RoomList(
        rooms=shown,
        open_count=sum(worker.rooms_open for worker in snapshot.workers),
        ended_count=sum(worker.rooms_ended for worker in snapshot.all_workers),
        next=_encode(_key(shown[-1])) if len(chosen) > limit else "",
    )


def detail(snapshot: AgentSnapshot, room: str, instance: str | None) -> RoomDetail | None:
    """Return a room in full, of any prefill instance or of `instance`; None if no worker knows it."""
    halves = tuple(
        sorted((e for e in _entries(snapshot) if e.room.room == room and instance in (None, e.room.instance)), key=_key)
    )
    if not halves:
        return None
    found = [
        msgspec.structs.replace(span, worker=worker.worker)
        for worker in snapshot.all_workers
        for span in worker.spans
        if span.room == room and instance in (None, span.instance)
    ]
    spans = tuple(sorted(found, key=lambda span: (span.start_ns, span.end_ns)))
    lacking = {worker.worker for worker in snapshot.all_workers if worker.spans_cut}
    cut = tuple(sorted({half.worker for half in halves} & lacking))
    traced = tuple(_traced(snapshot, entry) for entry in halves)
    return RoomDetail(room, traced, spans, incomplete=cut)


def _entries(snapshot: AgentSnapshot) -> Iterator[RoomEntry]:
    for worker in snapshot.all_workers:
        yield from (RoomEntry(worker.worker, False, room) for room in worker.rooms)
        yield from (RoomEntry(worker.worker, True, room) for room in worker.ended)


def _traced(snapshot: AgentSnapshot, entry: RoomEntry) -> RoomEntry:
    """Return an entry with the id of its trace, if the agent sends traces."""
    if not snapshot.sends_traces:
        return entry
    room = entry.room
    found = trace_id(snapshot.deployment, room.instance, room.room)
    return msgspec.structs.replace(entry, trace_id=f"{found:032x}")


def _key(entry: RoomEntry) -> _Key:
    room = entry.room
    return len(room.room), room.room, room.instance, room.half, entry.worker, entry.ended


def _encode(key: _Key) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(key)).decode().rstrip("=")


def _decode(cursor: str) -> _Key:
    if len(cursor) > _CURSOR_CHARACTERS_MAX:
        raise ValueError(f"the cursor has {len(cursor)} characters: give what `next` of the last page said")
    try:
        data = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return _CURSOR.decode(data)
    except (binascii.Error, msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise ValueError(f"{cursor!r} is no cursor: give what `next` of the last page said") from error
