"""Registers a rank at its agent for those of its roles whose declared layout matches the rank's.

Called by an engine's connector once, in each rank's process. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from longshore_client.client import Client
from longshore_client.errors import HelloRefused
from longshore_client.registration import connect
from longshore_engines.tensors import SharedCaches
from longshore_wire.engine_messages import Half
from longshore_wire.errors import Reason


def registered(
    socket: str | None,
    instance: str,
    shared: SharedCaches,
    roles: Sequence[Half],
    timeout_s: float,
    log: logging.Logger,
) -> tuple[Client, tuple[Half, ...]]:
    """Return a client and the roles that it is registered for.

    If the layouts of a deployment's two sides differ, an engine with both roles (kv_role kv_both) has only one of them,
    and is registered for that side.

    Args:
        log: of the engine's connector.
    Raises:
        ArgumentError, HelloRefused, ConnectError, LayoutError: as `connect`; the first refusal if the agent refuses every role.
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
            log.info("the deployment has this layout for %s alone (%s)", wish[0].name, refusal)
        return client, wish
    assert refusal is not None
    raise refusal
