"""Decides whether this operator serves a deployment where releases overlap. Called by `reconcile`.

A deployment's status names the Lease of the operator that serves it. A release for one namespace has precedence over one
for the whole cluster. Of two equal ones the first serves, until its Lease is deleted or is not renewed for long.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from longshore_operator import kinds
from longshore_operator.api import Api
from longshore_operator.errors import ApiError, NotFoundError
from longshore_operator.settings import Settings

Body = dict[str, Any]
CLUSTER, NAMESPACE = "Cluster", "Namespace"
# A Lease that was not renewed for this many of its durations is that of a release that is gone. An upgrade that pulls
# an image must not change the owner.
GONE_COUNT = 20
# A Lease is read at most this often, however many deployments it serves.
LOOK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Claim:
    """An operator's Lease (`namespace/name`), and whether it serves the cluster or one namespace."""

    lease: str
    scope: str

    @classmethod
    def of(cls, settings: Settings) -> Claim:
        """Return the claim of an operator with these settings."""
        lease = f"{settings.namespace}/{settings.lease_name}"
        return cls(lease, NAMESPACE if settings.watch_namespace else CLUSTER)

    @classmethod
    def read(cls, status: Body) -> Claim | None:
        """Return the claim in a deployment's status."""
        found = status.get("operator") or {}
        return cls(found["lease"], found["scope"]) if found.get("lease") and found.get("scope") else None

    def status(self) -> Body:
        """Return this claim as a part of the status."""
        return {"lease": self.lease, "scope": self.scope}


def may_claim(own: Claim, another: Claim, *, alive: bool) -> bool:
    """Whether `own` may take a deployment from `another`, whose Lease is `alive`."""
    return (own.scope, another.scope) == (NAMESPACE, CLUSTER) or not alive


class LeaseWatch:
    """Judges from here whether Leases of other releases are renewed. It compares no clocks of two machines."""

    def __init__(self, api: Api) -> None:
        self._api = api
        # By Lease: its version, since when it is known, how long it lasts, and when it was read (monotonic seconds).
        self._seen: dict[str, tuple[str, float, float, float]] = {}

    async def is_alive(self, lease: str) -> bool:
        """Whether a Lease exists and was renewed lately. One that cannot be read counts as alive."""
        now_s = time.monotonic()
        version, since_s, duration_s, read_s = self._seen.get(lease, ("", now_s, 0.0, float("-inf")))
        if now_s - read_s >= LOOK_EVERY_S:
            namespace, _, name = lease.partition("/")
            try:
                found = await self._api.get(kinds.LEASE, namespace, name)
            except NotFoundError:
                self._seen.pop(lease, None)
                return False
            except ApiError:
                return True
            if found["metadata"]["resourceVersion"] != version:
                version, since_s = found["metadata"]["resourceVersion"], now_s
            duration_s = float((found.get("spec") or {}).get("leaseDurationSeconds") or 0)
            self._seen[lease] = version, since_s, duration_s, now_s
        return now_s - since_s <= GONE_COUNT * duration_s
