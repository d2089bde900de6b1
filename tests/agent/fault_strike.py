"""Injects faults into one side of a scene and checks both engines' observations of every room.

A strike begins the fault, waits for the other engine's observations, and then ends the fault. Used by the fault tests.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from agent_world import EVENT_LIMIT_S, holders_of, is_worker, wait_for, wait_for_none
from fault_engine import RELEASED, SLAB_TOKENS, Actor, Doomed, freeze
from fault_judge import SceneJudge
from fault_scene import Place, Room, Stages, look
from fault_table import CLAIMED, DEAD, DECODE, DONE, LEFT_OPEN, LIBRARY_KEEPS, OFFERED, PREFILL

from longshore_wire.engine_messages import Half

# A room that no process will ever end is observed for this long; only its status shows that it is open.
_LEFT_OPEN_S = 0.2


@dataclass
class Strike:
    """One fault in progress."""

    mend: Callable[[], None] = lambda: None  # ends the fault
    dead: bool = False  # the struck engine never comes back


def kill_engine(stages: Stages) -> Strike:
    """SIGKILL to the engine; its memory must be free soon."""
    engine = stages.doomed
    engine.kill()
    wait_for(lambda: not holders_of(engine.instance), what="the memory to be free")
    return Strike(dead=True)


def stop_engine(stages: Stages) -> Strike:
    """SIGSTOP to the engine, until the other side has seen the end of all rooms."""
    stages.doomed.stop()
    return Strike(stages.doomed.go_on)


def kill_worker(stages: Stages) -> Strike:
    """SIGKILL to the engine's worker; the next worker serves the engine."""
    engine, epoch = stages.struck, stages.struck.epoch()
    os.kill(_worker(stages), signal.SIGKILL)
    return Strike(lambda: _served_again([(engine, epoch)]))


def stop_worker(stages: Stages) -> Strike:
    """SIGSTOP to the engine's worker: it sends nothing, but its port still accepts connections."""
    pid = _worker(stages)
    freeze(pid)
    return Strike(lambda: os.kill(pid, signal.SIGCONT))


def kill_agent(stages: Stages) -> Strike:
    """SIGKILL to the supervisor: its workers end with it. Then a new one starts, and the engines find it."""
    agent = stages.agent
    engines = [actor for actor in stages.place.actors if actor.engine.agent is agent]
    children, epochs = agent.children(), [(one, one.epoch()) for one in engines]
    agent.process.kill()
    agent.process.wait()

    def come_back() -> None:
        wait_for(lambda: not any(is_worker(pid) for pid in children), what="orphaned workers to end")
        agent.start()
        _served_again(epochs)

    return Strike(come_back)


def cancel(stages: Stages) -> Strike:
    """The engine cancels its halves of all rooms."""
    for room in stages.rooms:
        if stages.struck in (room.source, room.target):
            assert stages.struck.cancel(room.number) == ""
    return Strike()


def _worker(stages: Stages) -> int:
    worker = stages.agent.worker(stages.struck.instance)
    assert worker is not None
    return worker["pid"]


def _served_again(engines: list[tuple[Actor | Doomed, int]]) -> None:
    wait_for(lambda: all(one.is_connected() and one.epoch() != epoch for one, epoch in engines))


def watch(stages: Stages, strike: Strike, begun_s: float, limit_s: float, *, heard: bool) -> None:
    """Wait for the end of every half of every room; record it with its time since the strike or the strike's end.

    Args:
        heard: prefill offers a room that was only claimed after its agent knows that the room has failed.
    """
    told = [room for room in stages.rooms if room.stage not in (OFFERED, CLAIMED)]
    other = DECODE if stages.side == PREFILL else PREFILL
    for room in told:
        _note(room, other, begun_s, limit_s)
    strike.mend()
    begun_s = time.monotonic()
    for room in told:
        _note(room, stages.side, begun_s, limit_s, dead=strike.dead)
    if stages.place.gate is not None:
        # The following rooms need a lane.
        stages.place.gate.open()
    for room in stages.rooms:
        if room not in told:
            if room.stage == CLAIMED and heard:
                # Otherwise the offer might arrive before prefill knows of decode's abort, and would be accepted and then
                # fail.
                wait_for(lambda room=room: (look(stages.place.prefill, room, "source")[0] or {}).get("ended"))
            _late(stages, room, strike, limit_s)


def _note(room: Room, side: str, begun_s: float, limit_s: float, *, dead: bool = False) -> None:
    actor = room.source if side == PREFILL else room.target
    room.seen[side] = DEAD if dead else actor.end(room.number, limit_s)
    room.after_s = max(room.after_s, time.monotonic() - begun_s)


def _late(stages: Stages, room: Room, strike: Strike, limit_s: float) -> None:
    """Open the half that was missing, if its engine lives."""
    begun_s = time.monotonic()
    missing, there = (DECODE, PREFILL) if room.stage == OFFERED else (PREFILL, DECODE)
    late = room.target if missing == DECODE else room.source
    if strike.dead and late is stages.struck:
        room.seen[missing] = DEAD
        actor = room.source if there == PREFILL else room.target
        # No process is left that could end an offer without a claim, and no rule says that it must end.
        limit_s = _LEFT_OPEN_S if missing == DECODE else limit_s
        room.seen[there] = actor.end(room.number, limit_s)
        if room.seen[there] == LEFT_OPEN:
            assert actor.cancel(room.number) == ""
            actor.end(room.number, EVENT_LIMIT_S)
        return
    said = room.claim(stages.endpoint(room)) if missing == DECODE else room.offer()
    if said:
        room.seen[missing] = said
    else:
        _note(room, missing, begun_s, limit_s)
    _note(room, there, begun_s, limit_s, dead=strike.dead)


def play(place: Place, judge: SceneJudge, strike: Callable[[Stages], Strike], *, dooms: bool = False) -> None:
    """Play one scene to its end and assert everything that must hold.

    Args:
        strike: begins the fault.
        dooms: the struck engine runs in a separate process, which ends with the scene.
    """
    scene = judge.scene
    wait_for_none(place.leftovers)
    place.start = place.holdings()
    struck: dict[str, Doomed] = {}
    if place.gate is not None:
        place.gate.shut()
    try:
        if dooms:
            half, agent = (Half.SOURCE, place.prefill) if scene.side == PREFILL else (Half.TARGET, place.decode)
            struck[scene.side] = Doomed(agent, f"doomed-{scene.side}", half, 16 if scene.side == PREFILL else 8)
        judge.begin(place)
        source, target = struck.get(PREFILL, place.source), struck.get(DECODE, place.target)
        stages = Stages(place, scene.side, source, target)
        stages.set_up(judge.stages)
        beside = Beside(place) if place.plain is not None and "agent" not in scene.fault else None

        begun_s = time.monotonic()
        blow = strike(stages)
        if beside is not None:
            beside.arrives()
        heard = any(row.stage == CLAIMED and row.prefill.startswith("refused") for row in scene.rows)
        watch(stages, blow, begun_s, scene.limit_s, heard=heard)
        judge.sees(stages.rooms)
        judge.counts(place, [*stages.rooms, *([beside.room] if beside is not None else [])])
        if place.gate is not None:
            place.gate.open()
        _take_back(stages, blow)
    finally:
        if place.gate is not None:
            place.gate.open()
        for engine in struck.values():
            engine.close()
    _is_as_before(place, scene.kept_descriptors + LIBRARY_KEEPS[judge.transport])


def play_at_once(
    places: Mapping[str, Place],
    judges: Mapping[str, SceneJudge],
    strike: Callable[[Stages], Strike],
    *,
    dooms: bool = False,
) -> None:
    """Play one scene over several transports concurrently, for scenes that mostly wait for the same timeout over each."""
    with ThreadPoolExecutor(len(judges)) as players:
        playing = {
            transport: players.submit(play, places[transport], judge, strike, dooms=dooms)
            for transport, judge in judges.items()
        }
    for transport, played in playing.items():
        if (error := played.exception()) is not None:
            error.add_note(f"over {transport}")
            raise error


class Beside:
    """A room of other engines that is in progress during the fault and must not be affected."""

    def __init__(self, place: Place) -> None:
        assert place.small is not None and place.plain is not None
        self.room = Room("beside", place.small, place.plain, 2 * SLAB_TOKENS)
        assert (self.room.offer(SLAB_TOKENS), self.room.claim(place.small.endpoint())) == ("", "")

    def arrives(self) -> None:
        assert self.room.offer() == ""
        self.room.finish()
        self.room.seen = {PREFILL: DONE, DECODE: DONE}


def _take_back(stages: Stages, blow: Strike) -> None:
    """Free every page of living engines; none of their rooms may hold a page any more."""
    for room in stages.rooms:
        for side, actor in ((PREFILL, room.source), (DECODE, room.target)):
            if room.seen[side] == DEAD:
                continue
            if room.seen[side].startswith("refused"):
                actor.forget(room.number)
            else:
                assert actor.release(room.number, EVENT_LIMIT_S) == RELEASED, (room.stage, side)
    for actor in {id(actor): actor for room in stages.rooms for actor in (room.source, room.target)}.values():
        if not (blow.dead and actor is stages.struck):
            assert actor.events_left() == [], f"{actor.instance} got an event twice"
            assert actor.is_intact(), f"{actor.instance} has pages that are not what they ought to be"


def _is_as_before(place: Place, kept_descriptors: int) -> None:
    """Check that the ring is empty, another room is done, no other page has changed, and no resource was leaked."""
    wait_for_none(place.leftovers)
    place.warm_up()
    assert [actor.instance for actor in place.actors if not actor.is_intact()] == []
    wait_for_none(lambda: place.growth(kept_descriptors))
