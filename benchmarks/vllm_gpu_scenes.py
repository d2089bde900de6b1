"""Runs real vLLM engines on GPUs, with an agent or with another connector, for `vllm_on_gpus`.

An engine of TP2 runs on both GPUs, and one of TP1 on the last. On a machine with one GPU all engines of TP1 share it. Engines
of a scene serve each other in both directions.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from served_engines import LOG_CHARACTERS, ROOT, ServedEngine, python_path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "vllm"))
from engines import GPU_VARIABLES, MODEL_NAME, Prompt, body
from gpu_world import GPUAgent, agent_page

from longshore_cli.main import main as longshore

# The second engine of a size serves prefill of the same size.
SIDES: Mapping[str, tuple[int, ...]] = {"TP2": (0, 1), "TP1": (1,), "TP2 second": (0, 1), "TP1 second": (0,)}
# The sides of the first agent; the second has the others, so that both engines of each direction have their own.
FIRST_AGENTS_SIDES = ("TP2", "TP1 second")
LOOPBACK = "127.0.0.1"
TOKENS_MAX, CHUNK_TOKENS, BLOCK_TOKENS = 16_384, 2_048, 16
# Of TP1; a rank of TP2 has half.
KV_BYTES = 8 << 30
# vLLM's interpreter, and folders of packages that it does not have itself.
PYTHON, PATH = "VLLM_PYTHON", "VLLM_PATH"
# Another checkout, and the end of the names of connectors that run with its agents and its connector.
OTHER_TREE, OTHER = "OTHER_TREE", ", other tree"
OURS: Mapping[str, int] = {"Longshore, two agents": 2, "Longshore, one agent": 1}
AGENTS: Mapping[str, int] = {**OURS, **{name + OTHER: count for name, count in OURS.items()}}
NIXL, MOONCAKE, FLOOR = "NixlConnector", "MooncakeConnector", "floor"
MOONCAKE_TCP = f"{MOONCAKE}, TCP"
# Mooncake's library chooses its transport by these variables, not by `mooncake_protocol`. TCP fails a prompt with more pieces
# than may wait for a peer, by default some 2,000; vLLM makes a piece of each block, layer and pair of ranks.
MOONCAKES: Mapping[str, Mapping[str, str]] = {
    MOONCAKE: {"MC_INTRANODE_NVLINK": "1"},
    MOONCAKE_TCP: {"MC_FORCE_TCP": "1", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"},
}
# How long a benchmark waits until both agents know that a room has ended.
TIMELINE_LIMIT_S = 5.0
# A connector that has not answered by then has failed.
REQUEST_LIMIT_S = 45.0
CONNECTORS = (*AGENTS, NIXL, *MOONCAKES, FLOOR)


def devices_of(sides: Sequence[str], gpu_count: int) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each side. Raises SystemExit if the machine has too few."""
    needed_count = max(len(SIDES[side]) for side in sides)
    if gpu_count < needed_count:
        raise SystemExit(f"an engine of TP{needed_count} needs as many GPUs, and nvidia-smi lists {gpu_count}")
    return {side: SIDES[side] if gpu_count > 1 else (0,) for side in sides}


@dataclass
class Engine(ServedEngine):
    """One `vllm serve`; `start` returns at once.

    Attributes:
        transfer: vLLM's `--kv-transfer-config`.
        known: of its prompts, for decode, if that is known before prefill answers.
        tree: the checkout with its connector.
    """

    transfer: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[str, Any] = field(default_factory=dict)
    tree: Path = ROOT

    def command(self) -> list[str]:
        """Return the program and its arguments."""
        tp = len(self.devices)
        return [
            *(os.environ.get(PYTHON, sys.executable), "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)),
            *("--served-model-name", MODEL_NAME, "--host", LOOPBACK, "--port", str(self.port)),
            *("--tensor-parallel-size", str(tp), "--dtype", "bfloat16", "--block-size", str(BLOCK_TOKENS)),
            *("--max-model-len", str(TOKENS_MAX), "--max-num-batched-tokens", str(CHUNK_TOKENS)),
            *("--max-num-seqs", "64", "--kv-cache-memory-bytes", str(KV_BYTES // tp)),
            # It is checked at the start, against the memory that other engines leave.
            *("--gpu-memory-utilization", "0.1", "--no-enable-prefix-caching"),
            *("--kv-transfer-config", json.dumps(dict(self.transfer)), *self.arguments),
        ]

    def variables(self) -> dict[str, str]:
        """Return the environment in addition to ours."""
        path = python_path(os.environ.get(PATH), self.tree)
        # NixlConnector moves states of unequal TP in this order only.
        layout = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
        return {**GPU_VARIABLES, **layout, "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}

    def complete(self, prompt: Prompt, max_tokens: int, transfer: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a completion."""
        answer = self.http.post("/v1/completions", json=body(prompt, max_tokens, transfer))
        if answer.is_error:
            raise SystemExit(f"{self.name}: {answer.text}\n{self.log()}")
        return dict(answer.json())

    def stream(
        self, prompt: Prompt, max_tokens: int, transfer: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[float, list[int]]]:
        """Yield the tokens of each event of an answer, and when it came."""
        wanted = body(prompt, max_tokens, transfer, stream=True)
        with self.http.stream("POST", "/v1/completions", json=wanted) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if not event.get("choices"):
                        raise SystemExit(f"{self.name}: {event}\n{self.log()}")
                    yield time.monotonic(), event["choices"][0]["token_ids"] or []


class Scene:
    """The engines of one connector, by their names in `SIDES`, and their agents.

    Args:
        devices: the GPUs of each side.
        steps: the engines report their steps of each room to the agents.
    Attributes:
        kinds: how prompts are given to the engines: "in turn", "at once", or "floor".
        failed: why it cannot move prompts any more; empty while it can.
    """

    def __init__(
        self,
        name: str,
        devices: Mapping[str, tuple[int, ...]],
        model: Path,
        directory: Path,
        first_port: int,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        *,
        steps: bool = False,
    ) -> None:
        self.name, self._directory, self.failed = name, directory, ""
        self._stack = ExitStack()
        self.kinds = (FLOOR,) if name == FLOOR else ("in turn",) if name == NIXL else ("in turn", "at once")
        settings = {"LONGSHORE_DEPLOYMENT": "bench/vllm", "LONGSHORE_GPU_MPS": str(bool(environment)).lower()}
        settings |= {"LONGSHORE_CLIENT_SPANS": str(steps).lower()}
        tree = Path(os.environ[OTHER_TREE]).resolve() if name.endswith(OTHER) else ROOT
        settings |= {"PYTHONPATH": os.pathsep.join(path.replace(str(ROOT), str(tree), 1) for path in sys.path)}
        self.agents = [
            self._stack.enter_context(GPUAgent(**settings, **environment)) for _ in range(AGENTS.get(name, 0))
        ]
        self.engines: dict[str, Engine] = {}
        for index, side in enumerate(devices):
            instance = f"{side}-{first_port}".replace(" ", "-")
            more, variables, known = self._connector(side, first_port + 50 + 10 * index)
            transfer = {"kv_role": "kv_both", "engine_id": instance, **more}
            known |= {"remote_engine_id": instance} if known else {}
            label = f"{name}-{side}".replace(",", "").replace(" ", "-")
            self.engines[side] = Engine(
                *(label, model, devices[side], first_port + index, directory, {**environment, **variables}, arguments),
                transfer=transfer,
                known=known,
                tree=tree,
                request_limit_s=REQUEST_LIMIT_S,
            )

    def _connector(self, side: str, port: int) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        """Return an engine's transfer configuration, its environment, and what decode must be told of each of its prompts."""
        if self.agents:
            extra = {"socket": self.agents[0 if side in FIRST_AGENTS_SIDES else -1].socket}
            module = "longshore_engines.vllm"
            named = {"kv_connector": "LongshoreConnector", "kv_connector_module_path": module}
            return named | {"kv_connector_extra_config": extra}, {}, {}
        if self.name == FLOOR:
            return {"kv_connector": "FloorConnector", "kv_connector_module_path": "floor_connector"}, {}, {}
        if self.name == NIXL:
            variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            return {"kv_connector": NIXL}, variables, {}
        variables = {"VLLM_HOST_IP": LOOPBACK, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), **MOONCAKES[self.name]}
        known = {"do_remote_prefill": True, "remote_bootstrap_addr": f"http://{LOOPBACK}:{port}"}
        extra = {"mooncake_protocol": "tcp"}
        return {"kv_connector": MOONCAKE, "kv_connector_extra_config": extra}, variables, known

    def room(self) -> dict[str, Any]:
        """Return the number of a prompt that both engines get; it lets them have the prompt at once."""
        if self.name in MOONCAKES:
            return {"transfer_id": f"{random.getrandbits(63):x}"}
        return {"longshore_room": random.getrandbits(63)} if self.agents else {}

    def __enter__(self) -> Self:
        for engine in self.engines.values():
            engine.start()
            self._stack.callback(engine.end)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for index, agent in enumerate(self.agents):
            label = self.name.replace(",", "").replace(" ", "-")
            (self._directory / f"{label}-agent-{index}.log").write_text(agent.log(), encoding="utf-8")
        self._stack.close()

    def wait_ready(self) -> None:
        """Return when all engines serve. Raises SystemExit with the engine's and the agents' logs if one does not."""
        for engine in self.engines.values():
            try:
                engine.wait_ready()
            except SystemExit as error:
                agents = [f"agent {index}:\n{agent.log()[-LOG_CHARACTERS:]}" for index, agent in enumerate(self.agents)]
                raise SystemExit("\n".join([str(error), *agents])) from error

    def ended_rooms(self) -> set[str]:
        """Return the rooms that have ended at all of its agents."""
        return set.intersection(*(ended_rooms(agent) for agent in self.agents))

    def write_timeline(self, before: set[str], path: Path) -> None:
        """Write the timeline of the room that has ended since `before`, as `longshore trace room` prints it, and its file.

        If there is none, or if there are several, print that, and write none.
        """
        commanded = [word for agent in self.agents for word in ("--agent", agent_address(agent))]
        end_s = time.monotonic() + TIMELINE_LIMIT_S
        while not (ended := self.ended_rooms() - before) and time.monotonic() < end_s:
            time.sleep(0.05)
        if len(ended) != 1:
            print(f"{path.name}: {len(ended)} rooms have ended instead of 1, so there is no timeline", flush=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".txt").open("w") as text, redirect_stdout(text), redirect_stderr(text):
            longshore(["trace", "room", *ended, *commanded, "-o", str(path.with_suffix(".json"))])

    def processes(self) -> dict[str, list[int]]:
        """Return the processes of agents and of engines."""
        agents = [agent.process.pid for agent in self.agents]
        return {"agents": agents, "engines": [engine.process.pid for engine in self.engines.values()]}


def agent_address(agent: GPUAgent) -> str:
    """Return the address of an agent's HTTP pages."""
    return str(json.loads((agent.directory / "agent.json").read_bytes())["http"])


def ended_rooms(agent: GPUAgent) -> set[str]:
    """Return the rooms that have ended at an agent and that it still keeps."""
    found, after = set[str](), ""
    while True:
        page = json.loads(agent_page(agent, f"/v1/rooms?ended=true&limit=1000&after={quote(after)}"))
        found |= {entry["room"]["room"] for entry in page["rooms"]}
        after = page["next"]
        if not after:
            return found
