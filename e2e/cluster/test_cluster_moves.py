"""Agents and engines as pods on two nodes: bytes and tokens are equal, and they came over the network between the nodes."""

from __future__ import annotations

import pytest
from cluster_pods import Placed
from cluster_site import Site

_MODEL = {"attention": "GQA", "layers": 6, "kvHeads": 12, "headDim": 64, "dtype": "float32"}


@pytest.mark.shortest
@pytest.mark.parametrize("backend", ["NIXL", "Mooncake"])
def test_rooms_between_two_nodes_bring_every_byte_over_the_cable(site: Site, placed: Placed, backend: str) -> None:
    placed.create(backend=backend)
    placed.wait("Ready")
    placed.start_source()
    before = site.node("prefill").received_bytes() if site.real else 0
    rooms = placed.start_target(rooms=5, tokens=4096)
    placed.succeeds("target")
    assert len(rooms.done()) == 5
    payload = sum(room["bytes"] for room in rooms.done())
    assert payload == 5 * 4096 * 4096
    if site.real:
        assert site.node("prefill").received_bytes() - before > payload
    placed.wait("EnginesConnected", 30)
    status, lines = placed.checked()
    assert status == 0, lines
    for check in ("lease", "crd", "Ready", "images", "pods", "keys", "pages", "versions", "readyz", "workers", "wires"):
        assert lines[check]["state"] == "ok", lines[check]


def test_the_reference_engine_decodes_the_same_tokens_on_another_node(site: Site, placed: Placed) -> None:
    if site.real is None:
        pytest.skip("the reference engine's pods use this machine's checkout: only on nodes of `make e2e-cluster`")
    placed.create(model=_MODEL)
    placed.wait("Ready")
    target = placed.start_reference(prompts=3, tokens=12)
    placed.succeeds(target)
    lines = placed.lines(target)
    assert [(line["equal_bytes"], line["equal_tokens"]) for line in lines] == [(True, True)] * 3
    # TP4 to TP1: all of a token's KV, over the node's cable.
    assert [line["bytes"] for line in lines] == [500 * 36864] * 3
