"""Handlers for kopf: put each watch event into the world and queue the deployments that it concerns. Called by `main`.

Only kopf's low-level event handlers are used, so it adds no finalizers, annotations or state to any object.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import kopf

from longshore_operator import kinds, names
from longshore_operator.kinds import Kind
from longshore_operator.no_storage import NoDiffBase, NoProgress
from longshore_operator.settings import Settings
from longshore_operator.watches import watched
from longshore_operator.work_queue import WorkQueue
from longshore_operator.world import World

# kopf kills the process if its exit takes longer. Must be shorter than the pod's grace period.
_EXIT_LIMIT_S = 20.0
# A watch request is renewed after this; with bookmarks that costs nothing. The API server takes whole seconds.
_WATCH_S = 300
_CONNECT_S = 10.0
# kopf runs a task for each changed object and holds the whole object until the task ends. It must end soon, or a
# rollout over a thousand nodes would hold thousands of objects.
_IDLE_S = 0.2


def register(world: World, queue: WorkQueue, group: Sequence[Kind]) -> kopf.OperatorRegistry:
    """Return the handlers of these kinds."""
    registry = kopf.OperatorRegistry()
    # The same login as in `api`: the pod's ServiceAccount or, outside a cluster, the kubeconfig.
    kopf.on.login(id="service-account", registry=registry)(log_in_with_service_account)
    kopf.on.login(id="kubeconfig", registry=registry)(kopf.login_with_kubeconfig)
    for kind in group:
        handler = _handler(world, queue, kind)
        if kind.group:
            kopf.on.event(kind.group, kind.version, kind.plural, id=kind.name, registry=registry)(handler)
        else:
            kopf.on.event(kind.version, kind.plural, id=kind.name, registry=registry)(handler)
    return registry


def log_in_with_service_account(**arguments: Any) -> kopf.ConnectionInfo | None:
    """Return the address and credentials for the API server; None outside a cluster.

    kopf's own login uses the server's DNS name, which a pod without the cluster's DNS cannot resolve. Each pod's
    environment has the address.
    """
    found = kopf.login_with_service_account(**arguments)
    if found is None:
        return None
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not port:
        return found
    return dataclasses.replace(found, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")


def configure(settings: Settings, group: Sequence[Kind]) -> kopf.OperatorSettings:
    """Return kopf's settings for watches of these kinds."""
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.persistence.diffbase_storage = NoDiffBase()
    found.persistence.progress_storage = NoProgress()
    # The watched kinds are fixed, so kopf needs no permission to list namespaces and CRDs.
    found.scanning.disabled = True
    found.queueing.idle_timeout = _IDLE_S
    found.watching.server_timeout = _WATCH_S
    found.watching.connect_timeout = _CONNECT_S
    found.networking.request_timeout = settings.request_timeout_s
    found.process.ultimate_exiting_timeout = _EXIT_LIMIT_S
    for kind in group:
        if kind.label:
            key: Any = (kind.group, kind.version, kind.plural) if kind.group else (kind.version, kind.plural)
            found.watching.label_selectors[key] = kind.label
    return found


def watches(world: World, queue: WorkQueue, settings: Settings) -> dict[str, Coroutine[Any, Any, None]]:
    """Return all watches, by name. Each runs until the process receives SIGTERM or SIGINT, or another one did.

    kopf has one selector for all pods, so the pods of engines have an operator of kopf for themselves.
    """
    groups = {"watches": [kind for kind in watched(settings) if kind is not kinds.ENGINE_POD]}
    groups["watch of engine pods"] = [kinds.ENGINE_POD]
    return {name: _watch(register(world, queue, group), settings, group) for name, group in groups.items()}


async def _watch(registry: kopf.OperatorRegistry, settings: Settings, group: Sequence[Kind]) -> None:
    everywhere = not settings.watch_namespace
    # Only peering, which is off, would use it. kopf's default looks up the user's name, which a pod may lack.
    identity: Any = names.COMPONENT
    await kopf.operator(
        registry=registry,
        settings=configure(settings, group),
        standalone=True,
        identity=identity,
        clusterwide=everywhere,
        namespaces=() if everywhere else (settings.watch_namespace,),
    )


def _handler(world: World, queue: WorkQueue, kind: Kind) -> Callable[..., Coroutine[Any, Any, None]]:
    async def take(event: Any, **_: Any) -> None:
        body, deleted = event["object"], event["type"] == "DELETED"
        # Changed counts can be batched. A new spec or a deleted child is handled at once.
        urgent = (deleted and kind not in {kinds.POD, kinds.ENGINE_POD, kinds.NODE}) or (
            kind is kinds.DEPLOYMENT and world.is_new(body)
        )
        queue.add(world.take(kind, body, deleted=deleted), urgent=urgent)

    return take
