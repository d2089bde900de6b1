"""Renders all children of a deployment, in the order in which they are applied. Called by `decide`."""

from __future__ import annotations

from longshore_operator import kinds, names
from longshore_operator.kinds import Kind
from longshore_operator.render.agents import daemon_set, service_account
from longshore_operator.render.config import config_map
from longshore_operator.render.engines import engine_config_map
from longshore_operator.render.network import network_policy, pod_monitor, service
from longshore_operator.render.wanted import Body, Wanted, owned
from longshore_spec.node_groups import groups

_RENDER = {
    kinds.SERVICE_ACCOUNT: service_account,
    kinds.CONFIG_MAP: config_map,
    kinds.NETWORK_POLICY: network_policy,
    kinds.SERVICE: service,
    kinds.POD_MONITOR: pod_monitor,
}


def render(wanted: Wanted) -> list[tuple[Kind, Body]]:
    """Return every child that the deployment has switched on."""
    off = {
        kinds.NETWORK_POLICY: not wanted.agents.network_policy,
        kinds.POD_MONITOR: not wanted.agents.pod_monitor,
    }
    made: list[tuple[Kind, Body]] = []
    for kind in kinds.CHILDREN:
        if kind is kinds.CONFIG_MAP:
            made += [(kind, engine_config_map(wanted, role)) for role in (names.PREFILL, names.DECODE)]
        if kind is kinds.DAEMON_SET:
            made += [(kind, daemon_set(wanted, group)) for group in groups(wanted.manifest.spec)]
        elif not off.get(kind):
            made.append((kind, _RENDER[kind](wanted)))
    return made


def keys_secret(namespace: str, deployment: str, uid: str, name: str, text: str) -> Body:
    """Return the Secret of the keys. `text` is the file with their secret halves."""
    body = owned(namespace, deployment, uid, kinds.SECRET, name, {"type": "Opaque", "immutable": True})
    # Added last, so that the digest of `owned` does not depend on the secrets.
    return body | {"stringData": {names.KEYS_FILE: text}}
