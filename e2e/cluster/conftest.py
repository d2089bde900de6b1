"""Fixtures: one cluster and one release for the whole run of `make e2e-cluster`."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator

import pytest
from cluster_pods import MANY, Placed, Rooms
from cluster_site import RELEASE, Site, any_site, install_release, remove_release
from controlplane import binaries


def pytest_configure(config: pytest.Config) -> None:
    """Register our marks."""
    config.addinivalue_line("markers", "shortest: the most valuable tests, in the least time")
    config.addinivalue_line("markers", "programs(name, ...): programs of `controlplane.binaries` that the test runs")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs of the selected tests, because the network of the nodes does not reach the Go modules."""
    for name in sorted(
        {name for item in session.items for mark in item.iter_markers("programs") for name in mark.args}
    ):
        binaries.find(name)


# The end of each log that a failed test shows.
_LOG_CHARACTERS = 3000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of a failed test's pods, and the cluster's events, to its report."""
    report = yield
    placed = getattr(item, "funcargs", {}).get("placed")
    if report.failed and isinstance(placed, Placed):
        names = placed.site.try_kubectl("-n", placed.namespace, "get", "pods", "-o", "name").stdout.split()
        for name in names:
            report.sections.append((f"log of {name}", placed.log(name)[-_LOG_CHARACTERS:]))
        for what in ("pods,dgdep", "events"):
            found = placed.site.try_kubectl("-n", placed.namespace, "get", what, "-o", "wide").stdout
            report.sections.append((what, found[-_LOG_CHARACTERS:]))
    return report


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """The cluster."""
    with any_site() as found:
        yield found


@pytest.fixture(scope="session")
def release(site: Site) -> Iterator[str]:
    """A release of the chart; its namespace enforces the restricted profile when the operator's pod is created."""
    install_release(site)
    yield RELEASE
    remove_release(site)


@pytest.fixture
def bare(site: Site, release: str) -> Iterator[Site]:
    """The cluster without a release. The release comes back for the next test."""
    if site.real is None:
        pytest.skip(
            "removes the release, or installs into namespaces of a page: only on the nodes of `make e2e-cluster`"
        )
    remove_release(site)
    yield site
    remove_release(site)
    install_release(site)


@pytest.fixture
def namespace(site: Site, release: str) -> Iterator[str]:
    """A namespace for one test, deleted afterwards with its content."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    site.kubectl("create", "namespace", name)
    yield name
    # The nodes have to be free of the test's pods before the next one. The rest takes the cluster longer.
    site.try_kubectl("-n", name, "delete", "pods", "-l", "engine", "--timeout=60s")
    site.try_kubectl("-n", name, "delete", "dgdep", "--all", "--cascade=foreground", "--timeout=120s")
    site.try_kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def placed(site: Site, namespace: str) -> Placed:
    """A deployment's place; the test creates it."""
    return Placed(site, namespace)


@pytest.fixture
def served(placed: Placed) -> Placed:
    """The deployment is Ready, and an engine serves prefill."""
    placed.create()
    placed.wait("Ready")
    placed.start_source()
    return placed


@pytest.fixture
def open_room(served: Placed) -> Rooms:
    """A room that is open until something ends it. Named before `load`: prefill answers one decode engine at a time."""
    return served.open_room()


@pytest.fixture
def load(served: Placed) -> Rooms:
    """Rooms that move one after the other until the test ends."""
    rooms = served.start_target(MANY, tokens=1024)
    rooms.more(5)
    return rooms
