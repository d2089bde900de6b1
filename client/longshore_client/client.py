"""Offers an engine the calls of Longshore: share pools, offer pages, claim pages, and get events of their rooms.

Called by engines and connectors, from any thread. A blocking call waits only for the agent's answer, never for a
transfer. This module checks arguments, locks and waits; `core` decides everything, and `connection` holds the socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from longshore_client import arguments
from longshore_client.arguments import CacheTokens
from longshore_client.connection import Connection
from longshore_client.core import State
from longshore_client.errors import (
    AgentLost,
    ArgumentError,
    Busy,
    ClientClosed,
    PoolRefused,
    WaitTimeout,
    from_refusal,
)
from longshore_client.ledger import Call, HalfKey, Resume
from longshore_client.memory import close_all, duplicates
from longshore_client.pages import listed, split_claim, split_offer
from longshore_wire.engine_messages import (
    Ask,
    CachePages,
    Cancel,
    DeviceRegion,
    Endpoint,
    Half,
    Hello,
    Receive,
    Refused,
    RegisterPool,
    RoomEvent,
    RoomEventKind,
    UnregisterPool,
)
from longshore_wire.errors import LongshoreError, Reason, RoomError
from longshore_wire.layout import KVLayout, PoolGeometry, TargetMemory
from longshore_wire.names import room_name

# An agent answers in well under a millisecond. A worker's restart takes seconds, and a call may outlast it.
CALL_TIMEOUT_S = 30.0
# The kernel's limit of descriptors in one message (SCM_MAX_FD).
REGIONS_PER_POOL_MAX = 253
ENDED = frozenset({RoomEventKind.DONE, RoomEventKind.FAILED})


class Client:
    """One engine rank's connection to its agent; made by `registration.connect`. Every method may be called from any thread.

    Pages in host memory have an agent's worker and a connection of their own, behind the same calls.
    When the agent's worker dies, the client connects to the new one by itself and repeats every pool, open offer, open
    claim and unanswered call. No event is reported twice.
    """

    def __init__(self, hello: Hello, links: Mapping[TargetMemory, Connection]) -> None:
        self.instance = hello.instance
        self.layout = hello.layout
        self._links = links
        self._core = links[TargetMemory.DEVICE].core
        self._changed = links[TargetMemory.DEVICE].changed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """The number of the life of the worker that serves the device's pages; another number after a restart."""
        return self._core.welcome.epoch if self._core.welcome is not None else 0

    @property
    def deployment(self) -> str:
        """The deployment that the agent belongs to."""
        return self._core.welcome.deployment if self._core.welcome is not None else ""

    @property
    def engine_keys(self) -> tuple[bytes, ...]:
        """Keys by which engines of the deployment seal messages to each other, the newest first; none if it has no keys.

        They change while the deployment's keys are replaced: read them for each message.
        """
        return self._core.welcome.engine_keys if self._core.welcome is not None else ()

    @property
    def connected(self) -> bool:
        """Whether each memory's worker serves this engine now and has been told of everything that is open."""
        return all(link.core.state is State.READY for link in self._links.values())

    @property
    def open_count(self) -> int:
        """The number of open halves of rooms: offered or claimed, and not RELEASED."""
        with self._changed:
            return sum(len(link.core.ledger) for link in self._links.values())

    def is_open(self, room: int, half: Half, instance: str) -> bool:
        """Whether a half is open: a part of it was, or may have been, accepted, and it is not RELEASED.

        Ask this after a CallTimeout or AgentLost: when it is False, no process uses the half's pages.
        """
        key = HalfKey(
            arguments.half_of(half),
            arguments.text("instance", instance),
            arguments.room_number(room),
        )
        with self._changed:
            return any(link.core.ledger.get(key) is not None for link in self._links.values())

    @property
    def dropped_event_count(self) -> int:
        """The number of events that were dropped because no call took them."""
        return sum(link.core.dropped_event_count for link in self._links.values())

    def endpoint(self, timeout_s: float) -> Endpoint:
        """Return the endpoint by which decode reaches all ranks of this instance. Waits until all are registered.

        Raises:
            WaitTimeout: some were not registered in time; says how many were.
            ClientClosed: the client was closed.
        """
        timeout_s = arguments.timeout(timeout_s)
        with self._changed:
            self._check_open("endpoint")
            self._wait_for(
                lambda: self._core.endpoint is not None and self._core.endpoint.complete, timeout_s, "endpoint"
            )
            found = self._core.endpoint
            if found is None or not found.complete:
                parallel, there = self.layout.parallel, len(found.ranks) if found is not None else 0
                raise WaitTimeout(
                    f"{there} of {parallel.tp * parallel.pp} ranks of {self.instance} are registered after "
                    f"{timeout_s:g} s: start the others with the same instance name, or wait longer"
                )
            return found

    # -- pools -----------------------------------------------------------------------------------------------------

    def register_pool(
        self,
        cache: int,
        geometry: PoolGeometry,
        regions: Sequence[int] | Sequence[DeviceRegion],
        memory: TargetMemory = TargetMemory.DEVICE,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Share the pages of a cache with the agent.

        While an open room writes a page, other rooms cannot claim it. No check covers pools that overlap: they may, if a
        page with one id belongs to one of them at a time.

        Args:
            cache: the index of the cache in the layout of `memory`; a cache has one pool.
            memory: of the pages; HOST needs a `host_layout` of `connect`.
            geometry: where the pages lie; see `memory.pool_geometry`.
            regions: for each of `geometry.region_bytes`, a file descriptor, which the client duplicates; or a
                `cuda.device_region`, whose memory must stay allocated until the pool is unregistered.
        Raises:
            ArgumentError: the pool is registered already, or the regions do not fit the geometry.
            PoolRefused: the agent cannot map it.
            AgentLost, CallTimeout, ClientClosed: as `send`.
        """
        cache, timeout_s = arguments.cache_index(cache), arguments.timeout(timeout_s)
        link, geometry = self._link(arguments.memory_of(memory)), arguments.struct("geometry", geometry, PoolGeometry)
        descriptors, on_device = arguments.region_lists(regions, len(geometry.region_bytes), REGIONS_PER_POOL_MAX)
        message = RegisterPool(link.core.next_number(), cache, geometry, on_device)
        kept = duplicates(descriptors)
        try:
            call = Call((message,), descriptors=kept)
            self._enter(link, call, f"register_pool {cache}")
        except BaseException:
            close_all(kept)
            raise
        self._wait_answer(link, call, f"register_pool {cache}", timeout_s, PoolRefused)

    def unregister_pool(
        self, cache: int, memory: TargetMemory = TargetMemory.DEVICE, *, timeout_s: float | None = None
    ) -> None:
        """Withdraw the pool of a cache; open rooms fail. When this returns, no process uses its pages: free them only then.

        Raises:
            PoolRefused: there is no such pool.
            AgentLost, CallTimeout, ClientClosed: as `send`; with a `timeout_s` of None only ClientClosed.
        """
        cache, timeout_s = arguments.cache_index(cache), arguments.timeout_or_none(timeout_s)
        link = self._link(arguments.memory_of(memory))
        call = Call((UnregisterPool(link.core.next_number(), cache),))
        self._tell(link, call, f"unregister_pool {cache}", timeout_s, refused=PoolRefused)

    # -- rooms -----------------------------------------------------------------------------------------------------

    def send(
        self,
        room: int,
        pages: Sequence[int] | bytes,
        first_token: int,
        end_token: int,
        *,
        last: bool,
        others: Sequence[CacheTokens] = (),
        prompt: bytes = b"",
        capability: bytes = b"",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Offer tokens [first_token, end_token) of a room, computed and visible in `pages`. Never waits for a transfer.

        Offer chunks in order, without gaps. The pages belong to the room until its RELEASED event.

        Args:
            room: 0 to 2**64 - 1, unique in this instance.
            pages: [page_count] ids, or packed int32, little endian; the first is page number `first_token // page_size`
                of the sequence, the last holds token `end_token - 1`.
            last: True: `end_token` is the sequence's length, and every cache is offered up to it now. Such a chunk may be empty.
                A cache with PageOrder.SLOT comes once, from token 0 and with `last`; its pages are those of its layers.
            others: the same for further caches of the layout; the arguments above are of the first one.
            prompt: a digest of the prompt, up to 16 bytes, the same for all chunks; empty: none. If decode's claim has
                another one, the room fails with PROMPT_MISMATCH. Agents neither show nor log it.
            capability: a random secret, up to 16 bytes, the same for all chunks. Claims that do not show it are refused, and
                the room goes on. Empty: who knows `room` and `endpoint` can claim the room's KV, so draw `room` at random.
        Raises:
            ArgumentError: pages and tokens do not fit together; nothing was sent.
            Busy: make the same call again after the hint; an accepted part is not sent twice.
            RoomError: the room refuses this chunk; `reason` says why.
            AgentLost: the agent is away. Make the same call again; an accepted part is not sent twice.
            CallTimeout: the agent did not answer; cancel the room.
            ClientClosed: the client was closed.
        """
        begun_ns = time.monotonic_ns()
        room = arguments.room_number(room)
        first_token, end_token = arguments.token_range(first_token, end_token)
        last, timeout_s = arguments.flag("last", last), arguments.timeout(timeout_s)
        binding = arguments.binding_of(prompt, capability)
        layouts = self.layout.caches
        offered = _listed(layouts, pages, first_token, end_token, others)
        if not last and first_token == end_token and all(each.first_token == each.end_token for each in offered):
            raise ArgumentError(
                f"room {room_name(room)}: tokens [{first_token}, {end_token}) are none: only `last` may be empty"
            )
        ranges = tuple([(each.cache, each.first_token, each.end_token) for each in offered])
        key, link = HalfKey(Half.SOURCE, self.instance, room), self._link(TargetMemory.DEVICE)
        with self._changed:
            accepted_count = self._core.ledger.resumed(key, ranges, last=last)
        for index, part in enumerate(split_offer(room, offered, layouts, last=last)):
            if index < accepted_count:
                continue
            offer = msgspec.structs.replace(part, request=self._core.next_number(), binding=binding)
            try:
                begun_ns = self._tell(
                    link, Call((offer,), key=key), f"send of room {room_name(room)}", timeout_s, begun_ns
                )
            except (Busy, AgentLost):
                with self._changed:
                    self._core.ledger.stopped(key, Resume(ranges, last, index))
                raise

    def receive(
        self,
        room: int,
        endpoint: Endpoint,
        pages: Sequence[int] | bytes,
        first_token: int,
        end_token: int,
        *,
        memory: TargetMemory | None = None,
        digest: bool = False,
        others: Sequence[CacheTokens] = (),
        prompt: bytes = b"",
        capability: bytes = b"",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Claim tokens [first_token, end_token) of a room into `pages`. Never waits for a transfer.

        Args:
            room: the prefill engine's number of the room.
            endpoint: the result of `endpoint()` at the prefill engine.
            pages: see `send`; without the pages before `first_token` (a prefix that is here already).
            end_token: the sequence's length; equal to `first_token` for a full hit.
            memory: that of the pages, DEVICE or HOST; None: the deployment's `decode.target`.
            digest: compare digests of both sides' pages, even if the deployment does not (`integrity.digest`). If they differ,
                the room fails with DIGEST_MISMATCH and names layer, head and rank.
            others: the same for all further caches of the layout; the arguments above are of the first one. A cache with
                PageOrder.SLOT is claimed whole, from token 0, or not at all, from `end_token`.
            prompt, capability: see `send`.
        Raises:
            ArgumentError, Busy, RoomError, AgentLost, CallTimeout, ClientClosed: as `send`.
        """
        begun_ns = time.monotonic_ns()
        room = arguments.room_number(room)
        endpoint = arguments.endpoint_of(endpoint)
        first_token, end_token = arguments.token_range(first_token, end_token)
        link, timeout_s = self._link(memory), arguments.timeout(timeout_s)
        digest = arguments.flag("digest", digest)
        layouts = link.core.layout.caches
        wanted = _listed(layouts, pages, first_token, end_token, others)
        for each in wanted:
            if each.end_token != end_token:
                raise ArgumentError(
                    f"others: cache {layouts[each.cache].name!r} ends at token {each.end_token}, and the first one at {end_token}: "
                    "the end of every cache is the sequence's length"
                )
        if len(wanted) < len(layouts):
            raise ArgumentError(
                f"others has {len(wanted) - 1} of {len(layouts) - 1} caches: claim every cache, also one of which no token moves"
            )
        key = HalfKey(Half.TARGET, endpoint.instance, room)
        whole = Receive(
            request=link.core.next_number(),
            room=room,
            endpoint=endpoint,
            caches=(),
            digest=digest,
            binding=arguments.binding_of(prompt, capability),
        )
        call = Call(tuple(split_claim(whole, wanted)), key=key)
        self._tell(link, call, f"receive of room {room_name(room)}", timeout_s, begun_ns)

    def ask(
        self,
        room: int,
        endpoint: Endpoint,
        *,
        memory: TargetMemory | None = None,
        capability: bytes = b"",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Ask prefill to say when it has offered a room's first tokens, before this engine has pages for it.

        The event OFFERED follows; then claim the room with `receive`. If the room fails before, FAILED and RELEASED follow. A
        room that is asked for is open until it is claimed or cancelled. Of an engine's ranks, one needs to ask.

        Args:
            room, endpoint, memory, capability: as of `receive`.
        Raises:
            ArgumentError, Busy, RoomError, AgentLost, CallTimeout, ClientClosed: as `send`.
        """
        begun_ns = time.monotonic_ns()
        room = arguments.room_number(room)
        endpoint = arguments.endpoint_of(endpoint)
        link, timeout_s = self._link(memory), arguments.timeout(timeout_s)
        binding = arguments.binding_of(b"", capability)
        message = Ask(link.core.next_number(), room, endpoint, binding)
        call = Call((message,), key=HalfKey(Half.TARGET, endpoint.instance, room))
        self._tell(link, call, f"ask for room {room_name(room)}", timeout_s, begun_ns)

    def cancel(self, room: int, half: Half, *, instance: str | None = None, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Cancel a half. FAILED and RELEASED follow; do not use its pages before RELEASED.

        If the half is not open here, no event follows. A SOURCE half is still cancelled at the agent, which refuses
        later claims.

        Args:
            instance: the prefill instance; None: each instance that has this room open.
        Raises:
            AgentLost, CallTimeout, ClientClosed: as `send`; the cancellation of an open half is repeated to a new
                agent.
        """
        room, half = arguments.room_number(room), arguments.half_of(half)
        instance = None if instance is None else arguments.text("instance", instance)
        timeout_s = arguments.timeout(timeout_s)
        what = f"cancel of room {room_name(room)}"
        with self._changed:
            self._check_open(what)
            ledgers = [(link, link.core.ledger) for link in self._links.values()]
            found = [(link, key) for link, ledger in ledgers for key in ledger.cancel(half, instance, room)]
        if not found and half is Half.SOURCE and instance in (None, self.instance):
            found = [(self._links[TargetMemory.DEVICE], HalfKey(half, self.instance, room))]
        for link, key in found:
            message = Cancel(link.core.next_number(), key.half, key.instance, key.room)
            self._tell(link, Call((message,)), what, timeout_s)

    def poll(self, timeout_s: float = 0.0) -> list[RoomEvent]:
        """Return the events since the last call, in order. Each event is returned once, by `poll` or by one `wait`.

        Args:
            timeout_s: how long to wait if there is none; 0: do not block.
        Raises:
            ClientClosed: the client was closed, and all events were returned.
        """
        timeout_s = arguments.timeout(timeout_s)
        with self._changed:
            self._wait_for(lambda: bool(self._core.events) or self._closed, timeout_s, "poll")
            events = list(self._core.events)
            self._core.events.clear()
            if not events:
                self._check_open("poll")
            self._taken(events)
            return events

    def wait(
        self,
        room: int,
        half: Half,
        instance: str | None = None,
        kinds: Collection[RoomEventKind] = ENDED,
        timeout_s: float | None = None,
    ) -> RoomEvent:
        """Wait for the first event of a half that is one of `kinds`, and return it. Other events stay for other calls.

        Raises:
            WaitTimeout: no such event came within `timeout_s` (None: no limit).
            ClientClosed: the client was closed.
        """
        room, half = arguments.room_number(room), arguments.half_of(half)
        instance = None if instance is None else arguments.text("instance", instance)
        kinds, timeout_s = arguments.kinds_of(kinds), arguments.timeout_or_none(timeout_s)

        def find() -> RoomEvent | None:
            return self._core.find_event(half, instance, room, kinds)

        with self._changed:
            self._wait_for(lambda: find() is not None, timeout_s, f"wait for room {room_name(room)}")
            event = find()
            if event is None:
                raise WaitTimeout(
                    f"room {room_name(room)}: none of {', '.join(sorted(kind.name for kind in kinds))} within {timeout_s} s: "
                    "wait again, or cancel the room"
                )
            self._core.events.remove(event)
            self._taken([event])
            return event

    def close(self) -> None:
        """Leave the agent, which then releases all of this engine's memory. Waits in other threads end. Idempotent."""
        for link in self._links.values():
            link.close()

    # -- calls -----------------------------------------------------------------------------------------------------

    @property
    def _closed(self) -> bool:
        return any(link.core.state is State.CLOSED for link in self._links.values())

    def _link(self, memory: TargetMemory | None) -> Connection:
        """Return the connection for pages in a memory; None: the deployment's."""
        welcome = self._core.welcome
        # The pages of an engine whose device is the CPU are in host memory anyway.
        is_apart = TargetMemory.HOST in self._links or self._core.device != "cpu"
        if memory is None and is_apart and welcome is not None and welcome.target is TargetMemory.HOST:
            chosen = TargetMemory.HOST
        else:
            chosen = TargetMemory.DEVICE if memory is None else arguments.memory_of(memory)
        link = self._links.get(chosen)
        if link is None:
            named = f"memory is {chosen.name}"
            if memory is None:
                named = f"memory is not given, and the deployment's decode.target is {chosen.name.capitalize()}"
            raise ArgumentError(f"{named}: give connect the host_layout of this rank's pages there, or use DEVICE")
        return link

    def _check_open(self, what: str) -> None:
        for link in self._links.values():
            link.core.check_open(what)

    def _tell(
        self,
        link: Connection,
        call: Call,
        what: str,
        timeout_s: float | None,
        begun_ns: int = 0,
        refused: type[LongshoreError] = RoomError,
    ) -> int:
        """Make a call that began at `begun_ns`; return when the agent had accepted it (time.monotonic_ns)."""
        sent_ns = self._enter(link, call, what, begun_ns)
        key = call.key if link.core.steps.wanted else None
        try:
            self._wait_answer(link, call, what, timeout_s, refused)
        except LongshoreError:
            with self._changed:
                if key is not None and link.core.ledger.get(key) is None:
                    link.core.steps.forget(key)
            raise
        ended_ns = time.monotonic_ns()
        if key is not None:
            with self._changed:
                link.core.steps.answered(key, what.partition(" ")[0], sent_ns, ended_ns)
        return ended_ns

    def _taken(self, events: Sequence[RoomEvent]) -> None:
        """Record that the engine takes events, and report the steps of halves that are over. Called under the lock."""
        for link in self._links.values():
            if link.core.take_steps(events, time.monotonic_ns()):
                link.carry_out()

    def _enter(self, link: Connection, call: Call, what: str, begun_ns: int = 0) -> int:
        """Send a call's messages, or keep them for the next agent; return when that was done (time.monotonic_ns)."""
        with self._changed:
            self._check_open(what)
            if call.key and any(
                other is not link and other.core.ledger.get(call.key) for other in self._links.values()
            ):
                text = f"room {room_name(call.key.room)} is claimed already, into another memory: use one claim a room"
                raise RoomError(text, reason=Reason.ROOM_REUSED)
            link.core.enter(call, what)
            link.expect(call)
            link.carry_out()
            sent_ns = time.monotonic_ns()
            if call.key is not None:
                # Before another thread reads an event of this room.
                link.core.steps.sent(call.key, what.partition(" ")[0], begun_ns, sent_ns)
        return sent_ns

    def _wait_answer(
        self, link: Connection, call: Call, what: str, timeout_s: float | None, refused: type[LongshoreError]
    ) -> None:
        """Wait until the agent, or a later one, has accepted an entered call."""
        if not link.wait(call, timeout_s):
            with self._changed:
                if not call.settled:
                    link.core.give_up(call)
                    link.carry_out()
                    raise link.core.no_answer(what, timeout_s)
        if call.answer is None:
            raise ClientClosed(f"{what}: the client was closed")
        if isinstance(call.answer, Refused):
            raise from_refusal(call.answer, what, refused)

    def _wait_for(self, predicate: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        self._changed.wait_until(lambda: predicate() or self._closed, timeout_s)
        if self._closed and not predicate():
            raise ClientClosed(f"{what}: the client was closed")


def _listed(
    layouts: Sequence[KVLayout], pages: Sequence[int] | bytes, first_token: int, end_token: int, others: object
) -> list[CachePages]:
    """Return the pages of the first cache and of `others`, as messages name them. Raises ArgumentError."""
    found = [listed(pages, 0, first_token, end_token, layouts[0])]
    if others == ():
        return found
    for cache, its_pages, first, end in arguments.others_of(others, len(layouts)):
        try:
            found.append(listed(its_pages, cache, first, end, layouts[cache]))
        except ArgumentError as error:
            raise ArgumentError(f"others: cache {layouts[cache].name!r}: {error}", reason=error.reason) from error
    return found
