"""Tests that DIRECT's kernels are compiled when a pool is registered, so that no room waits, and only if needed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from kernel_process import KernelProcess
from page_shapes import Shape

from longshore_agent.kernels.cpu_copy import CpuCopier
from longshore_agent.memory.cuda import Allocation
from longshore_agent.memory.host_memory import StagingBuffer
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.worker import resources
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.moving import Mover
from longshore_wire.engine_messages import Half
from longshore_wire.layout import PageOrder
from longshore_wire.ways import Staging, Way

NEAR = Shape(heads=4)
TWELVE = Shape(heads=12)
OPAQUE = Shape(order=PageOrder.OPAQUE, blob_bytes=1024)


@pytest.mark.parametrize(
    ("near", "fars"),
    [
        (NEAR, [(NEAR, 4), (Shape(heads=2), 2), (Shape(heads=1), 1), (Shape(heads=8), 4)]),
        (dataclasses.replace(NEAR, order=PageOrder.HND), [(dataclasses.replace(NEAR, order=PageOrder.HND), 4)]),
        (OPAQUE, [(OPAQUE, 4), (dataclasses.replace(OPAQUE, heads=2), 2)]),
        (TWELVE, [(dataclasses.replace(TWELVE, heads=count), count) for count in (12, 6, 4, 3, 2, 1)]),
    ],
    ids=["token-major, to other TP sizes", "head-major", "opaque", "twelve heads"],
)
def test_the_first_room_of_each_peer_compiles_nothing(near: Shape, fars: list[tuple[Shape, int]]) -> None:
    with KernelProcess("prepared_checks", {}) as process:
        at_registration, by_rooms, launches = process.run("first_rooms", near, fars)
    assert at_registration > 0
    assert by_rooms == 0
    assert launches == len(fars)


@pytest.mark.parametrize("shape", [NEAR, TWELVE, dataclasses.replace(TWELVE, order=PageOrder.HND)])
def test_the_first_staged_slab_for_each_tp_size_compiles_nothing(shape: Shape) -> None:
    counts = [count for count in range(1, shape.heads + 1) if shape.heads % count == 0]
    with KernelProcess("prepared_checks", {}) as process:
        at_registration, by_slabs, launches = process.run("first_slabs", shape, counts)
    assert at_registration > 0
    assert by_slabs == 0
    assert launches == 2 * len(counts)


@pytest.mark.parametrize(
    ("near", "far", "heads"),
    [
        (NEAR, Shape(heads=8, page_size=4, page_count=40), 4),
        (dataclasses.replace(NEAR, order=PageOrder.HND), Shape(page_size=17), 2),
        (OPAQUE, OPAQUE, 4),
    ],
    ids=["smaller pages", "pages that nothing divides", "opaque"],
)
@pytest.mark.parametrize("kind", ["gather", "scatter", "direct"])
def test_the_driver_is_given_the_same_by_a_bound_launch_as_by_one_that_is_made_for_its_slab(
    near: Shape, far: Shape, heads: int, kind: str
) -> None:
    with KernelProcess("prepared_checks", {}) as process:
        bound, made = process.run("arguments_of_launches", near, far, heads, kind)
    assert len(bound) == 4
    assert bound == made


def test_a_version_of_triton_that_was_not_tried_launches_by_itself_and_is_told_of_once() -> None:
    with KernelProcess("prepared_checks", {}) as process:
        queued, by_driver, value_counts, logged = process.run("untried_triton")
    assert queued == ["gather", "scatter"]
    assert by_driver == 0
    assert value_counts == [26, 26]
    assert len(logged) == 1
    assert "99.1.0" in logged[0]


class Recorder:
    """A copier that records the prepared pools, and which of them were prepared for DIRECT."""

    def __init__(self) -> None:
        self.pools: list[object] = []
        self.direct: list[object] = []

    def prepare_pool(self, pool: object, *, direct: bool) -> None:
        self.pools.append(pool)
        self.direct += [pool] * direct


def moving_parts(
    monkeypatch: pytest.MonkeyPatch, device: str, roles: tuple[Half, ...], agent: str, **changes: Any
) -> tuple[Mover, list[Allocation]]:
    """Return a worker's resources on a simulated device, and the kind of each buffer that it has allocated there."""
    kinds: list[Allocation] = []

    def buffer(_: object, length_bytes: int, *, allocation: Allocation, **options: Any) -> StagingBuffer:
        kinds.append(allocation)
        return StagingBuffer(length_bytes, **options)

    settings = dataclasses.replace(Settings(), lane_bytes=1 << 20, ring_bytes=1 << 20, **changes)
    transport = SimpleNamespace(register=lambda *_: 1, close=lambda: None)
    played: dict[str, object] = {
        "open_device": lambda _: SimpleNamespace(index=0, enter=lambda: None, attribute=lambda _: 0),
        "make_transport": lambda *_: transport,
        "DeviceStagingBuffer": buffer,
        "device_copier": lambda *_: Recorder(),
    }
    for name, value in played.items():
        monkeypatch.setattr(resources, name, value)
    config = WorkerConfig("p/0/0", "p", 1, NEAR.layout, roles, settings, port=0, agent=agent, device=device)
    return Mover(config, Metrics(), SpanRecorder(1), lambda *_: None), kinds


def prepared(monkeypatch: pytest.MonkeyPatch, device: str, roles: tuple[Half, ...], agent: str, **changes: Any) -> bool:
    """Whether a worker prepares a pool for DIRECT when it is registered."""
    mover, _ = moving_parts(monkeypatch, device, roles, agent, **changes)
    pool: Any = object()
    mover.prepare_pool(pool)
    copier: Any = mover.resources.copier
    mover.resources.close()
    if device == "cpu":
        assert isinstance(copier, CpuCopier)
        return False
    assert copier.pools == [pool]
    return bool(copier.direct)


BOTH = (Half.SOURCE, Half.TARGET)


@pytest.mark.parametrize(
    ("device", "roles", "agent", "changes", "expected"),
    [
        ("GPU-1", BOTH, "life.gpu", {}, True),
        ("GPU-1", (Half.SOURCE,), "life.gpu", {"staging": Staging.NEVER}, True),
        ("GPU-1", (Half.SOURCE,), "life.gpu", {"force_way": Way.DIRECT, "staging": Staging.ALWAYS}, True),
        ("cpu", BOTH, "life", {}, False),
        ("GPU-1", (Half.TARGET,), "life.gpu", {}, False),
        ("GPU-1", BOTH, "", {}, False),
        ("GPU-1", BOTH, "life.gpu", {"staging": Staging.ALWAYS}, False),
        ("GPU-1", BOTH, "life.gpu", {"force_way": Way.STAGED}, False),
    ],
    ids=[
        "may",
        "never staged",
        "forced",
        "on a CPU",
        "only a target",
        "switched off",
        "always staged",
        "forced to stage",
    ],
)
def test_a_pool_that_can_never_be_direct_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, device: str, roles: tuple[Half, ...], agent: str, changes: Any, expected: bool
) -> None:
    assert prepared(monkeypatch, device, roles, agent, **changes) is expected


@pytest.mark.shows("agent.gpu_staging_memory")
@pytest.mark.parametrize("kind", Allocation)
def test_lanes_ring_and_the_memory_of_probes_are_of_the_kind_that_the_settings_name(
    monkeypatch: pytest.MonkeyPatch, kind: Allocation
) -> None:
    mover, kinds = moving_parts(monkeypatch, "GPU-1", BOTH, "", gpu_staging_memory=kind)
    assert kinds == [kind] * 3
    mover.resources.close()
