"""`longshore check` names the causes of faults. `test_cluster_moves` checks a deployment that works."""

from __future__ import annotations

from cluster_pods import Placed
from cluster_site import ROLE, SYSTEM, Site
from controlplane.waiting import until

_STATUS_LIMIT_S = 60.0


def test_an_agent_without_its_image_is_named(placed: Placed) -> None:
    placed.create(tp=1, agents={"image": "localhost/no-such-agent:1"})

    def said() -> str:
        status, lines = placed.checked()
        assert status == 1
        line = lines.get("images", {})
        return str(line["message"]) if line.get("state") == "error" else ""

    assert "localhost/no-such-agent:1: " in until(said, "the check names the image", _STATUS_LIMIT_S)


def test_a_node_without_its_label_and_an_operator_that_is_off_are_named(site: Site, placed: Placed) -> None:
    placed.create(tp=1)
    placed.wait("Ready")
    site.kubectl("label", "node", site.nodes["prefill"], f"{ROLE}-")
    try:
        placed.wait("Ready=False", _STATUS_LIMIT_S)
        status, lines = placed.checked()
        assert status == 1 and f"no node is picked by prefill ({ROLE}=prefill)" in lines["AgentsReady"]["message"]
        assert lines["AgentsReady"]["way_out"].startswith("Label nodes")
    finally:
        site.kubectl("label", "node", site.nodes["prefill"], f"{ROLE}=prefill")
    placed.wait("Ready")

    replicas = site.get(SYSTEM, "deployment", "longshore-operator")["spec"]["replicas"]
    scale = f"kubectl -n {SYSTEM} scale deployment longshore-operator --replicas="
    site.type(f"{scale}0")
    try:
        status, lines = placed.checked()
        assert (status, lines["available"]["way_out"]) == (1, f"{scale}1")
    finally:
        site.type(f"{scale}{replicas}")
        site.kubectl("-n", SYSTEM, "rollout", "status", "deployment/longshore-operator", "--timeout=60s")
    assert placed.checked()[0] == 0
