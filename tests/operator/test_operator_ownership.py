"""Tests ownership: which operator serves a deployment if releases overlap, and which objects are its children."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from operator_scene import KEY, settled

from longshore_operator import kinds, ownership
from longshore_operator.errors import ApiError, NotFoundError, RefusedError
from longshore_operator.ownership import Claim, LeaseWatch, may_claim
from longshore_operator.settings import Settings
from longshore_operator.world import ChildKey, Key

CLUSTER = Claim("system/one", "Cluster")
NAMESPACE = Claim("team/two", "Namespace")


@pytest.mark.parametrize(
    ("own", "another", "alive", "may"),
    [
        (NAMESPACE, CLUSTER, True, True),
        (CLUSTER, NAMESPACE, True, False),
        (CLUSTER, NAMESPACE, False, True),
        (CLUSTER, Claim("other/one", "Cluster"), True, False),
        (Claim("team/a", "Namespace"), NAMESPACE, True, False),
        (Claim("team/a", "Namespace"), NAMESPACE, False, True),
    ],
)
def test_the_narrower_one_serves_and_of_two_alike_the_first(own: Claim, another: Claim, alive: bool, may: bool) -> None:
    assert may_claim(own, another, alive=alive) is may


def test_of_two_that_are_alive_exactly_one_may_take_from_the_other_or_none() -> None:
    claims = (CLUSTER, NAMESPACE, Claim("other/one", "Cluster"), Claim("team/a", "Namespace"))
    for one in claims:
        for other in claims:
            if one != other:
                assert not (may_claim(one, other, alive=True) and may_claim(other, one, alive=True))


def test_a_claim_is_that_of_the_lease_and_reads_as_it_was_written() -> None:
    own = Claim.of(Settings(namespace="a", lease_name="b", watch_namespace="a"))
    assert own == Claim("a/b", "Namespace")
    assert Claim.of(Settings(namespace="a", lease_name="b")).scope == "Cluster"
    assert Claim.read({"operator": own.status()}) == own
    assert Claim.read({}) is Claim.read({"operator": {"lease": "a/b"}}) is None


class Leases:
    """An API server with one Lease of 15 s."""

    def __init__(self) -> None:
        self.version = 1
        self.error: ApiError | None = None
        self.reads = 0

    async def get(self, kind: kinds.Kind, namespace: str, name: str) -> dict[str, Any]:
        assert (kind, namespace, name) == (kinds.LEASE, "system", "one")
        self.reads += 1
        if self.error is not None:
            raise self.error
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": {"leaseDurationSeconds": 15}}


def test_a_lease_is_left_behind_if_it_is_gone_or_was_not_renewed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(ownership.time, "monotonic", lambda: now_s[0])
    server = Leases()
    watch = LeaseWatch(server)  # type: ignore[arg-type]

    def alive(after_s: float) -> bool:
        now_s[0] += after_s
        return asyncio.run(watch.is_alive("system/one"))

    assert alive(0)
    assert alive(1)
    assert server.reads == 1
    assert alive(299)
    server.version += 1
    assert alive(5)
    assert alive(300)
    assert not alive(1)
    server.version += 1
    assert alive(5)
    server.error = RefusedError("forbidden", 403)
    assert alive(1000)
    server.error = NotFoundError("gone", 404)
    assert not alive(5)


def test_the_status_keeps_the_claim_and_shows_no_names_of_other_namespaces() -> None:
    scene = settled()
    scene.body["status"]["operator"] = NAMESPACE.status()
    near, far = Key("team", "mistral"), Key("secret-project", "unnamed")
    for key in (KEY, near, far):
        if key != KEY:
            scene.put_deployment(key)
        scene.put_agent("a", key=key)
    status = scene.decide().status
    assert status is not None
    assert status["operator"] == NAMESPACE.status()
    text = scene.message("NodesShared")
    assert text.startswith("mistral and 1 of other namespaces on a: together")


def test_an_object_of_somebody_else_is_not_taken_for_a_child_of_ours() -> None:
    scene = settled()
    theirs = copy.deepcopy(scene.world.children[KEY][ChildKey("ConfigMap", "llama-agent")])
    theirs["metadata"]["ownerReferences"] = []
    scene.world.children[KEY][ChildKey("ConfigMap", "llama-agent")] = theirs
    assert [kind.name for kind, _ in scene.decide().apply] == ["ConfigMap"]
    scene.body["spec"]["agents"] = {"networkPolicy": False, "allowOpenDataPath": True}
    assert scene.decide().delete == (ChildKey("NetworkPolicy", "llama-agent"),)
