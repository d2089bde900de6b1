"""Main program of the rank processes: `python -m longshore_lab.engine.rank_main <fd>`, run by `starter.RankStarter`.

This process loads torch and then forks a rank for each connection that comes through `fd`. A rank reads its options from
its connection, answers `Ready`, and executes commands until `Stop` or until the driver closes the connection. An
extension, named in the options, runs in the same process: a connector that registers the pool elsewhere is such an
extension.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Protocol, cast

import msgspec
import torch

from longshore_lab.engine import commands
from longshore_lab.engine.config import RankOptions
from longshore_lab.engine.errors import EngineError
from longshore_lab.engine.rank import EngineRank, Sampled
from longshore_wire.errors import LongshoreError, Reason

# A request to start is one short datagram with an attached connection.
_REQUEST_BYTES_MAX = 16


class Extension(Protocol):
    """An extension of a rank. `RankOptions.extension` names a factory `(engine, extension_options) -> Extension`."""

    def handle(self, body: bytes) -> bytes:
        """Answer one `Extra`; a LongshoreError is reported to the driver, any other error ends the process."""

    def close(self) -> None:
        """Release the engine's pool; the engine closes next."""


class NoExtension:
    """The extension of a rank whose options name none."""

    def handle(self, body: bytes) -> bytes:
        """Refuse the request.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{len(body)} bytes for an extension, and the options name none: set `extension`")

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Start a rank for each connection that the driver passes; each serves the driver at its other end."""
    # An interrupt from the terminal reaches the whole process group, but the driver decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as link:
        try:
            descriptor = next_rank(link)
        except (BrokenPipeError, ConnectionResetError):
            descriptor = None
    if descriptor is None:
        return
    with Connection(descriptor) as connection:
        try:
            options = msgspec.msgpack.decode(connection.recv_bytes(), type=RankOptions)
            engine = EngineRank(options)
            try:
                extension = load_extension(engine)
                try:
                    answer(connection, commands.Ready(options.layout, engine.pool.geometry))
                    serve(connection, engine, extension)
                finally:
                    extension.close()
            finally:
                engine.close()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            # The driver has ended, so the error cannot be reported.
            return
        except Exception as error:
            try:
                answer(connection, failure(error))
            except (BrokenPipeError, ConnectionResetError):
                # A collective operation fails in this rank when the driver and the other ranks have ended.
                return
            raise


def next_rank(link: socket.socket) -> int | None:
    """Fork a rank for each connection. Return its descriptor in the rank, and None here when the driver has ended."""
    send(link, commands.Loaded())
    pids: dict[int, int] = {}  # by pidfd
    while True:
        poller = select.poll()
        for descriptor in (link.fileno(), *pids):
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll():
            if descriptor != link.fileno():
                pid = pids.pop(descriptor)
                os.close(descriptor)
                send(link, commands.Ended(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                continue
            data, connections, *_ = socket.recv_fds(link, _REQUEST_BYTES_MAX, 1)
            if not data:
                return None
            # No thread or GPU context exists yet, so a fork is safe.
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                for other in pids:
                    os.close(other)
                return connections[0]
            os.close(connections[0])
            pidfd = os.pidfd_open(pid)
            pids[pidfd] = pid
            send(link, commands.Started(pid), pidfd)


def send(link: socket.socket, answer: commands.StarterAnswer, *descriptors: int) -> None:
    """Send the driver an answer on its ranks."""
    socket.send_fds(link, [msgspec.msgpack.encode(answer)], descriptors)


def load_extension(engine: EngineRank) -> Extension:
    """Create the extension that the engine's options name."""
    if not engine.options.extension:
        return NoExtension()
    module, _, factory = engine.options.extension.partition(":")
    made = getattr(importlib.import_module(module), factory)(engine, engine.options.extension_options)
    return cast(Extension, made)


def serve(connection: Connection, engine: EngineRank, extension: Extension) -> None:
    """Answer commands until `Stop`. A typed error becomes an answer; any other propagates."""
    decoder = msgspec.msgpack.Decoder(commands.Command)
    while True:
        command = decoder.decode(connection.recv_bytes())
        if isinstance(command, commands.Stop):
            return
        try:
            reply = execute(engine, extension, command)
        except LongshoreError as error:
            reply = failure(error)
        answer(connection, reply)


def execute(engine: EngineRank, extension: Extension, command: commands.Command) -> commands.Reply:
    """Execute one command."""
    match command:
        case commands.Prefill(prompt, pages, first, end):
            return sampled([engine.prefill(prompt, pages, first, end)])
        case commands.Decode(pages, position, token, count):
            return sampled(engine.decode_many(pages, position, token, count))
        case commands.Dump(pages, first, end):
            rows = engine.pool.dump_tokens(pages, first, end)
            return commands.Dumped(list(rows.shape), rows.numpy().tobytes())
        case commands.Digest(pages, first, end):
            return commands.Digests(engine.pool.digest_tokens(pages, first, end))
        case commands.Zero(pages, first, end):
            engine.pool.zero(pages, first, end)
        case commands.Poison(pages):
            engine.pool.poison(pages)
        case commands.Extra(body):
            return commands.ExtraReply(extension.handle(body))
        case commands.Stop():
            raise AssertionError("Stop is not executed")
    return commands.Done()


def sampled(steps: list[Sampled]) -> commands.Tokens:
    """Return the reply with these tokens."""
    return commands.Tokens([step.token for step in steps], [step.margin for step in steps])


def failure(error: Exception) -> commands.Failed:
    """Return the reply that reports `error`."""
    reason = error.reason if isinstance(error, LongshoreError) else Reason.INTERNAL
    return commands.Failed(int(reason), f"{type(error).__name__}: {error}")


def answer(connection: Connection, reply: commands.Reply) -> None:
    """Send one reply."""
    connection.send_bytes(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
