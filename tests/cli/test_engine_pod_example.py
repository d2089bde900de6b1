"""Tests how the decode pod of examples/engine finds its prefill pod, and ends with it."""

from __future__ import annotations

import importlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "engine"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program, without ranks and so without an agent."""
    for name in ("TENSOR_PARALLEL", "PAGE_SIZE"):
        monkeypatch.setenv(f"LONGSHORE_ENGINE_{name}", "1")
    monkeypatch.syspath_prepend(FOLDER)
    found = importlib.import_module("engine_pod")
    monkeypatch.setattr(found, "ranks_of", lambda _half, _instance: [])
    yield found
    for name in ("engine_pod", "own_engine"):
        del sys.modules[name]


@pytest.mark.parametrize("address", ["prefill.invalid", "127.0.0.1"])
def test_a_prefill_pod_that_is_not_found_in_time_ends_the_program_with_one_line(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(program, "LIMIT_S", 0.0)
    monkeypatch.setattr(program, "PAUSE_S", 0.0)
    # Nothing listens at this port.
    monkeypatch.setattr(program, "PORT", 9)
    with pytest.raises(SystemExit) as ended:
        program.run_decode(address)
    (line,) = str(ended.value.code).splitlines()
    assert line.startswith(f"prefill at {address}:9 was not reached within 0 s: ")


def test_a_prefill_pod_that_starts_later_is_found(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(program, "PORT", server.getsockname()[1])
        # The first attempt fails, since nothing listens before this pause.
        monkeypatch.setattr(time, "sleep", lambda _seconds: server.listen())
        with program.connected("127.0.0.1", program.PORT) as found:
            assert found.getpeername() == server.getsockname()


@pytest.mark.parametrize(
    ("said", "resets"),
    [(b"", False), (b'["half of a', False), (b"", True)],
    ids=["ends", "ends-in-an-answer", "resets"],
)
def test_a_prefill_pod_that_ends_while_decode_waits_ends_the_program_with_one_line(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, said: bytes, *, resets: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(program, "PORT", server.getsockname()[1])

        def end() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(said)
                if resets:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        ending = threading.Thread(target=end)
        ending.start()
        with pytest.raises(SystemExit) as ended:
            program.run_decode("127.0.0.1")
        ending.join()
    (line,) = str(ended.value.code).splitlines()
    assert line.startswith("prefill does not answer any more: ")
