"""A simulated agent: the supervisor's rules for workers, siblings and ports, as `longshore_agent.supervisor.loop` has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim_net import Net
from sim_scenarios import LEASE_NS
from sim_worker import LOCAL_NS, Worker
from sim_world import MS, SECOND, US, Host, World

from longshore_agent.control.node_link import RoomFailed
from longshore_agent.supervisor.failed_rooms import FailedRooms
from longshore_wire.effects import PeerId
from longshore_wire.engine_messages import Endpoint, RankAddress
from longshore_wire.errors import Reason

if TYPE_CHECKING:
    from sim_engine import Client

KEPT_S = 2 * LEASE_NS / SECOND


@dataclass(eq=False)
class Agent:
    """One node's agent.

    Attributes:
        eager: its workers tick the core in each turn, as real workers do, not only when something is due.
        turn_ns: the time until a worker handles an arrival.
        wire: the wire to a target that sources find; empty: none.
    """

    world: World
    host: Host
    net: Net
    eager: bool = False
    turn_ns: int = 20 * US
    start_ns: int = 200 * MS
    wire: str = ""
    alive: bool = True
    slots: dict[PeerId, Worker | None] = field(default_factory=dict)
    epoch: int = 0
    life: int = 1
    _failed: FailedRooms = field(default_factory=lambda: FailedRooms(KEPT_S))

    @property
    def name(self) -> str:
        """The name of its host."""
        return self.host.name

    def hello(self, client: Client) -> None:
        """Give an engine rank a worker for one memory, or refuse it; a refused engine connects again."""
        if not client.alive:
            return
        # A new worker proves to its engine that no process writes the pages of the last worker's rooms any more.
        mapped = any(worker is not None and worker.lanes.maps(client) for worker in self.slots.values())
        if not self.alive or client.key in self.slots or mapped:
            self.world.at(LOCAL_NS, client.refused)
            return
        self.slots[client.key] = None
        self.world.at(self.start_ns, self._start, client, self.life)

    def _start(self, client: Client, life: int) -> None:
        if not self.alive or life != self.life:
            # The agent that admitted it has ended, and with it the connection.
            client.refused()
            return
        if not client.alive:
            del self.slots[client.key]
            return
        # Epochs are wall-clock times. They grow, because a worker starts after the last one's end.
        epoch = self.epoch = max(self.epoch + 1, self.world.now_ns + self.host.offset_ns)
        worker = Worker(self.world, self, client, epoch, client.config(epoch))
        self.slots[client.key] = worker
        self.world.say(repr(worker), "starts")
        for failed in self._failed.of(client.key.replica, self.world.now_ns / SECOND):
            worker.deliver(worker.sibling_failed, failed)
        self.world.at(LOCAL_NS, worker.deliver, worker.adopt)

    def adopted(self, worker: Worker) -> None:
        """A worker serves its engine now: tell all ranks which ranks are registered."""
        self.world.at(LOCAL_NS, self._publish, worker)

    def _family(self, worker: Worker) -> list[Worker]:
        replica = worker.client.key.replica
        found = [slot for key, slot in self.slots.items() if key.replica == replica and slot is not None]
        # The kernel tells that an engine has ended, also of a worker that is stopped.
        return [slot for slot in found if slot.ready and not slot.draining and slot.alive and slot.client.alive]

    def _publish(self, worker: Worker) -> None:
        workers = self._family(worker)
        if not self.alive or not workers:
            return
        ranks = sorted(
            (RankAddress(each.peer.rank, each.address, each.epoch) for each in workers), key=lambda each: each.rank
        )
        config = worker.core.config
        endpoint = Endpoint(worker.peer.instance, config.layout, tuple(ranks), config.agent)
        for each in workers:
            self.world.at(LOCAL_NS, each.client.learn, each, endpoint)

    def _siblings(self, worker: Worker) -> list[Worker]:
        """Return the other ranks' workers for this memory, also started ones that serve no engine yet."""
        replica = worker.client.key.replica
        started = [slot for key, slot in self.slots.items() if key.replica == replica and slot is not None]
        return [each for each in started if each is not worker and not each.draining and each.alive and self.alive]

    def room_failed(self, worker: Worker, failed: RoomFailed) -> None:
        """A worker has failed a room: tell its siblings, and those that start later."""
        if not self.alive:
            return
        if self._failed.add(worker.client.key.replica, failed, self.world.now_ns / SECOND):
            for each in self._siblings(worker):
                self.world.at(LOCAL_NS, each.deliver, each.sibling_failed, failed)

    def engine_left(self, worker: Worker, reason: Reason, text: str, replaced: bool) -> None:
        """A worker ends soon. If it is to be replaced, it has reported each room that it failed."""
        worker.draining = True
        if not replaced:
            for each in self._siblings(worker):
                self.world.at(LOCAL_NS, each.deliver, each.sibling_lost, reason, text)

    def worker_ended(self, worker: Worker) -> None:
        """A worker's process has ended."""
        if self.slots.get(worker.client.key) is worker:
            del self.slots[worker.client.key]
            replica = worker.client.key.replica
            if not any(key.replica == replica for key in self.slots):
                self._failed.forget(replica)
        if not worker.draining:
            worker.draining = True
            for each in self._siblings(worker):
                self.world.at(LOCAL_NS, each.deliver, each.sibling_lost, Reason.WORKER_LOST, "a worker was lost")

    def die(self) -> None:
        """SIGKILL of the supervisor; its workers see their link closed, and end."""
        self.world.say(self.name, "the agent dies")
        self.alive = False
        self.life += 1
        for worker in list(self.slots.values()):
            if worker is not None:
                self.world.at(LOCAL_NS, worker.thread, worker.end, "ends with its agent")
        self.slots.clear()
        self._failed = FailedRooms(KEPT_S)

    def start(self) -> None:
        """Start again, with the same ports."""
        self.alive = True
