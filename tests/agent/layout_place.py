"""Lists the tested engine layouts by name, and the transports over which each case runs.

`make test` runs every case over the loopback and one over each real transport, `make layouts` all over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from agent_fleet import World, over
from agent_world import Agent, Engine

from longshore_client import Half, ModelShape, PageOrder

FOUR_HEADS = ModelShape.kv(layers=2, kv_heads=4, head_dim=16, element_bytes=2)
FIVE_LAYERS = ModelShape.kv(layers=5, kv_heads=2, head_dim=8, element_bytes=4)
MANY_LAYERS = ModelShape.kv(layers=94, kv_heads=2, head_dim=4, element_bytes=1)
LATENT = ModelShape.latent(layers=3, width=36, element_bytes=2)
BLOB_BYTES = 1000  # of 16 tokens: K, V, and as many bytes that only the engine understands

# Name -> tensor parallel size and the rest of an engine's layout. All engines have both roles.
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp16": (16, {"model": FOUR_HEADS}),
    "tp8": (8, {"model": FOUR_HEADS}),
    "tp4": (4, {"model": FOUR_HEADS}),
    "tp2-64": (2, {"model": FOUR_HEADS, "page_size": 64}),
    "tp1-64": (1, {"model": FOUR_HEADS, "page_size": 64}),
    "tp1-1": (1, {"model": FOUR_HEADS, "page_size": 1}),
    "tp1-16": (1, {"model": FOUR_HEADS}),
    "tp2-hnd": (2, {"model": FOUR_HEADS, "order": PageOrder.HND}),
    "five-pp2": (2, {"model": FIVE_LAYERS, "pp": 2}),
    "five-pp3": (1, {"model": FIVE_LAYERS, "pp": 3}),
    "five-given": (1, {"model": FIVE_LAYERS, "pp": 3, "stage_layers": (1, 1, 3)}),
    "many-pp2": (1, {"model": MANY_LAYERS, "pp": 2}),
    "many-pp3": (1, {"model": MANY_LAYERS, "pp": 3}),
    "opaque-tp1": (1, {"model": FOUR_HEADS, "order": PageOrder.OPAQUE, "blob_bytes": BLOB_BYTES}),
    "opaque-tp2": (2, {"model": FOUR_HEADS, "order": PageOrder.OPAQUE, "blob_bytes": BLOB_BYTES}),
    "latent-tp4": (4, {"model": LATENT}),
    "latent-tp2": (2, {"model": LATENT}),
    "dp-0": (1, {"model": FOUR_HEADS, "dp": 2, "dp_rank": 0}),
    "dp-1": (1, {"model": FOUR_HEADS, "dp": 2, "dp_rank": 1}),
}
# Exceptions from the alternation between the two agents: engines at the other agent, or at one of their own.
AGENT_OF = {"dp-0": "right", "dp-1": "right", "never": "never", "never-opaque": "never", "always-latent": "always"}
# Decode only: engines at agents with transfer.staging Never or Always.
TARGET_ONLY: dict[str, tuple[int, dict[str, Any]]] = {
    "never": (1, {"model": FOUR_HEADS}),
    "never-opaque": (1, {"model": FOUR_HEADS, "order": PageOrder.OPAQUE, "blob_bytes": BLOB_BYTES}),
    "always-latent": (1, {"model": LATENT}),
}
_SETTINGS = {"never": {"LONGSHORE_STAGING": "Never"}, "always": {"LONGSHORE_STAGING": "Always"}}

REAL = ("NIXL", "Mooncake")
BACKENDS = over("Loopback", *REAL, part="layouts")
every_backend = pytest.mark.parametrize("place", BACKENDS, indirect=True)


# Tests of these come last in their file, because pytest keeps one backend's engines for consecutive tests.
real_backends = pytest.mark.parametrize("place", REAL, indirect=True)


class Place:
    """Agents and engines of one backend. `wanted` engines start at once, others when a test first uses them."""

    def __init__(self, directory: Path, backend: str, wanted: Sequence[str]) -> None:
        self._world = World(directory, LONGSHORE_BACKEND=backend)
        self._agents: dict[str, Agent] = {}
        self._starting: dict[str, Future[Engine]] = {}
        for name in wanted:
            self._start(name)

    def engine(self, name: str) -> Engine:
        """Return an engine by its name."""
        self._start(name)
        return self._starting[name].result()

    def close(self) -> None:
        self._world.close()

    def _start(self, name: str) -> None:
        if name in self._starting:
            return
        if name in TARGET_ONLY:
            (tp, options), roles = TARGET_ONLY[name], {"roles": [Half.TARGET]}
        else:
            (tp, options), roles = ENGINES[name], {}
        side = AGENT_OF.get(name, ("left", "right")[list(ENGINES).index(name) % 2] if name in ENGINES else "")
        if side not in self._agents:
            self._agents[side] = self._world.agent(side, **_SETTINGS.get(side, {}))
        instance = name.partition("-")[0] if name.startswith("dp-") else name
        self._starting[name] = self._world.engine(self._agents[side], instance, tp, **options, **roles)


def wanted_by(items: Sequence[pytest.Item], module: str, backend: str) -> list[str]:
    """Return the engines in the parameters of a module's selected tests, for one backend, in the order above."""
    named: set[object] = set()
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is not None and item.nodeid.startswith(module) and spec.params.get("place") == backend:
            named |= {value for value in spec.params.values() if isinstance(value, str)}
    return [name for name in (*ENGINES, *TARGET_ONLY) if name in named]
