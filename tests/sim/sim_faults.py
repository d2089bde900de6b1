"""Carries out the faults of a simulated run: one method for each kind. Called by `sim_run`; scenarios name the methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim_engine import Engine
from sim_mixes import MIXES
from sim_scenarios import Fault
from sim_world import MS, SECOND

if TYPE_CHECKING:
    from sim_run import Place, Run


class Faults:
    """The faults of a run: one method for each kind."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._world = run.world

    def strike(self, fault: Fault) -> None:
        """Carry out a fault."""
        self._world.say("fault", f"{fault.what} {fault.who} {fault.value // MS} ms")
        getattr(self, fault.what)(*fault.who, fault.value)

    def heal(self) -> None:
        """End all faults: start dead processes again, continue stopped ones."""
        run = self._run
        self._world.chance.calm = True
        for agent in run.agents:
            agent.host.cut = False
            agent.start()
        for place in run.places:
            for client in (client for life in place.lives for client in life.clients):
                client.resume()
                if client.worker is not None:
                    client.worker.resume()
            alive = [life for life in place.lives if life.alive]
            for life in place.lives:
                if life not in alive[-1:] and not MIXES[run.scenario.mix].twins_stay:
                    self._end(life)
            if not alive and not place.gone:
                run.start(place, place.spec.host)
        for worker in list(self._world.listeners.values()):
            worker.resume()

    @staticmethod
    def _end(life: Engine) -> None:
        for client in life.clients:
            if client.alive:
                client.die()

    def cancel(self, number: int, prefill: int, rank: int, _: int) -> None:
        """An engine cancels a room, at one rank or at all."""
        taken = self._run.taken.get(number)
        if taken is not None:
            for room in taken[1 - prefill].rooms(number):
                if rank in (-1, room.client.layout.rank):
                    room.client.cancel(room)

    def _life(self, at: int, number: int) -> Engine | None:
        return self._run.places[at].choose(number)

    def kill_worker(self, at: int, rank: int, _: int) -> None:
        """SIGKILL of a worker."""
        life = self._life(at, rank)
        if life is not None and life.clients[rank].worker is not None:
            life.clients[rank].worker.end("is killed")

    def kill_engine(self, at: int, rank: int, pause_ns: int) -> None:
        """An engine's ranks die, all or one before the others; it is started again."""
        place, life = self._run.places[at], self._life(at, rank)
        if life is None:
            return
        for client in life.process(rank):
            client.die()
        self._world.at(pause_ns // 4, self._end, life)
        self._world.at(pause_ns, self._again, place)

    def lose(self, at: int, rank: int, _: int) -> None:
        """An engine ends for good, its worker first: no message ends its rooms."""
        place = self._run.places[at]
        place.gone = True
        for life in place.lives:
            for client in life.clients:
                if client.worker is not None:
                    client.worker.end("is killed")
            self._end(life)

    def _again(self, place: Place) -> None:
        if place.choose(0) is None and not place.gone:
            self._run.start(place, place.spec.host)

    def move(self, at: int, rank: int, pause_ns: int) -> None:
        """An engine ends and is started on another node."""
        place, life = self._run.places[at], self._life(at, rank)
        if life is not None:
            self._end(life)
            host = (place.spec.host + 1) % len(self._run.agents)
            self._world.at(pause_ns // 4, lambda: place.choose(0) or self._run.start(place, host))

    def twin(self, at: int, rank: int, pause_ns: int) -> None:
        """A second engine of one name is started on another node; one of the two ends later, unless twins stay."""
        place, life = self._run.places[at], self._life(at, rank)
        if life is None or len([each for each in place.lives if each.alive]) > 1:
            return
        self._run.start(place, (place.spec.host + 1) % len(self._run.agents))
        if not MIXES[self._run.scenario.mix].twins_stay:
            self._world.at(pause_ns, self._end, place.lives[-1 - pause_ns // MS % 2])

    def kill_agent(self, at: int, _: int, pause_ns: int) -> None:
        """SIGKILL of a supervisor."""
        agent = self._run.agents[self._run.places[at].spec.host]
        if agent.alive:
            agent.die()
            self._world.at(pause_ns // 4, agent.start)

    def cut(self, at: int, _: int, pause_ns: int) -> None:
        """A host is cut off from all others for a while; its processes keep running."""
        host = self._run.agents[self._run.places[at].spec.host].host
        host.cut = True
        self._world.at(pause_ns, setattr, host, "cut", False)

    def replace(self, at: int, rank: int, pause_ns: int) -> None:
        """A host is cut off, and its engine is started on another node for as long: one of the two ends when the host is back."""
        self.cut(at, rank, pause_ns)
        self.twin(at, rank, pause_ns)

    def reboot(self, at: int, rank: int, pause_ns: int) -> None:
        """A host loses power, and comes back."""
        run = self._run
        agent = run.agents[run.places[at].spec.host]
        if not agent.alive:
            return
        agent.host.cut = True
        agent.die()
        for place in run.places:
            for life in place.lives:
                if life.clients[0].agent is agent:
                    self._end(life)
                    self._world.at(pause_ns + SECOND, self._again, place)
        self._world.at(pause_ns, setattr, agent.host, "cut", False)
        self._world.at(pause_ns, agent.start)

    def depart(self, at: int, rank: int, pause_ns: int) -> None:
        """A host loses power.

        Its engine starts on another node at about the time at which peers consider the old one lost.
        """
        place = self._run.places[at]
        host = (place.spec.host + 1) % len(self._run.agents)
        self.reboot(at, rank, pause_ns)
        self._world.at(pause_ns - 2 * SECOND, lambda: place.choose(0) or self._run.start(place, host))

    def stop_worker(self, at: int, rank: int, pause_ns: int) -> None:
        """SIGSTOP and SIGCONT of a worker."""
        life = self._life(at, rank)
        if life is not None and life.clients[rank].worker is not None:
            worker = life.clients[rank].worker
            worker.pause()
            self._world.at(pause_ns, worker.resume)

    def stop_engine(self, at: int, rank: int, pause_ns: int) -> None:
        """SIGSTOP and SIGCONT of an engine's rank."""
        life = self._life(at, rank)
        if life is not None:
            for client in life.process(rank):
                client.paused = True
                self._world.at(pause_ns, client.resume)

    def jump(self, at: int, _: int, pause_ns: int) -> None:
        """A host's clock jumps ahead."""
        agent = self._run.agents[self._run.places[at].spec.host]
        agent.host.offset_ns += pause_ns
        for worker in agent.slots.values():
            if worker is not None:
                worker.find_late()
