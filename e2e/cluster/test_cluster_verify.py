"""Runs `longshore verify` and `longshore bench cluster` against agents in pods of two nodes, and as a Job of `helm test`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cluster_pods import Placed
from cluster_site import CHART, COMMAND_LIMIT_S, SYSTEM, Site
from controlplane.waiting import until

from longshore_wire.names import TEST_INSTANCE_PREFIX

_JOB = "longshore-operator-verify"


def _command(placed: Placed, *words: str) -> list[str]:
    where = [f"--kubeconfig={placed.site.kubeconfig}", f"--namespace={placed.namespace}"]
    return [sys.executable, "-m", "longshore_cli.main", *words, *where]


def _run(placed: Placed, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(placed, *words), check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
    )


def _test_workers(placed: Placed) -> list[str]:
    """Return the workers of test instances at both agents."""
    found = []
    for role in ("prefill", "decode"):
        page = f"/api/v1/namespaces/{placed.namespace}/pods/{placed.agent(role)}:9470/proxy/v1/status"
        workers = json.loads(placed.site.kubectl("get", "--raw", page))["workers"]
        found += [worker["worker"] for worker in workers if worker["worker"].startswith(TEST_INSTANCE_PREFIX)]
    return found


@pytest.mark.shortest
def test_verify_moves_every_byte_between_pods(placed: Placed) -> None:
    placed.create(tp=2)
    placed.wait("Ready")
    done = _run(placed, "verify", placed.name, "-o", "json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    [pair] = json.loads(done.stdout)["pairs"]
    nodes = placed.site.nodes
    assert (pair["prefill"], pair["decode"], pair["verdict"]) == (nodes["prefill"], nodes["decode"], "ok")
    assert (pair["way"], pair["wire"]) == ("staged", "TCP")
    assert pair["room_bytes"] == 16 << 20


def test_instances_of_a_load_do_not_count_and_go_when_the_command_is_killed(placed: Placed) -> None:
    placed.create(tp=2)
    placed.wait("Ready")
    words = ("bench", "cluster", placed.name, "--seconds=600", "--sizes=64Ki", "--concurrency=2")
    load = subprocess.Popen(_command(placed, *words), stdout=subprocess.DEVNULL)
    try:
        until(lambda: len(_test_workers(placed)) == 3, "the workers of a load", 60)
        # The operator counts this engine only after it has seen the agent with the test instance, too.
        placed.start_source(tp=2)

        def counted() -> tuple[int, int] | None:
            status = placed.site.get(placed.namespace, "dgdep", placed.name)["status"]
            found = status["prefill"]["instances"], status["decode"]["instances"]
            return found if found != (0, 0) else None

        assert until(counted, "the operator counts an engine", 90) == (1, 0)
        assert len(_test_workers(placed)) == 3
        assert load.poll() is None
    finally:
        load.kill()
        load.wait()
    # The kubelet closes the input of the test engines, and they end.
    until(lambda: _test_workers(placed) == [], "no test instance is left", 60)


def test_helm_test_verifies_a_deployment_with_the_rights_of_its_job(site: Site, placed: Placed) -> None:
    placed.create(tp=2)
    placed.wait("Ready")
    values = [f"--set=test.verify.deployment={placed.name}", f"--set=test.verify.namespace={placed.namespace}"]
    upgrade = ("upgrade", "longshore", str(CHART), "-n", SYSTEM, "--reuse-values", "--wait", "--timeout=120s")
    site.helm(*upgrade, *values)
    try:
        said = site.helm("test", "longshore", "-n", SYSTEM, f"--filter=name={_JOB}", "--timeout=120s")
        assert f"TEST SUITE:     {_JOB}" in said and "Phase:          Succeeded" in said
        assert placed.events()  # it is still there
        # A wrong name fails the test, and its log says why.
        failed = site.try_helm(*upgrade, "--set=test.verify.deployment=none")
        assert failed.returncode == 0, failed.stderr
        assert site.try_helm("test", "longshore", "-n", SYSTEM, f"--filter=name={_JOB}", "--timeout=120s").returncode
        log = site.kubectl("-n", SYSTEM, "logs", f"job/{_JOB}")
        assert f"namespace {placed.namespace} has no DisaggDeployment none: it has {placed.name}" in log
    finally:
        site.helm(*upgrade, "--set=test.verify.deployment=")
        site.try_kubectl("-n", SYSTEM, "delete", f"job/{_JOB}", "--ignore-not-found")
