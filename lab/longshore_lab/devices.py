"""Parses and checks the GPUs for KV on the command line, and assigns them to ranks.

Called by `demo`, `bench` and the reference engine's options before anything starts. Loads no tensor library. Queries the
driver for the number of GPUs, and allocates nothing on them.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from longshore_lab.test_engine.memory import GPUMemory, HostMemory, Memory
from longshore_wire.errors import LongshoreError, Reason

CPU = "cpu"
# Transports that move GPU memory, and the default one. An engine's pages on a GPU are never registered with a transport,
# so that no transport writes them in place.
BACKENDS = ("NIXL", "Mooncake")
BACKENDS_DEFAULT = ("NIXL",)
WAYS_LEFT_OUT = (
    "contiguous and slices (pages on a GPU are not registered with a transport, which could write them in place)"
)
_NAME = re.compile(r"cuda:(0|[1-9][0-9]?)")
# CUDA_ERROR_NO_DEVICE.
_NO_DEVICE = 100
_GPU_NAME_BYTES = 256


class DevicesError(LongshoreError):
    """The requested devices cannot hold KV; names the available ones and the remedy."""

    reason = Reason.UNSUPPORTED


class Placement(NamedTuple):
    """GPUs of prefill's and of decode's ranks. Both are empty if KV is in host memory."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()

    @property
    def on_gpus(self) -> bool:
        """Whether KV is on GPUs."""
        return bool(self.prefill)

    def __str__(self) -> str:
        return f"prefill on {', '.join(self.prefill)}, decode on {', '.join(self.decode)}" if self.on_gpus else CPU


HOST = Placement()


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--devices`."""
    parser.add_argument(
        "--devices",
        type=parse,
        default=(),
        metavar="cuda:N,...",
        help="hold KV in these GPUs' memory, prefill on the first half of them and decode on the others (default: the host's)",
    )


def parse(text: str) -> tuple[str, ...]:
    """Parse GPUs such as `cuda:0,cuda:1`. Raises ArgumentTypeError, which argparse reports with the argument's name."""
    found = tuple(text.split(","))
    wrong = [name for name in found if not _NAME.fullmatch(name)]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no device: give GPUs by number, such as cuda:0,cuda:1")
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text}: name each GPU once")
    return found


def place(devices: Sequence[str]) -> Placement:
    """Assign the first half of the devices to prefill and the others to decode; a single one to both."""
    half = -(-len(devices) // 2)
    return Placement(tuple(devices[:half]), tuple(devices[half:] or devices))


def device_of(devices: Sequence[str], rank: int) -> str:
    """Return the device of a rank, assigned round-robin; the CPU if there are no devices."""
    return devices[rank % len(devices)] if devices else CPU


def memory_on(device: str, length_bytes: int) -> Memory:
    """Allocate memory for pages on a device, without a tensor library. Raises ArgumentError."""
    return HostMemory(length_bytes) if device == CPU else GPUMemory(length_bytes, _index(device))


def check(devices: Sequence[str], backends: Sequence[str]) -> Placement:
    """Check the devices and return their placement.

    Raises:
        DevicesError: a transport does not move GPU memory, there is no driver, or there are fewer GPUs.
    """
    if not devices:
        return HOST
    wrong = [name for name in backends if name not in BACKENDS]
    if wrong:
        raise DevicesError(
            f"--backend names {wrong[0]}, and memory of GPUs is moved by {' and '.join(BACKENDS)}: choose one of these, or leave --devices out"
        )
    there = gpu_names()
    missing = [name for name in devices if _index(name) >= len(there)]
    if missing:
        raise DevicesError(
            f"--devices names {', '.join(missing)}, and this process sees {_seen(there)}: name others, make more visible "
            "(CUDA_VISIBLE_DEVICES), or leave --devices out to hold KV in host memory"
        )
    return place(devices)


def describe(placement: Placement) -> str:
    """Return a text on where KV is, with the GPUs' names. Raises DevicesError."""
    there = gpu_names()
    names = dict.fromkeys(there[_index(device)] for device in (*placement.prefill, *placement.decode))
    return f"KV in GPU memory: {placement} ({', '.join(names)})"


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """Return the names of the visible GPUs in the driver's order. Raises DevicesError if there is no driver."""
    way_out = "leave --devices out to hold KV in host memory"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DevicesError(f"--devices needs a CUDA driver, and there is none here ({error}): {way_out}") from error
    code = driver.cuInit(0)
    if code == _NO_DEVICE:
        return ()
    count, device = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_GPU_NAME_BYTES)
    code = code or driver.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for index in range(count.value):
        code = code or driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index))
        code = code or driver.cuDeviceGetName(name, ctypes.c_int(_GPU_NAME_BYTES), device)
        found.append(name.value.decode(errors="replace"))
    if code:
        raise DevicesError(f"--devices needs CUDA, and its driver answers with error {code}: {way_out}")
    return tuple(found)


def _index(name: str) -> int:
    return int(name.partition(":")[2])


def _seen(there: Sequence[str]) -> str:
    if not there:
        return "no GPU"
    return "1 GPU, cuda:0" if len(there) == 1 else f"{len(there)} GPUs, cuda:0 to cuda:{len(there) - 1}"
