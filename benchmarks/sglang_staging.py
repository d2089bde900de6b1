"""Calls gather and scatter of SGLang's staging buffer, of an installed SGLang, for `gather_scatter_gpu --rival`.

SGLang's own functions prepare and launch its kernels. They gather the slab of one writer, but scatter those of all writers.
So a stand-in for the kernel in SGLang's module launches the programs of one writer alone, and keeps that launch, so that it
can be repeated without the rest of the function.

SGLANG_PATH has folders of packages, or this interpreter has SGLang. The module of 0.5.16 needs torch and Triton alone, that
of 0.5.23 imports all of SGLang. On a CPU, in Triton's interpreter, 0.5.23 alone works.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longshore_agent.kernels.device_kernel import CopyStream

PATH = "SGLANG_PATH"
FILE = Path("sglang", "srt", "disaggregation", "common", "staging_buffer.py")
KERNELS = {"gather": "_fused_gather_to_staging_kernel", "scatter": "_fused_scatter_from_staging_kernel"}
WRITERS = "writer_head_offsets"


@dataclass(frozen=True)
class Staging:
    """SGLang's module, its version, and its kernels by operation."""

    module: Any
    version: str
    kernels: Mapping[str, Any]


def load_staging() -> Staging:
    """Import SGLang's module from the first folder that has it. Raises SystemExit if there is none, or it fails."""
    given = [folder for folder in os.environ.get(PATH, "").split(os.pathsep) if folder]
    found = next((folder for folder in [*given, *sys.path] if (Path(folder) / FILE).is_file()), None)
    if found is None:
        raise SystemExit(
            f"no {FILE} in {', '.join(given) or 'the folders of this interpreter'}: "
            f"name the folder with SGLang 0.5.16 or later in {PATH}"
        )
    path = Path(found) / FILE
    # Behind ours, so that torch and Triton remain those of this interpreter.
    sys.path += [folder for folder in given if folder not in sys.path]
    spec = importlib.util.spec_from_file_location("sglang_staging_buffer", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        kernels = {operation: getattr(module, name) for operation, name in KERNELS.items()}
    except (ImportError, AttributeError, RuntimeError) as error:
        raise SystemExit(f"{path} cannot be used: {error}") from error
    versions = [each.version for each in importlib.metadata.distributions(name="sglang", path=[found])]
    return Staging(module, versions[0] if versions else "of unknown version", kernels)


class OneWriter:
    """Takes a kernel's place in SGLang's module: launches it for one of its writers, and keeps the launch."""

    def __init__(self, kernel: Any, writer: int, writer_count: int) -> None:
        """Launch nothing."""
        self._kernel, self._writer, self._writer_count = kernel, writer, writer_count
        self.launch: Callable[[], object] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launch on a grid whose first dimension is that of all writers."""
        programs, rest = divmod(grid[0], self._writer_count)
        assert rest == 0, f"{grid} has no equal shares of {self._writer_count} writers"

        def launch(*arguments: object) -> None:
            own = list(arguments)
            if WRITERS in self._kernel.arg_names:
                place = self._kernel.arg_names.index(WRITERS)
                offsets = own[place]
                assert isinstance(offsets, torch.Tensor)
                assert len(offsets) == self._writer_count
                own[place] = offsets[self._writer : self._writer + 1]
            self.launch = partial(self._kernel[(programs, *grid[1:])], *own)
            self.launch()

        return launch


class HostStream:
    """Takes a stream's place on a CPU, where SGLang's kernels run in Triton's interpreter, at once."""

    device = torch.device("cpu")

    def wait_stream(self, other: object) -> None:
        """Everything has ended."""

    def synchronize(self) -> None:
        """Everything has ended."""


class StagedCopy:
    """One gather or one scatter by SGLang, of the slice of one pair of ranks.

    Attributes:
        call: SGLang's function. It returns when a gather has ended, and when a scatter is queued in our stream.
    """

    def __init__(
        self,
        staging: Staging,
        operation: str,
        planes: torch.Tensor,
        pages: npt.NDArray[np.int32],
        heads: range,
        slab: torch.Tensor,
        stream: CopyStream,
    ) -> None:
        """Copy nothing.

        Args:
            planes: [2 * layers, pages, tokens of a page, heads, head_dim], K of all layers before V of all layers.
            pages: indexes of pages, in the host's memory.
            heads: of the slice; those of a scatter begin at a multiple of their number.
            slab: bytes, the target of a gather or the source of a scatter.
            stream: of scatters and of `launch`. SGLang gathers in a stream of its own.
        """
        tokens = planes.flatten(1, 2)
        self._k, self._v = list(tokens[: len(tokens) // 2]), list(tokens[len(tokens) // 2 :])
        self._module, self._name = staging.module, KERNELS[operation]
        self._pages, self._page_size, self._heads, self._pool_heads = pages, planes.shape[2], heads, planes.shape[3]
        # As int32, like the ids that SGLang passes.
        self._ids = torch.from_numpy(pages).to(planes.device)
        self._slab, self._stream = slab, stream
        gathers = operation == "gather"
        self._writer_count = 1 if gathers else self._pool_heads // len(heads)
        self._kernel = OneWriter(
            staging.kernels[operation], 0 if gathers else heads.start // len(heads), self._writer_count
        )
        self._staging = _staging_of(self._module, slab) if gathers else None
        self.call = self._gather if gathers else self._scatter

    def launch(self) -> None:
        """Queue SGLang's kernel alone, as its function has launched it; a first `call` is needed."""
        assert self._kernel.launch is not None, "call SGLang's function first"
        with self._stream.entered():
            self._kernel.launch()

    def _gather(self) -> None:
        gather = self._module.gather_all_layers_to_staging
        setattr(self._module, self._name, self._kernel)
        # 0.5.16 has it, later versions take the device of the planes.
        more = {"gpu_id": self._slab.device.index} if "gpu_id" in inspect.signature(gather).parameters else {}
        head, count = self._heads.start, len(self._heads)
        gather(self._k, self._v, self._pages, self._staging, head, count, self._page_size, **more)

    def _scatter(self) -> None:
        setattr(self._module, self._name, self._kernel)
        # So many prefill ranks write into the pages of one decode rank, which has all heads.
        ranks = (self._writer_count, 1, 0, self._pool_heads)
        with self._stream.entered():
            self._module.scatter_staging_to_kv(self._slab, self._k, self._v, self._ids, self._page_size, *ranks)


def _staging_of(module: Any, slab: torch.Tensor) -> Any:
    """Return a staging buffer of SGLang whose memory is the slab."""
    if slab.is_cuda:
        staging = module.StagingBuffer(1, str(slab.device), slab.device.index)
    else:
        # Its constructor refuses a CPU.
        staging = module.StagingBuffer.__new__(module.StagingBuffer)
        staging.device, staging.device_module, staging._gather_stream = slab.device, torch.cpu, HostStream()  # noqa: SLF001
    staging.buffer = slab
    return staging
