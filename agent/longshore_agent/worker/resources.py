"""Makes a worker's transport, staging memory, copier and runner, for a CPU or a GPU.

Called once by `moving`. This module chooses between the two kinds of device; other modules use the same interfaces.
"""

from __future__ import annotations

import os

from longshore_agent.kernels.copier import Copier
from longshore_agent.kernels.cpu_copy import CpuCopier
from longshore_agent.memory import mps
from longshore_agent.memory.cuda import Device, open_device
from longshore_agent.memory.device_memory import DeviceStagingBuffer
from longshore_agent.memory.host_memory import EXTENT_BYTES, StagingBuffer, StagingRange
from longshore_agent.pipeline.life import InboundTools, LaneCounts, OutboundTools
from longshore_agent.pipeline.runners import (
    COPIES_AHEAD_MAX,
    DIRECT_COPIES_MAX,
    WRITES_OPEN_MAX,
    EventRunner,
    Runner,
    ThreadRunner,
)
from longshore_agent.pipeline.slabs import Ends
from longshore_agent.pipeline.waits import Gate, StagingMemory
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.spans import SpanRecorder, StageLog
from longshore_agent.transport_choice import make_ports, make_transport
from longshore_agent.worker.config import WorkerConfig
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import RegionInfo
from longshore_wire.slabs import TRAILER_KEY_BYTES, slab_bytes

# Large enough to show in a wire's counters, small enough to cost nothing.
PROBE_BYTES = 1 << 20


def device_copier(device: Device, lanes: StagingRange | None, ring: StagingRange | None) -> Copier:
    """Return the copier of a GPU. It loads the tensor library, which a worker on a CPU does without."""
    from longshore_agent.kernels.device_copier import DeviceCopier

    return DeviceCopier(device, lanes, ring)


class Resources:
    """See the module.

    Attributes:
        device: None: a CPU.
        mps: whether the GPU is shared by CUDA's Multi-Process Service; None: a CPU, or the driver does not tell.
        ports: the ports at which the transport listens for bytes.
        probe_region: memory that peers may write to find out their wire to this worker.
        ring_region: None: this worker is no target, or its ring has no memory.
    """

    copier: Copier
    runner: Runner

    def __init__(self, config: WorkerConfig, ends: Ends, metrics: Metrics, spans: SpanRecorder) -> None:
        """Raises TransportError, DeviceError or PoolError."""
        # New for each life. Sources get it in the Attach, which is encrypted if the deployment has keys.
        self._trailer_key = os.urandom(TRAILER_KEY_BYTES)
        self._settings = settings = config.settings
        self._ends = ends
        self.device = None if config.device == "cpu" else open_device(config.device)
        self.mps: bool | None = None
        if self.device is not None:
            if settings.gpu_mps:
                mps.require(self.device)
            self.mps = mps.is_client(self.device)
            # The transport's library uses the device that is current in the calling thread.
            self.device.enter()
        name = config.peer.path.replace("/", ".")
        self.ports = make_ports(settings)
        self.transport = make_transport(settings, name, self.ports, self.device)
        probe = self._registered(2 * PROBE_BYTES)
        # Peers write to the first half, our own probes read the second.
        self.probe_region = RegionInfo(probe.address, PROBE_BYTES)
        self._probe, self._probe_address = probe, probe.address + PROBE_BYTES
        self.ring_region: RegionInfo | None = None
        log = StageLog(metrics, spans, later=self.device is not None)
        lane_count = settings.lane_count if Half.SOURCE in config.roles else 0
        ring_bytes = settings.ring_bytes if Half.TARGET in config.roles else 0
        if self.device is None:
            self._start_threads(lane_count, ring_bytes, log, is_target=Half.TARGET in config.roles)
        else:
            self._start_events(self.device, lane_count, ring_bytes, log)

    def _start_threads(self, lane_count: int, ring_bytes: int, log: StageLog, *, is_target: bool) -> None:
        """Start lanes and scatter threads. Each lane has a buffer of its own."""
        settings = self._settings
        self.copier = CpuCopier()
        counts = _counts(lane_count)
        memories = [
            StagingMemory(self._registered(settings.lane_bytes), range(lane, lane + 1)) for lane in range(lane_count)
        ]
        sources = [self._source(memory, counts, log) for memory in memories]
        ring: StagingRange | None = None
        if ring_bytes:
            ring = self._registered(ring_bytes, settings.ring_extent_bytes)
            self.ring_region = RegionInfo(
                ring.address, ring.length_bytes, settings.ring_extent_bytes, self._trailer_key
            )
        # Without a ring, they compare the digests of pages that were written in place.
        thread_count = settings.scatter_threads if is_target else 0
        targets = [self._target(ring, log, thread) for thread in range(thread_count)]
        self.runner = ThreadRunner(sources, targets, self._ends, probe_address=self._probe_address)

    def _start_events(self, device: Device, lane_count: int, ring_bytes: int, log: StageLog) -> None:
        """Make a runner that polls. All lanes share one buffer. Each buffer is one registration, so no write is cut."""
        settings = self._settings
        buffer = self._registered(lanes_bytes(lane_count, settings.lane_bytes)) if lane_count else None
        ring = self._registered(ring_bytes) if ring_bytes else None
        self.copier = device_copier(device, buffer, ring)
        direct = staged = target = None
        if buffer is not None:
            counts, memory = _counts(lane_count), StagingMemory(buffer, range(lane_count))
            direct = self._source(None, counts, log, Gate(DIRECT_COPIES_MAX))
            staged = self._source(memory, counts, log, Gate(COPIES_AHEAD_MAX), Gate(WRITES_OPEN_MAX))
        if ring is not None:
            self.ring_region = RegionInfo(ring.address, ring.length_bytes, trailer_key=self._trailer_key)
            target = self._target(ring, log)
        self.runner = EventRunner(
            direct, staged, target, self._ends, probe_address=self._probe_address, enter=device.enter
        )

    def _source(
        self,
        memory: StagingMemory | None,
        counts: LaneCounts,
        log: StageLog,
        copies: Gate | None = None,
        writes: Gate | None = None,
    ) -> OutboundTools:
        batch_count = self._settings.slices_batch
        return OutboundTools(
            self.copier, self.transport, memory, counts, log, batch_count, copies or Gate(), writes or Gate()
        )

    def _target(self, ring: StagingRange | None, log: StageLog, thread: int = 0) -> InboundTools:
        return InboundTools(self.copier, ring, log, self._trailer_key, self._settings.trailer_deadline_ns, thread)

    def _registered(self, length_bytes: int, extent_bytes: int = 0) -> StagingRange:
        """Return memory of this worker, registered with the transport. It lives as long as the worker.

        Args:
            extent_bytes: of each registration on a CPU; 0: the default. On a GPU, the buffer is one registration.
        """
        buffer: StagingRange
        if self.device is None:
            buffer = StagingBuffer(length_bytes, extent_bytes=extent_bytes or EXTENT_BYTES)
        else:
            allocation = self._settings.gpu_staging_memory
            buffer = DeviceStagingBuffer(self.device, length_bytes, extent_bytes=length_bytes, allocation=allocation)
        for extent in buffer.extents():
            self.transport.register(*extent)
        return buffer

    def close(self) -> None:
        """Stop idle threads and close the transport. Threads that still write end with the process."""
        self.runner.close()
        self.transport.close()


def lanes_bytes(lane_count: int, lane_bytes: int) -> int:
    """Return the size of all lanes' memory: for each lane, a slab of `lane_bytes` and its trailer."""
    return lane_count * slab_bytes(lane_bytes)


def _counts(lane_count: int) -> LaneCounts:
    return LaneCounts([0] * lane_count, [0] * lane_count)
