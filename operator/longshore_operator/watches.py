"""Detects dead watches by comparing their deliveries with lists. Called by `main`, shown by `health`.

A watch with an ended task or a stuck stream looks like a watch on a quiet cluster. Only a list tells them apart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longshore_operator import kinds
from longshore_operator.api import Api
from longshore_operator.errors import ApiError
from longshore_operator.kinds import Kind
from longshore_operator.served import Served
from longshore_operator.settings import Settings
from longshore_operator.world import World

_log = logging.getLogger(__name__)
# Interval at which a start compares the watches with lists.
_START_EVERY_S = 0.5
# kopf's name for the tasks of its watches. If kopf renames them, ended tasks are detected by the lists alone.
_TASK_PREFIX = "watcher for "


class WatchLag:
    """Computes how long each watch has missed an object. Pure: time is an argument."""

    def __init__(self, delivered: Mapping[str, Mapping[str, str]]) -> None:
        self._delivered = delivered
        # Kind -> uid -> (listed version, or None if a list did not show it; missed since, monotonic seconds).
        self._missed: dict[str, dict[str, tuple[int | None, float]]] = {}

    def listed(self, kind: str, versions: Mapping[str, str], before: Mapping[str, str], now_s: float) -> None:
        """Compare a list with the watch's deliveries.

        Args:
            versions: uid -> resourceVersion of each object that was listed.
            before: uid -> resourceVersion, as the watch had delivered when the list was requested.
        """
        delivered = self._delivered.get(kind, {})
        missed = self._missed.setdefault(kind, {})
        for uid, version in versions.items():
            if int(delivered.get(uid, -1)) < int(version):
                known = missed.get(uid)
                missed[uid] = (int(version), known[1] if known else now_s)
        for uid in before:
            if uid not in versions and uid in delivered:
                missed.setdefault(uid, (None, now_s))
        for uid in [uid for uid in missed if uid not in versions and uid not in delivered]:
            # It was deleted before the watch began.
            del missed[uid]

    def lags_s(self, now_s: float) -> dict[str, float]:
        """Return, by kind, for how long the oldest missed object has been missed; 0 if none is."""
        found: dict[str, float] = {}
        for kind, missed in self._missed.items():
            delivered = self._delivered.get(kind, {})
            for uid, (version, _) in list(missed.items()):
                caught_up = uid not in delivered if version is None else int(delivered.get(uid, -1)) >= version
                if caught_up:
                    del missed[uid]
            found[kind] = max((now_s - since_s for _, since_s in missed.values()), default=0.0)
        return found


class WatchCheck:
    """Lists the watched kinds at the start and then periodically.

    Attributes:
        started: set once every kind was listed and the watches have delivered all that was listed. Until then the
            world is incomplete, and nothing may be decided.
    """

    def __init__(self, api: Api, world: World, settings: Settings) -> None:
        self._api = api
        self._world = world
        self._settings = settings
        self._lag = WatchLag(world.delivered)
        self._tasks: Counter[str] = Counter()
        self.started = asyncio.Event()

    def lags_s(self) -> dict[str, float]:
        """Return, by kind, how long each watch has missed an object, in seconds."""
        return self._lag.lags_s(time.monotonic())

    def ended(self) -> list[str]:
        """Return the watches whose task has ended. kopf keeps running without them and reports nothing."""
        # The two watches of pods have the same name.
        alive = Counter(name for task in asyncio.all_tasks() if (name := task.get_name()).startswith(_TASK_PREFIX))
        self._tasks |= alive
        return sorted(self._tasks - alive)

    def missing(self) -> list[str]:
        """Return the kinds that a start still waits for."""
        if self.started.is_set():
            return []
        lags_s = self.lags_s()
        return [kind.name for kind in watched(self._settings) if lags_s.get(kind.name, 1.0) > 0]

    async def run(self) -> None:
        """Check every watch at the start and periodically. Never returns."""
        await self._read_schema()
        while missing := self.missing():
            for name in missing:
                await self._check(kinds.of(name))
            await asyncio.sleep(_START_EVERY_S)
        self.started.set()
        while True:
            await asyncio.sleep(self._settings.resync_s)
            self.ended()
            await self._read_schema()
            for kind in watched(self._settings):
                await self._check(kind)

    async def _read_schema(self) -> None:
        """Read which fields the CRD has. It may be replaced at any time, by a release or by hand."""
        try:
            self._world.served = Served.of(await self._api.schema(kinds.DEPLOYMENT.api_version))
        except ApiError as error:
            _log.warning("definition: %s", error)

    async def _check(self, kind: Kind) -> None:
        before = dict(self._world.delivered.get(kind.name, {}))
        namespace = self._settings.watch_namespace if kind.namespaced else ""
        try:
            found: Iterator[dict[str, Any]] = await self._api.metadata(kind, namespace)
        except ApiError as error:
            # Without a list nothing is known. An unavailable API server is no fault of the watch.
            _log.warning("watches: %s", error)
            return
        versions = {metadata["uid"]: metadata["resourceVersion"] for metadata in found}
        # An object whose deletion was delivered during the list request is not missed.
        self._lag.listed(kind.name, versions, before, time.monotonic())


def watched(settings: Settings) -> Sequence[Kind]:
    """Return the kinds that are watched."""
    optional = (kinds.NODE,) if settings.watch_nodes else ()
    return (kinds.DEPLOYMENT, *kinds.WATCHED_CHILDREN, kinds.POD, kinds.ENGINE_POD, *optional)
