"""Runs a prefill and a decode engine with an agent each, and asks both for a prompt as a router does. Called by tests."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import tiny_model
from controlplane.waiting import until
from nurseries import write_entry_points
from sglang_engines import LOOPBACK, PAGE_TOKENS, Engine, EngineOptions, Nursery, Prompt, body
from sglang_prompts import (
    AT_ONCE,
    LOGPROB_ERROR_MAX,
    NEW_TOKENS,
    PROMPTS,
    TELLING_TOKENS_MIN,
    Answer,
    Oracle,
    answer_of,
)
from tiny_model import TinyModel

from longshore_agent.control.curve import read
from longshore_cli.local_agents import LocalAgent, make_keys

# Small compared with a machine's memory, large compared with a prompt's KV: 700 tokens are 2.9 MB.
RING_BYTES = 64 << 20
LANE_BYTES = 4 << 20
SLAB_BYTES_MIN = 64 << 10
# Long enough that peers on a loaded machine are not considered dead.
PEER_TIMEOUT_S = 60
# See `sglang_zeroing`, which only SGLang's interpreter can import.
ZERO_VARIABLE = "E2E_SGLANG_ZERO"
# The same for `sglang_nixl`.
NIXL_VARIABLE = "E2E_SGLANG_NIXL"
# The same for `sglang_cpu`.
LATENT_VARIABLE = "E2E_SGLANG_LATENT"
END_LIMIT_S = 120.0
# The same for `sglang_gated`.
GATED_VARIABLE = "E2E_SGLANG_GATED"
TEST_PLUGINS = ("sglang_zeroing", "sglang_nixl", "sglang_cpu", "sglang_gated")


class Family(NamedTuple):
    """A kind of model.

    Attributes:
        make: writes a tiny one.
        switches: what its engines need on CPUs.
        logprob_error_max: how far logprobs of one engine alone differ by its chunks.
        has_state: it has caches beside that of all tokens.
    """

    make: Callable[[Path], TinyModel]
    switches: Mapping[str, str] = {}
    logprob_error_max: float = LOGPROB_ERROR_MAX
    has_state: bool = False

    def alone(self, nursery: Nursery, model: TinyModel, plugins: Path, *what: Any) -> Oracle:
        """Return the answers of one engine; `what` as for `Oracle`."""
        return Oracle(nursery, model, *what, environment=self.switches, paths=(write_plugins(plugins),))


DENSE = Family(partial(tiny_model.make, kv_heads=4))
LATENT = Family(tiny_model.make_latent, {LATENT_VARIABLE: "1"})
WINDOWED = Family(partial(tiny_model.make_alternating, kv_heads=4), has_state=True)
GATED = Family(partial(tiny_model.make_gated, kv_heads=4), {GATED_VARIABLE: "1"}, 2e-2, has_state=True)


@dataclass(frozen=True)
class Side:
    """One engine of a scene."""

    tp: int
    page_tokens: int = PAGE_TOKENS
    extra: Sequence[str] = ()
    plain: Sequence[str] = EngineOptions.plain
    pp: int = 1


def routed(bootstrap_port: int, room: int | None = None) -> dict[str, Any]:
    """Return what a router adds to a request for a prefill engine; without a `room`, a new one."""
    return {
        "bootstrap_host": LOOPBACK,
        "bootstrap_port": bootstrap_port,
        "bootstrap_room": random.randrange(1, 2**63) if room is None else room,
    }


class Scene:
    """Agents and engines of two sides; a context manager, which returns when all are ready.

    Args:
        prefill, decode: None: the engine of this side is in another scene.
        keys: the folder of the agents' keys, where agents of another scene are their peers.
        backend: SGLang's name of the transfer backend. Only ours has agents.
        paths: folders that the engines' Python searches first.
    Attributes:
        keys: the agents' keys.
        zero: while this file exists, received KV is zeroed; see `sglang_zeroing`.
    """

    def __init__(
        self,
        nursery: Nursery,
        model: TinyModel,
        prefill: Side | None,
        decode: Side | None,
        *,
        agent_settings: Mapping[str, str | int] | None = None,
        environment: Mapping[str, str] | None = None,
        keys: Path | None = None,
        backend: str = EngineOptions.backend,
        paths: Sequence[Path] = (),
    ) -> None:
        self._stack = ExitStack()
        self._logs = nursery.directory
        # A socket's path may be 107 bytes long.
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-sglang-")))
        self.zero = self._directory / "zero"
        if keys is None:
            keys = self._directory / "keys"
            make_keys(keys)
        self.keys = read(keys)
        plugins = write_plugins(self._directory)
        self.agents: dict[str, LocalAgent] = {}
        self.engines: dict[str, Engine] = {}
        for role, side in (("prefill", prefill), ("decode", decode)):
            if side is None:
                continue
            variables: dict[str, str] = {}
            if backend == EngineOptions.backend:
                settings: dict[str, str | int | float] = {
                    "deployment": "e2e/engines",
                    "node": role,
                    "keys_directory": str(keys),
                    "ring_bytes": RING_BYTES,
                    "lane_bytes": LANE_BYTES,
                    "slab_bytes_min": SLAB_BYTES_MIN,
                    "staging": "Always",
                    "peer_timeout_s": PEER_TIMEOUT_S,
                    **(agent_settings or {}),
                }
                agent = self.agents[role] = LocalAgent(settings, self._directory / role)
                variables = {
                    "LONGSHORE_ENGINE_SOCKET": agent.socket_path,
                    "LONGSHORE_ENGINE_INSTANCE_PREFIX": role,
                    ZERO_VARIABLE: str(self.zero),
                }
            options = EngineOptions(
                role,
                model,
                side.tp,
                role,
                variables | dict(environment or {}),
                side.page_tokens,
                tuple(side.extra),
                paths=(plugins, *paths),
                plain=tuple(side.plain),
                pp=side.pp,
                backend=backend,
            )
            self.engines[role] = Engine(nursery, options)

    @property
    def prefill(self) -> Engine:
        """The prefill engine."""
        return self.engines["prefill"]

    @property
    def decode(self) -> Engine:
        """The decode engine."""
        return self.engines["decode"]

    def routed(self, room: int | None = None) -> dict[str, Any]:
        """Return what a router adds to a request."""
        return routed(self.prefill.bootstrap_port, room)

    def ask(self, prompt: Prompt, max_tokens: int, **more: Any) -> Any:
        """Send a prompt to both engines at once, as a router does; return decode's answer."""
        content = body(prompt, max_tokens, **{**self.routed(), **more})
        with ThreadPoolExecutor(1) as thread:
            computed = thread.submit(self.prefill.post, content)
            found = self.decode.post(content)
            computed.result()
        return found

    def open_rooms(self) -> float:
        """Return the number of open halves of rooms at the agents."""
        return sum(agent.metrics().total("longshore_rooms_open") for agent in self.agents.values())

    def gathered_bytes(self) -> float:
        """Return the bytes of KV that prefill's agent has gathered from pages."""
        return self.agents["prefill"].metrics().total("longshore_stage_bytes_total", stage="gather")

    def received_bytes(self) -> float:
        """Return the bytes of KV that decode's agent has scattered into pages."""
        return self.agents["decode"].metrics().total("longshore_stage_bytes_total", stage="scatter")

    def __enter__(self) -> Self:
        try:
            for agent in self.agents.values():
                agent.start()
            for agent in self.agents.values():
                agent.wait_ready()
            for engine in self.engines.values():
                self._stack.enter_context(engine)
            for engine in self.engines.values():
                engine.wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for engine in self.engines.values():
            engine.kill()
        for agent in self.agents.values():
            agent.terminate()
        for role, agent in self.agents.items():
            agent.stop()
            if agent.log_path.exists():
                shutil.copy(agent.log_path, self._logs / f"agent-{role}.log")
        self._stack.close()


def write_plugins(directory: Path, tests: Sequence[str] = TEST_PLUGINS) -> Path:
    """Write the metadata by which SGLang finds the connector, as an installation has it, and the tests' plug-ins."""
    return write_entry_points(directory, "sglang.srt.plugins", {name: f"{name}:register" for name in tests})


def token_bytes(model: TinyModel) -> int:
    """Return the bytes of K and V of one token in all layers and heads."""
    return 2 * tiny_model.LAYERS * model.kv_heads * tiny_model.HEAD_DIM * tiny_model.ELEMENT_BYTES


def at_once(scene: Scene, prompts: Sequence[Prompt], max_tokens: int, **more: Any) -> list[Any]:
    """Ask for all prompts concurrently; return decode's answers."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda prompt: scene.ask(prompt, max_tokens, **more), prompts))


def answers_at_once(scene: Scene, prompts: Sequence[Prompt]) -> list[Answer]:
    """Ask for all prompts concurrently, with logprobs."""
    return [answer_of(found) for found in at_once(scene, prompts, NEW_TOKENS, return_logprob=True)]


def unchanged_by_zeroing(scene: Scene, alone: Oracle, what: str = "") -> list[int]:
    """Zero what came, or a part of it; return the lengths of the telling prompts with the tokens of one engine alone."""
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    scene.zero.write_text(what)
    try:
        answers = at_once(scene, telling, NEW_TOKENS)
    finally:
        scene.zero.unlink()
    return [len(p) for p, found in zip(telling, answers, strict=True) if found["output_ids"] == alone(p)]


@contextmanager
def held(scene: Scene, role: str) -> Iterator[None]:
    """Stop the workers of an agent during the block."""
    workers = [int(worker["pid"]) for worker in scene.agents[role].status()["workers"] if worker.get("pid")]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def rooms_open(scene: Scene, role: str) -> float:
    """Return the number of open halves at one agent."""
    return scene.agents[role].metrics().total("longshore_rooms_open")


def tokens_in_use(engine: Engine) -> int:
    """Return the number of tokens in pages that an engine has not freed."""
    found = engine.http.get("/v1/loads?include=core").raise_for_status().json()
    return sum(int(load["num_used_tokens"]) for load in found["loads"])


def check_nothing_is_lent(scene: Scene, limit_s: float = END_LIMIT_S) -> None:
    """Wait until no room is open at any agent, and every engine has all its pages."""
    until(lambda: scene.open_rooms() == 0, "no room is open at any agent", limit_s)
    for role, engine in scene.engines.items():
        until(partial(_has_all_pages, engine), f"{role} has all its pages", limit_s)


def _has_all_pages(engine: Engine) -> bool:
    return tokens_in_use(engine) == 0
