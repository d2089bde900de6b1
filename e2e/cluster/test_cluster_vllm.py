"""The pods of `examples/vllm` with a real vLLM on CPUs, on two real nodes.

No image of vLLM is built here. The pods run the agent's image and see the environment that `.ci/install-vllm` made, and
this checkout, at the paths of this machine. So they run as root without capabilities, and request fewer processors.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_pods import share_folders
from cluster_site import ROLE, Site
from controlplane.ports import free_port
from controlplane.processes import Process
from controlplane.waiting import until
from deployments import ROOT
from example_pods import EXAMPLES, Body, example, pod_of

VENV_VARIABLE = "E2E_VLLM_VENV"
# Two vLLMs of three ranks took 6 GB. Others on this machine need memory too.
MEMORY_BYTES_MIN = 10_000_000_000
# Each process imports vLLM for 10 s of an idle core, and for minutes beside others.
READY_LIMIT_S = 400.0
LIMIT_S = 120.0
PROMPT = [random.Random(7).randrange(3, 1000) for _ in range(300)]
NEW_TOKENS = 16

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def engines(site: Site, namespace: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The addresses of both engines, by role, and that of the router."""
    if site.real is None:
        pytest.skip("the pods use this machine's environment of vLLM: only on the nodes of `make e2e-cluster`")
    venv = os.environ.get(VENV_VARIABLE)
    assert venv, f"{VENV_VARIABLE} is not set: run `make e2e-cluster`"
    if (free := _available_bytes()) < MEMORY_BYTES_MIN:
        pytest.skip(f"two vLLMs need {MEMORY_BYTES_MIN} bytes of memory, and {free} are available")
    site.apply(namespace, *_moved(example("vllm/tiny.yaml"), namespace))
    program = f"--from-file={EXAMPLES / 'vllm' / 'tiny_model.py'}"
    site.kubectl("-n", namespace, "create", "configmap", "vllm-tiny-model", program)
    site.kubectl("-n", namespace, "wait", "--for=condition=Ready", "dgdep/vllm-tiny", f"--timeout={LIMIT_S:g}s")
    pods = {
        pod["spec"]["nodeSelector"][ROLE]: _with_environment(pod, site.agent_image, Path(venv))
        for body in _moved(example("vllm/pods.yaml"), namespace)
        if body["kind"] == "Deployment"
        for pod in [pod_of(body)]
    }
    site.apply(namespace, *pods.values())
    found = {}
    for role, pod in pods.items():
        name = pod["metadata"]["name"]
        until(lambda name=name: _is_ready(site, namespace, name), f"{name} is ready", READY_LIMIT_S)  # type: ignore[misc]
        found[role] = f"http://{site.get(namespace, 'pod', name)['status']['podIP']}:8000"
    port = free_port()
    addresses = ["--prefill", found["prefill"], "--decode", found["decode"], "--port", str(port)]
    router = Process("router", [sys.executable, EXAMPLES / "vllm" / "proxy.py", *addresses], tmp_path)
    found["router"] = f"http://127.0.0.1:{port}"
    until(lambda: router.check() and _answers(found["router"]), "the router listens", LIMIT_S)
    yield found
    router.stop()
    # pytest shows it if the test failed.
    for pod in pods.values():
        sys.stdout.write(site.try_kubectl("-n", namespace, "logs", pod["metadata"]["name"], "--tail=80").stdout)


def test_vllms_pods_decode_on_another_node_the_tokens_of_one_engine_alone(engines: dict[str, str]) -> None:
    moved = _tokens(engines["router"])
    assert len(moved) == NEW_TOKENS
    assert moved == _tokens(engines["prefill"])
    metrics = httpx.get(f"{engines['decode']}/metrics", timeout=LIMIT_S).text
    hits = [line for line in metrics.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")]
    assert [float(line.split()[-1]) for line in hits] == [len(PROMPT)]


def _available_bytes() -> int:
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024


def _moved(bodies: list[Body], namespace: str) -> list[Body]:
    text = json.dumps(bodies).replace("/run/longshore/default/", f"/run/longshore/{namespace}/")
    found: list[Body] = json.loads(text)
    for body in found:
        body["metadata"]["namespace"] = namespace
    return found


def _with_environment(pod: Body, image: str, venv: Path) -> Body:
    """Let an example's pod run vLLM from this machine's environment."""
    spec: Any = pod["spec"]
    # The label has `namespace` delete the pod first.
    pod["metadata"]["labels"]["engine"] = pod["metadata"]["name"]
    spec["securityContext"] |= {"runAsUser": 0, "runAsGroup": 0}
    variables = {
        "HOME": "/tmp",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # The agent's image has no compiler.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(["0"] * (2 if spec["nodeSelector"][ROLE] == "prefill" else 1)),
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("engines", "client", "wire")),
    }
    for container in (*spec["initContainers"], *spec["containers"]):
        container["image"] = image
        container["command"][0] = str(venv / "bin" / container["command"][0].replace("python3", "python"))
        container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        container["resources"] = {"limits": {"memory": "8Gi"}, "requests": {"cpu": "100m", "memory": "1Gi"}}
    interpreter = (venv / "bin" / "python").resolve().parents[1]
    share_folders(pod, {ROOT, venv, interpreter})
    return pod


def _is_ready(site: Site, namespace: str, name: str) -> bool:
    status = site.get(namespace, "pod", name)["status"]
    if status.get("phase") == "Failed" or any(one["restartCount"] for one in status.get("containerStatuses", [])):
        said = site.try_kubectl("-n", namespace, "logs", name, "--previous", "--tail=40").stdout
        raise RuntimeError(f"{name} ended: {said}")
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in status.get("conditions", []))


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code > 0
    except httpx.TransportError:
        return False


def _tokens(url: str) -> list[int]:
    """Return the tokens that greedily follow the prompt."""
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=request | {"return_token_ids": True}, timeout=LIMIT_S)
    assert answer.status_code == httpx.codes.OK, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found
