"""Sizes and starts the agents of one deployment on this machine. Called by `command`."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import msgspec

from longshore_cli.local_agents import LocalAgent, LocalAgentError, make_keys
from longshore_cli.up_directory import CONFIG_FILE
from longshore_spec.agent_config import AgentConfig, Backend, Control, dump
from longshore_spec.names import KEYS_FILE

# Sizes are rounded down to whole memory pages, and stay large enough for slabs of a useful size.
_PAGE_BYTES = 4096
_BUFFER_BYTES_MIN = 256 << 10
# Of the running `longshore up`, with its process's number.
LOCK_FILE = "up.lock"


@dataclass(frozen=True)
class Member:
    """One agent: its name and the role of its engines."""

    name: str
    role: str


def scaled(config: AgentConfig, factor: Fraction, backend: str | None) -> AgentConfig:
    """Return `config` for this machine: staging sizes times `factor`, free ports on the loopback address.

    Raises:
        ConfigError: the sizes do not fit each other when scaled.
    """
    replace = msgspec.structs.replace
    prefill = replace(config.prefill.staging, buffer_size=_sized(config.prefill.staging.buffer_size, factor))
    writers = config.prefill.tensor_parallel * config.prefill.pipeline_parallel
    pool_bytes = _sized(config.decode.staging.pool_size, factor)
    if factor != 1:
        # A ring must hold at least two slabs of each writer.
        pool_bytes = max(pool_bytes, 2 * writers * prefill.buffer_size)
    found = replace(
        config,
        prefill=replace(config.prefill, staging=prefill),
        decode=replace(config.decode, staging=replace(config.decode.staging, pool_size=pool_bytes)),
        control=Control(keys_directory=None, bind_address="127.0.0.1", http_port=0),
    )
    if backend is not None:
        found = replace(found, transfer=replace(found.transfer, backend=Backend(backend)))
    found.check()
    return found


def members_of(config: AgentConfig, instances: tuple[int, int] | None) -> list[Member]:
    """Return the agents: one for the node of each expected instance."""
    counts = instances or (config.prefill.instances or 1, config.decode.instances or 1)
    return [
        Member(f"{role}-{index}", role)
        for role, count in zip(("prefill", "decode"), counts, strict=True)
        for index in range(count)
    ]


class Fleet:
    """The running agents. A context manager: entering waits until all are ready, leaving until all have ended.

    A directory of an earlier fleet keeps its keys.

    Raises:
        LocalAgentError: another fleet runs in the directory.
    """

    def __init__(self, config: AgentConfig, members: list[Member], directory: Path) -> None:
        self.config = config
        self._directory = directory
        self._claim = _claimed(directory)
        self.agents: dict[str, LocalAgent] = {}
        keys = directory / "keys"
        control = msgspec.structs.replace(config.control, keys_directory=str(keys))
        self._config_path = directory / CONFIG_FILE
        self._config_path.write_text(dump(msgspec.structs.replace(config, control=control)))
        if not (keys / KEYS_FILE).exists():
            make_keys(keys)
        for member in members:
            settings = {"config_file": str(self._config_path), "node": member.name}
            self.agents[member.name] = LocalAgent(settings, directory / member.name)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            for agent in self.agents.values():
                self._stack.callback(agent.stop)
                agent.start()
            for agent in self.agents.values():
                agent.wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for agent in self.agents.values():
            agent.terminate()
        self._stack.close()
        self._claim.close()


def _claimed(directory: Path) -> TextIO:
    """Return the file whose lock this process holds, so that one fleet at a time runs in a directory.

    Raises:
        LocalAgentError: another one does, or the file cannot be written.
    """
    try:
        file = (directory / LOCK_FILE).open("a+", encoding="ascii")
    except OSError as error:
        raise LocalAgentError(f"{directory}: {error.strerror}: choose another --directory") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        with file:
            holder = file.read().strip() or "unknown"
        raise LocalAgentError(
            f"another `longshore up` (PID {holder}) runs in {directory}: end it, or choose another --directory"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _sized(length_bytes: int, factor: Fraction) -> int:
    return max(_BUFFER_BYTES_MIN, int(length_bytes * factor) // _PAGE_BYTES * _PAGE_BYTES)
