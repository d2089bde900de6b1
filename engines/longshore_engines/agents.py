"""Registers a rank at its agent for as many of its roles as the deployment declares its layout for.

Called by an engine's connector once, in each rank's process. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from longshore_client.client import Client, connect
from longshore_client.errors import HelloRefused
from longshore_engines.tensors import SharedCache
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason

_log = logging.getLogger("vllm.longshore")


def registered(
    socket: str, instance: str, shared: SharedCache, roles: Sequence[Half], timeout_s: float
) -> tuple[Client, tuple[Half, ...]]:
    """Return a client and the roles that it is registered for.

    An engine that may do both (kv_role kv_both) has the layout of one side of its deployment only, unless both are
    alike: then it is registered for that side.

    Raises:
        HelloRefused, ConnectError, LayoutError: as `connect`; the first refusal if the agent refuses every role.
    """
    wishes = [tuple(roles)] + ([(role,) for role in roles] if len(roles) > 1 else [])
    refusal: HelloRefused | None = None
    for wish in wishes:
        try:
            client = connect(
                socket, instance=instance, layout=shared.layout, device=shared.device, roles=wish, timeout_s=timeout_s
            )
        except HelloRefused as error:
            if error.reason is not Reason.LAYOUT_MISMATCH:
                raise
            refusal = refusal or error
            continue
        if refusal is not None:
            _log.info("the deployment has this layout for %s alone (%s)", wish[0].name, refusal)
        return client, wish
    assert refusal is not None
    raise refusal
