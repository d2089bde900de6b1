"""Joins protocol cores of several prefill instances and one decode rank without delay, loss or faults, for tests of load.

Lanes, transport and scatters take no time. Used by tests in this folder.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from longshore_wire.claims import Wanted
from longshore_wire.effects import PeerId, RoomEnded, Send, SessionConfig, StartScatter, StartWrite
from longshore_wire.engine_messages import CachePages, Endpoint, Half, RankAddress
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.peer_messages import RegionInfo, RoomKey
from longshore_wire.session import Session
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession

MS = 1_000_000
MODEL = ModelShape.kv(layers=2, kv_heads=2, head_dim=16, element_bytes=2)
PAGE_SIZE = 16
TOKEN_BYTES = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_bytes
DECODE = PeerId("D", 0, 0)


@dataclass
class Exchange:
    """All cores, the time, and the ended rooms."""

    sources: dict[str, SourceSession]
    target: TargetSession
    now_ns: int = 0
    done: list[RoomKey] = field(default_factory=list)  # in decode, in order
    failed: list[tuple[Half, RoomKey, Reason]] = field(default_factory=list)
    slabs_count: int = 0
    ring_peak_bytes: int = 0

    @classmethod
    def of(cls, instances: int, **settings: int) -> Exchange:
        """Make `instances` prefill ranks and one decode rank; `settings` are those of SessionConfig."""
        layout = KVLayout(MODEL, Parallel(), PAGE_SIZE)
        made = {"slab_bytes_min": 1 << 10, "slab_bytes_max": 1 << 16, "ring_bytes": 1 << 20, **settings}
        names = [f"P{number}" for number in range(instances)]
        sources = {name: SourceSession(SessionConfig("d", name, 7, layout, **made), now_ns=0) for name in names}
        target = TargetSession(SessionConfig("d", "D", 9, KVLayout(MODEL, Parallel(), 2 * PAGE_SIZE), **made), now_ns=0)
        for core in (*sources.values(), target):
            ring = RegionInfo(0, made["ring_bytes"]) if core is target else None
            core.describe(b"", ring, {}, address=f"{core.config.instance}:1")
        return cls(sources, target)

    def claim(self, instance: str, room: int, tokens: int) -> None:
        """Claim a room at decode; nothing is delivered before `settle`."""
        core = self.sources[instance]
        endpoint = Endpoint(instance, core.config.layout, (RankAddress(0, f"{instance}:1", core.config.epoch),))
        count = -(-tokens // (2 * PAGE_SIZE))
        self.target.claim(
            Wanted(RoomKey(instance, room), endpoint, (CachePages(0, 0, tokens, count, bytes(4 * count)),)), self.now_ns
        )

    def offer(self, instance: str, room: int, tokens: int) -> None:
        """Offer a whole room at prefill."""
        self.sources[instance].offer(room, [(0, 0, tokens)], last=True, now_ns=self.now_ns)

    def settle(self, until_done: int | None = None) -> None:
        """Deliver messages and do the work until nothing is left, or until this many rooms are done."""
        waiting: deque[tuple[Session, PeerId, object]] = deque()
        self._collect(waiting)
        while waiting:
            if until_done is not None and len(self.done) >= until_done:
                return
            core, sender, message = waiting.popleft()
            core.receive(sender, message, self.now_ns)  # type: ignore[arg-type]
            self._collect(waiting)

    def tick(self, step_ns: int) -> None:
        """Let time pass; engines renew their leases."""
        self.now_ns += step_ns
        for core in (*self.sources.values(), self.target):
            core.renew(self.now_ns)
            core.tick(self.now_ns)
        self.settle()

    def _collect(self, waiting: deque[tuple[Session, PeerId, object]]) -> None:
        worked = True
        while worked:
            worked = False
            for name, source in self.sources.items():
                for effect in source.take_effects():
                    worked = True
                    if isinstance(effect, Send):
                        waiting.append((self.target, PeerId(name, 0, 0), effect.message))
                    if isinstance(effect, StartWrite):
                        self.slabs_count += 1
                        source.write_done(
                            effect.peer, effect.pair, effect.slab, effect.payload_bytes, self.now_ns, announce=True
                        )
                    self._note(effect)
            for effect in self.target.take_effects():
                worked = True
                if isinstance(effect, Send):
                    waiting.append((self.sources[effect.peer.instance], DECODE, effect.message))
                if isinstance(effect, StartScatter):
                    self.target.scatter_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, self.now_ns)
                self._note(effect)
            ring = self.target.granter.ring
            self.ring_peak_bytes = max(self.ring_peak_bytes, ring.capacity_bytes - ring.free_bytes)

    def _note(self, effect: object) -> None:
        if isinstance(effect, RoomEnded) and effect.reason is not Reason.NONE:
            self.failed.append((effect.half, effect.key, effect.reason))
        elif isinstance(effect, RoomEnded) and effect.half is Half.TARGET:
            self.done.append(effect.key)


def size_of(value: object, seen: set[int] | None = None) -> int:
    """Count the entries of all containers of a core, at any depth, which shows state that rooms leave behind."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None))):
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        return len(value) + sum(size_of(each, seen) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return len(value) + sum(size_of(each, seen) for each in value)
    fields = getattr(value, "__dict__", None)
    found = size_of(fields, seen) if fields is not None else 0
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            found += size_of(getattr(value, name, None), seen)
    return found
