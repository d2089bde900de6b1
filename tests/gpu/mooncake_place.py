"""Provides a process with GPU memory and Mooncake's transport for it. As a script it carries out JSON commands by lines.

Without a GPU it uses the real library over a fake CUDA (stand_in_cuda.c): the wheel for CUDA 13, unpacked into the folder
in MOONCAKE_CUDA13_WHEEL. That tests everything except a GPU's own behaviour and speed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from longshore_agent.memory import cuda
from longshore_agent.transports import create
from longshore_agent.transports.base import Pieces, WriteState
from longshore_lab.test_engine.remote import Remote, serve

WHEEL = "MOONCAKE_CUDA13_WHEEL"
_LIMIT_S = 30.0
_TIMEOUT = struct.Struct("ll")


def build_stand_in(folder: Path) -> dict[str, str]:
    """Build the fake CUDA in `folder`; return the environment of a process that uses it."""
    source, compiler = Path(__file__).with_name("stand_in_cuda.c"), shutil.which("cc")
    assert compiler is not None, "a C compiler is needed"
    driver, runtime, versions = folder / "libcuda.so.1", folder / "libcudart.so.13", folder / "versions"
    versions.write_text("libcudart.so.13 { global: cuda*; };\n")
    common = [compiler, "-w", "-shared", "-fPIC", str(source)]
    subprocess.run([*common, "-Wl,-soname,libcuda.so.1", "-o", str(driver)], check=True)
    subprocess.run(
        [
            *common,
            "-DRUNTIME",
            "-Wl,-soname,libcudart.so.13",
            f"-Wl,--version-script={versions}",
            str(driver),
            "-o",
            str(runtime),
        ],
        check=True,
    )
    libraries = [str(folder), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        # The fake runtime is found first by its name, and the wheel before an installed one.
        "LD_PRELOAD": str(runtime),
        "PYTHONPATH": os.pathsep.join([os.environ[WHEEL], *filter(None, sys.path)]),
    }


class Place(Remote):
    """A process whose methods are those of `_Server`."""

    def __init__(self, name: str, device: int, environment: dict[str, str]) -> None:
        super().__init__([sys.executable, __file__, name, str(device)], environment)

    def close(self) -> None:
        super().close()
        for left in Path("/dev/shm").glob(f"stand-in-{self.pid}-*"):
            left.unlink()


class _Server:
    """The child's end. Its main thread writes, as a worker's control thread does."""

    def __init__(self, name: str, index: int) -> None:
        self.device = cuda.device_at(index)
        self.device.enter()
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.transport: Any = create(
            "Mooncake", name, device_index=index, device=self.device.name, enter=self.device.enter
        )
        self.regions: list[tuple[int, int]] = []
        self.tokens: dict[int, int] = {}
        self.writes: list[Any] = []

    def metadata(self) -> str:
        return str(self.transport.metadata().hex())

    def connect(self, metadata: str) -> str:
        return str(self.transport.connect(bytes.fromhex(metadata)))

    def disconnect(self, peer: str) -> None:
        self.transport.disconnect(peer)

    def allocate(self, length: int, seed: int) -> int:
        """Register new memory with content from `seed`."""
        address = self.device.allocate(length)
        content = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
        said = self.driver.cuMemcpyHtoD_v2(
            ctypes.c_uint64(address), ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(length)
        )
        assert not said, f"cuMemcpyHtoD says {said}"
        self.tokens[len(self.regions)] = self.transport.register(address, length)
        self.regions.append((address, length))
        return address

    def deregister(self, region: int) -> None:
        self.transport.deregister(self.tokens.pop(region))

    def digest(self, region: int) -> str:
        return hashlib.sha256(self.device.read(*self.regions[region])).hexdigest()

    def begin(self, peer: str, pieces: list[tuple[int, int, int]]) -> int:
        """Write pieces of (offset in the first region, target, bytes); return the write's number."""
        columns = [np.array(column, dtype=np.uint64) for column in zip(*pieces, strict=True)]
        columns[0] += np.uint64(self.regions[0][0])
        self.writes.append(self.transport.draft(peer, Pieces(*columns), b""))
        self.transport.start(self.writes[-1])
        return len(self.writes) - 1

    def look(self, write: int) -> list[Any]:
        """Return the state of a write, its error, and whether it is settled."""
        state = self.transport.state(self.writes[write])
        return [state.value, self.writes[write].error, self.transport.release(self.writes[write])]

    def finish(self, write: int) -> list[Any]:
        end_s = time.monotonic() + _LIMIT_S
        while self.transport.state(self.writes[write]) is WriteState.OPEN and time.monotonic() < end_s:
            pass
        return self.look(write)

    def probe(self, peer: str, target: int, length: int) -> str:
        """Probe in a new thread, as a worker does."""
        found: list[str] = []

        def probe() -> None:
            self.device.enter()
            found.append(self.transport.probe_wire(peer, self.regions[0][0], target, length).value)

        thread = threading.Thread(target=probe)
        thread.start()
        thread.join()
        return found[0]

    def stand_in(self, what: str, *arguments: int) -> int:
        return int(getattr(self.driver, f"stand_in_{what}")(*arguments))

    def hold(self, *, on: bool) -> None:
        """Hold copies, or let them continue."""
        self.stand_in("hold", int(on))

    def engines(self) -> int:
        """Return the number of this process's listeners: one for its own engine, one for each writing peer."""
        lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        names = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()}
        return sum(line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in names for line in lines)

    def listener_sleeps_us(self) -> list[int]:
        """Return for each listener the maximum sleep before it detects the end of its engine."""
        found = []
        for entry in Path("/proc/self/fd").iterdir():
            if entry.is_socket():
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        timeout = copy.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT.size)
                        seconds, microseconds = _TIMEOUT.unpack(timeout)
                        found.append(seconds * 1_000_000 + microseconds)
        return sorted(found)

    def close(self) -> None:
        self.transport.close()


def main() -> None:
    """Carry out commands until standard input ends."""
    server = _Server(sys.argv[1], int(sys.argv[2]))
    serve(server)
    server.close()
    os._exit(0)


if __name__ == "__main__":
    main()
