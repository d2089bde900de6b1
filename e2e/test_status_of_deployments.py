"""Tests `longshore status` against a real API server. Its proxy refuses the loopback addresses of these agents, so all are silent."""

from __future__ import annotations

import json

import pytest
from agent_responder import AgentResponder, instance, report
from deployments import Deployments

from longshore_cli.main import main

pytestmark = pytest.mark.usefixtures("operator", "nodes")


def test_status_lists_the_deployments_of_a_namespace_with_their_worst_fact_and_shows_one_as_a_tree(
    deployments: Deployments, responder: AgentResponder, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ["--kubeconfig", str(deployments.plane.kubeconfig)]
    here = [*cluster, "-n", deployments.namespace]
    assert main(["status", *here]) == 0
    assert capsys.readouterr().out == "no deployments\n"

    roles = {
        role: {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"longshore.dev/role": role}}
        for role in ("prefill", "decode")
    }
    deployments.apply(prefill=roles["prefill"] | {"instances": 2}, decode=roles["decode"] | {"instances": 1})
    deployments.wait_reason("Ready", "Ready")
    address = next(pod["status"]["podIP"] for pod in deployments.pods() if pod["spec"]["nodeName"] == "prefill-0")
    responder.answers[address] = report(instance("p-0", "source"))
    deployments.wait_reason("EnginesConnected", "EnginesMissing")

    assert main(["status", *here]) == 1
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:6] == ["NAME", "READY", "AGENTS", "ENGINES", "ROOMS", "GB/S"]
    assert line.split()[:6] == ["llama", "True", "3/3", "1/3", "0", "-"]
    # This operator is a process without a Deployment.
    assert line.endswith(
        f"no Deployment of an operator serves namespace {deployments.namespace}: conditions may be old"
    )
    assert main(["status", *cluster, "-A"]) == 1
    assert any(
        each.split()[:3] == [deployments.namespace, "llama", "True"] for each in capsys.readouterr().out.splitlines()
    )

    assert main(["status", "llama", *here]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"{deployments.namespace}/llama: Ready, agents 3/3, engines 1/3, ")
    for part in (
        "operator: off: no Deployment of an operator serves namespace",
        "AgentsReady True",
        "EnginesConnected False EnginesMissing: ",
        "prefill: 0/2 agents ready",
        "prefill-1: silent, pod llama-",
    ):
        assert part in text
    assert main(["status", "llama", *here, "-o", "json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["deployments"]
    assert [(agent["name"], agent["roles"]) for agent in found["agents"]] == [
        ("decode-0", ["decode"]),
        ("prefill-0", ["prefill"]),
        ("prefill-1", ["prefill"]),
    ]
    assert all(f"the agent in pod {deployments.namespace}/" in agent["silent"] for agent in found["agents"])
    assert main(["status", "qwen", *here]) == 1
    assert (
        f"longshore status: namespace {deployments.namespace} has no DisaggDeployment qwen: it has llama"
        in capsys.readouterr().err
    )
