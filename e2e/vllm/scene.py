"""Runs a prefill and a decode engine with an agent each, in either direction, or with vLLM's own NixlConnector instead.

Called by tests and `benchmarks/vllm_connectors.py`. Every engine has both roles (`kv_both`), so that tests use a pair in
both directions.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controlplane.ports import free_port
from controlplane.waiting import until
from engines import BLOCK_TOKENS, OUR_PATHS, Engine, EngineOptions, Nursery, Prompt, tokens_of
from nurseries import write_entry_points
from tiny_model import TinyModel

from longshore_cli.local_agents import LocalAgent, make_keys

# Small compared with a machine's memory, large compared with a prompt's KV: 700 tokens are 2.9 MB.
RING_BYTES = 64 << 20
LANE_BYTES = 4 << 20
SLAB_BYTES_MIN = 1 << 20
OFFLOADED_BYTES = 256 << 20
# Long enough that peers on a loaded machine are not considered dead.
PEER_TIMEOUT_S = 60
TRANSFER_LIMIT_S = 120.0
# A router's transfer parameters for a prefill engine.
TO_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Side:
    """One engine of a scene."""

    name: str
    tp: int
    policy: str = "fail"
    block_tokens: int = BLOCK_TOKENS
    extra: Sequence[str] = ()
    pages: str = "opaque"
    connectors: Sequence[str] = ()  # of a MultiConnector, by their names; empty: there is none
    environment: Mapping[str, str] = field(default_factory=dict)


class Scene:
    """Agents and engines of some sides; a context manager, which returns when all are ready.

    Args:
        keys: the agents' keys, where agents of another scene are their peers.
        digest: agents compare digests of both sides' pages.
    Attributes:
        zero: while this file exists, received KV is zeroed, or the part of it that the file names; see `zeroing`.
        hold: while this file exists, prefill stands still between two chunks at the token that it names.
        keep: while this folder exists, ranks write the bytes of the blocks that they offer and receive.
    """

    def __init__(
        self,
        nursery: Nursery,
        model: TinyModel,
        sides: Sequence[Side],
        peer_timeout_s: int = PEER_TIMEOUT_S,
        transfer_limit_s: float = TRANSFER_LIMIT_S,
        keys: Path | None = None,
        *,
        digest: bool = False,
    ) -> None:
        self._stack = ExitStack()
        self._logs = nursery.directory
        # A socket's path may be 107 bytes long.
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="e2e-vllm-")))
        self.zero, self.hold, self.keep = (self._directory / name for name in ("zero", "hold", "keep"))
        if keys is None:
            keys = self._directory / "keys"
            make_keys(keys)
        self.agents: dict[str, LocalAgent] = {}
        self.engines: dict[str, Engine] = {}
        plugins = write_entry_points(self._directory, "vllm.general_plugins")
        for side in sides:
            settings: dict[str, str | int | float] = {
                "deployment": "e2e/engines",
                "node": side.name,
                "keys_directory": str(keys),
                "ring_bytes": RING_BYTES,
                "lane_bytes": LANE_BYTES,
                "slab_bytes_min": SLAB_BYTES_MIN,
                # The usual minimum on a GPU is more than a whole prompt has here.
                "gpu_slab_bytes_min": SLAB_BYTES_MIN,
                "peer_timeout_s": peer_timeout_s,
                "digest": str(digest).lower(),
            }
            agent = LocalAgent(settings, self._directory / side.name)
            self.agents[side.name] = agent
            transfer = {
                "kv_connector": "ZeroingConnector",
                "kv_connector_module_path": "zeroing",
                "kv_role": "kv_both",
                "engine_id": side.name,
                "kv_load_failure_policy": side.policy,
                "kv_connector_extra_config": {
                    "socket": agent.socket_path,
                    "transfer_limit_s": transfer_limit_s,
                    "pages": side.pages,
                },
            }
            switches = {"ZERO": self.zero, "HOLD": self.hold, "KEEP": self.keep}
            environment = {**side.environment, **{f"E2E_VLLM_{name}": str(path) for name, path in switches.items()}}
            if side.connectors:
                transfer = self._several(side, transfer)
                environment["PYTHONPATH"] = os.pathsep.join(map(str, [plugins, *OUR_PATHS]))
            options = EngineOptions(
                side.name, model, side.tp, transfer, environment, side.block_tokens, tuple(side.extra)
            )
            self.engines[side.name] = Engine(nursery, options)

    def disk(self, name: str) -> Path:
        """Return where a side's ExampleConnector keeps KV."""
        return self._directory / f"disk-{name}"

    def _several(self, side: Side, transfer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a MultiConnector of our connector and others, in the side's order."""
        common = {name: transfer[name] for name in ("kv_role", "engine_id", "kv_load_failure_policy")}
        extra = {
            "LongshoreConnector": transfer["kv_connector_extra_config"],
            "ExampleConnector": {"shared_storage_path": str(self.disk(side.name))},
            "OffloadingConnector": {"cpu_bytes_to_use": OFFLOADED_BYTES},
        }
        children = [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra[name]}
            for name in side.connectors
        ]
        return {"kv_connector": "MultiConnector", **common, "kv_connector_extra_config": {"connectors": children}}

    def open_rooms(self) -> float:
        """Return the number of open halves of rooms at the agents."""
        return sum(agent.metrics().total("longshore_rooms_open") for agent in self.agents.values())

    def __enter__(self) -> Self:
        try:
            for agent in self.agents.values():
                agent.start()
            for engine in self.engines.values():
                self._stack.enter_context(engine)
            for agent in self.agents.values():
                agent.wait_ready()
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
        for name, agent in self.agents.items():
            agent.stop()
            if agent.log_path.exists():
                shutil.copy(agent.log_path, self._logs / f"agent-{name}.log")
        self._stack.close()


class NixlScene:
    """Two engines with vLLM's own NixlConnector; a context manager as `Scene`."""

    def __init__(self, nursery: Nursery, model: TinyModel, sides: Sequence[Side]) -> None:
        self._stack = ExitStack()
        self.engines: dict[str, Engine] = {}
        for side in sides:
            transfer = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": side.policy,
            }
            # Each rank uses the next port.
            environment = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }
            options = EngineOptions(f"nixl-{side.name}", model, side.tp, transfer, environment, side.block_tokens)
            self.engines[side.name] = Engine(nursery, options)

    def __enter__(self) -> Self:
        try:
            for engine in self.engines.values():
                self._stack.enter_context(engine)
            for engine in self.engines.values():
                engine.wait_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


def prefill(engine: Engine, prompt: Prompt) -> dict[str, Any]:
    """Compute a prompt at an engine; return the transfer parameters for the decode engine."""
    found: dict[str, Any] = engine.complete(prompt, 1, TO_PREFILL)["kv_transfer_params"]
    return found


def generate(source: Engine, target: Engine, prompt: Prompt, max_tokens: int) -> list[int]:
    """Return the tokens that `target` generates after a prompt that `source` computed."""
    return tokens_of(target.complete(prompt, max_tokens, prefill(source, prompt)))


@contextmanager
def held(scene: Scene, side: str) -> Iterator[None]:
    """Stop the workers of an agent during the block."""
    workers = [int(worker["pid"]) for worker in scene.agents[side].status()["workers"] if worker.get("pid")]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def rooms_open(scene: Scene, side: str) -> float:
    """Return the number of open rooms of an agent's decode engines."""
    return scene.agents[side].metrics().total("longshore_rooms_open", half="target")


def has_no_block_in_use(engine: Engine) -> bool:
    """Whether all blocks of an idle engine are free and none is lent."""
    engine.complete(Prompt([1, 2]), 2)  # Only work updates the gauge.
    return engine.metrics().total("vllm:kv_cache_usage_perc") == 0


def check_nothing_is_lent(scene: Scene, limit_s: float) -> None:
    """Wait until no room is open at any agent, and every engine has all its blocks."""
    until(lambda: scene.open_rooms() == 0, "no room is open at any agent", limit_s)
    for engine in scene.engines.values():
        until(partial(has_no_block_in_use, engine), f"{engine.options.name} has all its blocks", limit_s)
