"""Agents and engines as pods on two nodes: bytes and tokens are equal, and they came over the network between the nodes."""

from __future__ import annotations

import json
import re

import pytest
from cluster_pods import MANY, Placed
from cluster_site import Site
from deployments import ROOT

from longshore_cli.main import main
from longshore_spec.names import HTTP_PORT

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


def test_status_and_the_web_page_come_through_the_api_servers_proxy(
    site: Site, placed: Placed, capsys: pytest.CaptureFixture[str]
) -> None:
    placed.create()
    placed.wait("Ready")
    placed.start_source()
    placed.start_target(MANY, tokens=1024).more(5)
    words = ["status", placed.name, "-n", placed.namespace, "--kubeconfig", str(site.kubeconfig)]
    capsys.readouterr()
    assert main([*words, "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["deployments"]
    assert found["gb_per_s"] > 0
    agents = {agent["roles"][0]: agent for agent in found["agents"]}
    moved = {}
    for role, half in (("prefill", "source"), ("decode", "target")):
        assert (agents[role]["pod"], agents[role]["silent"]) == (placed.agent(role), "")
        peers = [peer for worker in agents[role]["report"]["workers"] for peer in worker["peers"]]
        moved[role] = [peer["bytes_moved"] for peer in peers if peer["half"] == half]
        assert len(moved[role]) == 4 and min(moved[role]) > 0, peers
    assert main(words) == 0
    assert "prefill: 1/1 agents ready, 4 engine ranks, 4 pairs staged over " in capsys.readouterr().out
    # The API server rewrites addresses in tags of HTML. The policy names the digests of script and style.
    served = site.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{placed.namespace}/pods/{placed.agent('decode')}:{HTTP_PORT}/proxy/"
    )
    page = (ROOT / "agent/longshore_agent/status/web_page.html").read_text(encoding="utf-8")
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>.*?</{tag}>", page, re.DOTALL)
        assert content in served
