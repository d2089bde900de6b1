"""Defines a worker's orders, which the supervisor sends as the first datagram of their link."""

from __future__ import annotations

import dataclasses
import os

import msgspec

from longshore_agent.files import read_crossover
from longshore_agent.memory.cuda import reached_by_all
from longshore_agent.settings import Settings
from longshore_wire.effects import PeerId, SessionConfig
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason
from longshore_wire.layout import KVLayout, TargetMemory
from longshore_wire.names import TEST_INSTANCE_PREFIX
from longshore_wire.peer_messages import DIGEST_KEY_BYTES
from longshore_wire.slabs import gpu_slab_bytes_max
from longshore_wire.ways import may_be_direct, staged_unless_forbidden

# Size of a direct slab on a GPU, in lanes. No buffer holds it. One kernel copies 256 MiB between two GPUs in less than
# a millisecond: longer than the messages for it take, and short enough for other rooms' turns.
_DIRECT_SLAB_LANES = 4


class WorkerConfig(msgspec.Struct, frozen=True):
    """One worker's orders.

    Attributes:
        agent: identity of the agent's life, for way DIRECT; empty: this worker does not use that way.
        name: in metrics and logs, unique within the agent.
        settings: the agent's.
        port: for peers to dial; 0: a free one.
        device: "cpu", or the UUID of the GPU that holds the engine's pages.
        engine: the engine's life, from its Hello.
        memory: of the engine's pages that this worker serves.
    """

    name: str
    instance: str
    epoch: int
    layout: KVLayout
    roles: tuple[Half, ...]
    settings: Settings
    port: int
    agent: str = ""
    device: str = "cpu"
    engine: int = 0
    memory: TargetMemory = TargetMemory.DEVICE

    @property
    def peer(self) -> PeerId:
        """The name of this worker for peers."""
        return PeerId.of(self)

    @property
    def is_test(self) -> bool:
        """Whether it serves a test engine, whose rooms are no traffic: alerts and ratios do not count them."""
        return self.instance.startswith(TEST_INSTANCE_PREFIX)

    def about(self, reason: Reason = Reason.NONE) -> dict[str, str]:
        """Return the fields of a log line on this worker, see `log_lines`."""
        fields = {"instance": self.instance, "worker": self.name}
        return fields if reason is Reason.NONE else fields | {"reason": reason.name}

    def session_config(self) -> SessionConfig:
        """Return the configuration of the protocol cores. Raises ConfigError if the crossover table is unreadable."""
        settings = self.settings
        core = SessionConfig(
            **settings.for_core(),
            instance=self.instance,
            epoch=self.epoch,
            layout=self.layout,
            memory=self.memory,
            backend=settings.backend.value,
            slab_bytes_max=settings.lane_bytes,
            neighbour_staging=settings.staging,
            wires=settings.allowed_wires.names,
            crossover=read_crossover(settings.crossover_file),
            agent=self.agent,
            engine=self.engine,
            digest_key=os.urandom(DIGEST_KEY_BYTES),
        )
        if self.device == "cpu":
            return core
        return dataclasses.replace(
            core,
            slab_bytes_max=gpu_slab_bytes_max(settings.lane_bytes, settings.lane_count),
            slab_bytes_min=settings.gpu_slab_bytes_min,
            grant_window=settings.gpu_grant_window,
            # An engine's GPU memory is mapped for our kernels only, so no transport can write it in place. If staging
            # is forbidden, the room must be refused.
            staging=staged_unless_forbidden(settings.staging),
            in_place=False,
            direct_slab_bytes=_DIRECT_SLAB_LANES * settings.lane_bytes,
            agent=self.agent if self.peer_access() else "",
        )

    def peer_access(self) -> bool | None:
        """Whether all other GPUs that this process sees can write the memory of this worker's; None: a CPU. Raises DeviceError."""
        return None if self.device == "cpu" else reached_by_all(self.device)

    def gives_directly(self) -> bool:
        """Whether this worker, as a source, may use way DIRECT. The target decides for each room, in its claim."""
        allowed = may_be_direct(self.settings.staging, self.settings.force_way)
        return Half.SOURCE in self.roles and self.agent != "" and allowed

    def to_bytes(self) -> bytes:
        """Encode the orders as one datagram."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> WorkerConfig:
        """Decode the result of `to_bytes`."""
        return msgspec.msgpack.decode(data, type=cls)
