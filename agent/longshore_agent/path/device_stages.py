"""Gather and scatter of a GPU's worker: the counterparts of `gather` and of the scatter on a CPU.

Called by lanes and scatter threads, each of which makes its own in its own thread. The tensor library is loaded when
the first is made: a worker on a CPU makes none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from longshore_agent.memory.device_memory import DeviceStagingBuffer
from longshore_agent.memory.staging import StagingPieces
from longshore_agent.path.jobs import ScatterJob, WriteJob, trailer_of
from longshore_wire.slabs import region_bytes

if TYPE_CHECKING:
    from longshore_agent.kernels.device_copier import DeviceCopier, DeviceTables
    from longshore_agent.memory.cuda import Device


class DeviceStages:
    """What threads of one worker need to make their own stages."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tables: DeviceTables | None = None
        self._lock = threading.Lock()

    def gather(self, buffer: StagingPieces) -> Callable[[WriteJob], int]:
        """Return the gather of a lane; see `gather.gather_slab`."""
        copier = self._copier(buffer)

        def run(job: WriteJob) -> int:
            effect, layout = job.effect, job.pool.layout
            length_bytes = region_bytes(effect.payload_bytes)
            copier.gather(
                job.pool,
                (job.pages.pages, job.pages.first_page),
                effect.tokens,
                effect.route.local_layers(layout),
                effect.route.local_heads(layout),
                length_bytes,
                trailer_of(effect),
            )
            return length_bytes

        return run

    def scatter(self, ring: StagingPieces) -> Callable[[ScatterJob], None]:
        """Return the scatter of a scatter thread; see `scatter.scatter_slab`."""
        copier = self._copier(ring)

        def run(job: ScatterJob) -> None:
            effect, layout = job.effect, job.pool.layout
            copier.scatter(
                job.pool,
                (job.pages.pages, job.pages.first_page),
                effect.tokens,
                effect.route.local_layers(layout),
                effect.route.local_heads(layout),
                effect.offset_bytes,
                effect.payload_bytes,
            )

        return run

    def _copier(self, buffer: StagingPieces) -> DeviceCopier:
        from longshore_agent.kernels.device_copier import DeviceCopier, DeviceTables

        assert isinstance(buffer, DeviceStagingBuffer)
        with self._lock:
            self._tables = self._tables or DeviceTables(self._device)
        return DeviceCopier(self._device, buffer, self._tables)
