"""Reads the directory of a `longshore up`: the config of its deployment, and the addresses of its agents.

Called by `agents` and `verify`; `up` and `local_agents` use its names. An agent that is named here may have ended.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import msgspec

from longshore_cli.status_pages import AgentPageError, AgentPages, Page
from longshore_spec import agent_config
from longshore_spec.agent_config import AgentConfig
from longshore_wire.errors import ConfigError, LongshoreError, Reason

CONFIG_FILE, STATE_FILE = "config.json", "agent.json"
_ROLES = frozenset({"prefill", "decode"})


def add_argument(parser: argparse._ActionsContainer) -> None:
    """Declare --directory."""
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="instead: the agents of a running `longshore up --directory DIR`",
    )


class DirectoryError(LongshoreError):
    """A directory is none of a `longshore up`; says why."""

    reason = Reason.INTERNAL


class AgentState(msgspec.Struct, frozen=True):
    """The state file that an agent writes when it starts to serve."""

    pid: int
    socket: str
    http: str


class Member(NamedTuple):
    """One agent.

    Attributes:
        name: of its node.
        role: of its engines.
        http: the address of its pages; empty: it does not run, as `problem` says.
    """

    name: str
    role: str
    directory: Path
    http: str
    problem: str

    def pages(self, *, token: str = "", authority: Path | None = None) -> AgentPages:
        """Return its pages; those of an agent that does not run raise AgentPageError when they are read."""
        if self.http:
            return AgentPages.at(self.http, token=token, authority=authority, name=self.name)
        return AgentPages(self.name, self._absent)

    def _absent(self, _path: str) -> Page:
        raise AgentPageError(self.problem)


def state(directory: Path) -> AgentState:
    """Return the state of the agent with this run directory. Raises OSError, msgspec.DecodeError."""
    return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=AgentState)


def members(directory: Path) -> list[Member]:
    """Return the agents of a `longshore up`, ordered by name. Raises DirectoryError: the directory is none of one."""
    found = [path for path in sorted(directory.glob("*")) if _role(path) in _ROLES]
    if not found or not (directory / CONFIG_FILE).exists():
        raise DirectoryError(
            f"--directory {directory}: it is no directory of `longshore up`: name one with a {CONFIG_FILE}"
        )
    return [_member(path) for path in found]


def config(directory: Path) -> AgentConfig:
    """Return the config of the deployment. Raises DirectoryError."""
    path = directory / CONFIG_FILE
    try:
        return agent_config.load(path.read_bytes())
    except (OSError, ConfigError) as error:
        raise DirectoryError(
            f"{path}: {error}: name a directory of a `longshore up` of this release that runs"
        ) from error


def _member(path: Path) -> Member:
    http, problem = "", ""
    try:
        http = state(path).http
    except (OSError, msgspec.DecodeError) as error:
        problem = f"no agent runs in {path}: {error}: start it by `longshore up`"
    return Member(path.name, _role(path), path, http, problem)


def _role(path: Path) -> str:
    return path.name.partition("-")[0]
