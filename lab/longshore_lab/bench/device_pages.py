"""Engines' pages on a GPU with known bytes. They are filled and compared in a host image, which is copied as a whole.

Called by `scene` for KV on GPUs. All GPU calls are in `engine.device_memory`.
"""

from __future__ import annotations

from longshore_lab.bench.pages import Content, Pages
from longshore_lab.engine.device_memory import DeviceMemory
from longshore_wire.engine_messages import DeviceRegion
from longshore_wire.layout import KVLayout


class DevicePages(Pages):
    """One rank's pool on a GPU, and an image of it in host memory.

    Raises:
        EngineError: torch cannot use the device, or it has too little memory.
    """

    def __init__(self, layout: KVLayout, token_count: int, seed: int, device: str) -> None:
        super().__init__(layout, token_count, seed)
        try:
            self._on_device = DeviceMemory(self.geometry.region_bytes[0], device)
        except BaseException:
            super().close()
            raise
        self.device = self._on_device.name

    @property
    def regions(self) -> list[int] | list[DeviceRegion]:
        """The regions, in the form that `Client.register_pool` takes."""
        return [self._on_device.region]

    def fill(self, content: Content, token_count: int) -> None:
        """Write the known bytes of the first tokens."""
        super().fill(content, token_count)
        self._on_device.put(self._memory)

    def wipe(self, token_count: int) -> None:
        """Zero the pages of the first tokens."""
        super().wipe(token_count)
        self._on_device.put(self._memory)

    def check(self, content: Content, token_count: int) -> None:
        """Copy the GPU's bytes to the host and check them as `Pages.check` does."""
        self._on_device.get(self._memory)
        super().check(content, token_count)
