"""Carries out a decision: keys, children, status, events, in that order. Called by `reconcile` alone.

Everything is server-side apply by one field manager. Where somebody else owns a field of ours, an event says who, and
the field is taken back.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Callable
from typing import Any

from longshore_operator import keys, kinds, names
from longshore_operator.api import Api
from longshore_operator.decide.decision import NewKeys, Transition
from longshore_operator.errors import ApiError, ConflictError, NotFoundError, RefusedError
from longshore_operator.kinds import Kind
from longshore_operator.observe import Observed, Refusal
from longshore_operator.reasons import ConditionType, Truth, reason
from longshore_operator.render.children import keys_secret
from longshore_operator.world import ChildKey, Key, World
from longshore_wire import names as wire_names

Body = dict[str, Any]
_log = logging.getLogger(__name__)
# What the API server takes of an event's message.
_EVENT_CHARACTERS_MAX = 1000


class GoneError(Exception):
    """The deployment or its namespace goes away while we work: there is nothing more to do."""


class ChangedError(Exception):
    """The deployment is not any more what the decision was made on: look at it again."""


class Applier:
    """Writes for one operator.

    Args:
        guard: raises if this replica may not write (any more); called before each write.
    """

    def __init__(self, api: Api, world: World, guard: Callable[[], None]) -> None:
        self._api = api
        self._world = world
        self._guard = guard
        # Deployments of which something was written since their look began.
        self.written: set[Key] = set()
        # Keys whose Secret or status is not written yet: repeated as they are, or each try would leave a Secret behind.
        self._unwritten: dict[Key, tuple[tuple[str, NewKeys], keys.Keys]] = {}

    def forget(self, key: Key) -> None:
        """A deployment is gone."""
        self.written.discard(key)
        self._unwritten.pop(key, None)

    async def make_keys(self, observed: Observed, new: NewKeys) -> None:
        """Make a Secret with new keys and put their public half into the status, by which children find it."""
        wanted = (observed.uid, new)
        unwritten = self._unwritten.get(observed.key)
        if unwritten is None or unwritten[0] != wanted:
            unwritten = self._unwritten[observed.key] = wanted, keys.make(new.accepted)
        made = unwritten[1]
        name = f"{observed.key.name}-keys-{made.fingerprint}"
        body = keys_secret(observed.key.namespace, observed.key.name, observed.uid, name, made.text)
        self._guard()
        try:
            await self._writing(observed.key, self._api.create(kinds.SECRET, body))
        except ConflictError as error:
            if error.cause != "AlreadyExists":
                raise
            # A try before this one did it though no answer came: nobody else knows keys of this name.
            _log.info("%s/%s: keys: %s", *observed.key, error)
        entry = {"revision": new.revision, "secret": name, "accepted": list(made.accepted)}
        entry |= {"previous": new.previous} if new.previous else {}
        await self.write_status(observed, {**observed.status, "keys": entry})
        del self._unwritten[observed.key]

    async def secret_is_missing(self, observed: Observed) -> bool:
        """Whether the Secret that the status names is gone. We may create Secrets, not read them: so we try, dry."""
        name = (observed.status.get("keys") or {}).get("secret")
        if not name:
            return False
        body = keys_secret(observed.key.namespace, observed.key.name, observed.uid, name, "")
        try:
            await self._api.create(kinds.SECRET, body, dry_run=True)
        except ConflictError as error:
            if error.cause != "AlreadyExists":
                raise
            return False
        except RefusedError:
            return False
        return True

    async def look_for_monitor(self, observed: Observed) -> None:
        """Read the PodMonitor, which is not watched because not every cluster knows its kind."""
        try:
            name = names.agent(observed.key.name)
            self._world.take_child(
                kinds.POD_MONITOR, await self._api.get(kinds.POD_MONITOR, observed.key.namespace, name)
            )
        except NotFoundError:
            return

    async def apply_children(self, observed: Observed, children: tuple[tuple[Kind, Body], ...]) -> Refusal | None:
        """Apply children in order; return the first that the API server refuses, after which nothing more is applied."""
        for kind, body in children:
            try:
                await self._apply_child(observed, kind, body)
            except (RefusedError, NotFoundError) as error:
                # Not found: its kind is not installed, as PodMonitor's may be.
                _raise_if_gone(error)
                name = f"{kind.name} {body['metadata']['name']}"
                return Refusal(name, str(error), observed.generation)
        return None

    async def _apply_child(self, observed: Observed, kind: Kind, body: Body) -> None:
        self._guard()
        child = ChildKey(kind.name, body["metadata"]["name"])
        before = observed.children.get(child)
        try:
            found = await self._api.apply(kind, body, force=False)
        except ConflictError as error:
            if error.cause != "FieldManagerConflict":
                raise
            await self._say(observed, "Warning", "FieldConflict", f"{kind.name} {child.name}: taken back: {error}")
            self._guard()
            found = await self._api.apply(kind, body, force=True)
        self.written.add(observed.key)
        _log.info("%s/%s: applied %s %s", *observed.key, kind.name, child.name)
        self._world.take_child(kind, found)
        if before is not None and before["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"]:
            # It looks different and applying changes nothing: the server writes some value its own way.
            self._world.settled[observed.key, child] = found["metadata"]["resourceVersion"]

    async def delete_children(self, observed: Observed, children: tuple[ChildKey, ...]) -> None:
        """Delete children that were switched off."""
        for child in children:
            self._guard()
            await self._api.delete(kinds.of(child.kind), observed.key.namespace, child.name)
            self._world.children.get(observed.key, {}).pop(child, None)

    async def write_status(self, observed: Observed, status: Body) -> None:
        """Write the whole status over the one that was observed.

        Raises:
            GoneError: the deployment was replaced by one of the same name.
            ChangedError: somebody changed it since. That may be another operator: keys that it made must stay.
        """
        seen = observed.body["metadata"]
        metadata = {name: seen[name] for name in ("name", "namespace", "uid", "resourceVersion")}
        body = {
            "apiVersion": wire_names.API_GROUP_VERSION,
            "kind": wire_names.KIND,
            "metadata": metadata,
            "status": status,
        }
        self._guard()
        writing = self._api.apply(kinds.DEPLOYMENT, body, force=True, subresource="status")
        self._world.take_status(observed.key, await self._writing(observed.key, writing))

    async def tell(self, observed: Observed, transitions: tuple[Transition, ...]) -> None:
        """Post an event for each transition that people want to hear of."""
        for transition in transitions:
            entry = transition.verdict
            row = reason(entry.condition, entry.reason)
            # Why Ready is False is told by the condition that it follows from.
            bad = row.truth is Truth.FALSE and bool(row.remedy) and entry.condition is not ConditionType.READY
            if bad or (row.truth is Truth.TRUE and not row.remedy and entry.reason != "RollingOut"):
                text = f"{entry.condition.value}: {entry.message}"
                await self._say(observed, "Warning" if bad else "Normal", entry.reason, text)

    async def _say(self, observed: Observed, level: str, name: str, message: str) -> None:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{observed.key.name}.{uuid.uuid4().hex[:16]}",
                "namespace": observed.key.namespace,
            },
            "involvedObject": {
                "apiVersion": wire_names.API_GROUP_VERSION,
                "kind": wire_names.KIND,
                "name": observed.key.name,
                "namespace": observed.key.namespace,
                "uid": observed.uid,
            },
            "type": level,
            "reason": name,
            "message": message[:_EVENT_CHARACTERS_MAX],
            "source": {"component": names.COMPONENT},
            "reportingComponent": names.COMPONENT,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.create(kinds.EVENT, body)
        except ApiError as error:
            # Events are for people; the status says the same.
            _log.warning("%s/%s: no event: %s", *observed.key, error)

    async def _writing(self, key: Key, call: Any) -> Body:
        try:
            found: Body = await call
        except ApiError as error:
            _raise_if_gone(error)
            if isinstance(error, NotFoundError) or "UID in precondition" in str(error):
                raise GoneError(f"{key.namespace}/{key.name}") from error
            if isinstance(error, ConflictError) and error.cause == "Conflict":
                raise ChangedError(str(error)) from error
            raise
        self.written.add(key)
        return found


def _raise_if_gone(error: ApiError) -> None:
    if error.cause == "NamespaceTerminating":
        raise GoneError(str(error)) from error
