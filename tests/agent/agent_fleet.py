"""Starts agents and engines concurrently and ends them together; provides the fleets that many tests share."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from agent_world import Agent, Engine, EngineProcess

from longshore_agent.control import curve
from longshore_client import Half, PageOrder

E = TypeVar("E", Engine, EngineProcess)


def over(*transports: Any, part: str = "transports") -> list[Any]:
    """Return parameters of tests, of which `make test` takes the first, and `make test-all` all."""
    return [transports[0], *(pytest.param(each, marks=pytest.mark.rest(part)) for each in transports[1:])]


class World:
    """Agents and engines of some tests; `close` ends them all."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self._directory = directory
        self._settings = settings
        self._stack = contextlib.ExitStack()
        self._agents: list[Agent] = []
        self.starters = ThreadPoolExecutor(4)

    def agent(self, name: str, **settings: str) -> Agent:
        agent = Agent(self._directory / name, **{**self._settings, **settings})
        self._agents.append(agent)
        return agent

    def engine(self, agent: Agent, instance: str, tp: int = 1, **options: Any) -> Future[Engine]:
        """Begin to start an engine instance; several start concurrently."""
        return self.starters.submit(lambda: self._keep(Engine(agent, instance, tp, **options)))

    def process(self, agent: Agent, instance: str, **options: Any) -> EngineProcess:
        return self._keep(EngineProcess(agent, instance, **options))

    def close(self) -> None:
        self.starters.shutdown()
        self._stack.close()
        with ThreadPoolExecutor(len(self._agents)) as enders:
            list(enders.map(Agent.stop, self._agents))

    def _keep(self, engine: E) -> E:
        self._stack.callback(engine.close)
        return engine


@dataclass
class Fleet:
    """Agents of one backend with engines. Every test may use them, and none may break them."""

    backend: str
    prefill: Agent
    decode: Agent
    forced: Agent
    two: Engine
    one: Engine
    three: Engine  # NIXL: pages of 4 tokens; others: head-major pages
    same: Engine  # as `one`, at the other agent
    other_way: Engine  # Loopback: staged, also where the layouts are equal; others: slices

    @property
    def agents(self) -> tuple[Agent, ...]:
        return self.prefill, self.decode, self.forced

    def leftovers(self) -> list[str]:
        return [left for agent in self.agents for left in agent.leftovers()]


def start_fleet(backend: str, directory: Path, worlds: contextlib.ExitStack) -> Fleet:
    """Start the fleet of a backend, which `worlds` ends."""
    nixl = backend == "NIXL"
    settings = {"LONGSHORE_BACKEND": backend}
    if nixl:
        # The links of this fleet are encrypted, so that its tests also cover keys.
        curve.write(curve.generate(), directory)
        settings["LONGSHORE_KEYS_DIRECTORY"] = str(directory)
    world = World(directory, **settings)
    worlds.callback(world.close)
    prefill, decode = world.agent("prefill"), world.agent("decode")
    forced = world.agent("forced", LONGSHORE_FORCE_WAY="Staged" if backend == "Loopback" else "Slices")
    three = {"page_size": 4} if nixl else {"order": PageOrder.HND}
    starting = {
        "two": world.engine(prefill, "two", 2),
        "one": world.engine(prefill, "one"),
        "three": world.engine(decode, "three", 3, roles=[Half.TARGET], **three),
        "same": world.engine(decode, "same", roles=[Half.TARGET]),
        "other_way": world.engine(forced, "other-way", roles=[Half.TARGET]),
    }
    engines = {name: engine.result() for name, engine in starting.items()}
    return Fleet(backend, prefill, decode, forced, **engines)
