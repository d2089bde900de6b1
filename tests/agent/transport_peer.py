"""A second process with a transport, for the contract suite: reads JSON commands by lines, answers each by a line.

Between commands it polls `notices`, as a worker does, unless it was told to idle. Run as a script by the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from open_ports import listening

from longshore_agent.errors import TransportError
from longshore_agent.transports import create
from longshore_agent.transports.base import Pieces, Transport, Write, WriteState
from longshore_agent.transports.data_ports import DataPorts
from longshore_wire.names import Wire

ANSWER_LIMIT_S = 90.0
# UCX_TLS of NIXL over TCP inside a machine. Where a GPU is, NIXL refuses a list of transports that has none for GPU memory.
TCP_ALONE = "^shm,ib"


def row(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def post(transport: Transport, peer: str, sources: Any, targets: Any, lengths: Any, notice: bytes = b"") -> Any:
    """Draft one write and start it."""
    write = transport.draft(peer, Pieces(sources, targets, lengths), notice)
    transport.start(write)
    return write


def finish(transport: Transport, write: Write, limit_s: float = ANSWER_LIMIT_S) -> WriteState:
    """Poll a write until its end, and our own notices, as a worker does."""
    end = time.monotonic() + limit_s
    while (state := transport.state(write)) is WriteState.OPEN and time.monotonic() < end:
        select.select([], [], [], 0.0002)
    return state


def mooncake_ports(pid: int) -> dict[str, int]:
    """Return the ports on which a process with Mooncake listens: `data` for IPv4 and IPv6, `handshake` for IPv4."""
    # An agent's other sockets are bound to one address.
    open_ports = [port for port in listening(pid) if port.address in ("0.0.0.0", "::")]
    return {"handshake" if port.kind == "tcp" else "data": port.port for port in open_ports}


def strike(port: int, host: str = "127.0.0.1", source: str = "127.0.0.1") -> None:
    """Send a message that crashes Mooncake to its handshake port: a list instead of the expected object."""
    body = b"\2[]"
    with socket.create_connection((host, port), source_address=(source, 0)) as link:
        link.sendall(struct.pack("<Q", len(body)) + body)


class PeerProcess:
    """The parent's end: starts the script, sends commands, waits for answers.

    Args:
        wires: the allowed wires; empty: any.
        host: the address for its ports; empty: the transport's own choice.
        inside: a prefix of its command, such as nsenter.
    """

    def __init__(
        self,
        backend: str,
        name: str,
        environment: dict[str, str] | None = None,
        wires: Sequence[Wire] = (),
        *,
        host: str = "",
        inside: Sequence[str] = (),
    ) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            [*inside, sys.executable, __file__, backend, name, host, *(wire.name for wire in wires)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_LIMIT_S)
        assert ready, "the peer process does not answer"
        line = self.process.stdout.readline()
        assert line, f"the peer process ended with {self.process.wait()}"
        return json.loads(line)

    def metadata(self) -> bytes:
        return bytes.fromhex(self.ask("metadata"))

    def read(self, region: int, offset: int, length: int) -> bytes:
        return bytes.fromhex(self.ask("read", region=region, offset=offset, length=length))

    def wait_notices(self, count: int) -> list[dict[str, str]]:
        return list(self.ask("notices", count=count))

    def cpu_ticks(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal that ends, stops or continues it; return when all of its threads have done so."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
        elif number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> int:
        """Ask it to end and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.tell("exit")
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            status = self.process.wait(ANSWER_LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
        return status


class Server:
    """The child's end. Each method is a command; its return value is the answer."""

    def __init__(self, backend: str, name: str, host: str, wires: Sequence[str]) -> None:
        options: dict[str, Any] = {"wires": [Wire[name] for name in wires]} if wires else {}
        if host:
            options["ports"] = DataPorts(host)
        self.transport = create(backend, name, **options)
        self.regions: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self.tokens: list[int] = []
        self.arrived: list[dict[str, str]] = []
        self.idling = False

    def poll(self) -> None:
        for peer, notice in self.transport.notices():
            digest = hashlib.sha256(self.regions[0]).hexdigest() if self.regions else ""
            self.arrived.append({"peer": peer, "notice": notice.hex(), "digest": digest})

    def metadata(self) -> str:
        return self.transport.metadata().hex()

    def connect(self, metadata: str) -> str:
        return self.transport.connect(bytes.fromhex(metadata))

    def register(self, length: int, fill: int) -> int:
        region = np.full(length, fill, dtype=np.uint8)
        self.regions.append(region)
        self.tokens.append(self.transport.register(region.ctypes.data, length))
        return int(region.ctypes.data)

    def region_count(self) -> int:
        return len(self.regions)

    def deregister(self, region: int) -> None:
        self.transport.deregister(self.tokens[region])

    def disconnect(self, peer: str) -> None:
        self.transport.disconnect(peer)

    def read(self, region: int, offset: int, length: int) -> str:
        return self.regions[region][offset : offset + length].tobytes().hex()

    def digest(self, region: int) -> str:
        return hashlib.sha256(self.regions[region]).hexdigest()

    def notices(self, count: int) -> list[dict[str, str]]:
        end = time.monotonic() + ANSWER_LIMIT_S / 2
        while len(self.arrived) < count and time.monotonic() < end:
            self.poll()
        arrived, self.arrived = self.arrived, []
        return arrived

    def post(self, peer: str, region: int, target: int, length: int, notice: str) -> str:
        source = row(self.regions[region].ctypes.data)
        try:
            write = post(self.transport, peer, source, row(target), row(length), bytes.fromhex(notice))
            end = time.monotonic() + ANSWER_LIMIT_S / 2
            while (state := self.transport.state(write)) is WriteState.OPEN and time.monotonic() < end:
                self.poll()
            self.transport.release(write)
        except TransportError as error:
            return type(error).__name__
        return state.value

    def probe(self, peer: str, region: int, target: int, length: int) -> str:
        return self.transport.probe_wire(peer, int(self.regions[region].ctypes.data), target, length).value

    def idle(self) -> int:
        self.idling = True
        return len(list(Path("/proc/self/task").iterdir()))

    def serve(self) -> None:
        while True:
            if select.select([sys.stdin.buffer], [], [], 60.0 if self.idling else 0.0002)[0]:
                line = sys.stdin.buffer.readline()
                command = json.loads(line) if line else {"command": "exit"}
                if command["command"] == "exit":
                    self.transport.close()
                    return
                self.idling = False
                answer = json.dumps(getattr(self, command.pop("command"))(**command))
                sys.stdout.write(answer + "\n")
                sys.stdout.flush()
            elif not self.idling:
                self.poll()


if __name__ == "__main__":
    Server(*sys.argv[1:4], sys.argv[4:]).serve()
