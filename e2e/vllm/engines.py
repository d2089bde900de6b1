"""Runs vLLM engines as processes, forked from a nursery and used over HTTP. Called by tests and `benchmarks/vllm_connectors.py`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import httpx
from controlplane.ports import can_listen, free_port
from controlplane.waiting import until
from nurseries import EngineError, tail
from nurseries import Nursery as EngineNursery
from tiny_model import TinyModel

from longshore_cli.metrics_page import MetricsPage

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
OUR_PATHS = (ROOT / "engines", ROOT / "client", ROOT / "wire", FOLDER)
# The first import of vLLM takes 10 s of an idle core, and minutes on a cold and busy disk.
READY_LIMIT_S = 290.0
# The first forward pass of an engine takes seconds, or tens of seconds with many processes on few cores.
REQUEST_LIMIT_S = 180.0
# An engine lends a prompt's blocks until decode has them, at most for a connector's limit of 120 s.
LENT_LIMIT_S = 150.0
KV_BYTES = 64 << 20
BLOCK_TOKENS = 32
# Prompts of more tokens than this are computed in chunks.
CHUNK_TOKENS = 128
TOKENS_MAX = 2048
MODEL_NAME = "tiny"
# Numbers of GPUs, such as "0,1", that engines run on instead of processors; see README.md.
DEVICES = [number for number in os.environ.get("E2E_VLLM_DEVICES", "").split(",") if number]
# The attention backend on GPUs. The tests need one for float32.
BACKEND = "TRITON_ATTN"
# Graphs for steps of decode, and no compiler, which would take minutes at each start.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4, 16]}
ON_GPUS = (
    *("--attention-backend", BACKEND, "--compilation-config", json.dumps(GRAPHS)),
    # It is checked at the start, against the memory that other engines leave.
    *("--gpu-memory-utilization", "0.05"),
)
GPU_VARIABLES = {
    # Programs that the usual packages compile at their first use.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    # The agent maps the cache by CUDA IPC handles.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
}


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine.

    Attributes:
        name: name of its log and of its instance.
        transfer: --kv-transfer-config; None for an engine that moves nothing.
        environment: variables of the engine's processes in addition to ours.
        extra: further arguments of `vllm serve`.
        is_spawned: start the program `vllm` as a user does, as always on GPUs. Takes 10 s of a core a process longer
            than a fork.
    """

    name: str
    model: TinyModel
    tp: int
    transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    block_tokens: int = BLOCK_TOKENS
    extra: Sequence[str] = ()
    is_spawned: bool = False

    def arguments(self, port: int) -> list[str]:
        """Return the arguments of `vllm`."""
        given = [
            *(
                "serve",
                str(self.model.path),
                "--served-model-name",
                MODEL_NAME,
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ),
            *("--dtype", "float32", "--kv-cache-memory-bytes", str(KV_BYTES)),
            *(ON_GPUS if DEVICES else ("--enforce-eager",)),
            *("--block-size", str(self.block_tokens), "--max-model-len", str(TOKENS_MAX), "--max-num-seqs", "16"),
            *("--max-num-batched-tokens", str(CHUNK_TOKENS), "--tensor-parallel-size", str(self.tp)),
        ]
        if self.transfer is not None:
            given += ["--kv-transfer-config", json.dumps(self.transfer)]
        return [*given, *self.extra]

    def variables(self) -> dict[str, str]:
        """Return the environment, with the processor or the GPU of each rank."""
        if DEVICES:
            # Attention in full float32, so that rounding changes no token.
            places = {"TRITON_F32_DEFAULT": "ieee", "CUDA_VISIBLE_DEVICES": ",".join(DEVICES[-self.tp :])}
            places |= GPU_VARIABLES
        else:
            cores = sorted(os.sched_getaffinity(0))
            places = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(self.tp))}
        return {
            **places,
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
            "PYTHONPATH": os.pathsep.join(map(str, OUR_PATHS)),
            **self.environment,
        }


class Nursery(EngineNursery):
    """The process from which vLLM engines are forked."""

    program: ClassVar[Path] = FOLDER / "vllm_program.py"
    environment: ClassVar[Mapping[str, str]] = {"VLLM_NO_USAGE_STATS": "1"}


class Engine:
    """One engine: `start` returns at once, `wait_ready` when it answers. A killed one may be started again."""

    def __init__(self, nursery: Nursery, options: EngineOptions) -> None:
        self._nursery = nursery
        self.options = options
        self.log_path = nursery.directory / f"{options.name}.log"
        self.port = free_port()
        self._keeper: int | None = None
        self.http = httpx.Client(base_url=self.url, timeout=REQUEST_LIMIT_S)

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self.http.close()

    def start(self) -> None:
        """Start its processes."""
        assert self._keeper is None, "the engine runs already"
        until(lambda: can_listen(self.port), f"port {self.port} of {self.options.name} is free")
        order: dict[str, Any] = {
            "arguments": self.options.arguments(self.port),
            "environment": self.options.variables(),
            "log": str(self.log_path),
        }
        if self.options.is_spawned or DEVICES:
            # vLLM does not work on a GPU in a fork of a process that has imported it.
            order["program"] = str(self._nursery.venv / "bin" / "vllm")
        self._keeper = self._nursery.ask(start=order)["pid"]

    def wait_ready(self) -> None:
        """Wait until it serves and has finished its first computation, which takes long."""

        def serves() -> bool:
            if not self.processes():
                raise EngineError(f"{self.options.name} ended:\n{self.log()}")
            try:
                return self.http.get("/health", timeout=5.0).status_code == httpx.codes.OK
            except httpx.TransportError:
                return False

        _until(self.processes, f"{self.options.name} has processes", READY_LIMIT_S, self)
        _until(serves, f"{self.options.name} serves", READY_LIMIT_S, self)
        self.complete(Prompt([1, 2]), 2)

    def processes(self) -> list[int]:
        """Return the ids of its processes; empty if it has ended."""
        if self._keeper is None:
            return []
        found: list[int] = self._nursery.ask(look=self._keeper)["processes"]
        return found

    def kill(self) -> None:
        """Kill all of its processes by SIGKILL and wait for their end. A second call does nothing."""
        if self._keeper is not None:
            self._nursery.ask(kill=self._keeper)
            self._keeper = None

    def complete(
        self, prompt: Prompt, max_tokens: int, transfer: Mapping[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return the response to a completion. Raises httpx.HTTPError unless it succeeds."""
        response = self.http.post("/v1/completions", json=body(prompt, max_tokens, transfer, **more))
        if response.is_error:
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        found: dict[str, Any] = response.json()
        return found

    def stream(
        self, prompt: Prompt, max_tokens: int, transfer: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the parts of a response as they arrive."""
        with self.http.stream(
            "POST", "/v1/completions", json=body(prompt, max_tokens, transfer, stream=True)
        ) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    part = json.loads(line.removeprefix("data: "))
                    if "error" in part:
                        raise EngineError(f"{self.options.name}: {part['error']}\n{self.log()}")
                    yield part

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. vLLM refuses while a block is in use or lent, so this waits until none is."""

        def is_empty() -> bool:
            answer = self.http.post("/reset_prefix_cache").raise_for_status()
            return answer.json()["success"] is True

        _until(is_empty, f"{self.options.name} has emptied its prefix cache", LENT_LIMIT_S, self)

    def metrics(self) -> MetricsPage:
        """Return `/metrics`, parsed."""
        return MetricsPage(self.http.get("/metrics").raise_for_status().text)

    def log(self) -> str:
        """Return the end of its log."""
        return tail(self.log_path)


class Prompt(list[int]):
    """The tokens of a prompt."""


def body(prompt: Prompt, max_tokens: int, transfer: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Return the JSON of a completion: greedy, with tokens as numbers."""
    found: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    if transfer is not None:
        found["kv_transfer_params"] = dict(transfer)
    return found


@contextmanager
def client(engine: Engine, prompt: Prompt, max_tokens: int, transfer: Mapping[str, Any]) -> Iterator[None]:
    """Send a request, and disconnect at the end of the block, whether or not an answer has come."""
    content = json.dumps(body(prompt, max_tokens, transfer)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: e2e\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", engine.port)) as connection:
        connection.sendall(head.encode() + content)
        yield


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    """Return the tokens of an answer."""
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def _until(look: Any, what: str, limit_s: float, engine: Engine) -> None:
    try:
        until(look, what, limit_s)
    except EngineError:
        raise
    except AssertionError as error:
        raise EngineError(f"{error}\n{engine.log()}") from error
