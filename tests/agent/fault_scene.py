"""Builds a fault scene: two agents, engines, and rooms that are brought to each stage and held there.

The tests inject the faults and then compare both engines' observations. Stages are read from the agents' pages.
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
from process_ledger import Holdings, holdings_of

PEER_TIMEOUT_S = 4.0
LANES = 3
# Enough rooms to fill the lanes and the ring, which has space for eight slabs.
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
    # Most of the ring may be in quarantine here. Another test covers the replacement of a worker above a quarter.
    "LONGSHORE_QUARANTINE_PERCENT": "100",
}


class Gate:
    """A gate. While it is shut, writes to some targets stay open: before their bytes land, or (`mute`) afterwards."""

    def __init__(self, directory: Path) -> None:
        self._until, self._when = directory / "open", {kind: directory / kind for kind in ("mute", "hold")}
        self._marks = {kind: directory / f"{kind}-mark" for kind in self._when}

    def rules(self, *targets: str) -> str:
        """The fault plan for the prefill agent's transport."""
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
        """Shut the gate. It holds no write yet."""
        for path in (self._until, *self._when.values(), *self._marks.values()):
            path.unlink(missing_ok=True)

    def turn(self, kind: str) -> None:
        """Hold future writes in this way ("": hold none); writes that are held already stay held."""
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
    """Two agents with engines that no test may break, and the resources that their processes held at the start."""

    prefill: Agent
    decode: Agent
    source: Actor  # pages of 16 tokens
    target: Actor  # pages of 8: staged from `source`
    small: Actor | None = None  # a prefill engine with pages of 8: in place to `target`
    whole: Actor | None = None  # a decode engine with pages of 16: in place from `source`
    gate: Gate | None = None
    plain: Actor | None = None  # a decode engine without a rule of the gate: staged from `small`
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
        """Return the resources that each supervisor and each worker holds now."""
        pids = {}
        for agent in (self.prefill, self.decode):
            pids[agent.directory.name] = agent.process.pid
            pids |= {worker["worker"]: worker["pid"] for worker in agent.status()["workers"]}
        held = holdings_of(pids.values())
        return {name: held[pid] for name, pid in pids.items() if pid in held}

    def growth(self, kept_descriptors: int) -> list[str]:
        """Return resources held beyond the start, by process; each process may keep `kept_descriptors` more."""
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
        """Move a room between all pairs, so that all their connections exist."""
        for source, target in self.pairs():
            room = Room("", source, target)
            assert (room.offer(), room.claim(source.endpoint())) == ("", "")
            room.finish()


@dataclass
class Room:
    """One room, and the observations of it so far."""

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
        """Wait until it is done on both sides; free its pages."""
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
        """The agent of the struck side."""
        return self.place.prefill if self.side == PREFILL else self.place.decode

    @property
    def struck(self) -> Actor | Doomed:
        """The engine of the struck side."""
        return self.source if self.side == PREFILL else self.target

    @property
    def doomed(self) -> Doomed:
        """The struck engine, which runs in a separate process."""
        assert isinstance(self.struck, Doomed)
        return self.struck

    def set_up(self, stages: Collection[str] = tuple(STAGES)) -> None:
        """Bring a room to each stage, and check that all of them are in their stages at one time."""
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
        # The pages say that a write comes, and only the mark that it is held: the gate must not turn between the two.
        wait_for(lambda: gate.held_count("hold") == 2, what="both writes to be held")
        gate.turn("mute")
        self._both(ARRIVED)
        wait_for(lambda: gate.held_count("mute") == 1, what="a write to be muted")
        gate.turn("hold")
        while {WAITING, GRANTED} - {room.stage for room in self.rooms}:
            assert len(self.rooms) < _ROOMS_MAX, [room.stage for room in self.rooms]
            self._both("")
        stages = Counter(room.stage for room in self.rooms)
        wait_for(lambda: gate.held_count("hold") == stages[WRITING] + stages[IN_PLACE], what="writes to be posted")
        assert gate.held_count("mute") == stages[ARRIVED]

    def _both(self, stage: str, source: Actor | Doomed | None = None, target: Actor | Doomed | None = None) -> Room:
        """Offer and claim a room. Without a given stage, it gets the one that it reaches."""
        room = self._room(stage, source, target)
        assert (room.offer(), room.claim(self.endpoint(room))) == ("", "")
        if stage:
            self._wait(room)
        else:
            room.stage = wait_for(lambda: self._settled(room))
        return room

    def _settled(self, room: Room) -> str:
        """Return the stage in which a room stays. A room waits for a lane only while all lanes are held."""
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
        """Return the endpoint of a room's prefill engine: the current one, or the last one before its end."""
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
    """Return one half of a room and the spans of all its slabs from an agent's page."""
    page = agent.room_page(room.number)
    if page is None:
        return None, set()
    halves = [{**entry["room"], "ended": entry["ended"]} for entry in page["halves"] if entry["room"]["half"] == half]
    return (halves[0] if halves else None), {span["stage"] for span in page["spans"] if span["kind"] == "stage"}


def stage_of(near: dict[str, Any] | None, far: dict[str, Any] | None, spans: set[str], wanted: str) -> str:
    """Return a room's stage, by the two agents' pages; "" between stages.

    Only the transport knows whether an open write has landed. Its mark shows that, and `wanted` selects the stage's name.
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
