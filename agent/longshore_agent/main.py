"""`longshore-agent`: one agent on this node, from its config file and its environment, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from longshore_agent import crossover_file
from longshore_agent.control import curve
from longshore_agent.settings import Settings, variable
from longshore_agent.status.app import create_app
from longshore_agent.status.checks import Rules
from longshore_agent.status.plans import PlanDefaults
from longshore_agent.status.server import serve
from longshore_agent.supervisor.loop import Supervisor
from longshore_agent.transports.loopback_faults import parse_faults
from longshore_agent.whole_file import write_whole
from longshore_wire.agent_config import AgentConfig, load
from longshore_wire.crossover import WHOLE_PAGES, Crossover
from longshore_wire.errors import ConfigError, LongshoreError

# Where others on this machine learn of a running agent: its addresses, as JSON.
STATE_FILE = "agent.json"
_EXIT_BAD_CONFIG = 2


class AgentState(msgspec.Struct):
    """What STATE_FILE holds."""

    pid: int
    socket: str
    http: str


@dataclass(slots=True)
class _Named:
    """What is in files that settings name, read once: a file may be a pipe, or change."""

    token: str = ""
    crossover: Crossover = WHOLE_PAGES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent; return its exit status: 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(prog="longshore-agent", description=__doc__)
    parser.add_argument("--config", type=Path, help="the deployment's config file; the environment counts more")
    chosen = parser.parse_args(arguments)
    try:
        settings, config = _read(chosen.config)
        return _serve(settings, config, _read_named(settings))
    except ConfigError as error:
        for fault in error.faults:
            sys.stderr.write(f"longshore-agent: {fault}\n")
    except LongshoreError as error:
        sys.stderr.write(f"longshore-agent: {error}\n")
    return _EXIT_BAD_CONFIG


def _read(path: Path | None) -> tuple[Settings, AgentConfig | None]:
    """Return what the file and the environment say. Raises ConfigError with the faults of both."""
    named = path or (Path(os.environ[variable("config_file")]) if os.environ.get(variable("config_file")) else None)
    config, faults = None, []
    if named is not None:
        try:
            config = load(named.read_bytes())
        except OSError as error:
            faults.append(f"{variable('config_file')}: {named}: {error.strerror}")
        except ConfigError as error:
            faults += [f"{named}: {fault}" for fault in error.faults]
    settings = Settings()
    try:
        base = None if config is None else Settings.from_config(config)
        settings = Settings.from_environment(os.environ, base=base)
    except ConfigError as error:
        faults += error.faults
    if faults:
        raise ConfigError(faults)
    return settings, config


def _read_named(settings: Settings) -> _Named:
    """Return what is in the files that settings name.

    Raises:
        ConfigError: with every fault of them: an agent must not be ready that can serve no engine.
    """
    named = _Named()

    def keys() -> None:
        if settings.keys_directory:
            curve.read_ring(Path(settings.keys_directory))

    def directory() -> None:
        Path(settings.run_directory).mkdir(mode=0o750, parents=True, exist_ok=True)

    def token() -> None:
        named.token = _token(settings)

    def table() -> None:
        named.crossover = crossover_file.load(settings.crossover_file)

    faults: list[str] = []
    for name, check in (
        ("run_directory", directory),
        ("keys_directory", keys),
        ("http_token_file", token),
        ("crossover_file", table),
        ("loopback_faults", lambda: parse_faults(settings.loopback_faults)),
    ):
        try:
            check()
        except OSError as error:
            faults.append(f"{variable(name)}: {getattr(settings, name)}: {error.strerror}")
        except ConfigError as error:
            faults += [f"{variable(name)}: {fault}" for fault in error.faults]
        except LongshoreError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(faults)
    return named


def _token(settings: Settings) -> str:
    """Return the token that HTTP asks for; empty: none. Raises OSError, or ConfigError: an empty file would ask for none."""
    if not settings.http_token_file:
        return ""
    found = Path(settings.http_token_file).read_text().strip()
    if not found:
        raise ConfigError([f"{settings.http_token_file} is empty: write the token into it, or name no file"])
    return found


def write_state(state: AgentState, directory: Path) -> Path:
    """Write the file by which others find this agent, and return its path. Who reads it meanwhile sees all of it or none."""
    path = directory / STATE_FILE
    write_whole(path, msgspec.json.encode(state))
    return path


def _serve(settings: Settings, config: AgentConfig | None, named: _Named) -> int:
    logging.basicConfig(
        level=settings.log_level.value.upper(), format="%(asctime)s agent %(levelname)s %(message)s", stream=sys.stderr
    )
    defaults = PlanDefaults.of(settings, named.crossover)
    supervisor = Supervisor(settings, config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    server = serve(
        create_app(supervisor, Rules.of(settings), defaults),
        settings.bind_host,
        settings.http_port,
        token=named.token,
        certificate_file=settings.http_certificate_file,
        key_file=settings.http_key_file,
    )
    scheme = "https" if settings.http_certificate_file else "http"
    state = AgentState(os.getpid(), supervisor.socket_path, f"{scheme}://{settings.bind_host}:{server.port}")
    state_path = write_state(state, Path(settings.run_directory))
    logging.getLogger(__name__).info("engines at %s, status at %s", state.socket, state.http)
    try:
        supervisor.run()
    finally:
        server.stop()
        state_path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
