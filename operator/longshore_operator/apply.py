"""Carries out a decision: keys, children, status, events, in that order. Called by `reconcile` alone.

Every write is a server-side apply by one field manager. If another manager owns one of our fields, an event names it
and we take the field back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from typing import Any

from longshore_operator import keys, kinds, names, timestamps
from longshore_operator.api import Api
from longshore_operator.decide.decision import NewKeys, Transition
from longshore_operator.errors import ApiError, ConflictError, NotFoundError, RefusedError, UndeclaredFieldError
from longshore_operator.kinds import Kind
from longshore_operator.observe import Observed, Refusal, Warned, newest_warnings
from longshore_operator.render.children import keys_secret
from longshore_operator.render.wanted import is_ours
from longshore_operator.world import ChildKey, Key, World
from longshore_spec import names as spec_names
from longshore_spec.condition_reasons import ConditionType, Truth, reason

Body = dict[str, Any]
_log = logging.getLogger(__name__)
# The API server limits an event's message to 1,024 characters.
_EVENT_CHARACTERS_MAX = 1000
# An admission webhook without dry runs is answered so.
_NO_DRY_RUN = "does not support dry run"
# A change of an object that was deleted, and of which another one was made under its name.
_OTHER_UID = ("metadata.uid", "uid mismatch")
# No object has this version. An apply that asks for it creates the object, and conflicts if there is one.
_NO_VERSION = "1"


class GoneError(Exception):
    """The deployment or its namespace is being deleted: nothing is left to do."""


class ChangedError(Exception):
    """The deployment or a child changed after the decision was made: reconcile it again."""


class StrangerError(Exception):
    """An object that is not ours has the name of a child."""


class Applier:
    """Writes for one operator.

    Args:
        guard: called before each write; raises if this replica may not write.
    """

    def __init__(self, api: Api, world: World, guard: Callable[[], None]) -> None:
        self._api = api
        self._world = world
        self._guard = guard
        # Deployments of which an object was written since their reconcile began.
        self.written: set[Key] = set()
        # The generations for which an event said that there is no PodMonitor.
        self._unmonitored: dict[Key, int] = {}

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted deployment."""
        self.written.discard(key)
        self._unmonitored.pop(key, None)

    async def make_keys(self, observed: Observed, new: NewKeys) -> None:
        """Create a Secret with new keys and record their public half in the status, where children look it up.

        The status names the Secret before it exists, so that after a failure or the operator's end the next attempt
        takes it over, without reading it.
        """
        known = observed.status.get("keys") or {}
        pending = known.get("pending")
        if not pending or not await self._exists(keys_secret(*observed.key, observed.uid, pending["secret"], "")):
            made = keys.make(new.accepted)
            name = f"{observed.key.name}-keys-{made.fingerprint}"
            pending = {"secret": name, "accepted": list(made.accepted)}
            status, _ = observed.served.part({**observed.status, "keys": {**known, "pending": pending}})
            observed = dataclasses.replace(observed, body=await self.write_status(observed, status))
            body = keys_secret(*observed.key, observed.uid, name, made.text)
            self._guard()
            await self._writing(observed.key, self._api.create(kinds.SECRET, body))
        entry = {"revision": new.revision, **pending}
        entry |= {"previous": new.previous} if new.previous else {}
        await self.write_status(observed, {**observed.status, "keys": entry})

    async def secret_is_missing(self, observed: Observed) -> bool:
        """Whether the Secret that the status names is gone."""
        name = (observed.status.get("keys") or {}).get("secret")
        if not name:
            return False
        try:
            return not await self._exists(keys_secret(*observed.key, observed.uid, name, ""))
        except RefusedError:
            return False

    async def _exists(self, secret: Body) -> bool:
        """Whether a Secret of this name exists. Uses a dry-run create, since we may not read Secrets."""
        try:
            await self._api.create(kinds.SECRET, secret, dry_run=True)
        except ConflictError as error:
            if error.cause != "AlreadyExists":
                raise
            return True
        return False

    async def warnings(self, observed: Observed) -> dict[str, Warned]:
        """Return the newest warning about each DaemonSet and pod of the deployment, by its uid."""
        ours = {pod.uid for pod in (*(agent.pod for agent in observed.agents), *observed.engine_pods)}
        ours |= {
            body["metadata"]["uid"] for child, body in observed.children.items() if child.kind == kinds.DAEMON_SET.name
        }
        try:
            return newest_warnings(await self._api.warnings(observed.key.namespace), ours)
        except RefusedError as error:
            _log.warning("%s/%s: events are not read: %s", *observed.key, error, extra=observed.key.about())
            return {}

    async def look_for_monitor(self, observed: Observed) -> None:
        """Read the PodMonitor. It is not watched, as some clusters lack its kind."""
        name = names.agent(observed.key.name)
        try:
            found = await self._api.get(kinds.POD_MONITOR, observed.key.namespace, name)
        except NotFoundError:
            known = self._world.children.get(observed.key, {}).get(ChildKey(kinds.POD_MONITOR.name, name))
            if known is not None:
                self._world.take_child(kinds.POD_MONITOR, known, deleted=True)
            return
        self._world.take_child(kinds.POD_MONITOR, found)

    async def apply_children(self, observed: Observed, children: tuple[tuple[Kind, Body], ...]) -> Refusal | None:
        """Apply children in order. Stop at the first that the API server refuses, and return it.

        If there are several DaemonSets, nothing is applied unless the API server accepts each one: the agents of one role
        must not be replaced, and engines there left without the others'.
        """
        sets = [(kind, body) for kind, body in children if kind is kinds.DAEMON_SET]
        tries = [(self._try_child, *child) for child in sets if len(sets) > 1]
        for step, kind, body in (*tries, *((self._apply_child, *child) for child in children)):
            try:
                await step(observed, kind, body)
            except (RefusedError, NotFoundError, StrangerError) as error:
                # NotFound also means that the kind is not installed, which is possible for PodMonitor.
                if isinstance(error, ApiError):
                    _raise_if_gone(error)
                name = f"{kind.name} {body['metadata']['name']}"
                if kind is kinds.POD_MONITOR:
                    # Agents work without it.
                    await self._miss_monitor(observed, f"{name}: {error}")
                    continue
                return Refusal(name, str(error), observed.generation)
        return None

    async def _try_child(self, observed: Observed, kind: Kind, body: Body) -> None:
        """Raise RefusedError if the API server would refuse a child. An object of another owner is left to `_apply_child`."""
        before = observed.children.get(ChildKey(kind.name, body["metadata"]["name"]))
        if before is not None and not is_ours(before, observed.uid):
            return
        bound = _at(body, resourceVersion=_NO_VERSION) if before is None else _at(body, uid=before["metadata"]["uid"])
        try:
            await self._api.apply(kind, bound, force=before is not None, dry_run=True)
        except ConflictError:
            return
        except RefusedError as error:
            if not any(words in str(error) for words in (_NO_DRY_RUN, *_OTHER_UID)):
                raise

    async def _miss_monitor(self, observed: Observed, text: str) -> None:
        """Tell once for each generation that the PodMonitor cannot be made."""
        if self._unmonitored.get(observed.key) != observed.generation:
            self._unmonitored[observed.key] = observed.generation
            about = f"{kinds.POD_MONITOR.name}/{observed.generation}"
            await self._say(observed, "Warning", "PodMonitorRefused", text, about, again=False)

    async def _apply_child(self, observed: Observed, kind: Kind, body: Body) -> None:
        child = ChildKey(kind.name, body["metadata"]["name"])
        before = observed.children.get(child)
        found = await (
            self._make(observed, kind, body) if before is None else self._change(observed, kind, body, before)
        )
        self.written.add(observed.key)
        _log.info("%s/%s: applied %s %s", *observed.key, kind.name, child.name, extra=observed.key.about())
        self._world.take_child(kind, found)
        if before is not None and before["metadata"]["resourceVersion"] == found["metadata"]["resourceVersion"]:
            # It differs, yet applying changes nothing: the server normalises some value.
            self._world.settled[observed.key, child] = found["metadata"]["resourceVersion"]

    async def _make(self, observed: Observed, kind: Kind, body: Body) -> Body:
        """Create a child. An object that exists is changed only if it is ours and its watch has not delivered it yet."""
        self._guard()
        try:
            return await self._api.apply(kind, _at(body, resourceVersion=_NO_VERSION), force=False)
        except ConflictError as error:
            # An object with fields of ours that another manager has conflicts by these, not by its version.
            if error.cause not in {"Conflict", "FieldManagerConflict"}:
                raise
        try:
            found = await self._api.get(kind, observed.key.namespace, body["metadata"]["name"])
        except NotFoundError as error:
            raise ChangedError(str(error)) from error
        return await self._change(observed, kind, body, found)

    async def _change(self, observed: Observed, kind: Kind, body: Body, before: Body) -> Body:
        """Change a child. Raises StrangerError if the object is not ours."""
        _raise_if_not_ours(observed, kind, before)
        # The API server refuses the change if the object was deleted and another one made under its name.
        bound = _at(body, uid=before["metadata"]["uid"])
        self._guard()
        try:
            return await self._applied(observed, kind, bound)
        except (ConflictError, RefusedError) as error:
            if any(words in str(error) for words in _OTHER_UID):
                raise ChangedError(str(error)) from error
            raise

    async def _applied(self, observed: Observed, kind: Kind, body: Body) -> Body:
        """Apply a child of ours; take fields back that another manager took, and tell."""
        try:
            return await self._api.apply(kind, body, force=False)
        except ConflictError as error:
            if error.cause != "FieldManagerConflict":
                raise
            text = f"{kind.name} {body['metadata']['name']}: taken back: {error}"
            await self._say(observed, "Warning", "FieldConflict", text, kind.name)
        self._guard()
        return await self._api.apply(kind, body, force=True)

    async def delete_children(self, observed: Observed, children: tuple[ChildKey, ...]) -> None:
        """Delete children that were switched off. An object made under the same name since is left."""
        for child in children:
            self._guard()
            uid = observed.children[child]["metadata"]["uid"]
            await self._api.delete(kinds.of(child.kind), observed.key.namespace, child.name, uid)
            self._world.children.get(observed.key, {}).pop(child, None)

    async def write_status(self, observed: Observed, status: Body) -> Body:
        """Replace the observed status; return the deployment.

        Raises:
            GoneError: the deployment was deleted, or recreated under the same name.
            ChangedError: it changed since. If another operator changed it, keys that it made must stay.
        """
        seen = observed.body["metadata"]
        metadata = {name: seen[name] for name in ("name", "namespace", "uid", "resourceVersion")}
        body = {
            "apiVersion": spec_names.API_GROUP_VERSION,
            "kind": spec_names.KIND,
            "metadata": metadata,
            "status": status,
        }
        self._guard()
        writing = self._api.apply(kinds.DEPLOYMENT, body, force=True, subresource="status")
        try:
            written = await self._writing(observed.key, writing)
        except UndeclaredFieldError as error:
            # The schema could not be read, or has changed since.
            row = reason(ConditionType.DEFINITION_MATCHES, "FieldsUnknown")
            await self._say(observed, "Warning", row.name, f"{error}. {row.remedy}", row.condition.value, again=False)
            raise
        self._world.take_status(observed.key, written)
        return written

    async def tell(self, observed: Observed, transitions: tuple[Transition, ...]) -> None:
        """Post an event for each transition that a user should see."""
        for transition in transitions:
            entry = transition.verdict
            row = reason(entry.condition, entry.reason)
            bad = row.truth is Truth.FALSE and bool(row.remedy) and not row.echo
            if bad or (row.truth is Truth.TRUE and not row.remedy and entry.reason != "RollingOut"):
                text = f"{entry.condition.value}: {entry.message}"
                level, about = "Warning" if bad else "Normal", entry.condition.value
                if bad or transition.shown:
                    await self._say(observed, level, entry.reason, text, about, again=transition.shown)

    async def tell_mismatches(self, observed: Observed, told: dict[tuple[str, str], int]) -> None:
        """Post an event for each worker with new slabs whose digests differed.

        Args:
            told: by node and worker, the counts that were told; updated.
        """
        for agent in observed.agents:
            if agent.report is None:
                continue
            found = {(agent.pod.node, worker.worker): worker for worker in agent.report.workers if worker.mismatches}
            for place in [place for place in told if place[0] == agent.pod.node and place not in found]:
                del told[place]
            for place, worker in found.items():
                if worker.mismatches == told.get(place):
                    continue
                text = f"{worker.worker} on {agent.pod.node}: {worker.mismatch}"
                # An earlier operator may have told of the same slabs.
                again = place in told
                if await self._say(observed, "Warning", "DigestMismatch", text, "/".join(place), again=again):
                    told[place] = worker.mismatches

    async def tell_left(self, observed: Observed, message: str) -> None:
        """Post the event that another operator serves the deployment, unless it is there."""
        await self._say(observed, "Normal", "ServedByAnother", message, message, again=False)

    async def _say(
        self, observed: Observed, level: str, name: str, message: str, about: str, *, again: bool = True
    ) -> bool:
        """Post an event; return whether it is there. A repeated one counts up.

        Args:
            about: what distinguishes events with the same reason.
            again: whether to count an event that is there with the same message.
        """
        same = f"{observed.uid}/{level}/{name}/{about}"
        now = timestamps.now()
        event = f"{observed.key.name}.{hashlib.sha256(same.encode()).hexdigest()[:16]}"
        body: Body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": event,
                "namespace": observed.key.namespace,
            },
            "involvedObject": {
                "apiVersion": spec_names.API_GROUP_VERSION,
                "kind": spec_names.KIND,
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
            try:
                await self._api.create(kinds.EVENT, body)
            except ConflictError:
                found = await self._api.get(kinds.EVENT, observed.key.namespace, event)
                if again or found.get("message") != body["message"]:
                    more = {"count": int(found.get("count") or 0) + 1, "lastTimestamp": now}
                    await self._api.replace(kinds.EVENT, found | more | {"message": body["message"]})
        except ApiError as error:
            # Mostly the status has the same text.
            _log.warning("%s/%s: no event: %s", *observed.key, error, extra=observed.key.about())
            return False
        return True

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


def _raise_if_not_ours(observed: Observed, kind: Kind, found: Body) -> None:
    """Raise unless the deployment owns an object.

    Raises:
        ChangedError: a deleted deployment of the same name owns it, so the garbage collector deletes it.
        StrangerError: it is not ours.
    """
    if is_ours(found, observed.uid):
        return
    owners = found["metadata"].get("ownerReferences") or []
    name = f"{kind.name} {found['metadata']['name']}"
    if any((owner["kind"], owner["name"]) == (spec_names.KIND, observed.key.name) for owner in owners):
        raise ChangedError(f"{name} of the deleted deployment of this name is still there")
    shown = ", ".join(f"{owner['kind']} {owner['name']}" for owner in owners) or "nobody"
    raise StrangerError(
        f"it exists, its owner is {shown} and not this deployment, so it is left as it is. "
        "Delete it, or give the deployment another name"
    )


def _at(body: Body, **condition: str) -> Body:
    """Return an object with a precondition in its metadata."""
    return {**body, "metadata": body["metadata"] | condition}
