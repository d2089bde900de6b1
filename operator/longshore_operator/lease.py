"""Leader election by a `coordination.k8s.io` Lease: one replica is active, the others wait. Called by `main`.

Clocks of other machines are not trusted. A Lease is expired when this replica has seen it unchanged for its duration.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from typing import Any

from longshore_operator import kinds
from longshore_operator.api import Api
from longshore_operator.errors import ApiError, ConflictError, NotFoundError
from longshore_operator.settings import Settings

Body = dict[str, Any]
_log = logging.getLogger(__name__)
# Polling interval of a waiting replica.
RETRY_S = 2.0


class LostLeaseError(Exception):
    """This replica is not active and must not write."""


class Mutex:
    """Holds or waits for the Lease. Only the holder may write."""

    def __init__(self, api: Api, settings: Settings, identity: str) -> None:
        self._api = api
        self._settings = settings
        self.identity = identity
        self._until_s = float("-inf")
        self._event = asyncio.Event()
        self._seen: tuple[str, float] = ("", 0.0)

    @property
    def is_held(self) -> bool:
        """Whether this replica may write now."""
        return time.monotonic() < self._until_s

    def check(self) -> None:
        """Raise LostLeaseError unless this replica may write now."""
        if not self.is_held:
            raise LostLeaseError("another replica may be the active one")

    async def held(self) -> None:
        """Return as soon as this replica is active."""
        while not self.is_held:
            self._event.clear()
            await self._event.wait()

    async def run(self) -> None:
        """Take the Lease when it is free and renew it in time. Never returns."""
        while True:
            mine = await self.turn()
            await asyncio.sleep(self._settings.lease_renew_s if mine else min(RETRY_S, self._settings.lease_renew_s))

    async def turn(self) -> bool:
        """Try once to take or renew the Lease; return whether it is ours."""
        started_s = time.monotonic()
        try:
            mine = await self._take_or_renew()
        except ApiError as error:
            _log.warning("lease: %s", error)
            return False
        if mine:
            if not self.is_held:
                _log.info("lease: %s is the active replica", self.identity)
            # Counted from before the request. The server counts from later, so we stop before another replica starts.
            self._until_s = started_s + self._settings.lease_s
            self._event.set()
        return mine

    async def release(self) -> None:
        """Release the Lease, so that the next replica starts at once. Call it after the last write."""
        if not self.is_held:
            return
        self._until_s = float("-inf")
        try:
            found = await self._api.get(kinds.LEASE, self._settings.namespace, self._settings.lease_name)
            if found["spec"].get("holderIdentity") == self.identity:
                found["spec"]["holderIdentity"] = ""
                await self._api.replace(kinds.LEASE, found)
        except ApiError as error:
            _log.warning("lease: not released, the next replica waits until it expires: %s", error)

    async def _take_or_renew(self) -> bool:
        try:
            found = await self._api.get(kinds.LEASE, self._settings.namespace, self._settings.lease_name)
        except NotFoundError:
            return await self._create()
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder != self.identity and holder and not self._expired(found):
            return False
        now = _now()
        changes: Body = {"holderIdentity": self.identity, "renewTime": now}
        changes["leaseDurationSeconds"] = max(1, round(self._settings.lease_s))
        if holder != self.identity:
            changes |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        found["spec"] = spec | changes
        try:
            await self._api.replace(kinds.LEASE, found)
        except ConflictError:
            return False  # another replica took it first
        return True

    async def _create(self) -> bool:
        now = _now()
        body = {
            "apiVersion": kinds.LEASE.api_version,
            "kind": kinds.LEASE.name,
            "metadata": {"name": self._settings.lease_name, "namespace": self._settings.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "acquireTime": now,
                "renewTime": now,
                "leaseDurationSeconds": max(1, round(self._settings.lease_s)),
                "leaseTransitions": 0,
            },
        }
        try:
            await self._api.create(kinds.LEASE, body)
        except ConflictError:
            return False
        return True

    def _expired(self, lease: Body) -> bool:
        version = lease["metadata"]["resourceVersion"]
        now_s = time.monotonic()
        if self._seen[0] != version:
            self._seen = (version, now_s)
        duration_s = float((lease.get("spec") or {}).get("leaseDurationSeconds") or self._settings.lease_s)
        return now_s - self._seen[1] > duration_s


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
