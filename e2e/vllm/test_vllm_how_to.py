"""The set-up of docs/how-to/vllm.md: `longshore up`, two `vllm serve`, the example router, and a client that streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import tiny_model
from controlplane.ports import free_port
from controlplane.processes import Process
from controlplane.waiting import until
from engines import ROOT, Engine, EngineOptions, Nursery, Prompt, body, tokens_of
from prompts import NEW_TOKENS, PROMPTS, SHARES_A_PREFIX, Oracle
from scene import TO_PREFILL
from tiny_model import TinyModel

from longshore_operator.render.engines import vllm_config

EXAMPLES = ROOT / "examples" / "vllm"
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def stage(nursery: Nursery, model: TinyModel) -> Iterator[tuple[str, Engine, Path]]:
    """Yield the router's address, its decode engine, and the folder of prefill's agent."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-vllm-")))
        sockets = agents_of(stack, EXAMPLES / "tiny.yaml", directory, nursery.directory)
        engines = {
            role: stack.enter_context(
                Engine(nursery, EngineOptions(f"how-to-{role}", model, tp, transfer, is_spawned=True))
            )
            for role, tp in (("prefill", 2), ("decode", 1))
            # The variables that the operator provides for an engine's pod of this role.
            if (transfer := json.loads(vllm_config(role, str(sockets[role]), "opaque")))
        }
        for engine in engines.values():
            engine.wait_ready()
        port = free_port()
        addresses = ["--prefill", engines["prefill"].url, "--decode", engines["decode"].url, "--port", str(port)]
        proxy = Process("proxy", [sys.executable, EXAMPLES / "proxy.py", *addresses], nursery.directory)
        stack.callback(proxy.stop)
        url = f"http://127.0.0.1:{port}"
        until(lambda: proxy.check() and answers(url), "the router listens", LIMIT_S)
        yield url, engines["decode"], sockets["prefill"].parent


def agents_of(stack: ExitStack, manifest: Path, directory: Path, logs: Path) -> dict[str, Path]:
    """Run the agents of a manifest by `longshore up` until the stack ends; return the socket of each role's."""
    longshore = Path(sys.executable).with_name("longshore")
    up = Process("longshore-up", [longshore, "up", "-f", manifest, "--directory", directory / "agents"], logs)
    stack.callback(up.stop)
    sockets = {role: directory / "agents" / f"{role}-0" / "agent.sock" for role in ("prefill", "decode")}
    until(lambda: up.check() and all(path.exists() for path in sockets.values()), "agents listen", LIMIT_S)
    return sockets


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code > 0
    except httpx.TransportError:
        return False


def test_clients_that_stream_get_the_tokens_of_one_engine_alone_and_their_prompts_were_moved(
    stage: tuple[str, Engine, Path], alone: Oracle
) -> None:
    url, decode, _ = stage
    moved = 0
    # The router sends the second prompt to both engines at once.
    for count, prompt in enumerate((PROMPTS[-2], PROMPTS[-1]), 1):
        assert streamed(url, prompt) == alone(prompt)
        moved += len(prompt)
        assert decode.metrics().total("vllm:external_prefix_cache_hits_total") == moved
        assert decode.metrics().total("vllm:longshore_load_bytes_count") == count
    # The chart's dashboard shows these.
    shown = {
        f"vllm:{name}_seconds_{end}"
        for name in ("longshore_load_time", "time_to_first_token")
        for end in ("sum", "count")
    }
    assert shown <= {sample.name for sample in decode.metrics().samples}


def streamed(url: str, prompt: Prompt) -> list[int]:
    """Return the tokens of a streamed answer. A busy engine sends several tokens in one event."""
    tokens: list[int] = []
    last = ""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body(prompt, NEW_TOKENS, stream=True), timeout=LIMIT_S
    ) as answer:
        assert answer.status_code == httpx.codes.OK
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                tokens += tokens_of(event) if event["choices"] else []
            last = line or last
    assert (answer.headers["content-type"].partition(";")[0], last) == ("text/event-stream", "data: [DONE]")
    return tokens


def workers_of(folder: Path) -> list[int]:
    """Return the workers of an agent that serve an engine's rank."""
    http = json.loads((folder / "agent.json").read_bytes())["http"]
    workers = httpx.get(f"{http}/v1/status").raise_for_status().json()["workers"]
    return [int(each["pid"]) for each in workers if each["engines"]]


def test_prompts_are_answered_after_the_workers_of_prefills_agent_were_killed(
    stage: tuple[str, Engine, Path], alone: Oracle
) -> None:
    url, _, prefill_folder = stage
    assert streamed(url, PROMPTS[-3]) == alone(PROMPTS[-3])
    before = workers_of(prefill_folder)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(
        lambda: len(now := workers_of(prefill_folder)) == len(before) and not set(now) & set(before),
        "prefill's ranks have new workers",
        LIMIT_S,
    )
    for prompt in (PROMPTS[-4], SHARES_A_PREFIX):
        assert streamed(url, prompt) == alone(prompt)


def test_an_error_of_an_engine_reaches_the_client_as_an_error(stage: tuple[str, Engine, Path]) -> None:
    url, _, _ = stage
    answer = httpx.post(f"{url}/v1/completions", json=body(PROMPTS[0], 1) | {"model": "another"}, timeout=LIMIT_S)
    assert answer.status_code == httpx.codes.NOT_FOUND


# -- the caches of a model in a deployment, as `longshore model` writes them ------------------------------------------------

# Tokens of a block. vLLM takes as many as the bytes of a layer's state need.
PAGE_SIZES = {"states": 96, "windows": 32}
MAKERS = {"states": tiny_model.make_mamba, "windows": tiny_model.make_windowed}
MANIFEST = """\
apiVersion: longshore.dev/v1alpha1
kind: DisaggDeployment
metadata: {{name: tiny}}
spec:
  model: {model}
  prefill: {{nodeSelector: {{role: prefill}}, tensorParallel: 2, pageSize: {page_size}, pageOrder: Opaque, staging: {{bufferSize: 8Mi}}}}
  decode: {{nodeSelector: {{role: decode}}, tensorParallel: 1, pageSize: {page_size}, pageOrder: Opaque, staging: {{poolSize: 64Mi}}}}
"""


@pytest.mark.parametrize("kind", MAKERS)
def test_engines_register_the_caches_that_longshore_model_writes_for_vllm(
    nursery: Nursery, tmp_path: Path, kind: str
) -> None:
    model = MAKERS[kind](tmp_path, 4)
    printed = subprocess.run(
        [Path(sys.executable).with_name("longshore"), "model", model.path, "--vllm", "-o", "json"],
        check=True,
        capture_output=True,
    )
    caches = json.loads(printed.stdout)["model"]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-vllm-")))
        manifest = tmp_path / "tiny.yaml"
        manifest.write_text(MANIFEST.format(model=json.dumps(caches), page_size=PAGE_SIZES[kind]))
        sockets = agents_of(stack, manifest, directory, nursery.directory)
        engines = {}
        for role, tp in (("prefill", 2), ("decode", 1)):
            transfer = json.loads(vllm_config(role, str(sockets[role]), "opaque"))
            options = EngineOptions(f"{kind}-{role}", model, tp, transfer, extra=("--no-enable-prefix-caching",))
            engines[role] = stack.enter_context(Engine(nursery, options))
        for engine in engines.values():
            engine.wait_ready()
        answer = engines["prefill"].complete(PROMPTS[-2], 1, TO_PREFILL)
        engines["decode"].complete(PROMPTS[-2], NEW_TOKENS, answer["kv_transfer_params"])
        assert engines["decode"].metrics().total("vllm:longshore_load_bytes_count") == 1
