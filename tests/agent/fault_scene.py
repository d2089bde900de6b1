"""A scene of faults: two agents, engines, and a room brought to each stage of its life and held there.

Nothing here strikes: the tests do, and then ask what both engines have seen. Stages are read from the agents' own pages.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_world import EVENT_LIMIT_S, Agent, room_ids, wait_for
from fault_engine import RELEASED, SLAB_TOKENS, Actor, Doomed
from fault_table import (
    ARRIVED,
    CLAIMED,
    DONE,
    GRANTED,
    IN_PLACE,
    OFFERED,
    OVER,
    PARTLY,
    PREFILL,
    STAGES,
    WAITING,
    WRITING,
)
from process_ledger import Holdings, holdings

PEER_TIMEOUT_S = 4.0
LANES = 3
# What a scene needs at most to fill the lanes and the ring: eight slabs fit the ring.
_ROOMS_MAX = 12
SETTINGS = {
    "LONGSHORE_HEARTBEAT_S": "0.2",
    "LONGSHORE_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
    "LONGSHORE_RETRY_MS": "100",
    "LONGSHORE_LANE_COUNT": str(LANES),
    "LONGSHORE_LANE_BYTES": "256Ki",
    "LONGSHORE_SLAB_BYTES_MIN": str(SLAB_TOKENS * 2048),
    "LONGSHORE_RING_BYTES": "1Mi",
    "LONGSHORE_RING_EXTENT_BYTES": "1Mi",
    # Most of the ring may be in quarantine here; that its worker is replaced above a quarter is another test's business.
    "LONGSHORE_QUARANTINE_PERCENT": "100",
}


class Gate:
    """Holds writes to some targets open while it is shut: before their bytes land, or (`mute`) after that."""

    def __init__(self, directory: Path) -> None:
        self._until, self._when = directory / "open", {kind: directory / kind for kind in ("mute", "hold")}
        self._marks = {kind: directory / f"{kind}-mark" for kind in self._when}

    def rules(self, *targets: str) -> str:
        """What the prefill agent's transport is told."""
        return json.dumps(
            [
                {
                    "kind": kind,
                    "count": None,
                    "peer": f"{target}.0.0",
                    "when": str(when),
                    "until": str(self._until),
                    "mark": str(self._marks[kind]),
                }
                for kind, when in self._when.items()
                for target in targets
            ]
        )

    def shut(self) -> None:
        """From now on what is held stays held; nothing is yet."""
        for path in (self._until, *self._when.values(), *self._marks.values()):
            path.unlink(missing_ok=True)

    def turn(self, kind: str) -> None:
        """Hold what comes from now on in this way ("": in none); what is held already stays so."""
        for path in self._when.values():
            path.unlink(missing_ok=True)
        if kind:
            self._when[kind].touch()

    def open(self) -> None:
        """Let everything go."""
        for path in self._when.values():
            path.unlink(missing_ok=True)
        self._until.touch()

    def held_count(self, kind: str) -> int:
        mark = self._marks[kind]
        return len(mark.read_text().splitlines()) if mark.exists() else 0


@dataclass
class Place:
    """Two agents with engines that no test may break, and what the processes of both held at the start."""

    prefill: Agent
    decode: Agent
    source: Actor  # pages of 16 tokens
    target: Actor  # pages of 8: staged from `source`
    small: Actor | None = None  # a prefill engine with pages of 8: in place to `target`
    whole: Actor | None = None  # a decode engine with pages of 16: in place from `source`
    gate: Gate | None = None
    plain: Actor | None = None  # a decode engine that no rule of the gate names: staged from `small`
    start: dict[str, Holdings] = field(default_factory=dict)

    @property
    def actors(self) -> list[Actor]:
        return [actor for actor in (self.source, self.small, self.target, self.whole, self.plain) if actor is not None]

    def pairs(self) -> list[tuple[Actor, Actor]]:
        """Prefill and decode engines between which rooms move."""
        wanted = [
            (self.source, self.target),
            (self.source, self.whole),
            (self.small, self.target),
            (self.small, self.plain),
        ]
        return [(source, target) for source, target in wanted if source is not None and target is not None]

    def leftovers(self) -> list[str]:
        return self.prefill.leftovers() + self.decode.leftovers()

    def holdings(self) -> dict[str, Holdings]:
        """What each supervisor and each worker holds now."""
        found = {}
        for agent in (self.prefill, self.decode):
            found[agent.directory.name] = holdings(agent.process.pid)
            found |= {worker["worker"]: holdings(worker["pid"]) for worker in agent.status()["workers"]}
        return found

    def growth(self, kept_descriptors: int) -> list[str]:
        """What is held beyond the start, by process; each may keep so many descriptors."""
        now = self.holdings()
        found = [f"{name} is new" for name in now.keys() - self.start.keys()]
        found += [f"{name} is gone" for name in self.start.keys() - now.keys()]
        both = [
            (name, held.grown_from(self.start[name], kept_descriptors))
            for name, held in now.items()
            if name in self.start
        ]
        return found + [f"{name}: {grown}" for name, grown in both if grown]

    def warm_up(self) -> None:
        """Move a room between all pairs, so that every connection that they need is there."""
        for source, target in self.pairs():
            room = Room("", source, target)
            assert (room.offer(), room.claim(source.endpoint())) == ("", "")
            room.finish()


@dataclass
class Room:
    """One room, and what was said of it so far."""

    stage: str
    source: Actor | Doomed
    target: Actor | Doomed
    total: int = SLAB_TOKENS
    number: int = field(default_factory=lambda: next(room_ids))
    offered: int = 0  # tokens
    claimed: bool = False
    seen: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0

    def offer(self, end: int | None = None) -> str:
        end = self.total if end is None else end
        first, self.offered = self.offered, end
        return self.source.send(self.number, first, end, self.total, last=end == self.total)

    def claim(self, endpoint: str) -> str:
        said = self.target.receive(self.number, endpoint, self.total)
        self.claimed = not said
        return said

    def finish(self) -> None:
        """Wait until it is done on both sides, and give its pages back."""
        for actor in (self.source, self.target):
            assert actor.end(self.number, EVENT_LIMIT_S) == DONE
            assert actor.release(self.number, EVENT_LIMIT_S) == RELEASED


class Stages:
    """Rooms from one prefill engine to decode engines, each held in its stage."""

    def __init__(self, place: Place, side: str, source: Actor | Doomed, target: Actor | Doomed) -> None:
        self.place, self.side, self.source, self.target = place, side, source, target
        self.rooms: list[Room] = []
        self.endpoints = {actor.instance: actor.endpoint() for actor in (source, place.small) if actor is not None}

    @property
    def agent(self) -> Agent:
        """That of the struck side."""
        return self.place.prefill if self.side == PREFILL else self.place.decode

    @property
    def struck(self) -> Actor | Doomed:
        """The engine of that side."""
        return self.source if self.side == PREFILL else self.target

    @property
    def doomed(self) -> Doomed:
        """The struck engine, which has a process of its own."""
        assert isinstance(self.struck, Doomed)
        return self.struck

    def set_up(self, stages: Collection[str] = tuple(STAGES)) -> None:
        """Bring a room to each stage, and see that all of them are there at one time."""
        if OVER in stages:
            self._both(OVER)
        if PARTLY in stages:
            room = self._room(PARTLY, total=2 * SLAB_TOKENS)
            assert (room.offer(SLAB_TOKENS), room.claim(self.endpoint(room))) == ("", "")
            self._wait(room)
        if CLAIMED in stages:
            room = self._room(CLAIMED)
            assert room.claim(self.endpoint(room)) == ""
            self._wait(room)
        if OFFERED in stages:
            room = self._room(OFFERED)
            assert room.offer() == ""
            self._wait(room)
        if WRITING in stages:
            self._hold()
        for room in self.rooms:
            assert self._stage(room) == room.stage

    def _hold(self) -> None:
        gate, place = self.place.gate, self.place
        assert gate is not None and place.small is not None and place.whole is not None
        gate.turn("hold")
        in_place = (self.source, place.whole) if self.side == PREFILL else (place.small, self.target)
        self._both(IN_PLACE, *in_place)
        self._both(WRITING)
        gate.turn("mute")
        self._both(ARRIVED)
        gate.turn("hold")
        while {WAITING, GRANTED} - {room.stage for room in self.rooms}:
            assert len(self.rooms) < _ROOMS_MAX, [room.stage for room in self.rooms]
            self._both("")
        stages = Counter(room.stage for room in self.rooms)
        wait_for(lambda: gate.held_count("hold") == stages[WRITING] + stages[IN_PLACE], what="writes to be posted")
        assert gate.held_count("mute") == stages[ARRIVED]

    def _both(self, stage: str, source: Actor | Doomed | None = None, target: Actor | Doomed | None = None) -> Room:
        """Offer and claim a room; without a stage, the one that it comes to is its own."""
        room = self._room(stage, source, target)
        assert (room.offer(), room.claim(self.endpoint(room))) == ("", "")
        if stage:
            self._wait(room)
        else:
            room.stage = wait_for(lambda: self._settled(room))
        return room

    def _settled(self, room: Room) -> str:
        """The stage in which a room stays: one that waits for a lane does so only while all of them are held."""
        stage = self._stage(room)
        if stage == GRANTED and self._held_lanes() < LANES:
            return ""
        return stage if stage in (WAITING, GRANTED, WRITING) else ""

    def _held_lanes(self) -> int:
        held = [room for room in self.rooms if room.source is self.source]
        return sum(room.stage in (IN_PLACE, WRITING, ARRIVED) for room in held)

    def _room(
        self,
        stage: str,
        source: Actor | Doomed | None = None,
        target: Actor | Doomed | None = None,
        total: int = SLAB_TOKENS,
    ) -> Room:
        room = Room(stage, source or self.source, target or self.target, total)
        self.rooms.append(room)
        return room

    def endpoint(self, room: Room) -> str:
        """How decode reaches a room's prefill engine: as it says now, or as it said while it lived."""
        with contextlib.suppress(OSError, AssertionError):
            self.endpoints[room.source.instance] = room.source.endpoint()
        return self.endpoints[room.source.instance]

    def _wait(self, room: Room) -> None:
        wait_for(lambda: self._stage(room) == room.stage, what=f"a room to be {room.stage!r}")

    def _stage(self, room: Room) -> str:
        near, near_spans = look(self.place.prefill, room, "source")
        far, far_spans = look(self.place.decode, room, "target")
        return stage_of(near, far, near_spans | far_spans, room.stage)


def look(agent: Agent, room: Room, half: str) -> tuple[dict[str, Any] | None, set[str]]:
    """One half of a room and the spans of all its slabs, as an agent's page shows them."""
    status, body = agent.ask(f"/v1/rooms/{room.number}")
    if status == 404:
        return None, set()
    page = json.loads(body)
    halves = [{**entry["room"], "ended": entry["ended"]} for entry in page["halves"] if entry["room"]["half"] == half]
    return (halves[0] if halves else None), {span["stage"] for span in page["spans"]}


def stage_of(near: dict[str, Any] | None, far: dict[str, Any] | None, spans: set[str], wanted: str) -> str:
    """The stage that a room is in, by what the two agents say of it; "" between stages.

    Whether an open write has landed is known to the transport alone: its mark tells, and `wanted` chooses the word.
    """
    if near is None:
        return CLAIMED if far is not None and not far["ended"] else ""
    if far is None:
        return OFFERED if not near["ended"] and not near["pairs"] else ""
    if near["ended"] and far["ended"]:
        return OVER if near["state"] == far["state"] == "done" else ""
    if near["state"] != "open" or far["state"] != "open" or not near["pairs"] or far["pairs"][0]["state"] != "open":
        return ""
    busy, granted = near["pairs"][0]["busy"], far["pairs"][0]["busy"]
    if near["slabs_done"] or far["slabs_done"]:
        partly = 0 < near["slabs_done"] == far["slabs_done"] < far["slabs_total"]
        return PARTLY if partly and not busy else ""
    if near["tokens_total"] < 0:
        return CLAIMED if not spans and not busy else ""
    if not spans and far["ways"] == ["staged"]:
        return {(0, 0): WAITING, (1, 1): GRANTED}.get((busy, granted), "")
    if not spans and far["ways"] == ["contiguous"]:
        return IN_PLACE if (busy, granted) == (1, 0) else ""
    if spans == {"gather"} and (busy, granted) == (1, 1):
        return ARRIVED if wanted == ARRIVED else WRITING
    return ""
