"""The commands of README and of the page on Kubernetes, typed on two nodes as they are written there."""

from __future__ import annotations

import re

import pytest
from cluster_pods import READY_LIMIT_S, Placed
from cluster_site import NEXT_TAG, SYSTEM, Site
from controlplane.waiting import until
from deployments import VERSION
from pages import REGISTRY, commands, typed

PAGE = "docs/how-to/kubernetes.md"


@pytest.mark.shortest
def test_readme_installs_a_release_and_its_example_becomes_ready(bare: Site) -> None:
    lines = commands("README.md", "## Quickstart")
    assert [line.split()[:2] for line in lines] == [["helm", "install"], ["kubectl", "apply"]]
    typed(bare, *lines)
    bare.kubectl("wait", "--for=condition=Ready", "dgdep/llama-70b", f"--timeout={READY_LIMIT_S:g}s")
    bare.kubectl("delete", "dgdep", "llama-70b", "--cascade=foreground", "--timeout=120s")


def test_the_page_on_kubernetes_installs_upgrades_rolls_back_and_removes(bare: Site, placed: Placed) -> None:
    label, *install = commands(PAGE, "2. Label the nodes", "\n4. ")
    typed(bare, label, node=bare.nodes["prefill"])
    typed(bare, *install)
    table = typed(bare, *(line for line in commands(PAGE, "This transcript") if "describe" not in line))[-1]
    assert re.search(r"^llama-70b +True +Ready +1/1 TP4 +1/1 TP1 +2/2 +NIXL ", table, re.MULTILINE), table
    bare.kubectl("delete", "dgdep", "llama-70b", "--cascade=foreground", "--timeout=120s")

    rooms = placed.rooms()
    upgrade, roll_back = commands(PAGE, "## Upgrade and roll back")
    for command, tag in ((upgrade, NEXT_TAG), (roll_back, VERSION)):
        bare.tag_images(NEXT_TAG)
        typed(bare, command, tag=NEXT_TAG)
        until(lambda tag=tag: _images(placed) == {f"{REGISTRY}/longshore-agent:{tag}"}, f"all agents are of {tag}")  # type: ignore[misc]
        placed.wait("Ready")
        rooms.more(10)
    assert rooms.failed() == []

    typed(bare, "helm uninstall longshore -n longshore-system --wait", *commands(PAGE, "## Uninstall"))
    until(
        lambda: bare.get(placed.namespace, "pods", "-l", "app.kubernetes.io/name=longshore-agent")["items"] == [],
        "gone",
    )
    assert "longshore" not in bare.kubectl("get", "crd,clusterrole,clusterrolebinding", "-o", "name")
    assert bare.kubectl("-n", SYSTEM, "get", "lease,deployment,secret,role", "-o", "name") == ""


def _images(placed: Placed) -> set[str]:
    """Return the images of the agents that are ready, and empty for one that is not."""
    pods = placed.site.get(placed.namespace, "pods", "-l", "app.kubernetes.io/name=longshore-agent")["items"]
    return {pod["spec"]["containers"][0]["image"] if placed.is_ready(pod["metadata"]["name"]) else "" for pod in pods}
