"""What a worker moves bytes with: its transport, staging memory, lanes and scatters, on a CPU or on a GPU.

Made once by `moving`. On a CPU, threads do the jobs that are put here; on a GPU the device does, and `turn` begins and ends
what it can.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import cast

from longshore_agent.kernels import rows
from longshore_agent.memory.cuda import Device, open_device
from longshore_agent.memory.device_memory import DeviceStagingBuffer
from longshore_agent.memory.staging import StagingBuffer, StagingPieces
from longshore_agent.path.device_direct import DeviceDirectLanes
from longshore_agent.path.device_lanes import DeviceLanes, buffer_bytes
from longshore_agent.path.device_scatter import DeviceScatterers
from longshore_agent.path.device_stages import DeviceStages
from longshore_agent.path.jobs import ProbeJob, Result, Results, WriteJob
from longshore_agent.path.lanes import Lanes
from longshore_agent.path.scatter import Scatterers
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.snapshot import LaneStatus
from longshore_agent.status.spans import SpanRecorder
from longshore_agent.transport_choice import make_ports, make_transport
from longshore_agent.transports.base import DraftingTransport
from longshore_agent.worker.config import WorkerConfig
from longshore_wire.engine_messages import Half
from longshore_wire.peer_messages import RegionInfo
from longshore_wire.trailer import TRAILER_KEY_BYTES

# Large enough that a wire's counters show it, small enough to cost nothing.
PROBE_BYTES = 1 << 20


def nothing() -> None:
    """Nothing is under way that could be hurried."""


class Parts:
    """See the module.

    Attributes:
        device: None: a CPU.
        ports: where the transport listens for bytes.
        probe_region: where peers may write to find out their wire to this worker.
        ring_region: None: this worker is no target, or has no staging.
        lanes: None: this worker is no source.
        stages: a GPU's.
        direct: copies from pages to pages by a GPU; on a CPU the lanes do those.
        hurry: what a GPU's source does between other work, so that its wire does not stand still.
    """

    def __init__(
        self, config: WorkerConfig, settings: Settings, results: Results, metrics: Metrics, spans: SpanRecorder
    ) -> None:
        """Raises TransportError, DeviceError or PoolError."""
        # Of this life; sources get it when they attach, over connections that are encrypted where there are keys.
        self._trailer_key = os.urandom(TRAILER_KEY_BYTES)
        self._settings, self._results, self._metrics, self._spans = settings, results, metrics, spans
        self.device = None if config.device == "cpu" else open_device(config.device)
        if self.device is not None:
            # The transport's library takes the device that is current in the thread that calls it.
            self.device.enter()
        layout = config.layout
        name = f"{config.instance}.{layout.parallel.dp_rank}.{layout.rank}"
        self.ports = make_ports(settings)
        self.transport = make_transport(settings, name, self.ports, self.device)
        self._probe = self._allocate(2 * PROBE_BYTES)
        self.transport.register(self._probe.address, self._probe.length_bytes)
        # Peers write to the first half, our own probes read the second.
        self.probe_region = RegionInfo(self._probe.address, PROBE_BYTES)
        self.ring_region: RegionInfo | None = None
        self.lanes: Lanes | DeviceLanes | None = None
        self.stages: DeviceStages | None = None
        self.direct: DeviceDirectLanes | None = None
        self.scatterers: Scatterers | DeviceScatterers | None = None
        self.hurry: Callable[[], None] = nothing
        if self.device is not None:
            self._start_device(self.device, config.roles)
            return
        rows.prepare()
        if Half.SOURCE in config.roles:
            self.lanes = self._make_lanes()
        if Half.TARGET in config.roles and settings.ring_bytes:
            self._start_ring()

    def _allocate(self, length_bytes: int) -> StagingPieces:
        """Return memory for what is not staging, of the same kind: a probe proves its wire. It lives as long as this worker."""
        if self.device is None:
            return StagingBuffer(length_bytes)
        return DeviceStagingBuffer(self.device, length_bytes, allocation=self._settings.gpu_staging_memory)

    def _make_lanes(self) -> Lanes:
        settings = self._settings
        buffers = [StagingBuffer(settings.lane_bytes) for _ in range(settings.lane_count)]
        for buffer in buffers:
            for extent in buffer.extents():
                self.transport.register(*extent)
        return Lanes(
            buffers,
            self.transport,
            self._results,
            self._metrics,
            self._spans,
            slices_batch=settings.slices_batch,
            probe_address=self._probe.address + PROBE_BYTES,
        )

    def _start_ring(self) -> None:
        settings = self._settings
        ring = StagingBuffer(settings.ring_bytes, extent_bytes=settings.ring_extent_bytes)
        for extent in ring.extents():
            self.transport.register(*extent)
        self.ring_region = RegionInfo(ring.address, ring.length_bytes, settings.ring_extent_bytes, self._trailer_key)
        self.scatterers = Scatterers(
            ring,
            self._results,
            self._metrics,
            self._spans,
            thread_count=settings.scatter_threads,
            trailer_deadline_ns=settings.trailer_deadline_ns,
            trailer_key=self._trailer_key,
        )

    def _start_device(self, device: Device, roles: tuple[Half, ...]) -> None:
        """Start lanes and scatters of a GPU. Each buffer is one allocation and one registration: no write is cut."""
        settings = self._settings
        lane_bytes = buffer_bytes(settings.lane_count, settings.lane_bytes) if Half.SOURCE in roles else 0
        ring_bytes = settings.ring_bytes if Half.TARGET in roles else 0
        lanes, ring = (
            DeviceStagingBuffer(device, length_bytes, extent_bytes=length_bytes, allocation=settings.gpu_staging_memory)
            if length_bytes
            else None
            for length_bytes in (lane_bytes, ring_bytes)
        )
        for buffer in (lanes, ring):
            if buffer is not None:
                self.transport.register(buffer.address, buffer.length_bytes)
        stages = self.stages = DeviceStages(device, lanes, ring)
        if lanes is not None:
            self.lanes = DeviceLanes(
                lanes,
                settings.lane_count,
                stages,
                # The one transport of GPUs' memory drafts.
                cast(DraftingTransport, self.transport),
                self._results,
                self._metrics,
                self._spans,
                probe_address=self._probe.address + PROBE_BYTES,
                enter=device.enter,
            )
            self.hurry = self.lanes.hurry
            self.direct = DeviceDirectLanes(settings.lane_count, stages, self._metrics, self._spans)
        if ring is not None:
            self.ring_region = RegionInfo(ring.address, ring.length_bytes, trailer_key=self._trailer_key)
            self.scatterers = DeviceScatterers(
                stages,
                self._metrics,
                self._spans,
                trailer_deadline_ns=settings.trailer_deadline_ns,
                trailer_key=self._trailer_key,
            )

    @property
    def put_direct(self) -> Callable[[WriteJob], None] | None:
        """What begins a copy from pages to pages; None: this worker is no source."""
        copying = self.lanes if self.direct is None else self.direct
        return None if copying is None else copying.put

    @property
    def driven(self) -> bool:
        """Whether something is under way that `turn` must bring on: soon, as bytes wait for it."""
        return (
            (self.direct is not None and self.direct.busy)
            or (isinstance(self.lanes, DeviceLanes) and self.lanes.busy)
            or (isinstance(self.scatterers, DeviceScatterers) and self.scatterers.busy)
        )

    @property
    def copying(self) -> bool:
        """Whether a GPU copies from pages to pages: nobody but `turn` learns that it is over."""
        return self.direct is not None and self.direct.copying

    def turn(self, ended: Mapping[Half, list[Result]]) -> None:
        """Begin and end what a GPU's jobs allow; add those that have ended to `ended`. Threads need nothing of it."""
        if self.direct is not None and self.direct.busy:
            ended[Half.SOURCE].extend(self.direct.turn())
        if isinstance(self.lanes, DeviceLanes) and self.lanes.busy:
            ended[Half.SOURCE].extend(self.lanes.turn())
        if isinstance(self.scatterers, DeviceScatterers) and self.scatterers.busy:
            ended[Half.TARGET].extend(self.scatterers.turn())

    def drop_given_up(self) -> None:
        """Jobs have been given up: let go of those that a GPU has not begun to write. Lanes on a CPU look by themselves."""
        if isinstance(self.lanes, DeviceLanes):
            self.lanes.drop_given_up()

    def probed(self, job: ProbeJob) -> None:
        """A probe is over: a GPU's lanes write again."""
        if isinstance(self.lanes, DeviceLanes):
            self.lanes.probed(job)

    def held(self) -> tuple[WriteJob, ...]:
        """Return the jobs whose writes are open."""
        return () if self.lanes is None else self.lanes.held()

    def lane_status(self) -> tuple[LaneStatus, ...]:
        """Return what each lane has done, by any way."""
        own = self.lanes.status() if self.lanes is not None else ()
        return own if self.direct is None else self.direct.added_to(own)

    def stop_device(self, limit_s: float) -> None:
        """Begin nothing on a GPU any more, and wait until it touches no pages. Raises DeviceError if it hangs."""
        if self.stages is not None:
            for lanes in (self.lanes, self.direct):
                if lanes is not None:
                    lanes.stop()
            self.stages.wait(limit_s)

    def close(self) -> None:
        """Stop threads that wait and let the transport go; threads that still write end with the process."""
        if self.lanes is not None:
            self.lanes.stop()
        if self.scatterers is not None:
            self.scatterers.stop()
        self.transport.close()
