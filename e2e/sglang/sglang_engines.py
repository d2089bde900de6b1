"""Runs SGLang engines as processes, forked from a nursery and used over HTTP. Called by tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import httpx
from controlplane.ports import can_listen, free_port
from controlplane.waiting import until
from nurseries import EngineError, tail
from nurseries import Nursery as EngineNursery
from tiny_model import TinyModel

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# The first import of SGLang takes 12 s of an idle core, and minutes on a cold and busy disk.
READY_LIMIT_S = 290.0
# The first forward pass of an engine takes seconds, or tens of seconds with many processes on few cores.
REQUEST_LIMIT_S = 180.0
PAGE_TOKENS = 16
# Prompts of more tokens than this are computed in chunks.
CHUNK_TOKENS = 128
POOL_TOKENS = 8192
TOKENS_MAX = 2048
RUNNING_MAX = 8
LOOPBACK = "127.0.0.1"


class Nursery(EngineNursery):
    """The process from which SGLang engines are forked."""

    program: ClassVar[Path] = FOLDER / "sglang_program.py"
    environment: ClassVar[Mapping[str, str]] = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        "SGLANG_HOST_IP": LOOPBACK,
    }

    @cached_property
    def version(self) -> str:
        """The version of SGLang in the environment."""
        (found,) = self.venv.glob("lib/python3*/site-packages/sglang-*.dist-info")
        return found.name.removeprefix("sglang-").removesuffix(".dist-info")


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine.

    Attributes:
        name: name of its log.
        role: "prefill" or "decode"; None for an engine that moves nothing.
        environment: variables of the engine's processes in addition to ours.
        extra: further arguments.
        paths: folders that Python searches first.
        plain: arguments that switch features of SGLang off.
        backend: SGLang's name of the transfer backend.
    """

    name: str
    model: TinyModel
    tp: int
    role: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    page_tokens: int = PAGE_TOKENS
    extra: Sequence[str] = ()
    paths: Sequence[Path] = ()
    chunk_tokens: int = CHUNK_TOKENS
    plain: Sequence[str] = ("--disable-radix-cache", "--disable-overlap-schedule")
    backend: str = "longshore"
    pp: int = 1

    def arguments(self, port: int, bootstrap_port: int, version: str) -> list[str]:
        """Return the arguments of the server of a version of SGLang."""
        given = [
            *("--model-path", str(self.model.path), "--served-model-name", "tiny", "--skip-server-warmup"),
            *("--host", LOOPBACK, "--port", str(port), "--tp-size", str(self.tp), "--page-size", str(self.page_tokens)),
            *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
            *("--max-total-tokens", str(POOL_TOKENS), "--context-length", str(TOKENS_MAX)),
            *("--max-running-requests", str(RUNNING_MAX), "--chunked-prefill-size", str(self.chunk_tokens)),
            *self.plain,
        ]
        if self.pp > 1:
            given += ["--pp-size", str(self.pp)]
        if self.role is not None:
            given += ["--disaggregation-mode", self.role, "--disaggregation-transfer-backend", self.backend]
        if self.role == "prefill":
            given += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
        if self.role == "decode" and version != "0.5.16":
            # The default uses a GPU. 0.5.16 has no such option and uses the CPU.
            given += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        return [*given, *self.extra]

    def variables(self) -> dict[str, str]:
        """Return the environment, with the processor of each rank."""
        cores = sorted(os.sched_getaffinity(0))
        ranks = "|".join(str(cores[rank % len(cores)]) for rank in range(self.tp * self.pp))
        return {
            "SGLANG_CPU_OMP_THREADS_BIND": ranks,
            "PYTHONPATH": os.pathsep.join(
                str(path) for path in (*self.paths, ROOT / "engines", ROOT / "client", ROOT / "wire", FOLDER)
            ),
            **self.environment,
        }


class Server:
    """The HTTP server of an engine."""

    http: httpx.Client

    def post(self, content: Mapping[str, Any], path: str = "/generate") -> Any:
        """Return the answer to a request. Raises httpx.HTTPStatusError with its text unless it succeeds."""
        response = self.http.post(path, json=content)
        if response.is_error:
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        return response.json()

    def stream(self, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the parts of a response as they arrive."""
        with self.http.stream("POST", "/generate", json={**content, "stream": True}) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))


class Engine(Server):
    """One engine: `start` returns at once, `wait_ready` when it answers. A killed one may be started again."""

    def __init__(self, nursery: Nursery, options: EngineOptions) -> None:
        self._nursery = nursery
        self.options = options
        self.log_path = nursery.directory / f"{options.name}.log"
        self.port = free_port()
        self.bootstrap_port = free_port()
        self._keeper: int | None = None
        self.http = httpx.Client(base_url=self.url, timeout=REQUEST_LIMIT_S)

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{LOOPBACK}:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self.http.close()

    def start(self) -> None:
        """Start its processes."""
        assert self._keeper is None, "the engine runs already"
        for port in (self.port, self.bootstrap_port):
            until(partial(can_listen, port), f"port {port} of {self.options.name} is free")
        order: dict[str, Any] = {
            "arguments": self.options.arguments(self.port, self.bootstrap_port, self._nursery.version),
            "environment": self.options.variables(),
            "log": str(self.log_path),
        }
        self._keeper = self._nursery.ask(start=order)["pid"]

    def serves(self) -> bool:
        """Whether it answers."""
        try:
            return self.http.get("/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        """Wait until it serves."""
        try:
            until(self.processes, f"{self.options.name} has processes", READY_LIMIT_S)
            until(lambda: not self.processes() or self.serves(), f"{self.options.name} serves", READY_LIMIT_S)
        except AssertionError as error:
            raise EngineError(f"{error}\n{self.log()}") from error
        if not self.processes():
            raise EngineError(f"{self.options.name} ended:\n{self.log()}")

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

    def log(self) -> str:
        """Return the end of its log."""
        return tail(self.log_path)


class Prompt(list[int]):
    """The tokens of a prompt."""


def body(prompt: Prompt, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return the JSON of a request: greedy, with tokens as numbers."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, **more}
