"""Renders the agents' config file and its ConfigMap."""

from __future__ import annotations

import msgspec

from longshore_operator import kinds, names
from longshore_operator.render.wanted import Body, Wanted, child
from longshore_spec.agent_config import digests, dump
from longshore_spec.node_groups import Group


def config_text(wanted: Wanted) -> str:
    """Return the config file without the instance counts: a change of these must not replace agents."""
    prefill = msgspec.structs.replace(wanted.config.prefill, instances=None)
    decode = msgspec.structs.replace(wanted.config.decode, instances=None)
    return dump(msgspec.structs.replace(wanted.config, prefill=prefill, decode=decode))


def config_digest(wanted: Wanted, group: Group) -> str:
    """Return the digest of what the agents of a group read at start."""
    return names.config_digest(digests(wanted.config), group.roles)


def config_map(wanted: Wanted) -> Body:
    """Return the ConfigMap of the agents' config."""
    return child(wanted, kinds.CONFIG_MAP, {"data": {names.CONFIG_FILE: config_text(wanted)}})
