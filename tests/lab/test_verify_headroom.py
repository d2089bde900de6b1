"""Tests that a test engine takes no memory that its pod does not have."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from longshore_lab.test_engine import headroom
from longshore_lab.test_engine.headroom import NoMemoryError, needed_bytes, require
from longshore_spec import manifest
from longshore_spec.agent_config import Role
from longshore_spec.verify_messages import Start, room_tokens
from longshore_wire.layout import KVLayout, ModelShape, PageOrder, Plane
from longshore_wire.names import TEST_RING_BYTES_MAX

CONFIG = manifest.load("""
apiVersion: longshore.dev/v1alpha1
kind: DisaggDeployment
metadata: {name: llama-70b}
spec:
  model: {attention: GQA, layers: 80, kvHeads: 8, headDim: 128, dtype: bfloat16}
  prefill: {tensorParallel: 8, pageSize: 16, nodeSelector: {a: b}}
  decode: {tensorParallel: 1, pageSize: 64, nodeSelector: {a: b}}
""").agent_config()
MIB = 1 << 20


def start(**more: object) -> Start:
    return Start(
        **{"run": "1", "prefill": True, "decode": False, "room_bytes": 1, "room_count": 1, "limit_s": 1, **more}
    )


def test_rooms_are_whole_pages_of_both_sides() -> None:
    token_bytes = 80 * 8 * 2 * 128 * 2
    assert room_tokens(CONFIG, 1) == 64
    assert room_tokens(CONFIG, 64 * token_bytes) == 64
    assert room_tokens(CONFIG, 64 * token_bytes + 1) == 128


def test_the_need_grows_with_ranks_places_and_tokens_and_not_with_the_declared_staging() -> None:
    tokens = room_tokens(CONFIG, 16 * MIB)
    prefill = needed_bytes(CONFIG, start(), tokens, "host")
    # Eight workers of 100 MiB, and eight shares of pages and content.
    assert 8 * 100 * MIB < prefill < 1500 * MIB
    decode = needed_bytes(CONFIG, start(prefill=False, decode=True), tokens, "host")
    assert TEST_RING_BYTES_MAX + 100 * MIB < decode < CONFIG.decode.staging.pool_size
    more = needed_bytes(CONFIG, start(prefill=False, decode=True, room_count=4), tokens, "host")
    assert more - decode == 3 * tokens * CONFIG.decode.layout(CONFIG.model).token_bytes


def test_pages_and_staging_on_gpus_are_no_host_memory_and_their_processes_need_more() -> None:
    for halves in ({}, {"prefill": False, "decode": True}):
        small, large = room_tokens(CONFIG, MIB), room_tokens(CONFIG, 64 * MIB)
        needs = {
            kind: [needed_bytes(CONFIG, start(**halves), tokens, kind) for tokens in (small, large)]
            for kind in ("host", "gpu")
        }
        content_bytes = (large - small) * 80 * 8 * 2 * 128 * 2
        assert needs["gpu"][1] - needs["gpu"][0] == content_bytes
        assert needs["host"][1] - needs["host"][0] == 2 * content_bytes
        assert needs["gpu"][0] > needs["host"][0]


def test_every_cache_counts_tokens_by_their_number_and_a_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [needed_bytes(CONFIG, start(), tokens, "host") for tokens in (64, 128)]
    parallel = CONFIG.prefill.layout(CONFIG.model).parallel
    state = KVLayout(ModelShape(6, (Plane(8, 4096, 3),), 2), parallel, 2, PageOrder.SLOT, name="state")
    draft = KVLayout(ModelShape.kv(2, 8, 128, 2), parallel, 16, name="draft")
    honest = Role.layout
    monkeypatch.setattr(
        Role, "layout", lambda self, model: msgspec.structs.replace(honest(self, model), others=(state, draft))
    )
    after = [needed_bytes(CONFIG, start(), tokens, "host") for tokens in (64, 128)]
    # Both pages and content, of all ranks together.
    state_bytes, draft_token_bytes = 6 * 8 * 3 * 4096, 2 * 2 * 8 * 128 * 2
    assert [more - less for more, less in zip(after, before, strict=True)] == [
        2 * (state_bytes + tokens * draft_token_bytes) for tokens in (64, 128)
    ]


@pytest.mark.parametrize("version", [0, 1])
def test_the_limit_of_a_container_counts_without_the_cache_that_the_kernel_drops(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, usage, statistics = (tmp_path / name for name in ("limit", "usage", "statistics"))
    cache = headroom._FILES[version][3]
    monkeypatch.setattr(headroom, "_FILES", ((str(limit), str(usage), str(statistics), cache),))
    monkeypatch.setattr(headroom, "_left_of_machine", lambda: None)
    tokens = room_tokens(CONFIG, 1)
    usage.write_text(f"{500 * MIB}\n")
    statistics.write_text(f"anon 7\n{cache} {100 * MIB}\n")
    limit.write_text(f"{4096 * MIB}\n")
    require(CONFIG, start(), tokens, "host")
    limit.write_text(f"{700 * MIB}\n")
    with pytest.raises(NoMemoryError, match=r"and 300 MiB of memory are left beside the agent: give smaller sizes"):
        require(CONFIG, start(), tokens, "host")
    limit.write_text("max\n")
    require(CONFIG, start(), tokens, "host")
