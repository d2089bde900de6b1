"""Plays a scenario of the simulator to its end, and checks the required state.

Called by tests, by `simulate` and by `sim_shrink`. Faults happen while rooms are opened. Then they stop, dead processes are started
again, and time goes on until no room is open.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec
from sim_agent import Agent
from sim_engine import Client, Engine
from sim_faults import Faults
from sim_mixes import MIXES
from sim_net import Net
from sim_scenarios import AFTERMATH_NS, Fault, Replica, RoomSpec, Scenario
from sim_world import MS, SECOND, Chance, Host, ViolationError, World

from longshore_wire import claims, target
from longshore_wire.effects import SessionConfig
from longshore_wire.engine_messages import Endpoint, Half
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, Plane, TargetMemory
from longshore_wire.names import ON_GPU
from longshore_wire.peer_messages import RoomKey

# Engines and agents have started by then.
BEGIN_NS = 2 * SECOND
# After the faults everything must end within the sum of some timeouts of rooms, peers and writes.
LIMIT_NS = 90 * SECOND
# Ended rooms are remembered for two leases, and failures unknown to their source for a further minute.
MEMORY_NS = 60 * SECOND
WAIT_NS = 50 * MS
HOST_FAULTS = frozenset({"kill_agent", "cut", "reboot", "replace", "depart", "jump"})
WORKER_FAULTS = frozenset({"kill_worker", "stop_worker"})
TWINS = frozenset({"twin", "replace"})
TRIES_MAX = 400


@dataclass
class Place:
    """A replica: its engine's lives, the newest last; at most two are alive at once."""

    spec: Replica
    lives: list[Engine] = field(default_factory=list)
    gone: bool = False  # it is never started again

    def choose(self, number: int) -> Engine | None:
        """Return the life of the engine that takes request `number`."""
        alive = [engine for engine in self.lives if engine.alive]
        return alive[number % len(alive)] if alive else None


@dataclass
class Outcome:
    """The result of a run; `fault` is empty if all checks held."""

    scenario: Scenario
    fault: str = ""
    where: str = ""
    rooms: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[int, str]] = field(default_factory=list)
    fates: dict[tuple[str, ...], Any] = field(default_factory=dict)


def play(scenario: Scenario, *, trace: bool = False, deep: bool = False) -> Outcome:
    """Play a scenario. `deep`: also wait until cores must have forgotten all rooms."""
    run = Run(scenario, trace=trace)
    outcome = Outcome(scenario, rooms=len(scenario.rooms))
    with ExitStack() as stack:
        for module in (claims, target):
            stack.enter_context(patch.object(module, "PAGES_PER_MESSAGE_MAX", scenario.message_pages))
        try:
            run.play(deep=deep)
        except Exception as error:  # noqa: BLE001 - any error of a core is a finding
            outcome.fault = f"{type(error).__name__}: {error}"
            outcome.where = traceback.format_exc()
    outcome.counts = run.world.counts
    outcome.trace = run.world.trace or []
    outcome.fates = run.world.chance.drawn
    return outcome


class Run:
    """See the module."""

    def __init__(self, scenario: Scenario, *, trace: bool = False) -> None:
        self.scenario = scenario
        chance = Chance(f"{scenario.mix} {scenario.seed} fates", scenario.odds, scenario.fates, steady=scenario.steady)
        world = self.world = World(chance, [] if trace else None)
        hosts = [Host(f"h{number}", offset_ns) for number, offset_ns in enumerate(scenario.clocks_ns)]
        net = Net(world, {host.name: host for host in hosts}, codec=scenario.codec)
        self.agents = [
            Agent(
                world,
                host,
                net,
                eager=scenario.eager,
                turn_ns=scenario.turn_ns,
                wire=scenario.wire,
            )
            for host in hosts
        ]
        self.places = [Place(spec) for spec in scenario.replicas]
        self.taken: dict[int, tuple[Engine, Engine]] = {}  # by room: who has it
        self._engines = 0
        for place in self.places:
            self.start(place, place.spec.host)

    # -- live engines ----------------------------------------------------------------------------------------------

    def start(self, place: Place, host: int) -> None:
        """Begin a life of an engine."""
        agent = self.agents[host]
        half = Half.SOURCE if place.spec.prefill else Half.TARGET
        ranks = range(place.spec.tp * place.spec.pp)
        self._engines += 1
        made = [
            partial(self._config, place.spec, agent, self._engines, rank, memory)
            for memory in place.spec.memories
            for rank in ranks
        ]
        place.lives.append(Engine([Client(self.world, agent, half, each) for each in made]))
        self.world.say(f"engine {place.spec.instance}/{place.spec.dp_rank}", f"starts on {agent.name}")

    def _config(
        self, spec: Replica, agent: Agent, engine: int, rank: int, memory: TargetMemory, epoch: int
    ) -> SessionConfig:
        place = Parallel(spec.tp, rank % spec.tp, spec.pp, rank // spec.tp, spec.dp, spec.dp_rank)
        on_device = memory is TargetMemory.DEVICE
        # Ranks of one agent may copy into each other's pages.
        near = f"{agent.name}.{agent.life}{ON_GPU if self.scenario.on_gpu and on_device else ''}"
        return SessionConfig(
            "sim",
            spec.instance,
            epoch,
            self._layout(place, spec.page_size if on_device else spec.host_page_size),
            memory,
            engine=engine,
            agent=near if self.scenario.near else "",
            **self.scenario.settings,
        )

    def _layout(self, place: Parallel, page_size: int) -> KVLayout:
        """Return the layout of a rank. Each cache has one layer more than the one before, and pages of another size."""
        model = self.scenario.model
        others = tuple(
            self._other(msgspec.structs.replace(model, layers=model.layers + cache), place, page_size, cache)
            for cache in range(1, self.scenario.cache_count)
        )
        return KVLayout(model, place, page_size, others=others)

    def _other(self, model: ModelShape, place: Parallel, page_size: int, cache: int) -> KVLayout:
        size = 2 * page_size if cache % 2 else max(1, page_size // 2)
        kind = (self.scenario.seed + cache) % 3 if self.scenario.states else 0
        if kind == 0:
            return KVLayout(model, place, size, name=f"cache-{cache}")
        if kind == 1:
            return KVLayout(model, place, size, name=f"window-{cache}")
        # Sections with as many heads, with twice as many, and with one that all ranks have.
        planes = (Plane(model.kv_heads, 8, 2), Plane(2 * model.kv_heads, 8), Plane(1, 8, 3))
        state = ModelShape(model.layers, planes, model.element_bytes)
        return KVLayout(state, place, size, PageOrder.SLOT, name=f"state-{cache}")

    def clients(self) -> Iterator[Client]:
        """Return all ranks of engines that live."""
        return (client for place in self.places for life in place.lives for client in life.clients if client.alive)

    # -- rooms -----------------------------------------------------------------------------------------------------

    def _begin(self, spec: RoomSpec, tries: int = 0) -> None:
        prefill = self.places[spec.prefill].choose(spec.number)
        decode = self.places[spec.decode].choose(spec.number)
        endpoint = prefill.endpoint if prefill is not None else None
        if prefill is None or decode is None or endpoint is None:
            if tries < TRIES_MAX and not self.world.chance.calm:
                self.world.at(WAIT_NS, self._begin, spec, tries + 1)
            return
        self.taken[spec.number] = (prefill, decode)
        self.world.at(spec.offer_ns, self._offer, spec, prefill)
        self.world.at(spec.claim_ns, self._claim, spec, prefill, decode, endpoint if spec.stale_endpoint else None)

    def _offer(self, spec: RoomSpec, engine: Engine) -> None:
        instance = self.places[spec.prefill].spec.instance
        for rank, client in enumerate(engine.clients):
            room = client.open(spec.number, instance, 0, spec.end, 0) if client.alive else None
            if room is not None:
                first, at_ns = 0, self.world.now_ns + rank * spec.skew_ns
                for end in spec.chunks:
                    room.chunks.append((at_ns, first, end, False))
                    first, at_ns = end, at_ns + spec.chunk_ns
                room.chunks[-1] = (*room.chunks[-1][:3], True)
                client.offer(room)

    def _claim(
        self, spec: RoomSpec, prefill: Engine, decode: Engine, endpoint: Endpoint | None, tries: int = 0
    ) -> None:
        endpoint = endpoint or prefill.endpoint
        if endpoint is None:
            if tries < TRIES_MAX:
                self.world.at(WAIT_NS, self._claim, spec, prefill, decode, None, tries + 1)
            return
        for client in decode.of(spec.memory):
            end = max(spec.first, spec.end + spec.lie)
            room = client.open(spec.number, endpoint.instance, spec.first, end, spec.keep_ns) if client.alive else None
            if room is not None:
                client.claim(room, endpoint, spec.first, asks=spec.number % 3 == 0 and spec.first < end)

    # -- a run -----------------------------------------------------------------------------------------------------

    def play(self, *, deep: bool) -> None:
        """Play the scenario. Raises ViolationError, or any error of a core."""
        world = self.world
        for spec in self.scenario.rooms:
            world.at(BEGIN_NS + spec.at_ns, self._begin, spec)
        faults = Faults(self)
        for fault in self.scenario.faults:
            world.at(BEGIN_NS + fault.at_ns, faults.strike, fault)
        last_ns = max((each.at_ns for each in self.scenario.rooms), default=0)
        last_ns = max([last_ns, *(each.at_ns + each.value for each in self.scenario.faults)])
        world.run(BEGIN_NS + last_ns + SECOND)
        world.say("the world", "faults are over")
        faults.heal()
        calm_ns = world.now_ns
        # By then earlier messages have arrived and lost peers are detected.
        world.run(calm_ns + max(self.scenario.odds.late_ns, 6 * SECOND))
        while self.open():
            if world.now_ns > calm_ns + LIMIT_NS:
                raise ViolationError("never ended: " + "; ".join(self.open()[:6]))
            world.run(world.now_ns + 250 * MS)
        self._check_quiet(2 * SECOND)
        self._check_outcomes()
        if deep:
            lease_ns = self.scenario.settings["lease_ns"]
            world.run(world.now_ns + 2 * lease_ns + MEMORY_NS + 10 * SECOND)
            self._check_forgotten()
            self._check_quiet(2 * SECOND, "attaches")

    def _sides(self, number: int) -> list[tuple[Engine, Engine]]:
        if number not in self.taken:
            return []
        prefill, decode = self.taken[number]
        return [(prefill, decode), (decode, prefill)]

    def open(self) -> list[str]:
        """Return texts on open rooms and held memory."""
        found = [f"{client} has no worker" for client in self.clients() if not client.served]
        for client in self.clients():
            for half in client.core.ledger:
                room = client.rooms[RoomKey(half.key.instance, half.key.room)]
                ended = "not ended" if room.ended is None else f"ended with {room.ended.name} and not released"
                found.append(f"room {half.key.room} at {client}: {ended}")
        for worker in self._workers():
            found += [f"room {key.room} in the core of {worker}" for key in worker.core.rooms]
            if worker.half is Half.TARGET:
                ring = worker.core.granter.ring
                if ring.used_bytes or ring.held_bytes:
                    found.append(f"{ring.used_bytes} bytes used and {ring.held_bytes} held at {worker}")
        return found

    def _workers(self) -> list[Any]:
        return [
            worker for agent in self.agents for worker in agent.slots.values() if worker is not None and worker.alive
        ]

    def _check_quiet(self, during_ns: int, what: str = "words") -> None:
        """Check that, with no room open, workers send only heartbeats and dial only lost peers."""
        world = self.world
        # By then a new worker was found and got the open rooms of its last life.
        world.run(world.now_ns + 3 * SECOND)
        before = world.counts[what]
        world.run(world.now_ns + during_ns)
        if world.counts[what] != before:
            raise ViolationError(f"{world.counts[what] - before} {what} are said while nothing is open")
        for worker in self._workers():
            due_ns = worker.core.next_due_ns()
            if due_ns is not None and due_ns < worker.clock():
                raise ViolationError(f"{worker} has something due in the past")
            if worker.half is Half.TARGET and worker.core.in_place_count:
                raise ViolationError(f"{worker} expects bytes of {worker.core.in_place_count} pairs that are over")
            over = worker.tables.keys() - worker.core.rooms.keys()
            if over or any(jobs for key, jobs in worker.lanes.jobs.items() if key not in worker.core.rooms):
                raise ViolationError(
                    f"{worker} holds {len(over)} tables and jobs of {len(worker.lanes.jobs)} rooms that are over"
                )

    def _check_outcomes(self) -> None:
        mix = MIXES[self.scenario.mix]
        cancelled = {fault.who[0] for fault in self.scenario.faults if fault.what == "cancel"}
        struck = {at for fault in self.scenario.faults for at in self._struck(fault)}
        last_ns = max((fault.at_ns + fault.value for fault in self.scenario.faults), default=0)
        most = max(place.spec.tp for place in self.places)
        for spec in self.scenario.rooms:
            if mix.never_fits and self.places[spec.prefill].spec.tp == most:
                continue
            sides = {(spec.prefill, TargetMemory.DEVICE), (spec.decode, spec.memory)}
            alone = mix.alone and spec.number not in cancelled and not struck & sides
            after = mix.aftermath and spec.at_ns >= last_ns + AFTERMATH_NS
            halves = [room for engine, _ in self._sides(spec.number) for room in engine.rooms(spec.number)]
            for room in halves:
                if room.ended is not Reason.NONE and (mix.sure or alone or after):
                    raise ViolationError(f"room {spec.number} is not done at {room.client}, and no fault met it")
                if mix.reasons is not None and room.ended and room.ended not in mix.reasons:
                    raise ViolationError(f"room {spec.number} has failed with {room.ended.name} at {room.client}")
            self._check_timed_out(spec.number)
            if mix.prompt_ns and alone and halves:
                taken_ns, ended_ns = max(half.taken_ns for half in halves), max(half.ended_ns for half in halves)
                if ended_ns - taken_ns > mix.prompt_ns:
                    text = f"room {spec.number} took {(ended_ns - taken_ns) / 1e9:.1f} s, and no fault met it"
                    raise ViolationError(text)

    def _check_timed_out(self, number: int) -> None:
        """Check that messages, not a timeout, end a half whose other side is alive, where both sides had the whole room."""
        if MIXES[self.scenario.mix].forgets or any(fault.what in TWINS for fault in self.scenario.faults):
            # No peer listens to a refused twin, and a worker that has forgotten a room sends no message about it.
            return
        for engine, other in self._sides(number):
            halves, others = engine.rooms(number), other.rooms(number)
            # A rank without pages for a room has no half, and decode may have asked just that one.
            is_whole = all(
                len(side.of(TargetMemory.DEVICE)) <= len(found) for side, found in ((engine, halves), (other, others))
            )
            if not is_whole or any(half.cancelled or not half.lives for half in (*halves, *others)):
                continue
            if not all(half.opened for half in (*halves, *others)):
                continue
            ends_ns = [half.taken_by.ended_ns for half in others if half.taken_by is not None]
            lived_until_ns = min((each_ns for each_ns in ends_ns if each_ns is not None), default=self.world.now_ns)
            for half in halves:
                if half.ended is not Reason.TIMED_OUT or half.taken_by is None:
                    continue
                # A clock that jumps ends a half early, perhaps before a cut network is whole again.
                has_waited = half.ended_ns - half.taken_ns >= half.taken_by.core.config.room_timeout_ns
                if has_waited and half.ended_ns < lived_until_ns:
                    raise ViolationError(f"room {number} waits until time is over at {half.client}")

    def _struck(self, fault: Fault) -> set[tuple[int, TargetMemory]]:
        """Return the replicas that a fault may have harmed, and in which memory: all of a struck host, also after a move."""
        if fault.what == "cancel":
            return set()
        at, spec = fault.who[0], self.places[fault.who[0]].spec
        if fault.what in WORKER_FAULTS:
            return {(at, spec.memory_of(fault.who[1]))}
        harmed = [at]
        if fault.what in HOST_FAULTS:
            harmed = [other for other, place in enumerate(self.places) if place.spec.host == spec.host]
        return {(each, memory) for each in harmed for memory in TargetMemory}

    def _check_forgotten(self) -> None:
        for worker in self._workers():
            found = sorted({key.room for key in mentioned(worker.core)})
            if found:
                raise ViolationError(f"{worker} remembers {len(found)} rooms, {found[:5]} among them")


def mentioned(value: object, seen: set[int] | None = None) -> Iterator[RoomKey]:
    """Yield every room key that a core holds, however deep."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | bytes | int | float | None):
        return
    seen.add(id(value))
    if isinstance(value, RoomKey):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            for each in pair:
                yield from mentioned(each, seen)
    elif isinstance(value, list | tuple | set | frozenset) or hasattr(value, "rotate"):
        for each in value:  # type: ignore[union-attr]
            yield from mentioned(each, seen)
    yield from mentioned(getattr(value, "__dict__", None), seen)
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            yield from mentioned(getattr(value, name, None), seen)
