"""Tests the effect of each of an agent's variables on a worker's cores, from its text to the core's effects."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from core_outputs import effects_of, messages_of
from status_scene import agent, worker

from longshore_agent.settings import Settings
from longshore_agent.status.findings import Rules, readiness
from longshore_agent.worker import config as orders
from longshore_agent.worker.config import WorkerConfig
from longshore_spec.status import WorkerState
from longshore_wire.claims import Wanted
from longshore_wire.effects import PeerId, RoomEnded, SessionConfig, StartWrite
from longshore_wire.engine_messages import CachePages, Endpoint, Half, RankAddress
from longshore_wire.errors import Reason, RingError, RoomError
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel
from longshore_wire.links import PeerState
from longshore_wire.peer_messages import Claim, Demand, PeerMessage, Ping, RegionInfo, RoomKey
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way

GPU = "GPU-7e375b68-5e7c-3244-17df-0d90019d4b71"
MS, S = 10**6, 10**9
# A token is 1 KiB.
MODEL = ModelShape.kv(layers=4, kv_heads=4, head_dim=16, element_bytes=2)
PREFILL, DECODE = PeerId("P", 0, 0), PeerId("D", 0, 0)
# Rooms of some thousand tokens need many of these buffers; other limits are large.
SMALL = {
    "LONGSHORE_BACKEND": "Loopback",
    "LONGSHORE_LANE_BYTES": "1Mi",
    "LONGSHORE_SLAB_BYTES_MIN": "16Ki",
    "LONGSHORE_GPU_SLAB_BYTES_MIN": "16Ki",
    "LONGSHORE_RING_BYTES": "64Mi",
    "LONGSHORE_RING_SHARE_DIVISOR": "1",
    "LONGSHORE_GRANT_WINDOW": "1024",
    "LONGSHORE_GPU_GRANT_WINDOW": "1024",
}


def session_config(instance: str, half: Half, device: str, **settings: str) -> SessionConfig:
    """Return the configuration that a worker of an agent with these variables gives its core."""
    variables = SMALL | {f"LONGSHORE_{name.upper()}": value for name, value in settings.items()}
    order = PageOrder.HND if half is Half.SOURCE else PageOrder.NHD
    layout = KVLayout(MODEL, Parallel(), 16, order)
    found = Settings.from_environment(variables)
    return WorkerConfig(f"{instance}/0/0", instance, 7, layout, (half,), found, 0, device=device).session_config()


@dataclass
class Cores:
    """A prefill and a decode core of two agents with the same variables. No write is done before `write` is called."""

    source: SourceSession
    target: TargetSession
    now_ns: int = 0
    said: list[PeerMessage] = field(default_factory=list)  # by both, in order
    writes: list[StartWrite] = field(default_factory=list)
    ended: list[RoomEnded] = field(default_factory=list)

    @classmethod
    def of(cls, device: str = "cpu", **settings: str) -> Cores:
        source, target = (
            session_config(instance, half, device, **settings)
            for instance, half in (("P", Half.SOURCE), ("D", Half.TARGET))
        )
        found = cls(SourceSession(source, now_ns=0), TargetSession(target, now_ns=0))
        found.source.describe(b"", None, {}, address="h:1")
        found.target.describe(b"", RegionInfo(4096, target.ring_bytes), {})
        return found

    def claim(self, room: int, tokens: int) -> None:
        endpoint = Endpoint("P", self.source.config.layout, (RankAddress(0, "h:1", 7),))
        pages = -(-tokens // 16)
        self.target.claim(
            Wanted(RoomKey("P", room), endpoint, (CachePages(0, 0, tokens, pages, bytes(4 * pages)),)), self.now_ns
        )

    def offer(self, room: int, tokens: int, *, last: bool = True) -> None:
        self.source.offer(room, [(0, 0, tokens)], last=last, now_ns=self.now_ns)

    def begin(self, tokens: int, room: int = 1) -> None:
        """Claim and offer a room, and exchange messages until both cores are quiet."""
        self.claim(room, tokens)
        self.offer(room, tokens)
        self.settle()

    def settle(self) -> None:
        while self.exchange():
            pass

    def exchange(self) -> bool:
        asked, answered = messages_of(self.target), messages_of(self.source)
        for _, message in asked:
            self.source.receive(DECODE, message, self.now_ns)
        for _, message in answered:
            self.target.receive(PREFILL, message, self.now_ns)
        self.said += [message for _, message in (*asked, *answered)]
        for core in (self.source, self.target):
            for effect in effects_of(core):
                if isinstance(effect, StartWrite):
                    self.writes.append(effect)
                elif isinstance(effect, RoomEnded):
                    self.ended.append(effect)
        return bool(asked or answered)

    def tick_both(self, at_ns: int) -> None:
        self.now_ns = at_ns
        for core in (self.source, self.target):
            core.tick(at_ns)

    def heard(self, kind: type) -> list[PeerMessage]:
        return [message for message in self.said if isinstance(message, kind)]

    @property
    def slab_count(self) -> int:
        (*_, demand) = self.heard(Demand)
        assert isinstance(demand, Demand)
        return demand.slab_count


def slab_count(tokens: int = 4096, device: str = "cpu", **settings: str) -> int:
    cores = Cores.of(device, **settings)
    cores.begin(tokens)
    return cores.slab_count


def writes_at_once(tokens: int = 4096, device: str = "cpu", **settings: str) -> int:
    """Return the number of slabs that prefill may write before the first has arrived."""
    cores = Cores.of(device, **settings)
    cores.begin(tokens)
    assert cores.writes
    return len(cores.writes)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "reached_by_all", lambda device: True)


@pytest.mark.shows("agent.lane_bytes", "field.prefill.staging.bufferSize")
def test_a_slab_is_no_longer_than_a_lane() -> None:
    for lane_bytes in (1 << 18, 1 << 20):
        cores = Cores.of(lane_bytes=str(lane_bytes), lane_count="1", slab_bytes_min=str(lane_bytes // 2))
        cores.begin(8192)
        sizes = {write.payload_bytes for write in cores.writes}
        assert lane_bytes // 2 < max(sizes) <= lane_bytes


@pytest.mark.shows("agent.lane_count")
def test_a_room_is_cut_for_two_slabs_a_lane() -> None:
    assert (slab_count(256, lane_count="1"), slab_count(256, lane_count="4")) == (2, 8)


@pytest.mark.shows("agent.slab_bytes_min", "agent.gpu_slab_bytes_min")
@pytest.mark.parametrize(("name", "device"), [("slab_bytes_min", "cpu"), ("gpu_slab_bytes_min", GPU)])
def test_slabs_are_not_cut_below_their_minimum_which_gpus_have_of_their_own(name: str, device: str) -> None:
    other = {"slab_bytes_min": "gpu_slab_bytes_min", "gpu_slab_bytes_min": "slab_bytes_min"}[name]
    large = {"lane_bytes": "64Mi", "lane_count": "4"}
    assert slab_count(4096, device, **large) == 8
    assert slab_count(4096, device, **large, **{name: "2Mi"}) == 2
    assert slab_count(4096, device, **large, **{other: "2Mi"}) == 8


@pytest.mark.shows("agent.grant_window", "agent.gpu_grant_window")
@pytest.mark.parametrize(("name", "device"), [("grant_window", "cpu"), ("gpu_grant_window", GPU)])
def test_a_writer_is_granted_its_window_at_once_which_gpus_have_of_their_own(name: str, device: str) -> None:
    other = {"grant_window": "gpu_grant_window", "gpu_grant_window": "grant_window"}[name]
    for window in (1, 3):
        assert writes_at_once(4096, device, **{name: str(window)}, lane_bytes="128Ki") == window
    assert writes_at_once(4096, device, **{other: "1"}, lane_bytes="128Ki") > 3


@pytest.mark.shows("agent.ring_share_divisor")
def test_a_room_is_granted_no_more_than_its_share_of_the_ring() -> None:
    for divisor in (2, 8):
        cores = Cores.of(ring_bytes="2Mi", ring_share_divisor=str(divisor), lane_bytes="64Ki")
        cores.begin(4096)
        used_bytes = cores.target.granter.ring.used_bytes
        share_bytes = (2 << 20) // divisor
        assert share_bytes - (1 << 17) < used_bytes <= share_bytes


@pytest.mark.shows("agent.ring_bytes", "field.decode.staging.poolSize")
def test_the_ring_is_as_large_as_it_is_set_and_without_one_nothing_is_staged() -> None:
    for ring_bytes in (1 << 20, 4 << 20):
        cores = Cores.of(ring_bytes=str(ring_bytes), lane_bytes="64Ki")
        cores.begin(8192)
        assert ring_bytes - (1 << 17) < cores.target.granter.ring.used_bytes <= ring_bytes
    with pytest.raises(RingError, match=r"staging\.poolSize of 0 bytes"):
        Cores.of(ring_bytes="0", force_way="Staged").claim(1, 16)


@pytest.mark.shows("agent.force_way")
@pytest.mark.parametrize("way", ["Staged", "Slices"])
def test_a_forced_way_is_that_of_every_claim(way: str) -> None:
    cores = Cores.of(force_way=way)
    cores.claim(1, 64)
    cores.settle()
    assert {claim.way for claim in cores.heard(Claim)} == {Way[way.upper()]}


@pytest.mark.shows("agent.staging", "field.transfer.staging")
@pytest.mark.parametrize(("staging", "way"), [("Always", Way.STAGED), ("Never", Way.SLICES)])
def test_staging_is_used_always_or_never_as_it_is_set(staging: str, way: Way) -> None:
    cores = Cores.of(staging=staging)
    cores.claim(1, 64)
    cores.settle()
    assert {claim.way for claim in cores.heard(Claim)} == {way}


@pytest.mark.parametrize("staging", ["Auto", "Always", "Never"])
def test_pages_on_a_gpu_are_staged_unless_that_is_forbidden_and_then_refused_by_name(staging: str) -> None:
    cores = Cores.of(GPU, staging=staging)
    if staging == "Never":
        with pytest.raises(RoomError, match=r"transfer\.staging Auto or Always"):
            cores.claim(1, 64)
        return
    cores.claim(1, 64)
    cores.settle()
    assert {claim.way for claim in cores.heard(Claim)} == {Way.STAGED}


@pytest.mark.shows("agent.lease_s")
@pytest.mark.parametrize("lease_s", [2, 30])
def test_rooms_whose_engine_is_silent_end_with_their_lease(lease_s: int) -> None:
    cores = Cores.of(lease_s=str(lease_s), peer_timeout_s="3000")
    cores.offer(1, 64)
    cores.source.tick(lease_s * S - 1)
    assert not [effect for effect in effects_of(cores.source) if isinstance(effect, RoomEnded)]
    cores.source.tick(lease_s * S)
    (end,) = [effect for effect in effects_of(cores.source) if isinstance(effect, RoomEnded)]
    assert end.reason is Reason.LEASE_EXPIRED


@pytest.mark.shows("agent.retry_ms")
@pytest.mark.parametrize("retry_ms", [50, 400])
def test_what_is_not_answered_is_said_again_after_its_time(retry_ms: int) -> None:
    cores = Cores.of(retry_ms=str(retry_ms))
    cores.begin(64)
    cores.claim(2, 64)
    (first,) = [message for _, message in messages_of(cores.target) if isinstance(message, Claim)]
    cores.target.tick(retry_ms * MS - 1)
    assert not [message for _, message in messages_of(cores.target) if isinstance(message, Claim)]
    cores.target.tick(retry_ms * MS)
    assert [message for _, message in messages_of(cores.target) if isinstance(message, Claim)] == [first]


@pytest.mark.shows("agent.heartbeat_s")
@pytest.mark.parametrize("heartbeat_s", [0.5, 3])
def test_a_peer_is_pinged_once_a_heartbeat(heartbeat_s: float) -> None:
    cores = Cores.of(heartbeat_s=str(heartbeat_s), peer_timeout_s="100")
    cores.begin(64)
    before = len(cores.heard(Ping))
    cores.tick_both(int(heartbeat_s * S) - 1)
    cores.settle()
    assert len(cores.heard(Ping)) == before
    cores.tick_both(int(heartbeat_s * S))
    cores.settle()
    assert len(cores.heard(Ping)) > before


@pytest.mark.shows("agent.peer_timeout_s")
@pytest.mark.parametrize("timeout_s", [2, 20])
def test_a_peer_that_is_silent_for_the_peer_timeout_is_lost(timeout_s: int) -> None:
    cores = Cores.of(peer_timeout_s=str(timeout_s), heartbeat_s="1")
    cores.begin(64)
    for second in range(1, timeout_s):
        cores.target.tick(second * S)
        assert cores.target.peers[PREFILL].state is PeerState.ATTACHED, second
    cores.target.tick((timeout_s + 1) * S)
    assert cores.target.peers[PREFILL].state is PeerState.LOST


@pytest.mark.shows("agent.write_timeout_s")
@pytest.mark.parametrize("timeout_s", [10, 50])
def test_memory_for_ready_tokens_waits_for_bytes_as_long_as_the_write_timeout(timeout_s: int) -> None:
    cores = Cores.of(write_timeout_s=str(timeout_s), peer_timeout_s="3000", lease_s="3000")
    cores.begin(64)
    assert cores.writes
    # The core checks when it repeats a message, which it does with growing intervals.
    while not cores.ended and cores.now_ns < 2 * timeout_s * S:
        cores.tick_both(min(core.next_due_ns() for core in (cores.source, cores.target)))
        cores.settle()
    assert timeout_s * S <= cores.now_ns <= (timeout_s + 5) * S
    assert {(end.half, end.reason) for end in cores.ended} == {(half, Reason.TRANSFER_FAILED) for half in Half}


@pytest.mark.shows("agent.room_timeout_s")
@pytest.mark.parametrize("timeout_s", [10, 50])
def test_a_room_in_which_nothing_happens_fails_after_the_room_timeout(timeout_s: int) -> None:
    cores = Cores.of(room_timeout_s=str(timeout_s), lease_s="3000")
    cores.offer(1, 64)
    cores.source.tick(timeout_s * S - 1)
    cores.settle()
    assert not cores.ended
    cores.source.tick(timeout_s * S)
    cores.settle()
    assert [(end.half, end.key.room) for end in cores.ended] == [(Half.SOURCE, 1)]


@pytest.mark.shows("agent.rooms_max")
@pytest.mark.parametrize("rooms_max", [1, 3])
def test_a_worker_takes_as_many_rooms_as_it_is_set_and_is_busy_for_the_next(rooms_max: int) -> None:
    cores = Cores.of(rooms_max=str(rooms_max))
    for say in (cores.claim, cores.offer):
        for room in range(rooms_max):
            say(room, 64)
        with pytest.raises(RoomError) as caught:
            say(rooms_max, 64)
        assert caught.value.reason is Reason.BUSY


@pytest.mark.shows("agent.ended_rooms_max")
@pytest.mark.parametrize("ended_rooms_max", [64, 66])
def test_as_many_ended_rooms_are_remembered_as_are_set(ended_rooms_max: int) -> None:
    cores = Cores.of(ended_rooms_max=str(ended_rooms_max))
    for room in range(ended_rooms_max + 1):
        cores.offer(room, 64)
        cores.source.cancel(RoomKey("P", room), Reason.CANCELLED, "enough", 0)
    assert [key.room for key in cores.source.ended] == list(range(1, ended_rooms_max + 1))
    with pytest.raises(RoomError):
        cores.offer(1, 64)
    cores.offer(0, 64)


@pytest.mark.shows("agent.start_limit_s")
@pytest.mark.parametrize("limit_s", [5, 90])
def test_a_worker_may_start_as_long_as_is_set_before_its_agent_is_unready(limit_s: int) -> None:
    rules = Rules.of(Settings.from_environment({"LONGSHORE_START_LIMIT_S": str(limit_s)}))

    def reasons(age_s: float) -> list[str]:
        starting = worker("d/1", state=WorkerState.STARTING, state_age_s=age_s)
        return [check.reason for check in readiness(agent(worker(), starting), rules).checks if not check.ok]

    assert (reasons(limit_s), reasons(limit_s + 0.1)) == ([], ["WorkerStarting"])
