"""The ranks of a test engine: their pages and clients, and how they call an agent.

Called by all that plays an engine. Knows what every engine does, and no test: what moves when is up to the caller.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from typing import TypeVar

from longshore_client.client import Client
from longshore_client.connection import open_links
from longshore_client.errors import AgentLost, Busy
from longshore_client.registration import connect
from longshore_lab.test_engine.memory import HostMemory, Memory
from longshore_lab.test_engine.pages import Pages, Pool
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Endpoint, Half, Hello, RoomEvent, RoomEventKind
from longshore_wire.layout import KVLayout, TargetMemory
from longshore_wire.names import TEST_INSTANCE_PREFIX

T = TypeVar("T")
U = TypeVar("U")

# Pause between two attempts while the agent is away.
_AWAY_PAUSE_S = 0.1
# Pause between two questions for an endpoint with the newest worker of each rank.
_ENDPOINT_PAUSE_S = 0.01
RELEASED = frozenset({RoomEventKind.RELEASED})


def registered(
    socket: str, instance: str, pool: Pool, roles: Collection[Half], limit_s: float, others: Sequence[Pool] = ()
) -> Client:
    """Register a rank and its pages at an agent. Raises LongshoreError.

    Args:
        pool: of the first cache, with the rank's layout.
        others: of the rank's other caches, in order.
    """
    device = pool.memory.device_name
    if instance.startswith(TEST_INSTANCE_PREFIX):
        client = _connect_test(socket, instance, pool.layout, device, roles, limit_s)
    else:
        client = connect(
            socket, instance=instance, layout=pool.layout, device=device, roles=tuple(roles), timeout_s=limit_s
        )
    try:
        # On a GPU the agent compiles the kernels of this layout now, so that no room waits for them.
        for index, each in enumerate((pool, *others)):
            client.register_pool(index, each.geometry, each.memory.regions, timeout_s=limit_s)
    except BaseException:
        client.close()
        raise
    return client


def _connect_test(
    socket: str, instance: str, layout: KVLayout, device: str, roles: Collection[Half], limit_s: float
) -> Client:
    """Connect as `longshore_client.connect` does, which refuses the names of test instances to engines."""
    number = 1 + int.from_bytes(os.urandom(7), "little")
    hello = Hello(ENGINE_PROTOCOL_VERSION, instance, layout, device, tuple(roles), engine=number, pid=os.getpid())
    return Client(hello, open_links(socket, {TargetMemory.DEVICE: hello}, limit_s))


def insist(call: Callable[[], T], end_s: float) -> T:
    """Repeat a call while the agent's queues are full or it restarts, until `end_s` of the monotonic clock.

    A refused call has sent nothing. Raises LongshoreError: that of the last attempt.
    """
    while True:
        try:
            return call()
        except (Busy, AgentLost) as error:
            pause_s = error.retry_after_s if isinstance(error, Busy) else _AWAY_PAUSE_S
            if time.monotonic() + pause_s > end_s:
                raise
            time.sleep(pause_s)


def wait_ended(client: Client, room: int, half: Half, instance: str | None, end_s: float) -> RoomEvent:
    """Wait until a half has ended and no process uses its pages; return its end. Raises LongshoreError."""
    event = client.wait(room, half, instance, timeout_s=left_s(end_s))
    client.wait(room, half, instance, RELEASED, left_s(end_s))
    return event


def cancelled(client: Client, room: int, half: Half, instance: str) -> bool:
    """Cancel a half; return whether it is open, so that its release follows. Raises LongshoreError.

    If the agent has accepted no call of the half, nothing follows.
    """
    client.cancel(room, half, instance=instance)
    return client.is_open(room, half, instance)


def side_by_side(call: Callable[[U], T], arguments: Sequence[U]) -> list[T]:
    """Make a call for each argument, all at the same time; return the results in order. Raises the first error.

    The threads are daemons: an interrupt does not wait for one that still waits for an agent.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    done: SimpleQueue[None] = SimpleQueue()

    def run(index: int, argument: U) -> None:
        try:
            results[index] = call(argument)
        except BaseException as error:  # noqa: BLE001 -- raised again below, in the caller's thread
            errors.append(error)
        done.put(None)

    for index, argument in enumerate(arguments):
        threading.Thread(target=run, args=(index, argument), daemon=True).start()
    for _ in arguments:
        done.get()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(arguments))]


class Rank(Pages):
    """One rank of an engine: its pages, registered at an agent. It is itself the pages of its first cache.

    Args:
        page_count: pages of the first cache.
        other_counts: pages of each other cache.
    Attributes:
        client: of the agent.
        pools: the pages of each cache.
    """

    def __init__(
        self,
        socket: str,
        instance: str,
        layout: KVLayout,
        roles: Collection[Half],
        page_count: int,
        limit_s: float,
        allocate: Callable[[int], Memory] = HostMemory,
        other_counts: Sequence[int] = (),
    ) -> None:
        super().__init__(layout, page_count, allocate)
        self._others: list[Pages] = []
        try:
            for cache, count in zip(layout.caches[1:], other_counts, strict=True):
                self._others.append(Pages(cache, count, allocate))
            self.client = registered(socket, instance, self, roles, limit_s, self._others)
        except BaseException:
            self._free()
            raise

    @property
    def pools(self) -> list[Pages]:
        """See Rank."""
        return [self, *self._others]

    def close(self) -> None:
        """Leave the agent, and free the memory."""
        self.client.close()
        self._free()

    def _free(self) -> None:
        super().close()
        for pages in self._others:
            pages.close()


class Engine:
    """All ranks of one instance in this process, with one page allocator for all of them.

    Args:
        socket: the agent's.
        layout: of any one rank.
        page_count: of each rank, in the first cache.
        limit_s: for the registration.
        allocate: makes the memory of a rank's pages, given its number and the bytes.
        other_counts: as page_count, of each other cache. The allocator has no pages of these.
    Attributes:
        ranks: in order.
        free: pages that are not in use, in the order of their use.
    Raises:
        LongshoreError: the agent refuses a rank, or memory is missing; nothing is left.
    """

    def __init__(
        self,
        socket: str,
        instance: str,
        layout: KVLayout,
        roles: Collection[Half],
        page_count: int,
        limit_s: float,
        allocate: Callable[[int, int], Memory] | None = None,
        other_counts: Sequence[int] = (),
    ) -> None:
        self.instance, self.page_size = instance, layout.page_size
        self._limit_s = limit_s
        made: list[Rank] = []

        def start(number: int) -> Rank:
            memory = HostMemory if allocate is None else lambda length_bytes: allocate(number, length_bytes)
            own = layout.at(number)
            made.append(Rank(socket, instance, own, roles, page_count, limit_s, memory, other_counts))
            return made[-1]

        try:
            self.ranks = side_by_side(start, range(layout.rank_count))
        except BaseException:
            for rank in made:
                rank.close()
            raise
        self.free = random.Random(instance).sample(range(page_count), page_count)

    @property
    def client(self) -> Client:
        """The client of rank 0."""
        return self.ranks[0].client

    def endpoint(self) -> Endpoint:
        """Return the instance's addresses, once rank 0 knows the newest worker of each rank. Raises LongshoreError."""
        end_s = time.monotonic() + self._limit_s
        while True:
            endpoint = self.client.endpoint(left_s(end_s))
            newest = {rank.client.epoch for rank in self.ranks if rank.client.connected}
            if newest <= {address.epoch for address in endpoint.ranks}:
                return endpoint
            time.sleep(_ENDPOINT_PAUSE_S)

    def take_pages(self, first_token: int, end_token: int) -> list[int]:
        """Allocate pages for tokens [first, end), scattered over the pool."""
        if first_token == end_token:
            return []
        count = -(-end_token // self.page_size) - first_token // self.page_size
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, f"{self.instance} has no pages left"
        return taken

    def accept(self, pages: list[int]) -> None:
        """Free pages of a failed, released room. They may hold any bytes, which nothing may change from now on."""
        self.free += pages
        for rank in self.ranks:
            rank.expected[:, :, pages] = rank.planes[:, :, pages]

    def intact(self) -> bool:
        """Whether every byte of all ranks has its expected value."""
        return all(rank.intact() for rank in self.ranks)

    def close(self) -> None:
        """Leave the agent."""
        for rank in self.ranks:
            rank.close()


def left_s(end_s: float) -> float:
    """Return the seconds until a time of the monotonic clock; at least 0."""
    return max(0.0, end_s - time.monotonic())
