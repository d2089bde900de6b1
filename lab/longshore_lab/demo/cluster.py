"""Runs the processes of the demo: two or three agents a transport for all pairs, and the engines of one pair at a time.

For each transport the decode engines are registered with two agents, so that one run can move the same pages by both ways
and by every transport. One agent is configured for staged slabs, the other for slices. Slices do not reach KV on GPUs:
there the other agent is prefill's own, whose engines exchange pages directly. Engines of one pair also have pages in host
memory, registered with the agent for staged slabs, or on GPUs with prefill's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from longshore_cli.lifetime import Watch
from longshore_cli.local_agents import LocalAgent, make_keys
from longshore_lab.devices import Placement
from longshore_lab.engine.config import RankOptions
from longshore_lab.engine.connector import EXTENSION, ConnectorOptions, Registration
from longshore_lab.engine.processes import EngineProcesses
from longshore_lab.engine.starter import RankStarter
from longshore_wire.engine_messages import Half

STAGED, SLICES, DIRECT, HOST = "staged", "slices", "direct", "host"
PAGE_SIZE = 16
# Small compared with a prompt, so that the ring wraps many times. Each lane's buffer still holds a slab of 1 MiB or more.
_RING_BYTES = 12 << 20
_LANE_BYTES = 2 << 20
_SLAB_BYTES_MIN = 256 << 10


class Agents:
    """The agents of one transport: one for prefill and one for each way of decode. Use as a context manager.

    Attributes:
        decode: the agent of each way; that of `direct` is prefill's own.
        other_way: the way that is compared with staged.
    """

    def __init__(self, backend: str, directory: Path, placement: Placement) -> None:
        self.backend = backend
        self.other_way = DIRECT if placement.on_gpus else SLICES
        keys = directory / "keys"
        make_keys(keys)
        common: dict[str, str | int | float] = {
            "backend": backend,
            "deployment": "demo/demo",
            "keys_directory": str(keys),
            "ring_bytes": _RING_BYTES,
            "lane_bytes": _LANE_BYTES,
            "slab_bytes_min": _SLAB_BYTES_MIN,
            "gpu_slab_bytes_min": _SLAB_BYTES_MIN,
        }
        self.prefill = LocalAgent(common | {"node": "prefill"}, directory / "prefill")
        self.decode = {
            STAGED: LocalAgent(common | {"node": "decode", "force_way": "Staged"}, directory / "decode"),
            self.other_way: self.prefill
            if placement.on_gpus
            else LocalAgent(common | {"node": "decode-slices", "force_way": "Slices"}, directory / "slices"),
        }

    @property
    def host(self) -> LocalAgent:
        """The agent that serves decode's pages in host memory."""
        return self.decode[self.host_way]

    @property
    def host_way(self) -> str:
        """The way to these pages."""
        return DIRECT if self.other_way == DIRECT else STAGED

    @property
    def all(self) -> list[LocalAgent]:
        """Every agent."""
        return list(dict.fromkeys([self.prefill, *self.decode.values()]))

    def registration(self, way: str) -> str:
        """Return the engines' name of their registration for this way. Prefill has only the one for staged."""
        return f"{self.backend} {way}"

    def __enter__(self) -> Self:
        try:
            for agent in self.all:
                agent.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Return when all of them are ready."""
        for agent in self.all:
            agent.wait_ready()

    def close(self) -> None:
        """End all of them."""
        for agent in self.all:
            agent.terminate()
        for agent in self.all:
            agent.stop()


class Engines:
    """A prefill and a decode instance, registered with their agents; use as a context manager.

    Attributes:
        name: the pair's name, such as `TP4 -> TP1`.
        prefill_instance, decode_instances: names of the instances, the latter by the way of its agent.
        has_host: decode's ranks also have pages in host memory, at the first transport's agent.
    """

    def __init__(
        self,
        transports: Sequence[Agents],
        prefill_tp: int,
        decode_tp: int,
        page_count: int,
        seed: int,
        placement: Placement,
        starter: RankStarter,
        *,
        has_host: bool = False,
    ) -> None:
        self._starter = starter
        self.has_host = has_host
        self._transports = transports
        self.name = f"TP{prefill_tp} -> TP{decode_tp}"
        self.prefill_instance = f"prefill-{prefill_tp}-{decode_tp}"
        ways = [*(way for agents in transports for way in agents.decode), *([HOST] if has_host else [])]
        self.decode_instances = {way: f"decode-{prefill_tp}-{decode_tp}-{way}" for way in ways}
        self._started: list[EngineProcesses] = []
        prefill = {
            agents.registration(STAGED): Registration(self.prefill_instance, agents.prefill.socket_path)
            for agents in transports
        }
        decode = {
            agents.registration(way): Registration(self.decode_instances[way], agent.socket_path)
            for agents in transports
            for way, agent in agents.decode.items()
        }
        if has_host:
            agents = transports[0]
            name = self.decode_instances[HOST]
            decode[agents.registration(HOST)] = Registration(name, agents.host.socket_path, host=True)
        try:
            near, far = ConnectorOptions(Half.SOURCE, prefill), ConnectorOptions(Half.TARGET, decode)
            self.prefill = self._start(near, prefill_tp, page_count, seed, placement.prefill)
            self.decode = self._start(far, decode_tp, page_count, seed + 1, placement.decode)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def wait_ready(self) -> None:
        """Return when every rank of both instances holds its weights and is registered."""
        for engine in self._started:
            engine.wait_ready()

    @contextlib.contextmanager
    def watched_by(self, watch: Watch) -> Iterator[None]:
        """Watch the ranks, and the agents' workers that serve them, during the block."""
        names = [self.prefill_instance, *self.decode_instances.values()]
        with contextlib.ExitStack() as stack:
            for role, engine in (("prefill", self.prefill), ("decode", self.decode)):
                for rank, pid in enumerate(engine.pids):
                    stack.callback(watch.add(pid, f"rank {rank} of {role} (process {pid})"))
            for agent in (agent for agents in self._transports for agent in agents.all):
                stack.callback(agent.workers_watched_by(watch, names))
            yield

    def close(self) -> None:
        """Kill every rank at once. There is nothing to save, and agents release an engine that has ended."""
        for engine in self._started:
            engine.close(stop_timeout_s=0.0)

    def _start(
        self, connector: ConnectorOptions, tp: int, page_count: int, seed: int, devices: tuple[str, ...]
    ) -> EngineProcesses:
        options = RankOptions(
            tp=tp,
            page_size=PAGE_SIZE,
            page_count=page_count,
            shuffle_seed=seed,
            devices=devices,
            extension=EXTENSION,
            extension_options=msgspec.msgpack.encode(connector),
        )
        engine = EngineProcesses(options, wait=False, starter=self._starter)
        self._started.append(engine)
        return engine
