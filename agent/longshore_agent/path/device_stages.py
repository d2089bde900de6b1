"""Gather, scatter and direct copy of a GPU's worker: the counterparts of those on a CPU, queued and not waited for.

Called by `device_lanes`, `device_scatter` and `device_direct`, in the worker's control thread. The tensor library is loaded when the first
stages are made: a worker on a CPU makes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from longshore_agent.kernels.kept import Kept
from longshore_agent.kernels.view import Pages, View
from longshore_agent.memory.device_memory import DeviceStagingBuffer
from longshore_agent.memory.pools import KVPool
from longshore_agent.path.jobs import PageTable, ScatterJob, WriteJob, page_ids, sealed_trailer
from longshore_wire.engine_messages import Half

if TYPE_CHECKING:
    from longshore_agent.memory.cuda import Device

# Rooms between two neighbours whose sides are kept from slab to slab; as many as keep their page ids on the device.
_SIDES_MAX = 2048


class Copy(Protocol):
    """One queued copy of a slab."""

    def passed(self) -> bool:
        """Whether the device has done it."""

    def trailer(self) -> bytes:
        """Return the 64 bytes behind a scattered slab, as they were just before the scatter; once it has passed."""

    def end(self) -> None:
        """Let its pools and all else go, once; the device must have passed it."""


class Stages(Protocol):
    """What lanes, scatters and direct copies ask of a device."""

    def gather(self, job: WriteJob, offset_bytes: int) -> Copy:
        """Queue the gather of a slab and its trailer to a place of the lanes' memory.

        Raises:
            PoolError: the engine has let its pages go.
            LongshoreError: nothing was queued.
        """

    def scatter(self, job: ScatterJob) -> Copy:
        """Queue a look at a landed slab's trailer, then its scatter. Raises as `gather`."""

    def direct(self, job: WriteJob) -> Copy | None:
        """Queue the copy of a slab into its target's pages, which are mapped here. Raises as `gather`.

        Returns:
            None: nothing was queued, as the kernel is being compiled beside this thread. Ask again.
        """


class DeviceStages:
    """Those of a real device."""

    def __init__(self, device: Device, lanes: DeviceStagingBuffer | None, ring: DeviceStagingBuffer | None) -> None:
        from longshore_agent.kernels.device_copier import DeviceCopier

        self._copier = DeviceCopier(device, lanes, ring)
        self._sides: Kept[tuple[View, View]] = Kept(_SIDES_MAX)
        self._target_ids: Kept[Pages] = Kept(_SIDES_MAX)

    def prepare(self, pool: KVPool) -> None:
        """A pool is registered: let no slab of it wait for what can be done now. Takes seconds."""
        self._copier.prepare(pool)

    def prepare_direct(self, pool: KVPool) -> None:
        """The same for slabs that leave it by way DIRECT."""
        self._copier.prepare_direct(pool)

    def admit(self, pool: KVPool, table: PageTable, half: Half) -> None:
        """A half's pages are known: copy their ids to the device."""
        if len(table.pages):
            self._copier.hold(pool, (table.pages, table.first_page), to_gather=half is Half.SOURCE)

    def admit_direct(self, pool: KVPool, table: PageTable) -> None:
        """The same for slabs that leave them by way DIRECT."""
        if len(table.pages):
            self._copier.hold_direct(pool, (table.pages, table.first_page), to_write=False)

    def admit_target(self, pool: KVPool, pages: bytes, first_page: int) -> None:
        """The same for the pages of a neighbour that slabs will be written to.

        Args:
            pages: packed page ids, as its claim brought them: the object that the slabs' effects will bring.
            first_page: which page of the sequence the first one is.
        Raises:
            LongshoreError: they are not pages of that pool.
        """
        if pages:
            self._copier.hold_direct(pool, (self._ids(pages), first_page), to_write=True)

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
            sealed_trailer(job),
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

    def direct(self, job: WriteJob) -> Copy | None:
        """See `Stages.direct`."""
        effect = job.effect
        # A room's slabs have one list of ids on either side, and one route.
        known = (job.pages, job.pool, effect.target_pages, job.neighbour, effect.route)
        sides = self._sides.get(lambda: job.neighbour_sides(self._ids(effect.target_pages)), *known)
        return self._copier.direct(sides, effect.tokens)

    def wait(self, limit_s: float) -> None:
        """Wait until the device has done all that was queued. Raises DeviceError if it has not within `limit_s`."""
        self._copier.wait(limit_s)

    def _ids(self, pages: bytes) -> Pages:
        """Return packed page ids as an array: the same one for the same object, by which its copy on the device is known."""
        return self._target_ids.get(lambda: page_ids(pages), pages)
