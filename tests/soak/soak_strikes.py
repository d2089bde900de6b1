"""The soak's faults: a schedule from a seed, and the processes that it kills, stops and starts again.

Called by `soak`. Measures, by the processes alone, how long a dead engine's memory stays, and how long the engine of a dead
agent or worker has no room done.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from soak_messages import Leave
from soak_nodes import LEASE_S, SHAPES, Fleet, Node, Victim, memory_of, now_s
from soak_traffic import Timers, Traffic

# Mean time between two strikes over all fleets. Each strike ends some rooms, and starting a process takes seconds of a
# core.
STRIKE_EVERY_S = 8.0
# A stop lasts from one heartbeat to beyond the peer's timeout and the lease.
STOP_MIN_S, STOP_MAX_S = 1.0, LEASE_S + 5.0
# A killed process is restarted at once, as by its supervisor, or after this time.
AWAY_MAX_S = 6.0
AT_ONCE_SHARE = 0.6
# A room that was done before its agent died is reported within this. No process comes back so soon.
SETTLE_S = 0.5
# Polling interval for the memory of a dead engine.
LOOK_S = 0.02


class Kind(StrEnum):
    """The kinds of strike on a node, or on two."""

    KILL_ENGINE = "kill engine"
    KILL_WORKER = "kill worker"
    KILL_SUPERVISOR = "kill supervisor"
    KILL_AGENT = "kill agent"
    KILL_BOTH_AGENTS = "kill both agents"
    KILL_ENGINE_AND_WORKER = "kill engine and worker"
    RESTART_ENGINE = "restart engine"
    RESTART_AGENT = "restart agent"
    STOP_ENGINE = "stop engine"
    STOP_WORKER = "stop worker"
    STOP_SUPERVISOR = "stop supervisor"


# Weight of each kind.
WEIGHTS: Mapping[Kind, int] = {
    Kind.KILL_ENGINE: 6,
    Kind.KILL_WORKER: 5,
    Kind.KILL_SUPERVISOR: 2,
    Kind.KILL_AGENT: 3,
    Kind.KILL_BOTH_AGENTS: 1,
    Kind.KILL_ENGINE_AND_WORKER: 1,
    Kind.RESTART_ENGINE: 1,
    Kind.RESTART_AGENT: 1,
    Kind.STOP_ENGINE: 3,
    Kind.STOP_WORKER: 5,
    Kind.STOP_SUPERVISOR: 1,
}
STOPS = frozenset({Kind.STOP_ENGINE, Kind.STOP_WORKER, Kind.STOP_SUPERVISOR})
# In each quarter of a run the processes of these are only stopped, so that they live long while their peers die: what
# grows with every death of a peer is seen. Between the others anything may happen to both.
SPARED = (
    ("prefill-a", "decode-a"),
    ("prefill-a", "decode-b"),
    ("prefill-b", "decode-b"),
    ("prefill-b", "decode-a"),
)


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        at_s: when, after the first room; pauses between cycles do not count.
        fleet: its place among the fleets.
        node: by name.
        opposite: a node of the other side, for what strikes two.
        rank: of the worker that is struck, if one is.
        hold_s: how long a process is stopped, or dead before it is started again.
    """

    at_s: float
    kind: Kind
    fleet: int
    node: str
    opposite: str
    rank: int
    hold_s: float


def schedule(seed: int, duration_s: float, fleet_count: int) -> list[Strike]:
    """Return the strikes of a run, in order; the same for the same arguments."""
    chance = random.Random(f"strikes of {seed}")
    found: list[Strike] = []
    at_s = chance.expovariate(1 / STRIKE_EVERY_S)
    while at_s < duration_s:
        spared = SPARED[int(len(SPARED) * at_s / duration_s)]
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        names = [name for name in SHAPES if kind in STOPS or name not in spared]
        node = chance.choice(names)
        hold_s = 0.0 if chance.random() < AT_ONCE_SHARE else chance.random() * AWAY_MAX_S
        if kind in STOPS:
            hold_s = chance.uniform(STOP_MIN_S, STOP_MAX_S)
        opposite = next(name for name in SHAPES if name not in spared and SHAPES[name].half is not SHAPES[node].half)
        rank = chance.randrange(SHAPES[node].tp)
        found.append(Strike(at_s, kind, chance.randrange(fleet_count), node, opposite, rank, hold_s))
        at_s += chance.expovariate(1 / STRIKE_EVERY_S)
    return found


@dataclass
class Times:
    """Measured times in seconds: `clean` if nothing else was struck meanwhile, else `other`."""

    clean: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)


@dataclass
class _Wait:
    """A struck process that has not recovered yet."""

    node: Node
    since_s: float
    is_clean: bool
    is_over: Callable[[], bool]
    times: Times


class Striker:
    """Carries out strikes, and restarts the processes that they have ended."""

    def __init__(
        self, fleets: list[Fleet], traffics: list[Traffic], timers: Timers, log: Callable[[str], None]
    ) -> None:
        self.released, self.recovered, self.replaced = Times(), Times(), Times()
        self.missed = 0
        self.done: dict[str, int] = {}
        self._fleets, self._traffics, self._timers, self._log = fleets, traffics, timers, log
        self._stopped: list[Victim] = []
        self._away = 0
        self._waits: list[_Wait] = []

    @property
    def is_quiet(self) -> bool:
        """Whether no process is stopped or dead."""
        return not self._stopped and not self._away

    @property
    def is_measuring(self) -> bool:
        """Whether a recovery is being measured, which needs short pauses."""
        return any(wait.times is self.released for wait in self._waits)

    def strike(self, strike: Strike) -> None:
        """Carry out a strike; it misses if its process is not there."""
        node = self._fleets[strike.fleet].nodes[strike.node]
        if not any(self._carry_out(strike, node)):
            self.missed += 1
            return
        self.done[strike.kind] = self.done.get(strike.kind, 0) + 1
        words = f" for {strike.hold_s:.1f} s" if strike.kind in STOPS else ""
        self._log(f"{strike.kind}: {node.title} rank {strike.rank}{words}")

    def _carry_out(self, strike: Strike, node: Node) -> Iterator[bool]:
        """Yield, for each process of the strike, whether it was there."""
        match strike.kind:
            case Kind.KILL_ENGINE:
                yield self._kill_engine(node, strike.hold_s)
            case Kind.KILL_WORKER:
                yield self._kill_worker(node, strike.rank)
            case Kind.KILL_ENGINE_AND_WORKER:
                yield self._kill_worker(node, strike.rank)
                yield self._kill_engine(node, strike.hold_s)
            case Kind.KILL_SUPERVISOR | Kind.KILL_AGENT | Kind.RESTART_AGENT:
                yield self._end_agent(node, strike.kind, strike.hold_s)
            case Kind.KILL_BOTH_AGENTS:
                yield self._end_agent(node, Kind.KILL_AGENT, strike.hold_s)
                opposite = self._fleets[strike.fleet].nodes[strike.opposite]
                yield self._end_agent(opposite, Kind.KILL_AGENT, strike.hold_s)
            case Kind.RESTART_ENGINE:
                yield self._restart_engine(node)
            case _:
                yield self._stop(node, strike)

    def look(self) -> None:
        """Note what has recovered."""
        for wait in list(self._waits):
            if wait.is_over():
                self._waits.remove(wait)
                (wait.times.clean if wait.is_clean else wait.times.other).append(now_s() - wait.since_s)

    def resume(self) -> None:
        """Continue all stopped processes at once."""
        for victim in list(self._stopped):
            self._go_on(victim)

    def start_engine(self, node: Node) -> None:
        """Start an engine, for the first time or again."""
        node.engine.start()
        node.struck_s = now_s()

    def engine_ended(self, node: Node) -> None:
        """An engine has ended by itself: on an order, or because it found no agent in time."""
        code = node.engine.over()
        self._traffic(node).lost(node)
        self._log(f"the engine of {node.title} has ended with {code}")
        self._later(node, 0.0, lambda: self.start_engine(node))

    # -- faults ----------------------------------------------------------------------------------------------------

    def _kill_engine(self, node: Node, hold_s: float) -> bool:
        if not node.engine.pid:
            return False
        memory, holders = memory_of(node.engine.pid), [*node.workers().values(), node.agent.pid]
        is_clean = self._is_well(node)
        started_s = now_s()
        node.engine.kill()
        self._hit(node)
        self._traffic(node).lost(node)
        if memory:
            released = lambda: not any(memory & memory_of(pid) for pid in holders)  # noqa: E731
            self._waits.append(_Wait(node, started_s, is_clean, released, self.released))
        self._later(node, hold_s, lambda: self.start_engine(node))
        return True

    def _restart_engine(self, node: Node) -> bool:
        # It is restarted when its end is detected.
        if not node.engine.tell(Leave()):
            return False
        self._hit(node)
        return True

    def _kill_worker(self, node: Node, rank: int) -> bool:
        pid = node.workers().get(rank)
        if pid is None:
            return False
        is_clean, started_s = self._is_well(node), now_s()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._hit(node)
        self._watch_rooms(node, started_s, is_clean, self.replaced)
        return True

    def _end_agent(self, node: Node, kind: Kind, hold_s: float) -> bool:
        if not node.agent.running:
            return False
        is_clean, started_s = self._is_well(node) and not hold_s, now_s()
        pid = node.agent.pid
        if kind is Kind.KILL_SUPERVISOR:
            os.kill(pid, signal.SIGKILL)
        elif kind is Kind.KILL_AGENT:
            node.agent.kill()
        else:
            node.agent.terminate()
            # It lets open rooms end, and its restart waits for that.
            is_clean = False
        self._hit(node)
        if not any(wait.node is node and wait.times is self.recovered for wait in self._waits):
            self._watch_rooms(node, started_s, is_clean, self.recovered)
        self._later(node, hold_s, lambda: self._start_agent(node, pid))
        return True

    def _stop(self, node: Node, strike: Strike) -> bool:
        pid = {
            Kind.STOP_ENGINE: node.engine.pid,
            Kind.STOP_WORKER: node.workers().get(strike.rank, 0),
            Kind.STOP_SUPERVISOR: node.agent.pid if node.agent.running else 0,
        }[strike.kind]
        victim = Victim(pid) if pid else None
        if victim is None or not victim.send(signal.SIGSTOP):
            return False
        self._stopped.append(victim)
        self._hit(node)

        def go_on() -> None:
            self._go_on(victim)
            node.struck_s = now_s()

        self._timers.after(strike.hold_s, go_on)
        return True

    # -- afterwards ------------------------------------------------------------------------------------------------

    def _go_on(self, victim: Victim) -> None:
        if victim in self._stopped:
            self._stopped.remove(victim)
            victim.send(signal.SIGCONT)
            victim.close()

    def _start_agent(self, node: Node, ended_pid: int) -> None:
        """Start an agent again once process `ended_pid` has ended."""
        if node.agent.running and node.agent.pid == ended_pid:
            # It was told to end, and first lets rooms end.
            self._later(node, LOOK_S * 10, lambda: self._start_agent(node, ended_pid))
            return
        if node.agent.running:
            # It was struck twice, and the other strike has started it.
            return
        node.agent.start()
        node.struck_s = now_s()

    def _later(self, node: Node, delay_s: float, call: Callable[[], None]) -> None:
        self._away += 1

        def start() -> None:
            self._away -= 1
            call()

        self._timers.after(delay_s, start)
        node.struck_s = now_s()

    def _hit(self, node: Node) -> None:
        node.struck_s = now_s()
        for wait in self._waits:
            wait.is_clean = wait.is_clean and wait.node is not node

    def _watch_rooms(self, node: Node, since_s: float, is_clean: bool, times: Times) -> None:
        traffic = self._traffic(node)
        self._waits.append(
            _Wait(node, since_s, is_clean, lambda: traffic.done_at_s.get(node.name, 0.0) > since_s + SETTLE_S, times)
        )

    def _is_well(self, node: Node) -> bool:
        """Whether all processes of a node run, and none was struck lately."""
        return (
            node.engine.is_ready and len(node.workers()) == node.shape.tp and node.agent.running and not self._stopped
        )

    def _traffic(self, node: Node) -> Traffic:
        return next(traffic for traffic in self._traffics if node in traffic.fleet.nodes.values())
