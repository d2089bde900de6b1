"""One control plane for the whole run, and what tests ask of it. Every wait has a limit, everything ends by its id."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from controlplane.cluster import ControlPlane
from controlplane.nodes import start_kwok
from deployments import CRD

# Pods of KWOK get addresses of loopback, so that one responder on this machine can play all agents.
POD_NETWORK = "127.128.0.0/10"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with KWOK and our CRD."""
    with ControlPlane(tmp_path_factory.mktemp("controlplane")) as plane:
        start_kwok(plane, POD_NETWORK)
        plane.kubectl("create", "-f", str(CRD))
        plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd/disaggdeployments.longshore.dev")
        yield plane


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own, gone afterwards with all that is in it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    plane.kubectl("create", "namespace", name)
    yield name
    plane.try_kubectl("delete", "namespace", name, "--wait=false")
