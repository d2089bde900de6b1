"""Runs real SGLang engines on GPUs, with agents or with SGLang's own NIXL backend, for `sglang_on_gpus`.

An engine of TP2 runs on both GPUs, a prefill of TP1 on the first and a decode of TP1 on the last.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from served_engines import DENSE_TOKEN_BYTES, ServedEngine, python_path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e" / "sglang"))
from gpu_world import GPUAgent
from sglang_engines import LOOPBACK, Server
from sglang_scene import routed, write_plugins

DEVICES: Mapping[tuple[str, int], tuple[int, ...]] = {
    ("prefill", 2): (0, 1),
    ("decode", 2): (0, 1),
    ("prefill", 1): (0,),
    ("decode", 1): (1,),
}
TOKENS_MAX, PAGE_TOKENS, AT_ONCE_MAX = 16_384, 16, 64
# A backend that has not answered by then has failed. The slowest answer that was seen took 3 s.
REQUEST_LIMIT_S = 40.0
# SGLang's interpreter, and folders of packages that it does not have itself.
PYTHON, PATH = "SGLANG_PYTHON", "SGLANG_PATH"
STAGED, PLAIN = "SGLang NIXL, staging", "SGLang NIXL"
AGENTS: Mapping[str, int] = {"Longshore, two agents": 2, "Longshore, one agent": 1}
BACKENDS = (*AGENTS, STAGED, PLAIN)
# Prefill gathers half the heads of a chunk's K and V, 2 bytes an element, into one buffer for each of its queues. 0.5.16 has
# 64 MB: it sends what does not fit in slices, over which decode then scatters memory that nobody wrote. 0.5.23 has enough.
STAGING_BYTES = TOKENS_MAX * DENSE_TOKEN_BYTES // 2
STAGING_VARIABLES = {
    "SGLANG_DISAGG_STAGING_BUFFER": "1",
    "SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB": str(STAGING_BYTES >> 20),
}
VARIABLES = {
    "SGLANG_HOST_IP": LOOPBACK,
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Engines share GPUs, so those of one engine have unequal free memory.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    # A compiler would take a minute at each start.
    "TORCHDYNAMO_DISABLE": "1",
    # The agent maps the cache by CUDA IPC handles.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
}
ON_GPU = (
    *("--dtype", "bfloat16", "--attention-backend", "triton", "--disable-custom-all-reduce"),
    # SGLang compares it with the memory that engines beside this one leave. `--max-total-tokens` is the size.
    *("--mem-fraction-static", "0.95"),
)
ON_CPU = ("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-overlap-schedule")
CPU_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent",
    "OMP_NUM_THREADS": "1",
    # SGLang's allocator of pages is a program of Triton.
    "TRITON_INTERPRET": "1",
}
GRAPHS = ("--cuda-graph-bs-decode", "1", "4", "16", "64")


@dataclass
class SGLangEngine(ServedEngine, Server):
    """One `sglang.launch_server`.

    Attributes:
        role: "prefill" or "decode".
        backend: SGLang's name of the transfer backend.
        kv_tokens: size of the KV pool.
    """

    role: str = "prefill"
    backend: str = "longshore"
    kv_tokens: int = 0
    tp: int = 1

    def command(self) -> list[str]:
        """Return the program and its arguments."""
        given = [
            *(os.environ.get(PYTHON, sys.executable), "-m", "sglang.launch_server", "--model-path", str(self.model)),
            *("--served-model-name", "tiny", "--host", LOOPBACK, "--port", str(self.port), "--skip-server-warmup"),
            *("--tp-size", str(self.tp), "--page-size", str(PAGE_TOKENS), "--disable-radix-cache"),
            *("--max-total-tokens", str(self.kv_tokens), "--context-length", str(TOKENS_MAX)),
            # One chunk a prompt: 0.5.16 computes the first chunk of a prompt that it moves nowhere again and again.
            *("--max-running-requests", str(AT_ONCE_MAX), "--chunked-prefill-size", str(TOKENS_MAX)),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disaggregation-mode", self.role, "--disaggregation-transfer-backend", self.backend),
            *(ON_GPU if self.devices else ON_CPU),
        ]
        if self.role == "prefill":
            given += ["--disaggregation-bootstrap-port", str(self.bootstrap_port), "--disable-prefill-cuda-graph"]
        elif self.devices:
            given += GRAPHS
        return [*given, *self.arguments]

    def variables(self) -> dict[str, str]:
        """Return the environment in addition to ours."""
        more = (
            {} if self.devices else CPU_VARIABLES | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp)))}
        )
        return {**VARIABLES, **more, "PYTHONPATH": python_path(os.environ.get(PATH))}

    @property
    def bootstrap_port(self) -> int:
        """The port at which prefill tells where its ranks are."""
        return self.port + 50


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine; requests go to both at once, as SGLang's router sends them."""

    prefill: SGLangEngine
    decode: SGLangEngine

    def routed(self) -> dict[str, Any]:
        """Return what a router adds to a request."""
        return routed(self.prefill.bootstrap_port)


@dataclass
class Scene:
    """The engines of one backend, a pair for each direction, and its agents. A context manager that starts them.

    Attributes:
        directions: tensor parallel sizes of prefill and decode.
    """

    name: str
    directions: Sequence[tuple[int, int]]
    model: Path
    directory: Path
    first_port: int
    kv_tokens: int
    environment: Mapping[str, str]
    on_cpu: bool = False
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    agents: list[GPUAgent] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def _start(self, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-plugins-")))
        settings = {"LONGSHORE_DEPLOYMENT": "bench/sglang", "LONGSHORE_GPU_MPS": str(bool(self.environment)).lower()}
        for _ in range(AGENTS.get(self.name, 0)):
            agent = GPUAgent(**settings, **self.environment)
            self.agents.append(stack.enter_context(agent))
        plugins = write_plugins(folder, ())
        for index, direction in enumerate(self.directions):
            roles = zip(("prefill", "decode"), direction, strict=True)
            engines = [
                self._engine(role, tp, self.first_port + 10 * index + side, plugins)
                for side, (role, tp) in enumerate(roles)
            ]
            self.pairs[direction] = Pair(*engines)
            for engine in engines:
                engine.start()
                stack.callback(engine.end)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for index, agent in enumerate(self.agents):
            (self.directory / f"{self.label}-agent-{index}.log").write_text(agent.log(), encoding="utf-8")
        self._stack.close()

    @property
    def label(self) -> str:
        """Its name in the names of files."""
        return self.name.replace(",", "").replace(" ", "-")

    def wait_ready(self) -> None:
        """Return when all engines serve."""
        for pair in self.pairs.values():
            pair.prefill.wait_ready()
            pair.decode.wait_ready()

    def _engine(self, role: str, tp: int, port: int, plugins: Path) -> SGLangEngine:
        variables = dict(self.environment)
        if self.agents:
            agent = self.agents[len(self.agents) - 1 if role == "decode" else 0]
            variables |= {"LONGSHORE_ENGINE_SOCKET": agent.socket, "LONGSHORE_ENGINE_INSTANCE_PREFIX": f"{role}-{port}"}
        elif self.name == STAGED:
            variables |= STAGING_VARIABLES
        engine = SGLangEngine(
            name=f"{self.label}-{role}-TP{tp}",
            model=self.model,
            devices=() if self.on_cpu else DEVICES[role, tp],
            port=port,
            directory=self.directory,
            role=role,
            backend="longshore" if self.agents else "nixl",
            kv_tokens=self.kv_tokens,
            tp=tp,
            request_limit_s=REQUEST_LIMIT_S,
        )
        own = engine.variables()["PYTHONPATH"]
        engine.environment = variables | {"PYTHONPATH": os.pathsep.join([str(plugins), own])}
        return engine
