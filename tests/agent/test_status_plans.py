"""Tests that `/v1/plan` between registered instances shows the mode that the decode rank's session would choose."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from msgspec.structs import replace

from longshore_agent.settings import Settings
from longshore_agent.status.plans import PlanDefaults, PlanQuery, PlanView, answer
from longshore_agent.worker import config as worker_config
from longshore_agent.worker.config import WorkerConfig
from longshore_spec.status import EngineStatus, InstanceStatus, PoolStatus
from longshore_wire.claims import Wanted
from longshore_wire.engine_messages import CachePages, Endpoint, Half, RankAddress
from longshore_wire.errors import LayoutError, LongshoreError, RoomError
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Parallel, Plane
from longshore_wire.peer_messages import RegionInfo, RoomKey
from longshore_wire.target import TargetSession
from longshore_wire.ways import Staging, Way, chosen_way

MODEL = ModelShape.kv(layers=4, kv_heads=8, head_dim=64, element_bytes=2)
GPU = "GPU-00000000-0000-0000-0000-000000000001"
LIFE = "life"
TOKENS = 256


def layout(tp: int, model: ModelShape = MODEL) -> KVLayout:
    return KVLayout(model, Parallel(tp=tp), 16)


def instance(name: str, laid_out: KVLayout, device: str, near: str | None = None) -> InstanceStatus:
    """Return an instance as the supervisor lists it; `near` is its workers' report at their start."""
    agent = agent_of(device)
    ranks = tuple(RankAddress(rank, f"h:{rank}", 7) for rank in range(laid_out.rank_count))
    places = {rank.rank: (device, agent if near is None else near) for rank in ranks}
    return InstanceStatus.of(Endpoint(name, laid_out, ranks, agent), (), places)


def agent_of(device: str) -> str:
    """Return the agent's name in an endpoint, as the supervisor gives it to workers of a kind of device."""
    return LIFE if device == "cpu" else f"{LIFE}.gpu"


def engine(target: InstanceStatus, *pools: PoolStatus) -> EngineStatus:
    """Return rank 0 of an instance as its worker lists it."""
    return EngineStatus(target.instance, 0, ("target",), target.layout, pools)


def planned(
    source: InstanceStatus,
    target: InstanceStatus,
    staging: Staging = Staging.AUTO,
    engines: tuple[EngineStatus, ...] = (),
) -> PlanView:
    settings = msgspec.structs.replace(PlanDefaults.of(Settings()), staging=staging)
    query = PlanQuery.model_validate({"source": source.instance, "target": target.instance, "chunk_tokens": TOKENS})
    return answer(query, (source, target), settings, engines=engines)


def claimed(source: InstanceStatus, target: InstanceStatus, staging: Staging, device: str) -> tuple[str, str]:
    """Return the mode and reason that a real session of target rank 0 chooses for its first pair."""
    settings = dataclasses.replace(Settings(), staging=staging)
    config = WorkerConfig(
        "d/0/0", "d", 9, target.layout.layout(), (Half.TARGET,), settings, port=0, agent=agent_of(device),
        device=device,
    ).session_config()  # fmt: skip
    session = TargetSession(config, now_ns=0)
    session.describe(b"", RegionInfo(0, 1 << 30), {})
    key = RoomKey("p", 1)
    session.claim(Wanted(key, source.endpoint(), (CachePages(0, 0, TOKENS, TOKENS // 16, bytes(4 * TOKENS // 16)),)), 0)
    pair = next(pair for pair in session.rooms[key].pairs.values() if pair.route is not None)
    if pair.open is None:
        return pair.way.name, pair.why.name
    choice = chosen_way(
        pair.open,
        config.crossover,
        (config.backend, "Unknown"),
        in_place=source.ranks[0].device == "cpu",
        lane_bytes=settings.lane_bytes,
        ring_bytes=config.ring_bytes,
    )
    return choice.way.name, choice.why.name


@pytest.mark.parametrize("staging", Staging)
@pytest.mark.parametrize("tp", [1, 2], ids=["whole pages", "parts of pages"])
@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("target_device", ["cpu", GPU])
@pytest.mark.parametrize("source_device", ["cpu", GPU])
def test_a_plan_by_names_says_what_the_session_of_the_decode_rank_chooses(
    monkeypatch: pytest.MonkeyPatch, source_device: str, target_device: str, reached: bool, tp: int, staging: Staging
) -> None:
    monkeypatch.setattr(worker_config, "reached_by_all", lambda _: reached)
    near = agent_of(target_device) if reached or target_device == "cpu" else ""
    source, target = instance("p", layout(tp), source_device), instance("d", layout(1), target_device, near)
    if target_device == GPU and staging is Staging.NEVER and near != source.agent:
        for ask in (planned, lambda *given: claimed(*given, GPU)):
            with pytest.raises(RoomError, match="those of decode d are on a GPU"):
                ask(source, target, staging)
        return
    found = planned(source, target, staging).pairs[0]
    assert (found.way.upper(), found.why.upper()) == claimed(source, target, staging, target_device)


def test_a_gpu_writes_host_memory_and_gpus_of_its_agent_directly_and_a_cpu_host_memory_only() -> None:
    ranks = {device: instance("p", layout(2), device) for device in ("cpu", GPU)}
    found = {
        (source_device, target_device): planned(source, instance("d", layout(1), target_device)).way
        for source_device, source in ranks.items()
        for target_device in ranks
    }
    assert [ends for ends, way in found.items() if way != "Direct"] == [("cpu", GPU)]


def test_a_gpu_of_another_agent_stages_into_host_memory_and_is_refused_where_staging_is_forbidden() -> None:
    source = msgspec.structs.replace(instance("p", layout(2), GPU), agent="another.gpu")
    target = instance("d", layout(1), "cpu")
    assert planned(source, target).way == "Staged"
    # Decode claims, and prefill refuses: no transport can read its pages in place.
    with pytest.raises(RoomError, match="on a GPU"):
        planned(source, target, Staging.NEVER)


def test_a_gpu_stages_into_pages_whose_rows_are_apart_and_the_plan_says_so() -> None:
    source, target = instance("p", layout(2), GPU), instance("d", layout(1), "cpu")
    settings = Settings()
    config = WorkerConfig(
        "d/0/0", "d", 9, target.layout.layout(), (Half.TARGET,), settings, port=0, agent=LIFE
    ).session_config()  # fmt: skip
    session = TargetSession(config, now_ns=0)
    session.describe(b"", RegionInfo(0, 1 << 30), {})
    for room, adjacent in ((1, True), (2, False)):
        key = RoomKey("p", room)
        pages = (TOKENS // 16, bytes(4 * TOKENS // 16))
        session.claim(Wanted(key, source.endpoint(), (CachePages(0, 0, TOKENS, *pages),), adjacent=adjacent), 0)
    ways = [{pair.way for pair in session.rooms[RoomKey("p", room)].pairs.values() if pair.route} for room in (1, 2)]
    assert ways == [{Way.DIRECT}, {Way.STAGED}]
    pools = [PoolStatus(number, 96, 1 << 20, adjacent=adjacent) for number, adjacent in ((0, True), (1, False))]
    found = [planned(source, target, engines=(engine(target, *given),)).way for given in (pools[:1], pools)]
    assert found == ["Direct", "Staged"]


def test_a_plan_by_names_is_for_the_memory_that_is_asked_for() -> None:
    source, device = instance("p", layout(2), GPU), instance("d", layout(1), GPU)
    host = msgspec.structs.replace(instance("d", layout(1), "cpu"), memory="host")
    defaults = PlanDefaults.of(Settings())
    for memory in ("device", "host"):
        query = PlanQuery.model_validate({"source": "p", "target": "d", "target_memory": memory})
        assert answer(query, (source, device, host), defaults).way == "Direct"
    query = PlanQuery.model_validate({"source": "p", "target": "d", "target_memory": "host"})
    with pytest.raises(LongshoreError, match=r"no instance 'd' with pages in host memory.*d \(device\)"):
        answer(query, (source, device), defaults)


def test_an_engine_whose_agent_takes_no_part_in_direct_is_not_direct() -> None:
    off = msgspec.structs.replace(instance("p", layout(2), "cpu"), agent="")
    assert planned(off, instance("d", layout(1), "cpu", near="")).way == "Staged"


def test_each_rank_of_a_target_chooses_by_its_own_device() -> None:
    source, target = instance("p", layout(1), GPU), instance("d", layout(2), GPU)
    apart = msgspec.structs.replace(target.ranks[1], near="")
    mixed = planned(source, msgspec.structs.replace(target, ranks=(target.ranks[0], apart)))
    assert [(pair.target_rank, pair.way, pair.why) for pair in mixed.pairs] == [
        (0, "Direct", "near"),
        (1, "Staged", "staging"),
    ]
    assert mixed.way == "Mixed"


def test_a_rank_that_has_not_registered_yet_is_taken_to_lie_where_the_first_one_does() -> None:
    source, target = instance("p", layout(1), GPU), instance("d", layout(2), GPU)
    partial = msgspec.structs.replace(target, ranks=target.ranks[:1])
    assert planned(source, partial).way == "Direct"
    assert planned(source, msgspec.structs.replace(target, ranks=())).way != "Direct"


def test_a_latent_on_gpus_that_do_not_reach_each_other_is_staged_as_its_claim_would_be() -> None:
    model = ModelShape.latent(2, 16, 2)
    source, target = instance("p", layout(1, model), GPU), instance("d", layout(1, model), GPU, near="")
    assert planned(source, target).pairs[0].way == Way.STAGED.name.capitalize()
    assert planned(source, instance("d", layout(1, model), GPU)).pairs[0].way == Way.DIRECT.name.capitalize()


def test_the_plan_of_each_cache_of_two_instances_is_asked_for_by_its_name() -> None:
    state = ModelShape(3, (Plane(8, 32, 3), Plane(1, 64, 2)), 2)
    caches = [KVLayout(state, Parallel(tp=tp), 3, PageOrder.SLOT, name="ssm") for tp in (2, 1)]
    sides = [
        instance(name, replace(layout(tp), others=(cache,)), "cpu")
        for name, tp, cache in zip("ab", (2, 1), caches, strict=True)
    ]
    assert all(side.endpoint().layout.caches[1] == cache for side, cache in zip(sides, caches, strict=True))
    query = {"source": "a", "target": "b", "chunk_tokens": TOKENS}
    found = [
        answer(PlanQuery.model_validate(query | more), tuple(sides), PlanDefaults.of(Settings()))
        for more in ({}, {"cache": "kv"}, {"cache": "ssm"})
    ]
    assert [(each.cache, each.bytes_per_token, each.slot_bytes) for each in found] == [
        ("kv", 4 * 8 * 64 * 2 * 2, 0),
        ("kv", 4 * 8 * 64 * 2 * 2, 0),
        ("ssm", 0, 3 * (8 * 32 * 3 + 64 * 2)),
    ]
    with pytest.raises(LayoutError, match=r"^cache is 'conv': the instances have kv, ssm$"):
        answer(PlanQuery.model_validate(query | {"cache": "conv"}), tuple(sides), PlanDefaults.of(Settings()))
