"""Runs one agent, configured by its file and environment, until SIGTERM or SIGINT: the command `longshore-agent`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from longshore_agent import logs
from longshore_agent.control import curve
from longshore_agent.files import read_crossover, read_secret, write_whole
from longshore_agent.settings import Settings
from longshore_agent.status.findings import Rules
from longshore_agent.supervisor.loop import Supervisor
from longshore_spec import distribution
from longshore_spec.agent_config import AgentConfig, load
from longshore_spec.environment import variable
from longshore_wire.crossover import WHOLE_PAGES, Crossover
from longshore_wire.errors import ConfigError, LongshoreError

# The file with a running agent's addresses, as JSON, for other programs on this machine.
STATE_FILE = "agent.json"
_EXIT_BAD_CONFIG = 2


class AgentState(msgspec.Struct):
    """The content of STATE_FILE."""

    pid: int
    socket: str
    http: str


@dataclass(slots=True)
class _Named:
    """The contents of files that settings name, read once, since a file may be a pipe or change."""

    token: str = ""
    crossover: Crossover = WHOLE_PAGES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent; return its exit status: 2 for an invalid configuration."""
    parser = argparse.ArgumentParser(prog="longshore-agent", description=__doc__)
    parser.add_argument("--config", type=Path, help="the deployment's config file; environment variables override it")
    parser.add_argument("--version", action="version", version=f"longshore-agent {distribution.installed_version()}")
    chosen = parser.parse_args(arguments)
    _raise_descriptor_limit()
    try:
        settings, config = _read(chosen.config)
        return _serve(settings, config, _read_named(settings))
    except ConfigError as error:
        logs.complain(error.faults)
    except LongshoreError as error:
        logs.complain([str(error)])
    return _EXIT_BAD_CONFIG


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors, often 1,024, to the hard limit, for this process and its workers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _read(path: Path | None) -> tuple[Settings, AgentConfig | None]:
    """Return the settings of the file and the environment. Raises ConfigError with the faults of both."""
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
    """Read the files that settings name.

    Raises:
        ConfigError: with all faults. An agent that can serve no engine must not become ready.
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
        named.crossover = read_crossover(settings.crossover_file)

    def telemetry_library() -> None:
        if settings.otel:
            from longshore_agent.status import otel

            otel.check(os.environ)

    def loopback() -> None:
        if settings.loopback_faults:
            # It needs numpy, whose import takes as long as that of all the rest.
            from longshore_agent.transports.loopback import parse_faults

            parse_faults(settings.loopback_faults)

    faults: list[str] = []
    for name, check in (
        ("run_directory", directory),
        ("keys_directory", keys),
        ("http_token_file", token),
        ("crossover_file", table),
        ("otel", telemetry_library),
        ("loopback_faults", loopback),
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
    """Return the bearer token of HTTP; empty if none is required. Raises OSError; ConfigError if the file is empty."""
    if not settings.http_token_file:
        return ""
    found = read_secret(Path(settings.http_token_file)).decode().strip()
    if not found:
        raise ConfigError([f"{settings.http_token_file} is empty: write the token into it, or name no file"])
    return found


def write_state(state: AgentState, directory: Path) -> Path:
    """Write STATE_FILE atomically and return its path."""
    path = directory / STATE_FILE
    write_whole(path, msgspec.json.encode(state))
    return path


def _serve(settings: Settings, config: AgentConfig | None, named: _Named) -> int:
    logs.begin(settings, logs.SUPERVISOR)
    supervisor = Supervisor(settings, config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    pages = _Pages(settings, named, supervisor)
    try:
        supervisor.run()
    finally:
        pages.close()
    if pages.error is not None:
        raise pages.error
    return 0


class _Pages:
    """Serves HTTP beside the supervisor's loop. A thread loads the libraries, which takes 1 s, while the loop accepts engines.

    Attributes:
        error: why it cannot serve, after which the supervisor stops; None without an error.
    """

    def __init__(self, settings: Settings, named: _Named, supervisor: Supervisor) -> None:
        self.error: BaseException | None = None
        self._settings, self._named, self._supervisor = settings, named, supervisor
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._closed = False
        # A daemon thread, so that an agent that stops at once does not wait for the libraries.
        threading.Thread(target=self._start, name="http-start", daemon=True).start()

    def close(self) -> None:
        """Stop HTTP, or prevent its start."""
        with self._lock:
            self._closed = True
            self._stack.close()

    def _start(self) -> None:
        try:
            # Loads fastapi, pydantic and uvicorn, which no engine waits for.
            from longshore_agent.status.app import create_app
            from longshore_agent.status.plans import PlanDefaults
            from longshore_agent.status.server import serve

            app = create_app(
                self._supervisor, Rules.of(self._settings), PlanDefaults.of(self._settings, self._named.crossover)
            )
            with self._lock:
                if self._closed:
                    return
                server = serve(
                    app,
                    self._settings.bind_host,
                    self._settings.http_port,
                    token=self._named.token,
                    certificate_file=self._settings.http_certificate_file,
                    key_file=self._settings.http_key_file,
                    refused=lambda: self._supervisor.metrics.add("longshore_http_refusals_total"),
                )
                self._stack.callback(server.stop)
                self._tell(server.port)
        except BaseException as error:  # noqa: BLE001 -- raised again by `_serve`, in the main thread
            self.error = error
            self._supervisor.stop()

    def _tell(self, port: int) -> None:
        settings = self._settings
        scheme = "https" if settings.http_certificate_file else "http"
        state = AgentState(os.getpid(), self._supervisor.socket_path, f"{scheme}://{settings.bind_host}:{port}")
        try:
            path = write_state(state, Path(settings.run_directory))
        except OSError as error:
            text = f"{settings.run_directory}: {STATE_FILE} cannot be written: {error.strerror}"
            raise ConfigError([f"{variable('run_directory')}: {text}"]) from error
        self._stack.callback(path.unlink, missing_ok=True)
        logging.getLogger("longshore_agent.main").info("engines at %s, status at %s", state.socket, state.http)


if __name__ == "__main__":
    sys.exit(main())
