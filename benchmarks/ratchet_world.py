"""Runs the control work of rooms in one process and one thread, so that an instruction counter sees the same each time.

Used by `ratchet_scenes`. Two real workers, and two cores of the client, exchange real messages. The clock, ZeroMQ, NIXL,
the CUDA driver and torch are played: they move no bytes, take no time, and cost a constant number of instructions a call.
Import this module before any module of the agent: it replaces torch, Triton and the clock.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec

# -- the clock -----------------------------------------------------------------------------------------------------------

_START_NS = 1_000_000_000_000
_TICK_NS = 1_000


class Clock:
    """Each call of a function of `time` takes a microsecond. `advance` skips idle time."""

    def __init__(self) -> None:
        self._set(_START_NS)

    def now_ns(self) -> int:
        """Return the time."""
        return time.monotonic_ns()

    def advance(self, wait_ns: int) -> None:
        """Let time pass without a call."""
        self._set(time.monotonic_ns() + wait_ns)

    def restart(self) -> None:
        """Begin at the first moment again."""
        self._set(_START_NS)

    def _set(self, now_ns: int) -> None:
        # Counters of the C library of Python: a function of Python would cost more than what it stands for.
        time.monotonic_ns = itertools.count(now_ns, _TICK_NS).__next__
        time.monotonic = itertools.count(now_ns / 1e9, _TICK_NS / 1e9).__next__
        time.thread_time_ns = itertools.count(now_ns, _TICK_NS).__next__


# -- torch and Triton ----------------------------------------------------------------------------------------------------


class _Tensor:
    """Memory of a device at an invented address."""

    is_cuda = False
    _addresses = itertools.count(1 << 44, 1 << 24)

    def __init__(self, *_: object, device: object = None, **_options: object) -> None:
        self.device = device
        self._address = next(self._addresses)

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return 8


class _Stream:
    def __init__(self, device: object) -> None:
        self.device, self.cuda_stream = device, 7

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Kernel:
    """A kernel of Triton whose code is never run."""

    def __init__(self, function: object) -> None:
        self.function = function

    def warmup(self, *_: object, **_constants: object) -> Any:
        return SimpleNamespace(function=1, metadata=SimpleNamespace(shared=0), _init_handles=lambda: None)


def _jit(function: object = None, **_: object) -> object:
    return _Kernel(function) if function is not None else _Kernel


def _play_libraries() -> None:
    """Replace torch and Triton, whose import alone would take minutes under an instruction counter."""
    torch, triton, language = (ModuleType(name) for name in ("torch", "triton", "triton.language"))
    device = SimpleNamespace
    vars(torch).update(
        device=lambda kind, index=0: device(type=kind, index=index),
        tensor=_Tensor,
        empty=_Tensor,
        zeros=_Tensor,
        int32="int32",
        int64="int64",
        uint8="uint8",
        OutOfMemoryError=MemoryError,
        cuda=SimpleNamespace(
            set_device=lambda _: None,
            current_stream=_Stream,
            Stream=_Stream,
            stream=lambda _: nullcontext(),
            device=lambda _: nullcontext(),
        ),
    )
    kinds = {f"{sign}int{8 << power}": f"{sign}{power}" for sign in ("", "u") for power in range(4)}
    vars(language).update(constexpr=lambda value: value, tensor=object, **kinds)
    vars(triton).update(jit=_jit, language=language, __version__="3.6.0")
    sys.modules |= {"torch": torch, "triton": triton, "triton.language": language}


CLOCK = Clock()
_play_libraries()

from longshore_agent.control import peer_net  # noqa: E402 - after torch, Triton and the clock were replaced, as all below
from longshore_agent.control.node_link import AdoptEngine, NodeLink, PoolRegion, PoolWanted  # noqa: E402
from longshore_agent.memory import cuda  # noqa: E402
from longshore_agent.settings import Settings  # noqa: E402
from longshore_agent.transports import nixl, nixl_library  # noqa: E402
from longshore_agent.worker import resources  # noqa: E402
from longshore_agent.worker.config import WorkerConfig  # noqa: E402
from longshore_agent.worker.loop import Worker  # noqa: E402
from longshore_client import Half, KVLayout, ModelShape, Parallel, pool_geometry  # noqa: E402
from longshore_client.arguments import CacheTokens  # noqa: E402
from longshore_client.client import Client  # noqa: E402
from longshore_client.core import Core, State  # noqa: E402
from longshore_spec.agent_config import Backend  # noqa: E402
from longshore_wire.effects import Send  # noqa: E402
from longshore_wire.engine_messages import (  # noqa: E402
    ENGINE_PROTOCOL_VERSION,
    TO_ENGINE,
    DeviceRegion,
    Endpoint,
    Hello,
    RankAddress,
    RoomEventKind,
)
from longshore_wire.layout import PageOrder, Plane, TargetMemory  # noqa: E402
from longshore_wire.names import Wire as WireKind  # noqa: E402
from longshore_wire.peer_messages import PEER  # noqa: E402
from longshore_wire.source import SourceSession  # noqa: E402

PAGE_SIZE = 64
PAGE_COUNT = 8192
DEVICE = "GPU-00000000-0000-0000-0000-000000000000"
_TURNS_MAX = 1_000_000
# Of Qwen3.5-397B: 15 layers with attention, and 45 with a state, 15 of them in a page: what a layer has of each token, of its
# convolution in three rows, and of its state.
_SLOT_PAGES = 3
HYBRID = (
    ModelShape.kv(layers=15, kv_heads=2, head_dim=256, element_bytes=2),
    ModelShape(45, (Plane(16, 256, 3), Plane(16, 256, 3), Plane(64, 256, 3)), 2),
    ModelShape(45, (Plane(64, 65_536),), 4),
)


# -- the CUDA driver -----------------------------------------------------------------------------------------------------

_NOT_READY = 600
_MPS_ENABLED = 133
# The place of an argument of a copy in its block: the target's address, and the first of eight words of the trailer.
_TARGET_PLACE, _TRAILER_PLACE = 2, 18
_TRAILER_BYTES = 64


class Driver:
    """The functions of the CUDA driver. A copy passes after `polls` queries of its event.

    Attributes:
        trailers: of the slabs that were gathered, by the address of the part that was gathered last.
        landed: trailers in a ring, by their address.
    """

    def __init__(self, polls: int) -> None:
        self.polls = polls
        self.trailers: dict[int, bytes] = {}
        self.landed: dict[int, bytes] = {}
        self._addresses = itertools.count(1 << 44, 1 << 41)
        self._queries: dict[int, int] = {}
        self._kept: list[object] = []

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_: 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802 - the driver's name, like those below
        count._obj.value = 1
        return 0

    def cuMemAlloc_v2(self, address: Any, _: int) -> int:  # noqa: N802
        address._obj.value = next(self._addresses)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, *_: object) -> int:  # noqa: N802
        return self.cuMemAlloc_v2(address, 0)

    def cuMemGetAddressRange_v2(self, base: Any, length: Any, address: int) -> int:  # noqa: N802
        base._obj.value, length._obj.value = address, 1 << 40
        return 0

    def cuEventCreate(self, event: Any, _: int) -> int:  # noqa: N802
        event._obj.value = next(self._addresses)
        return 0

    def cuMemHostAlloc(self, address: Any, length: int, _: int) -> int:  # noqa: N802
        memory = ctypes.create_string_buffer(length)
        self._kept.append(memory)
        address._obj.value = ctypes.addressof(memory)
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, _: object) -> int:  # noqa: N802
        value._obj.value = int(number != _MPS_ENABLED)
        return 0

    def cuDeviceCanAccessPeer(self, value: Any, *_: object) -> int:  # noqa: N802
        value._obj.value = 1
        return 0

    def cuEventRecord(self, event: Any, _: int) -> int:  # noqa: N802
        self._queries[event.value] = self.polls
        return 0

    def cuEventQuery(self, event: Any) -> int:  # noqa: N802
        left = self._queries[event.value] = self._queries[event.value] - 1
        return 0 if left < 0 else _NOT_READY

    def cuLaunchKernel(self, *arguments: Any) -> int:  # noqa: N802
        places = arguments[9]
        trailer = ctypes.string_at(places[_TRAILER_PLACE], _TRAILER_BYTES)
        if any(trailer):
            self.trailers[ctypes.c_uint64.from_address(places[_TARGET_PLACE]).value] = trailer
        return 0

    def cuMemcpyDtoHAsync_v2(self, target: int, source: int, length: int, _: int) -> int:  # noqa: N802
        ctypes.memmove(target, self.landed.pop(source), length)
        return 0


# -- NIXL ----------------------------------------------------------------------------------------------------------------


class Wire:
    """All agents of NIXL. A write is done after `polls` queries."""

    def __init__(self, driver: Driver, polls: int) -> None:
        self.driver, self.polls = driver, polls
        self.agents: dict[str, NixlAgent] = {}

    def start(self, inbox: str, outbox: str, *_: object, **_options: object) -> tuple[object, ...]:
        """Stand for `nixl_library.start`."""
        return NixlAgent(self, inbox), NixlAgent(self, outbox), (), False


class NixlAgent:
    """One agent: descriptors are what was given, and a handle is what it writes."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name
        self._notices: dict[str, list[bytes]] = {}
        wire.agents[name] = self

    def register_memory(self, region: object, _: str) -> object:
        return region

    def get_agent_metadata(self) -> bytes:
        name = self._name.encode()
        return b"nixlSerDes|Agent" + struct.pack("<Q", len(name)) + name + b"|"

    def add_remote_agent(self, _: bytes) -> None:
        pass

    def get_xfer_descs(self, rows: object, _: str) -> object:
        return rows

    def initialize_xfer(self, _: str, local: object, remote: object, peer: str, notice: bytes) -> NixlHandle:
        return NixlHandle(local, remote, peer, notice, self._wire.polls)

    def transfer(self, handle: NixlHandle, _: bytes) -> str:
        (source, length, _), (target, _, _) = handle.local[0], handle.remote[0]
        driver = self._wire.driver
        # The trailer came with the last part of the slab.
        part = next(part for part in driver.trailers if source <= part < source + length)
        driver.landed[target + length - _TRAILER_BYTES] = driver.trailers.pop(part)
        return "PROC"

    def check_xfer_state(self, handle: NixlHandle) -> str:
        handle.polls -= 1
        if handle.polls >= 0:
            return "PROC"
        if handle.notice:
            self._wire.agents[handle.peer].land(self._name, handle.notice)
            handle.notice = b""
        return "DONE"

    def land(self, sender: str, notice: bytes) -> None:
        self._notices.setdefault(sender, []).append(notice)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        if not self._notices:
            return {}
        found, self._notices = self._notices, {}
        return found


class NixlHandle:
    """One write."""

    def __init__(self, local: Any, remote: Any, peer: str, notice: bytes, polls: int) -> None:
        self.local, self.remote, self.peer, self.notice, self.polls = local, remote, peer, notice, polls

    def release(self) -> None:
        pass


# -- ZeroMQ --------------------------------------------------------------------------------------------------------------


class _Again(Exception):  # noqa: N818 - ZeroMQ's name
    pass


class _Frame:
    more = False

    def __init__(self, data: bytes) -> None:
        self.bytes = data

    def __getitem__(self, _: str) -> str:
        return "127.0.0.1"


class _Socket:
    """A ROUTER or a DEALER, whose messages arrive at once."""

    bound: ClassVar[dict[str, _Socket]] = {}
    closed = False

    def __init__(self, kind: int) -> None:
        self.kind, self.route = kind, b""
        self.arrived: deque[Any] = deque()
        self.dealers: dict[bytes, _Socket] = {}

    def setsockopt(self, option: int, value: Any) -> None:
        if option == zmq.ROUTING_ID:
            self.route = value

    def getsockopt_string(self, _: int) -> str:
        return next(f"tcp://{place}" for place, known in self.bound.items() if known is self)

    def poll(self, _timeout_ms: int, events: int) -> int:
        return events

    def get_monitor_socket(self, _: int) -> _Socket:
        return _Socket(0)

    def bind(self, _: str) -> None:
        self.bound[f"127.0.0.1:{40000 + len(self.bound)}"] = self

    def connect(self, place: str) -> None:
        self.router = self.bound[place.rpartition(";")[2]]
        self.router.dealers[self.route] = self

    def send(self, data: bytes, _: int) -> None:
        self.router.arrived += (self.route, _Frame(data))

    def send_multipart(self, parts: list[bytes], _: int) -> None:
        self.dealers[parts[0]].arrived.append(parts[1])

    def recv(self, _: int = 0, *, copy: bool = True) -> Any:
        del copy
        if not self.arrived:
            raise _Again
        return self.arrived.popleft()

    def recv_multipart(self, _: int = 0) -> Any:
        raise _Again


class _Poller:
    """Remembers what it would poll."""

    def __init__(self) -> None:
        self.sockets: dict[object, None] = {}
        self.writable: set[object] = set()

    def register(self, socket_or_descriptor: object, events: int) -> None:
        self.sockets[socket_or_descriptor] = None
        self.modify(socket_or_descriptor, events)

    def modify(self, socket_or_descriptor: object, events: int) -> None:
        if events == zmq.POLLIN:
            self.writable.discard(socket_or_descriptor)
        else:
            self.writable.add(socket_or_descriptor)

    def unregister(self, socket_or_descriptor: object) -> None:
        self.sockets.pop(socket_or_descriptor, None)


zmq = SimpleNamespace(
    Context=lambda: SimpleNamespace(socket=_Socket, set=lambda *_: None, term=lambda: None),
    POLLIN=1,
    POLLOUT=2,
    Poller=_Poller,
    Again=_Again,
    ZMQError=_Again,
    Frame=_Frame,
    Socket=_Socket,
    **{
        name: number
        for number, name in enumerate(
            (
                "ROUTER",
                "DEALER",
                "ROUTING_ID",
                "ROUTER_MANDATORY",
                "HANDSHAKE_IVL",
                "ROUTER_HANDOVER",
                "EVENT_HANDSHAKE_FAILED_PROTOCOL",
                "LAST_ENDPOINT",
                "LINGER",
                "SNDHWM",
                "RCVHWM",
                "MAXMSGSIZE",
                "IPV6",
                "IMMEDIATE",
                "MAX_SOCKETS",
                "NOBLOCK",
            ),
            start=1,
        )
    },
)


# -- engines and workers -------------------------------------------------------------------------------------------------


class Link:
    """Stands for a client's connection: instead of a thread, a waiting call runs the world."""

    def __init__(self, core: Any, connected: socket.socket, world: World) -> None:
        self.core, self._socket, self._world = core, connected, world
        self.changed = _Waits(world)

    def check_process(self, _: str) -> None:
        pass

    def expect(self, _: object) -> None:
        pass

    def carry_out(self) -> None:
        """Send the core's messages."""
        while self.core.outbox:
            self._socket.sendmsg([self.core.outbox.popleft().data], [], socket.MSG_NOSIGNAL)
        self.core.take_effects()

    def wait(self, call: Any, _: float | None) -> bool:
        """Run the world until a call is settled."""
        self._world.run(lambda: call.settled)
        return True

    def receive(self) -> bool:
        """Read the worker's messages; return whether there were any."""
        moved = False
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return moved
            moved = True
            self.core.take(TO_ENGINE.decode(data), time.monotonic())
            self.carry_out()


class _Waits(nullcontext[None]):
    """Stands for the lock of a client's cores."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def wait_until(self, predicate: Callable[[], bool], _: float | None) -> bool:
        if not predicate():
            self._world.run(predicate)
        return True


class Engine:
    """One engine rank: a client, the end of its socket, and the worker that serves it."""

    def __init__(self, world: World, name: str, half: Half, layout: KVLayout) -> None:
        self._world, self.layout = world, layout
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.supervisor = NodeLink(ours)
        config = WorkerConfig(
            name, name, 1, layout, (half,), world.settings, 0, agent=world.agent, device=DEVICE, engine=1
        )
        self.worker = Worker(config, NodeLink(theirs))
        connected, engine_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.setblocking(False)
        hello = Hello(ENGINE_PROTOCOL_VERSION, name, layout, DEVICE, (half,), 1, os.getpid())
        self.supervisor.send(AdoptEngine(hello), engine_end.fileno())
        engine_end.close()
        self.core = Core(hello, "played", deque())
        self.core.connected(0.0)
        self.core.outbox.clear()  # the supervisor has read the Hello
        self.link = Link(self.core, connected, world)
        self.client = Client(hello, {TargetMemory.DEVICE: self.link})  # type: ignore[dict-item]

    def start(self, page_count: int, handle: bytes) -> Endpoint:
        """Register the pools; return the engine's endpoint."""
        for number, layout in enumerate(self.layout.caches):
            geometry = pool_geometry(layout, page_count if number == 0 else _SLOT_PAGES)
            self.client.register_pool(number, geometry, [DeviceRegion(handle, 0) for _ in geometry.region_bytes])
        rank = RankAddress(0, self.worker.net.address, 1)
        return Endpoint(self.client.instance, self.layout, (rank,), agent=self._world.agent)

    def forward(self, engines: list[Engine]) -> None:
        """Do the supervisor's part: pass on messages about pools of neighbours."""
        for message, descriptor in self.supervisor.receive():
            if isinstance(message, PoolWanted | PoolRegion):
                reader = message.owner if isinstance(message, PoolWanted) else message.asker
                engine = next(each for each in engines if each.worker.config.peer == reader)
                engine.supervisor.send(message, descriptor)


class World:
    """A prefill and a decode engine of one rank each with their workers, in this process. `turn` runs each of them once.

    Args:
        polls: queries after which a copy and a write are done.
        near: whether the workers belong to one agent, so that slabs go by way DIRECT.
        hybrid: whether most layers keep a recurrent state, so that a room moves three caches.
    """

    def __init__(self, clock: Clock, *, polls: int = 1, near: bool = False, hybrid: bool = False) -> None:
        self.clock = clock
        self.driver = Driver(polls)
        self.agent = "life.gpu" if near else ""
        library: Any = self.driver
        for function in (cuda.open_device, cuda.device_at, cuda.reached_by_all):
            function.cache_clear()
        played: dict[object, dict[str, object]] = {
            cuda: {"_driver": lambda: library, "_quick": lambda name: getattr(library, name)},
            nixl_library: {"start": Wire(self.driver, polls).start},
            nixl.NixlTransport: {"probe_wire": lambda *_: WireKind.NVLINK},
            resources: {"make_ports": lambda _: SimpleNamespace(admit=lambda _: None, lost=lambda: "")},
            peer_net: {"zmq": zmq},
        }
        for owner, changes in played.items():
            for name, value in changes.items():
                setattr(owner, name, value)
        self.settings = Settings(deployment="ratchet/ratchet", backend=Backend.NIXL)
        model = ModelShape.kv(layers=80, kv_heads=8, head_dim=128, element_bytes=2)
        layout = KVLayout(model, Parallel(), PAGE_SIZE)
        if hybrid:
            layout = msgspec.structs.replace(
                layout, model=HYBRID[0], others=tuple(map(_slot, ("conv", "ssm"), HYBRID[1:]))
            )
        self._slots = [CacheTokens(cache, list(range(_SLOT_PAGES)), 0, 0) for cache in (1, 2)] if hybrid else []
        self.source = Engine(self, "prefill0", Half.SOURCE, layout)
        self.target = Engine(self, "decode", Half.TARGET, layout)
        self.engines = [self.source, self.target]
        self.quiet: list[QuietSource] = []
        self.run(lambda: all(engine.core.state is State.READY for engine in self.engines))
        self.endpoints = [engine.start(PAGE_COUNT, bytes([number]) * 64) for number, engine in enumerate(self.engines)]
        self._room = 0

    def move(self, token_counts: list[int]) -> None:
        """Move rooms of so many tokens at once, claimed before they are offered, until all their pages are released."""
        prefill, decode = self.source.client, self.target.client
        rooms, page = [], 0
        for count in token_counts:
            self._room += 1
            pages = list(range(page, page + -(-count // PAGE_SIZE)))
            page += len(pages)
            rooms.append((self._room, pages, count))
        for room, pages, count in rooms:
            others = [each._replace(end_token=count) for each in self._slots]
            decode.receive(room, self.endpoints[0], pages, 0, count, others=others)
        for room, pages, count in rooms:
            others = [each._replace(end_token=count) for each in self._slots]
            prefill.send(room, pages, 0, count, last=True, others=others)
        for room, *_ in rooms:
            for client, half in ((decode, Half.TARGET), (prefill, Half.SOURCE)):
                event = client.wait(room, half, prefill.instance)
                assert event.kind is RoomEventKind.DONE, event
                client.wait(room, half, prefill.instance, (RoomEventKind.RELEASED,))

    def turn(self) -> bool:
        """Let each engine and each worker that is awake work once; return whether any of them did."""
        worked = False
        for engine in self.engines:
            worked |= engine.link.receive()
            engine.forward(self.engines)
            worked |= _worker_turn(engine.worker)
        for source in self.quiet:
            worked |= source.answer()
        return worked

    def run(self, until: Callable[[], object]) -> None:
        """Run until a condition is met. Skips idle time."""
        for _ in range(_TURNS_MAX):
            if until():
                return
            if not self.turn():
                self.clock.advance(1_000_000)
        raise AssertionError("it does not come about")


def _slot(name: str, model: ModelShape) -> KVLayout:
    return KVLayout(model, Parallel(), model.layers // _SLOT_PAGES, PageOrder.SLOT, name=name)


class QuietSource:
    """The core of a prefill worker without a worker: it attaches and answers heartbeats."""

    def __init__(self, world: World, name: str) -> None:
        known = world.source.worker
        config = dataclasses.replace(known.config.session_config(), instance=name)
        self._core = SourceSession(config, now_ns=time.monotonic_ns())
        self._router = _Socket(zmq.ROUTER)
        self._router.bind("")
        place = self._router.getsockopt_string(0).removeprefix("tcp://")
        transport = known.mover.resources.transport
        self._core.describe(transport.metadata(), None, {}, None, place)
        self.endpoint = Endpoint(name, config.layout, (RankAddress(0, place, 1),))
        self._peer = world.target.worker.config.peer

    def answer(self) -> bool:
        """Handle the messages that have arrived; return whether there were any."""
        arrived = bool(self._router.arrived)
        while self._router.arrived:
            route, frame = self._router.recv(), self._router.recv()
            self._core.receive(self._peer, PEER.decode(frame.bytes), time.monotonic_ns())
            for effect in self._core.take_effects():
                if isinstance(effect, Send):
                    self._router.send_multipart([route, PEER.encode(effect.message)], 0)
        return arrived


def _worker_turn(worker: Worker) -> bool:
    """Do one turn as `Worker.run` does, unless the worker would sleep."""
    wait_ms = worker._timeout_ms()
    poller: Any = worker.net.poller
    ready = {
        watched
        for watched in poller.sockets
        if (watched.arrived if isinstance(watched, _Socket) else select.select([watched], [], [], 0)[0])
    } | poller.writable
    if wait_ms and not ready:
        return False
    worker._turn(frozenset(ready), time.monotonic_ns())
    return True
