"""An oracle of caches with any planes: what each rank's memory must hold, by loops over the definition of a layout.

Used by tests of plans and copies, and by those of agents. Asks no planner and no layout which layers and heads a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore_client.memory import create_region
from longshore_lab.test_engine.pages import held_heads, held_layers, page_rows, planes_of
from longshore_wire.layout import KVLayout, PageOrder, PlaneGeometry, PoolGeometry

Bytes = npt.NDArray[np.uint8]
POISON = 0xDE


def content(seed: int, layout: KVLayout, end_token: int) -> list[Bytes]:
    """Return the cache of a sequence: of each plane [layer, unit, head, byte].

    A unit is a token, an opaque page, or a row of a slot.
    """
    units = -(-end_token // layout.page_size) if layout.order is PageOrder.OPAQUE else end_token
    found = []
    for index, plane in enumerate(planes_of(layout)):
        rows = plane.rows if layout.order is PageOrder.SLOT else units
        shape = (layout.model.layers, rows, plane.heads, plane.row_bytes)
        found.append(np.random.default_rng((seed, index)).integers(0, 256, shape, np.uint8))
    return found


@dataclass
class Memory:
    """The memory of one rank's cache.

    Attributes:
        data: of each region.
    """

    layout: KVLayout
    geometry: PoolGeometry
    data: list[Bytes]
    expected: list[Bytes] = field(default_factory=list)

    @classmethod
    def shared(cls, layout: KVLayout, geometry: PoolGeometry) -> tuple[Memory, list[int]]:
        """Return poisoned memory that others can map, and its descriptors, which the caller closes."""
        regions = [create_region(length_bytes) for length_bytes in geometry.region_bytes]
        made = cls(layout, geometry, [np.frombuffer(mapping, np.uint8) for _, mapping in regions])
        for region in made.data:
            region[:] = POISON
        made.expected = [region.copy() for region in made.data]
        return made, [descriptor for descriptor, _ in regions]

    def put(
        self, where: Sequence[Bytes], pages: Sequence[int], whole: Sequence[Bytes], first_token: int, end_token: int
    ) -> None:
        """Write tokens [first, end) of a sequence's `content` into regions, opaque pages as a whole.

        Args:
            pages: those from the page of `first_token` on; of a slot those of its layers.
        """
        layout, layers = self.layout, held_layers(self.layout)
        slot, first_page = layout.order is PageOrder.SLOT, first_token // layout.page_size
        units = range(first_token, end_token)
        if layout.order is PageOrder.OPAQUE:
            units = range(first_page, -(-end_token // layout.page_size))
        for index, plane in enumerate(planes_of(layout)):
            heads, rows = held_heads(layout, plane.heads), page_rows(layout, plane)
            for local, layer in enumerate(layers):
                place = self.geometry.planes[index * len(layers) + local]
                view = self._view(where[place.region], place, rows, len(heads), plane.row_bytes)
                for unit in range(rows) if slot else units:
                    page = pages[local // layout.page_size if slot else unit // rows - first_page]
                    view[page, unit % rows] = whole[index][layer, unit, heads]

    def intact(self) -> bool:
        """Whether every byte has its expected value, also where nothing was to be written."""
        return all(np.array_equal(*each) for each in zip(self.data, self.expected, strict=True))

    def _view(self, region: Bytes, place: PlaneGeometry, rows: int, heads: int, row_bytes: int) -> Any:
        shape = (self.geometry.page_count, rows, heads, row_bytes)
        strides = (place.page_stride, place.token_stride, place.head_stride, 1)
        return np.lib.stride_tricks.as_strided(region[place.offset :], shape, strides)


def state_geometry(layout: KVLayout, slot_count: int) -> PoolGeometry:
    """Return memory in which a slot of a layer has all planes: those of as many rows side by side, row by row.

    So conv states lie as [rows, q|k|v], or as [q|k|v, rows] if their planes have one row. As many tensors as a page has
    layers; layers with the same number in their page share a tensor, and have slots of their own.
    """
    sizes = [len(held_heads(layout, plane.heads)) * plane.row_bytes for plane in layout.model.planes]
    offsets, strides, end = [], [], 0
    numbers = range(len(sizes))
    for rows, group in groupby(numbers, key=lambda index: layout.model.planes[index].rows):
        members = list(group)
        stride = sum(sizes[index] for index in members)
        offsets += [end + sum(sizes[before] for before in members if before < index) for index in members]
        strides += [stride] * len(members)
        end += rows * stride
    slot_bytes = -(-end // 64) * 64
    layer_count = len(held_layers(layout))
    tensor_count = min(layout.page_size, layer_count)
    planes = tuple(
        PlaneGeometry(
            0,
            layer % layout.page_size * slot_count * slot_bytes + offsets[index],
            slot_bytes,
            strides[index],
            plane.row_bytes,
        )
        for index, plane in enumerate(layout.model.planes)
        for layer in range(layer_count)
    )
    return PoolGeometry(slot_count, (tensor_count * slot_count * slot_bytes,), planes)
