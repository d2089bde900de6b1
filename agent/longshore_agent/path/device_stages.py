"""Gather and scatter of a GPU's worker: the counterparts of `gather` and of the scatter on a CPU, queued and not waited for.

Called by `device_lanes` and `device_scatter`, in the worker's control thread. The tensor library is loaded when the first
stages are made: a worker on a CPU makes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from longshore_agent.memory.device_memory import DeviceStagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_agent.path.jobs import PageTable, ScatterJob, WriteJob, trailer_of
from longshore_wire.engine_messages import Half

if TYPE_CHECKING:
    from longshore_agent.memory.cuda import Device


class Copy(Protocol):
    """One queued copy of a slab."""

    def passed(self) -> bool:
        """Whether the device has done it."""

    def trailer(self) -> bytes:
        """Return the 64 bytes behind a scattered slab, as they were just before the scatter; once it has passed."""

    def end(self) -> None:
        """Let the pool and all else go, once; the device must have passed it."""


class Stages(Protocol):
    """What lanes and scatters ask of a device."""

    def gather(self, job: WriteJob, offset_bytes: int) -> Copy:
        """Queue the gather of a slab and its trailer to a place of the lanes' memory.

        Raises:
            PoolError: the engine has let its pages go.
            LongshoreError: nothing was queued.
        """

    def scatter(self, job: ScatterJob) -> Copy:
        """Queue a look at a landed slab's trailer, then its scatter. Raises as `gather`."""


class DeviceStages:
    """Those of a real device."""

    def __init__(self, device: Device, lanes: DeviceStagingBuffer | None, ring: DeviceStagingBuffer | None) -> None:
        from longshore_agent.kernels.device_copier import DeviceCopier

        self._copier = DeviceCopier(device, lanes, ring)

    def prepare(self, pool: KVPool) -> None:
        """A pool is registered: let no slab of it wait for what can be done now. Takes seconds."""
        self._copier.prepare(pool)

    def admit(self, pool: KVPool, table: PageTable, half: Half) -> None:
        """A half's pages are known: copy their ids to the device."""
        if len(table.pages):
            self._copier.hold(pool, (table.pages, table.first_page), to_gather=half is Half.SOURCE)

    def gather(self, job: WriteJob, offset_bytes: int) -> Copy:
        """See `Stages.gather`."""
        effect, layout = job.effect, job.pool.layout
        return self._copier.gather(
            job.pool,
            (job.pages.pages, job.pages.first_page),
            effect.tokens,
            effect.route.local_layers(layout),
            effect.route.local_heads(layout),
            offset_bytes,
            trailer_of(effect),
        )

    def scatter(self, job: ScatterJob) -> Copy:
        """See `Stages.scatter`."""
        effect, layout = job.effect, job.pool.layout
        return self._copier.scatter(
            job.pool,
            (job.pages.pages, job.pages.first_page),
            effect.tokens,
            effect.route.local_layers(layout),
            effect.route.local_heads(layout),
            effect.offset_bytes,
            effect.payload_bytes,
        )

    def wait(self, limit_s: float) -> None:
        """Wait until the device has done all that was queued. Raises DeviceError if it has not within `limit_s`."""
        self._copier.wait(limit_s)
