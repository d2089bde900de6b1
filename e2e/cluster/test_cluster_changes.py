"""What an administrator changes on a cluster while rooms move: every accepted room arrives."""

from __future__ import annotations

import pytest
from cluster_pods import Placed, Rooms
from cluster_site import CHART, NEXT_TAG, RELEASE, SYSTEM, Site, install_release
from controlplane.waiting import until
from deployments import BASELINE_CHART, VERSION


def test_helm_upgrade_replaces_the_operator_and_no_agent(site: Site, placed: Placed, load: Rooms) -> None:
    agents = [placed.agent(role) for role in site.nodes]
    chart = ("upgrade", "longshore", str(CHART), "-n", SYSTEM, "--reuse-values", "--wait", "--timeout=120s")
    site.helm(*chart, "--set=logLevel=debug")
    load.more(10)
    placed.wait("Ready")
    assert [placed.agent(role) for role in site.nodes] == agents
    assert load.failed() == []


@pytest.mark.shortest
def test_an_upgrade_from_the_last_release_and_a_rollback_take_no_deployment_from_ready(
    bare: Site, placed: Placed
) -> None:
    """Operator, chart and CRD change while rooms move, first with the same agent's image, then with another one."""
    install_release(bare, BASELINE_CHART, "--set=image.tag=baseline")
    rooms = placed.rooms()
    agents, since = [placed.agent(role) for role in bare.nodes], placed.transitions()["Ready"]
    options = ("-n", SYSTEM, "--wait", "--timeout=120s")
    upgrade = ("upgrade", RELEASE, str(CHART), "--reset-then-reuse-values", *options)
    for command in ((*upgrade, f"--set=image.tag={VERSION}"), ("rollback", RELEASE, *options)):
        bare.helm(*command)
        rooms.more(10)
        placed.wait("Ready")
        assert placed.transitions()["Ready"] == since
        assert [placed.agent(role) for role in bare.nodes] == agents

    bare.tag_images(NEXT_TAG)
    image = f"{bare.agent_image.rpartition(':')[0]}:{NEXT_TAG}"
    bare.helm(*upgrade, f"--set=image.tag={NEXT_TAG}", f"--set=agent.image={image}")
    reasons: set[tuple[str, str]] = set()

    def replaced() -> bool:
        reasons.add(placed.condition("AgentsReady")[1:])
        return all(placed.is_ready(name) and name not in agents for name in map(placed.agent, bare.nodes))

    until(replaced, "the agents are of the next release")
    rooms.more(10)
    placed.wait("Ready")
    assert {reason for reason, _ in reasons} <= {"AgentsUpdating", "AgentsOutdated", "AllAgentsReady"}, reasons
    # An agent that ends finishes the rooms that it has. A room fails if decode claims it after that, at the address that it
    # was given before. Rooms move one after another, so that is one for each agent.
    failed = rooms.failed()
    assert len(failed) <= len(agents) and all(room["reason"] == "PEER_LOST" and room["text"] for room in failed), failed


def test_a_replaced_operator_leaves_the_status_as_it_was(site: Site, placed: Placed, load: Rooms) -> None:
    before = placed.transitions()
    site.kubectl("-n", SYSTEM, "rollout", "restart", "deployment/longshore-operator")
    site.kubectl("-n", SYSTEM, "rollout", "status", "deployment/longshore-operator", "--timeout=120s")
    load.more(10)
    placed.wait("Ready")
    after = placed.transitions()
    for kind in ("Ready", "Compatible", "AgentsReady"):
        assert before[kind] == after[kind], kind
    assert load.failed() == []


def test_another_staging_size_replaces_agents_and_rooms_go_on(site: Site, placed: Placed, load: Rooms) -> None:
    old = placed.agent("prefill")
    placed.change({"prefill": {"staging": {"bufferSize": "16Mi"}}, "decode": {"staging": {"poolSize": "256Mi"}}})
    until(lambda: placed.agent("prefill") != old and placed.is_ready(placed.agent("prefill")), "a new agent is ready")
    load.more(10)
    placed.wait("Ready")


def test_new_keys_reach_all_agents_and_rooms_go_on(site: Site, placed: Placed, load: Rooms) -> None:
    old = {role: placed.agent(role) for role in site.nodes}
    placed.change({"agents": {"keysRevision": 2}})
    for role in site.nodes:
        until(lambda role=role: placed.agent(role) != old[role], f"a new agent of {role}")
    placed.wait("Ready")
    load.more(10)


def test_metrics_of_agents_are_served_through_their_service(site: Site, placed: Placed) -> None:
    placed.create(tp=1)
    placed.wait("Ready")
    text = site.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{placed.namespace}/services/http:{placed.name}-agent:http/proxy/metrics"
    )
    assert "\nlongshore_" in text


@pytest.mark.shortest
def test_helm_test_passes(site: Site, release: str) -> None:
    said = site.helm("test", release, "-n", SYSTEM, "--timeout=200s")
    assert "Phase:          Succeeded" in said
