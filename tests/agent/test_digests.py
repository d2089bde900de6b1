"""Rooms with digests: damage anywhere between prefill's pages and decode's fails its room alone, and names the place.

Both halves have the real core, pipeline and transport, in this process, so that a test can damage what a thread holds.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from agent_fleet import World, over
from agent_world import Engine, Request
from fault_judge import carries
from fault_table import DAMAGES, DONE
from fault_table import failed as failed_with
from half_worker import TOKENS, Halves
from page_shapes import Shape, opened

from longshore_agent.kernels import cpu_copy
from longshore_agent.kernels.copier import Copy, PlaneRows, Slab
from longshore_agent.kernels.cpu_copy import CpuCopier
from longshore_agent.pipeline import life
from longshore_agent.pipeline.life import LaneCounts, OutboundTools
from longshore_agent.pipeline.slabs import OutboundEnd, OutboundSlab, PageTable
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder, StageLog
from longshore_agent.transports.base import Pieces
from longshore_client import Half, PageOrder, RoomEventKind
from longshore_spec.agent_config import Backend
from longshore_wire.effects import PeerId, StartScatter, StartWrite
from longshore_wire.errors import Reason
from longshore_wire.peer_messages import PairKey, RoomKey
from longshore_wire.plan import Pair
from longshore_wire.ways import Way

BACKENDS = over(Backend.LOOPBACK, Backend.NIXL, Backend.MOONCAKE)
WAYS = [Way.STAGED, Way.CONTIGUOUS, Way.SLICES]
# Of one head of one token.
ROW_BYTES = 64
PAYLOAD_BYTES = 2 * 2 * TOKENS * 2 * ROW_BYTES
Plant = Callable[[pytest.MonkeyPatch, Halves], None]


def is_at_source() -> bool:
    """Whether this thread is one of a source."""
    return threading.current_thread().name.startswith("lane-")


def flip(address: int) -> None:
    """Change one bit of memory."""
    ctypes.c_uint8.from_address(address).value ^= 4


def around_submit(patch: pytest.MonkeyPatch, change: Callable[[Slab], None], *, gather: bool) -> None:
    """Call `change` with the slab: after each gather, or before each scatter."""
    real = CpuCopier.submit

    def submit(self: CpuCopier, copy: Copy) -> Any:
        if not gather and isinstance(copy.source, Slab):
            change(copy.source)
        ticket = real(self, copy)
        if gather and isinstance(copy.target, Slab):
            change(copy.target)
        return ticket

    patch.setattr(CpuCopier, "submit", submit)


def around_copy(patch: pytest.MonkeyPatch, change: Callable[[PlaneRows], PlaneRows], *, at_source: bool) -> None:
    """Change the addresses that one side copies."""
    real = cpu_copy.copy_addresses

    def copy_addresses(rows: PlaneRows, **given: Any) -> None:
        real(change(rows) if is_at_source() == at_source else rows, **given)

    patch.setattr(cpu_copy, "copy_addresses", copy_addresses)


def lane_bit(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    around_submit(patch, lambda slab: flip(slab.memory.address + slab.offset_bytes + 5), gather=True)


def ring_bit(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    around_submit(patch, lambda slab: flip(slab.memory.address + slab.offset_bytes + 5), gather=False)


def stale_slab(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    """Leave the payload of another slab before the right trailer."""
    other = np.random.default_rng(9).bytes(PAYLOAD_BYTES)
    around_submit(
        patch, lambda slab: ctypes.memmove(slab.memory.address + slab.offset_bytes, other, len(other)), gather=False
    )


def page_bit(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    """Let the copy read another bit than the digest."""
    size = 64 * 8 * 2 * ROW_BYTES
    other = ctypes.create_string_buffer(size)

    def change(rows: PlaneRows) -> PlaneRows:
        ctypes.memmove(other, int(rows.source_planes[0]), size)
        flip(ctypes.addressof(other) + int(rows.segments[0, 0]) + 5)
        planes = rows.source_planes.copy()
        planes[0] = ctypes.addressof(other)
        return rows._replace(source_planes=planes)

    around_copy(patch, change, at_source=True)


def shifted(column: int) -> Callable[[PlaneRows], PlaneRows]:
    """Use the page before the right one on one side of the first segment."""

    def change(rows: PlaneRows) -> PlaneRows:
        segments = rows.segments.copy()
        segments[0, column] -= 8 * 2 * ROW_BYTES
        return rows._replace(segments=segments)

    return change


def wrong_page_read(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    around_copy(patch, shifted(0), at_source=True)


def wrong_page_written(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    around_copy(patch, shifted(1), at_source=False)


def swapped_heads(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    """Swap the two heads of the first token in the ring."""

    def swap(slab: Slab) -> None:
        at = slab.memory.address + slab.offset_bytes
        rows = [ctypes.string_at(at + head * ROW_BYTES, ROW_BYTES) for head in (1, 0)]
        ctypes.memmove(at, b"".join(rows), 2 * ROW_BYTES)

    around_submit(patch, swap, gather=False)


STAGED_PLANTS: dict[str, Plant] = {
    "a bit in the lane": lane_bit,
    "a bit in the ring": ring_bit,
    "a bit in prefill's pages": page_bit,
    "a wrong page that is read": wrong_page_read,
    "a wrong page that is written": wrong_page_written,
    "swapped heads": swapped_heads,
    "a stale slab": stale_slab,
}


def landed_bit(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    """Change a bit that was written in place."""
    real = CpuCopier.digest

    def digest(self: CpuCopier, *given: Any) -> Any:
        if not is_at_source():
            view = given[0][0].view
            flip(int(view.planes[0].addresses[0] + view.pages[0] * view.planes[0].page_stride) + 5)
        return real(self, *given)

    patch.setattr(CpuCopier, "digest", digest)


def wrong_target(patch: pytest.MonkeyPatch, halves: Halves) -> None:
    """Write a piece where another belongs."""
    real = life.pieces_in_place

    def pieces(*given: Any) -> Pieces:
        found = real(*given)
        return found._replace(targets=np.roll(found.targets, 1))

    patch.setattr(life, "pieces_in_place", pieces)


def failed(halves: Halves, room: int) -> str:
    """Run a room that must fail by its digests in both halves; return the text."""
    halves.begin(room, digest=True)
    ends = [halves.end(room, half) for half in (Half.TARGET, Half.SOURCE)]
    assert [end.reason for end in ends] == [Reason.DIGEST_MISMATCH] * 2, ends
    halves.run(lambda: not halves.prefill.session.rooms and not halves.decode.session.rooms)
    assert halves.decode.mover.metrics.snapshot().value("longshore_digests_total", result="different") == 1
    return ends[0].text


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_room_with_digests_arrives_over_every_transport_and_way_and_each_slab_is_compared(make, backend, way) -> None:
    halves = make(backend=backend, force_way=way, slab_bytes_min=1 << 14)
    pages = halves.begin(1, digest=True)
    assert halves.end(1).reason is Reason.NONE
    assert halves.arrived(pages)
    slabs = halves.decode.mover.metrics.snapshot().value("longshore_slabs_total", half="target", way=way.name.lower())
    assert slabs >= 1
    assert halves.decode.mover.metrics.snapshot().value("longshore_digests_total", result="equal") == slabs


@pytest.mark.parametrize("plant", STAGED_PLANTS.values(), ids=STAGED_PLANTS)
def test_damage_to_a_staged_slab_fails_its_room_and_names_layer_head_rank_and_slab(make, plant, monkeypatch) -> None:
    halves = make()
    with monkeypatch.context() as patch:
        plant(patch, halves)
        text = failed(halves, 1)
    assert re.match(
        r"layer [01], [KV], head 0: tokens 0 to 64 in decode rank 0's pages are not those of prefill rank 0 \(slab 0",
        text,
    )
    pages = halves.begin(2, digest=True)
    assert halves.end(2).reason is Reason.NONE
    halves.arrived(pages)
    held = halves.decode.pages
    assert np.array_equal(held.planes[:, :, pages], held.expected[:, :, pages])


@pytest.mark.parametrize("plant", [landed_bit, wrong_target])
@pytest.mark.parametrize("backend", BACKENDS)
def test_damage_to_pages_that_were_written_in_place_fails_the_room(make, backend, plant, monkeypatch) -> None:
    halves = make(backend=backend, force_way=Way.SLICES)
    with monkeypatch.context() as patch:
        plant(patch, halves)
        assert failed(halves, 1).startswith("layer 0, K, head 0")
    halves.begin(2, digest=True)
    assert halves.end(2).reason is Reason.NONE


def test_without_digests_the_same_damage_is_not_found(make, monkeypatch) -> None:
    halves = make()
    lane_bit(monkeypatch, halves)
    pages = halves.begin(1)
    assert halves.end(1).reason is Reason.NONE
    assert not halves.arrived(pages)
    scatters = [effect for effect in halves.decode.effects if isinstance(effect, StartScatter)]
    assert {(effect.digest_key, effect.digests) for effect in scatters} == {(b"", b"")}


@pytest.mark.shows("agent.digest", "field.integrity.digest")
def test_a_deployment_that_asks_for_digests_compares_every_room(make, monkeypatch) -> None:
    halves = make(digest=True)
    lane_bit(monkeypatch, halves)
    halves.begin(1)
    assert halves.end(1).reason is Reason.DIGEST_MISMATCH


def test_a_source_that_sends_no_digests_fails_the_room(make, monkeypatch) -> None:
    halves, real = make(), CpuCopier.submit
    monkeypatch.setattr(CpuCopier, "submit", lambda self, copy: real(self, copy._replace(digest_key=b"")))
    halves.begin(1, digest=True)
    end = halves.end(1)
    assert end.reason is Reason.UNSUPPORTED
    assert "has sent no digests, which the room asks for: update its agent" in end.text


def direct_end(first_page_written: int) -> tuple[OutboundEnd, float]:
    """Copy a slab directly between two pools, into pages from this one on instead of 0; return its end, and the count."""
    shape = Shape(layers=2, heads=2, head_dim=16, page_size=8, page_count=8)
    layout, metrics = shape.layout, Metrics()
    pages = np.arange(4, dtype=np.int32)
    route = Pair(0, 0, (0, 2), ((0, 2),), layout.token_bytes, Way.DIRECT)
    pair = PairKey(RoomKey("prefill", 1), 0, 0, 1, 1, "decode", 0)
    effect = StartWrite(
        PeerId("decode", 0, 0),
        pair,
        0,
        (0, 30),
        route,
        Way.DIRECT,
        30 * layout.token_bytes,
        0,
        0,
        30,
        pages.tobytes(),
        0,
        b"key",
    )
    log = StageLog(metrics, SpanRecorder(8), later=False)
    tools = OutboundTools(CpuCopier(), None, None, LaneCounts([0], [0]), log, 1)  # type: ignore[arg-type]
    with opened(shape, seed=1) as near, opened(shape, seed=None) as far:
        table = PageTable(0, pages)
        attach: Any = None
        slab = OutboundSlab(effect, near, table, "decode", attach, False, far, PageTable(0, pages))
        real = cpu_copy.copy_addresses

        def copy_addresses(rows: PlaneRows, **given: Any) -> None:
            segments = rows.segments.copy()
            segments[0, 1] += first_page_written * far.sections[0].groups[0].page_stride
            real(rows._replace(segments=segments), **given)

        with patch.object(cpu_copy, "copy_addresses", copy_addresses):
            steps = life.outbound(slab, tools)
            while True:
                try:
                    assert next(steps).passed()
                except StopIteration as stop:
                    return stop.value, metrics.snapshot().value("longshore_digests_total")


def test_a_direct_copy_compares_both_sides_itself() -> None:
    end, compared = direct_end(first_page_written=0)
    assert (end.error, compared) == ("", 1)
    end, compared = direct_end(first_page_written=5)
    assert (end.reason, compared) == (Reason.DIGEST_MISMATCH, 1)
    assert "direct" in end.error


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[tuple[Engine, dict[str, Engine]]]:
    world = World(tmp_path_factory.mktemp("digests"), LONGSHORE_BACKEND="NIXL", LONGSHORE_DIRECT="true")
    try:
        near, far = world.agent("near"), world.agent("far")
        target = [Half.TARGET]
        source = world.engine(near, "source", 2, roles=[Half.SOURCE])
        starting = {
            "direct": world.engine(near, "direct", page_size=4, roles=target),
            "staged": world.engine(far, "staged", 3, order=PageOrder.HND, roles=target),
            "slices": world.engine(world.agent("in-place", LONGSHORE_FORCE_WAY="Slices"), "slices", roles=target),
        }
        yield source.result(), {name: engine.result() for name, engine in starting.items()}
    finally:
        world.close()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Iterator[tuple[Path, Engine, dict[str, Engine]]]:
    """Real agents whose writes each land with a bit changed while a file exists."""
    directory = tmp_path_factory.mktemp("damaged")
    rule = {"kind": "damage", "count": None, "when": str(directory / "damage")}
    world = World(directory, LONGSHORE_BACKEND="Loopback")
    try:
        source = world.engine(
            world.agent("prefill", LONGSHORE_LOOPBACK_FAULTS=json.dumps([rule])), "from", 2, roles=[Half.SOURCE]
        )
        starting = {
            name: world.engine(world.agent(name, LONGSHORE_FORCE_WAY=way), name, roles=[Half.TARGET])
            for name, way in (("staged", "Staged"), ("in-place", "Slices"))
        }
        yield directory / "damage", source.result(), {name: engine.result() for name, engine in starting.items()}
    finally:
        world.close()


@carries(*DAMAGES)
def test_a_bit_that_changes_on_the_wire_ends_as_the_table_says_and_the_next_room_arrives(damaged, judge) -> None:
    switch, source, targets = damaged
    target = targets["in-place" if "in place" in judge.wrong.fault else "staged"]
    judge.begin(source.agent, target.agent)
    before = target.agent.metric("longshore_digests_total", result="different")
    each = Request(source, target, 40, digest="with digests" in judge.wrong.fault)
    switch.touch()
    each.claim()
    each.offer()
    found = each.ends()
    switch.unlink()
    words = [DONE if end.kind is RoomEventKind.DONE else failed_with(end.reason) for end in found]
    (prefill,), (decode,) = set(words[:2]), set(words[2:])
    judge.sees(prefill, decode)
    different = round(target.agent.metric("longshore_digests_total", result="different") - before)
    judge.counts(different)
    if judge.wrong.counted:
        assert different >= 1
        assert "in decode rank 0's pages are not those of prefill rank" in found[-1].text
    else:
        assert not target.intact()
        target.ranks[0].expected[:] = target.ranks[0].planes
    after = Request(source, target, 40, digest=True)
    after.claim()
    after.offer()
    after.arrives()
    assert target.intact()


@pytest.mark.shows("argument.receive.digest")
@pytest.mark.parametrize("way", ["direct", "staged", "slices"])
def test_real_agents_compare_every_slab_of_a_room_that_asks_for_it_and_of_no_other(fleet, way) -> None:
    source, targets = fleet
    agent = source.agent if way == "direct" else targets[way].agent

    def compared() -> float:
        return agent.metric("longshore_digests_total", result="equal")

    before = compared()
    for digest in (True, False):
        each = Request(source, targets[way], 333, prefix=37, cuts=(100, 200), digest=digest)
        each.claim()
        each.offer()
        each.arrives()
        assert targets[way].intact()
        if digest:
            slabs, before = compared() - before, compared()
            assert slabs >= len(targets[way].ranks)
    assert compared() == before
    assert agent.metric("longshore_digests_total", result="different") == 0
