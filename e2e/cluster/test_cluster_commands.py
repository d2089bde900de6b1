"""The command of a user with a kubeconfig: it reads agents in pods through the API server, while rooms move."""

from __future__ import annotations

import json

import pytest
from cluster_pods import Placed, Rooms
from cluster_site import Site

from longshore_wire.names import room_name


@pytest.mark.shortest
def test_commands_show_a_deployment_of_the_cluster(site: Site, placed: Placed, load: Rooms) -> None:
    where = ("-n", placed.namespace)
    number = load.done()[-1]["room"]
    room = room_name(number)
    listed = site.longshore("rooms", placed.name, *where, "--limit", "1000", "-o", "json")
    assert not listed.returncode, listed.stderr
    halves = {entry["room"]["half"]: entry for entry in json.loads(listed.stdout) if entry["room"]["room"] == room}
    assert {half: entry["room"]["state"] for half, entry in halves.items()} == {"source": "done", "target": "done"}
    for half, role in (("source", "prefill"), ("target", "decode")):
        assert halves[half]["agent"] == f"{placed.namespace}/{placed.agent(role)} on {site.nodes[role]}"

    for given in (str(number), room):
        traced = site.longshore("trace", "room", given, placed.name, *where)
        assert not traced.returncode, traced.stderr
        for worker in ("prefill worker 0", "decode worker 0"):
            assert f"  {worker}  " in traced.stdout

    other = site.longshore("rooms", "no-such", *where)
    assert other.returncode == 1
    assert f"namespace {placed.namespace} has no DisaggDeployment no-such: it has {placed.name}" in other.stderr
