"""`helm uninstall` while rooms move: definition, deployments and agents stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_pods import MANY, Placed
from cluster_site import CHART, SYSTEM, Site


@pytest.fixture
def uninstalled(site: Site, placed: Placed) -> Iterator[str]:
    """What Helm says when the release goes while a deployment is Ready. The release comes back for the next test."""
    placed.create()
    placed.wait("Ready")
    yield site.helm("uninstall", "longshore", "-n", SYSTEM, "--wait", "--timeout=120s")
    site.helm("install", "longshore", str(CHART), "-n", SYSTEM, "--wait", "--timeout=120s", *site.values())


def test_agents_and_the_definition_outlive_the_release(site: Site, placed: Placed, uninstalled: str) -> None:
    assert "[CustomResourceDefinition] disaggdeployments.longshore.dev" in uninstalled
    assert site.kubectl("get", "crd", "disaggdeployments.longshore.dev", "-o", "name")
    assert site.kubectl("-n", placed.namespace, "get", "dgdep", "-o", "name")
    assert all(placed.is_ready(placed.agent(role)) for role in site.nodes)
    placed.start_source()
    placed.start_target(MANY, tokens=1024).more(5)
