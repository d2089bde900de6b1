"""Tests the crossover table: values between and beyond its points, invalid tables, and when a core chooses."""

from __future__ import annotations

import msgspec
import pytest
from core_outputs import messages_of
from hypothesis import given
from hypothesis import strategies as st
from source_voice import attach_to, stay_alive

from longshore_wire.claims import Wanted
from longshore_wire.crossover import WHOLE_PAGES, Crossover, Default, Measured, Row, read, write
from longshore_wire.effects import PeerId, SessionConfig
from longshore_wire.engine_messages import CachePages, Endpoint, RankAddress
from longshore_wire.errors import ConfigError, Reason, RingError
from longshore_wire.layout import Attention, KVLayout, ModelShape, PageOrder, Parallel
from longshore_wire.links import WIRE_WAIT_NS
from longshore_wire.peer_messages import PROTOCOL_VERSION, Attach, Claim, RegionInfo, RoomKey, WireFound
from longshore_wire.plan import plan
from longshore_wire.target import TargetSession
from longshore_wire.ways import Staging, Way, Why, choose

MODEL = ModelShape.kv(2, 4, 16, 2)  # a token is 512 bytes: 2 layers, K and V, 4 heads of 32 bytes
WHOLE = KVLayout(MODEL, Parallel(), 16)  # a page of one plane is 2,048 bytes
HALVES = KVLayout(MODEL, Parallel(2), 16)  # a run is 64 bytes
PREFILL = PeerId("P", 0, 0)
NOW_NS = 1_000_000_000
PROBE = RegionInfo(4096, 4096)

# In place is cheaper up to 10 kB of short runs, and from 100 kB on of long ones.
TABLE = Crossover(
    measured=(
        Measured(
            "NIXL",
            "TCP",
            (
                Row(64, (1_000, 100_000), (0.010, 0.010), (0.001, 0.100)),
                Row(2048, (10_000, 1_000_000), (0.001, 0.100), (0.010, 0.010)),
            ),
        ),
    )
)


def chosen(source: KVLayout, target: KVLayout, tokens: int, wire: str = "TCP", **options: object) -> tuple[Way, Why]:
    made = plan(source, target)
    can_stage = bool(options.pop("can_stage", True))
    table = options.pop("table", TABLE)
    assert isinstance(table, Crossover)
    left_open = made.open_pair(made.pairs[0], (0, tokens), lane_bytes=1 << 30, ring_bytes=1 << 30)
    found = choose(left_open._replace(can_stage=can_stage), table, ("NIXL", wire))
    return found.way, found.why


@pytest.mark.parametrize(
    ("source", "tokens", "way"),
    [
        (HALVES, 4, Way.SLICES),  # 1 kB
        (HALVES, 30, Way.SLICES),  # 7.7 kB
        (HALVES, 60, Way.STAGED),  # 15 kB
        (HALVES, 4000, Way.STAGED),
        (WHOLE, 16, Way.STAGED),  # 8 kB
        (WHOLE, 160, Way.STAGED),  # 82 kB
        (WHOLE, 256, Way.CONTIGUOUS),  # 131 kB
        (WHOLE, 100_000, Way.CONTIGUOUS),
    ],
)
def test_the_cheaper_way_is_taken_between_the_points_of_the_table_and_beyond_them(source, tokens, way):
    assert chosen(source, WHOLE, tokens) == (way, Why.MEASURED)


def test_runs_of_a_length_between_two_rows_follow_both():
    between = KVLayout(MODEL, Parallel(), 16, PageOrder.HND)  # a run of one head of a page of 4 tokens: 128 bytes
    entry = TABLE.measured[0]
    staged = [entry.seconds(run, 10_000)[0] for run in (64, 128, 362, 1024, 2048)]
    assert staged == sorted(staged, reverse=True)
    assert staged[0] == pytest.approx(0.010)
    assert staged[2] == pytest.approx((0.010 * 0.001) ** 0.5, rel=0.01)
    assert staged[-1] == pytest.approx(0.001)
    small = KVLayout(MODEL, Parallel(), 4, PageOrder.HND)
    assert chosen(between, small, 16)[1] is Why.MEASURED


def test_beyond_the_largest_total_both_ways_grow_with_the_bytes():
    entry = TABLE.measured[0]
    assert entry.seconds(2048, 4_000_000) == pytest.approx((0.400, 0.040))
    assert entry.seconds(2048, 100) == pytest.approx(entry.seconds(2048, 10_000))
    assert entry.seconds(1 << 30, 1_000_000) == pytest.approx((0.100, 0.010))


@pytest.mark.parametrize(
    ("source", "table", "way"),
    [
        (WHOLE, WHOLE_PAGES, Way.CONTIGUOUS),
        (HALVES, WHOLE_PAGES, Way.STAGED),
        (WHOLE, Crossover(default=Default("large", 1 << 20)), Way.STAGED),
        (HALVES, Crossover(default=Default("pieces", 0, 64)), Way.SLICES),
        (HALVES, Crossover(default=Default("pieces", 0, 65)), Way.STAGED),
    ],
)
def test_where_nothing_was_measured_the_named_default_decides_by_the_length_of_runs(source, table, way):
    assert chosen(source, WHOLE, 64, "RDMA", table=table) == (way, Why.DEFAULT)


def test_what_no_ring_takes_is_never_staged():
    assert chosen(WHOLE, WHOLE, 16, can_stage=False) == (Way.CONTIGUOUS, Why.NO_RING)
    assert chosen(HALVES, WHOLE, 64, "RDMA", can_stage=False) == (Way.SLICES, Why.NO_RING)


@given(st.data())
def test_a_table_that_was_written_is_read_back_equal(data: st.DataObject):
    sizes = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=4, unique=True).map(sorted)
    rows = []
    for run in data.draw(sizes):
        totals = data.draw(sizes)
        times = st.lists(st.floats(1e-9, 1e9), min_size=len(totals), max_size=len(totals))
        rows.append(Row(run, tuple(totals), tuple(data.draw(times)), tuple(data.draw(times))))
    table = TABLE.put(Measured("Mooncake", "TCP", tuple(rows), 'a "machine", [1, 2]', "2026-11-22"))
    assert read(write(table), "it") == table


def test_a_new_measurement_takes_the_place_of_that_of_the_same_wire_alone():
    other = msgspec.structs.replace(TABLE.measured[0], wire="SharedMemory")
    newer = msgspec.structs.replace(TABLE.measured[0], date="later")
    assert TABLE.put(other).put(newer).measured == (other, newer)


def test_nvlink_goes_by_what_was_measured_of_cuda_ipc_until_it_was_measured_itself():
    ipc, nvlink = (msgspec.structs.replace(TABLE.measured[0], wire=wire) for wire in ("CudaIPC", "NVLink"))
    assert TABLE.entry("NIXL", "NVLink") is None
    table = TABLE.put(ipc)
    assert table.entry("NIXL", "NVLink") == ipc
    assert table.entry("Mooncake", "NVLink") is None
    assert table.put(nvlink).entry("NIXL", "NVLink") == nvlink
    assert table.put(nvlink).entry("NIXL", "CudaIPC") == ipc
    assert TABLE.put(nvlink).entry("NIXL", "CudaIPC") is None


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[1]", ["Expected `object`"]),
        ('{"version": 2}', ["version is 2"]),
        ('{"verison": 1}', ["verison"]),
        (
            """{"measured": [{"backend": "NIXL", "wire": "TCP", "rows": [
            {"run_bytes": 9, "total_bytes": [2, 1], "staged_s": [1, 1], "in_place_s": [1, 0]}]},
            {"backend": "NIXL", "wire": "TCP", "rows": []}]}""",
            ["run_bytes 9: total_bytes", "run_bytes 9: in_place_s", "is there twice", "rows: give at least one"],
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_every_fault_and_the_file_by_name(text, faults):
    with pytest.raises(ConfigError) as caught:
        read(text.encode(), "the file")
    assert len(caught.value.faults) == len(faults)
    for fault, part in zip(caught.value.faults, faults, strict=True):
        assert fault.startswith("the file: ")
        assert part in fault


def session(
    source: KVLayout = HALVES, target: KVLayout = WHOLE, lane_bytes: int = 1 << 20, **options: object
) -> TargetSession:
    """A decode core with TABLE that has a room of 4 tokens of an attached source."""
    settings = {"backend": "NIXL", "ring_bytes": 1 << 20, "crossover": TABLE} | options
    core = TargetSession(SessionConfig("d", "D", 1, target, **settings), now_ns=0)
    core.describe(b"", None, {}, PROBE)
    ranks = tuple(RankAddress(rank, f"h:{rank}", 7) for rank in range(source.rank_count))
    core.claim(Wanted(RoomKey("P", 5), Endpoint("P", source, ranks), (CachePages(0, 0, 4, 1, bytes(4)),)), NOW_NS)
    attach(core, source, 7, lane_bytes)
    return core


def attach(core: TargetSession, source: KVLayout, epoch: int, lane_bytes: int = 1 << 20) -> None:
    """Let all ranks of the source answer, in one life."""
    for rank in range(source.rank_count):
        message = Attach(PROTOCOL_VERSION, "d", "P", epoch, source.at(rank), "NIXL", b"", None, (), lane_bytes)
        attach_to(core, PREFILL._replace(rank=rank), message, NOW_NS)


def claims(core: TargetSession) -> list[tuple[Way, Why]]:
    """Return the modes of the claims to the first rank that are sent now."""
    sent = [message for peer, message in messages_of(core) if peer == PREFILL]
    return [(message.way, message.why) for message in sent if isinstance(message, Claim)]


def test_a_pair_whose_way_depends_on_the_wire_is_claimed_once_the_wire_is_known():
    core = session()
    assert claims(core) == []
    assert core.expects_bytes, "some transports move a probe's bytes only while the target looks for notices"
    core.receive(PREFILL, WireFound(7, 1, "TCP"), NOW_NS)
    assert claims(core) == [(Way.SLICES, Why.MEASURED)]
    core.receive(PREFILL, WireFound(7, 1, "RDMA"), NOW_NS)
    core.tick(NOW_NS + 10_000_000_000)
    assert {way for way, _ in claims(core)} == {Way.SLICES}, "a pair never changes its way"


def test_a_wire_that_nobody_tells_of_is_waited_for_to_a_deadline():
    core = session()
    said = stay_alive(core, NOW_NS, NOW_NS + WIRE_WAIT_NS - 1)
    assert not [message for _, message in said if isinstance(message, Claim)]
    due_ns = core.next_due_ns()
    assert due_ns is not None
    assert due_ns <= NOW_NS + WIRE_WAIT_NS
    core.tick(NOW_NS + WIRE_WAIT_NS)
    assert claims(core) == [(Way.STAGED, Why.DEFAULT)]


def test_the_wire_to_a_source_that_was_restarted_is_found_out_again():
    core = session()
    core.receive(PREFILL, WireFound(7, 1, "TCP"), NOW_NS)
    claims(core)
    attach(core, HALVES, 8)
    ranks = tuple(RankAddress(rank, f"h:{rank}", 8) for rank in range(2))
    core.claim(Wanted(RoomKey("P", 6), Endpoint("P", HALVES, ranks), (CachePages(0, 0, 4, 1, bytes(4)),)), NOW_NS)
    assert claims(core) == []
    core.receive(PREFILL, WireFound(8, 1, "RDMA"), NOW_NS)
    assert claims(core) == [(Way.STAGED, Why.DEFAULT)]


def test_a_room_that_is_given_up_while_its_wire_is_awaited_was_never_claimed_and_leaves_nothing():
    core = session()
    core.cancel(RoomKey("P", 5), Reason.CANCELLED, "given up", NOW_NS)
    core.receive(PREFILL, WireFound(7, 1, "TCP"), NOW_NS)
    assert claims(core) == []
    assert core.rooms == {}
    assert not core.expects_bytes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"staging": Staging.ALWAYS}, (Way.STAGED, Why.STAGING)),
        ({"staging": Staging.NEVER}, (Way.SLICES, Why.STAGING)),
        ({"force_way": Way.STAGED}, (Way.STAGED, Why.FORCED)),
        ({"crossover": WHOLE_PAGES}, (Way.STAGED, Why.DEFAULT)),
        ({"crossover": WHOLE_PAGES, "ring_bytes": 0}, (Way.SLICES, Why.NO_RING)),
    ],
)
def test_a_way_that_does_not_depend_on_the_wire_is_claimed_at_once(options, expected):
    assert claims(session(**options)) == [expected]


def test_whole_pages_that_no_lane_of_the_source_takes_go_in_place_whatever_the_table_says():
    core = session(WHOLE, WHOLE, lane_bytes=256)
    core.receive(PREFILL, WireFound(7, 1, "TCP"), NOW_NS)
    assert claims(core) == [(Way.CONTIGUOUS, Why.NO_RING)]


@pytest.mark.parametrize("page_size", [16, 8])
def test_a_latent_is_left_to_the_table_like_any_cache_of_one_head(page_size):
    """Its pages are whole between equal sizes, also with other TP sizes, and parts of pages between others."""
    found = {}
    for attention in Attention:
        shape = ModelShape.of(attention, 2, 1, 64, 2)
        core = session(KVLayout(shape, Parallel(), 16), KVLayout(shape, Parallel(), page_size))
        core.receive(PREFILL, WireFound(7, 1, "TCP"), NOW_NS)
        found[attention] = claims(core)
    assert found[Attention.LATENT] == found[Attention.HEADS] != []


def test_a_ring_that_is_too_small_by_mistake_is_refused_and_not_made_up_for_by_a_slow_way():
    with pytest.raises(RingError, match="poolSize of 256"):
        session(ring_bytes=256)
