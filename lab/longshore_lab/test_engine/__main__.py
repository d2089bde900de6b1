"""Runs a test engine: `python -m longshore_lab.test_engine`. See the package.

It answers each line of its standard input by a line, and ends with it. It also ends if no line comes for IDLE_LIMIT_S, since
a connection that is cut does not always close the input.
"""

from __future__ import annotations

import argparse
import os
import queue
import select
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from longshore_lab.test_engine.headroom import Allocate, chosen, on_host, require
from longshore_lab.test_engine.instance import Instance
from longshore_spec.agent_config import AgentConfig, load
from longshore_spec.names import CONFIG_PATH
from longshore_spec.verify_messages import (
    VERSION,
    Answer,
    Ask,
    Claim,
    Claimed,
    Done,
    End,
    Offer,
    Refused,
    Start,
    Started,
    room_tokens,
)
from longshore_wire.engine_messages import Endpoint, Half
from longshore_wire.errors import ConfigError, LongshoreError, Reason
from longshore_wire.names import TEST_INSTANCE_PREFIX

# Several times the interval of the command's empty lines.
IDLE_LIMIT_S = 120.0
_READ_BYTES = 1 << 16
_LINE = msgspec.json.Decoder(Ask)


class NoAgentError(LongshoreError):
    """No agent listens at the socket, or its config cannot be read; names the path."""

    reason = Reason.WORKER_LOST


class Program:
    """The instances beside one agent, and the requests about them."""

    def __init__(self, config: AgentConfig, path: str) -> None:
        self._config = config
        self._path = path
        self._limit_s = 0.0
        self._allocate: Allocate = on_host
        self._prefill: Instance | None = None
        self._decode: Instance | None = None
        self._flipped_tokens = 0

    def answer(self, ask: Ask) -> Answer:
        """Carry out one request. Raises LongshoreError."""
        if isinstance(ask, Start):
            return self._start(ask)
        end_s = time.monotonic() + self._limit_s
        if isinstance(ask, Claim):
            assert self._decode is not None, "a command claims at an agent that it has started for decode"
            tokens = room_tokens(self._config, ask.room_bytes)
            rooms, seconds = self._decode.claim(
                ask.endpoint, ask.rooms, tokens, ask.concurrency, end_s, compare_each=ask.compare_each
            )
            return Claimed(tuple(rooms), seconds)
        assert self._prefill is not None, "a command offers at an agent that it has started for prefill"
        if isinstance(ask, End):
            self._flip(0)
            self._prefill.ended(ask.rooms, end_s, cancel=ask.cancel)
            return Done()
        assert isinstance(ask, Offer), "no other request is left"
        tokens = room_tokens(self._config, ask.room_bytes)
        self._flip(tokens if ask.flip_byte else 0)
        self._prefill.offer(ask.rooms, tokens, end_s)
        return Done()

    def _flip(self, tokens: int) -> None:
        """Make one byte of rooms of this length wrong, or for 0 every byte right again."""
        assert self._prefill is not None, "only prefill's pages are changed"
        for each in {self._flipped_tokens, tokens} - {0} if self._flipped_tokens != tokens else ():
            self._prefill.flip_byte(each)
        self._flipped_tokens = tokens

    def _start(self, ask: Start) -> Started:
        if ask.version != VERSION:
            text = f"the command speaks version {ask.version}, this test engine {VERSION}: install the same release"
            raise NoAgentError(text, reason=Reason.UNKNOWN_VERSION)
        _reach(self._path)
        self._limit_s = ask.limit_s
        tokens = room_tokens(self._config, ask.room_bytes)
        kind, self._allocate = chosen(ask.memory, self._config.transfer.backend)
        require(self._config, ask, tokens, kind)
        endpoint: Endpoint | None = None
        if ask.prefill:
            self._prefill = self._instance(ask, Half.SOURCE, tokens)
            endpoint = self._prefill.endpoint(ask.limit_s)
        if ask.decode:
            self._decode = self._instance(ask, Half.TARGET, tokens)
        return Started(endpoint, self._decode.instance if self._decode else "", kind)

    def _instance(self, ask: Start, half: Half, tokens: int) -> Instance:
        role, name = (self._config.prefill, "prefill") if half is Half.SOURCE else (self._config.decode, "decode")
        return Instance(
            self._path,
            f"{TEST_INSTANCE_PREFIX}{name}-{ask.run}",
            role.layout(self._config.model),
            half,
            self._allocate,
            tokens,
            1 if half is Half.SOURCE else ask.room_count,
            ask.limit_s,
        )


def _reach(path: str) -> None:
    """Raise NoAgentError at once if nothing listens at a socket: the client would try until its limit."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except PermissionError:
            return  # The client's message names the group.
        except OSError as error:
            raise NoAgentError(f"no agent listens at {path}: {error.strerror}") from error


def _read_lines(lines: queue.SimpleQueue[bytes]) -> None:
    """Pass on the lines of the standard input. Ends the process at its end, whatever runs: the agent releases the rest."""
    data = b""
    while select.select([0], [], [], IDLE_LIMIT_S)[0] and (read := os.read(0, _READ_BYTES)):
        *whole, data = (data + read).split(b"\n")
        for line in whole:
            if line.strip():
                lines.put(line)
    os._exit(0)


def _answer(engine: Program, line: bytes) -> Answer:
    try:
        return engine.answer(_LINE.decode(line))
    except msgspec.DecodeError as error:
        return Refused(Reason.MALFORMED_MESSAGE.name, f"{error}: install the same release as the agent's")
    except LongshoreError as error:
        return Refused(error.reason.name, str(error))


def main() -> int:
    """Serve the standard input; return 2 if the agent's config cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m longshore_lab.test_engine", description=__doc__)
    parser.add_argument("--config", type=Path, default=Path(CONFIG_PATH), help="the agent's config file")
    parser.add_argument("--socket", help="the agent's socket for engines (that of the config)")
    chosen = parser.parse_args()
    try:
        config = load(chosen.config.read_bytes())
    except (OSError, ConfigError) as error:
        sys.stderr.write(f"{chosen.config}: {error}\n")
        return 2
    engine = Program(config, chosen.socket or config.engine_socket)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    while True:
        answer = _answer(engine, lines.get())
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
