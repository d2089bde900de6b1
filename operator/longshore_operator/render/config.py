"""The agents' config file and the ConfigMap that holds it."""

from __future__ import annotations

import msgspec

from longshore_operator import kinds, names
from longshore_operator.render.wanted import Body, Wanted, child
from longshore_wire.agent_config import dump


def config_text(wanted: Wanted) -> str:
    """Return the file. How many instances are expected is the status's business: it must not replace agents."""
    prefill = msgspec.structs.replace(wanted.config.prefill, instances=None)
    decode = msgspec.structs.replace(wanted.config.decode, instances=None)
    return dump(msgspec.structs.replace(wanted.config, prefill=prefill, decode=decode))


def config_map(wanted: Wanted) -> Body:
    """Return the ConfigMap of the agents' config."""
    return child(wanted, kinds.CONFIG_MAP, {"data": {names.CONFIG_FILE: config_text(wanted)}})
