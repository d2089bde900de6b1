"""Loads NIXL and starts its agents. Only this file imports nixl.

Called by nixl.py; `ucx` sets up UCX, which NIXL uses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any, NamedTuple

from longshore_agent.errors import TransportError
from longshore_agent.transports import ucx
from longshore_agent.transports.base import Wire
from longshore_agent.transports.data_ports import DataPorts
from longshore_wire.errors import Reason


class Started(NamedTuple):
    """Two agents of NIXL, the errors of its calls, and whether the agents serve only peers of this host."""

    inbox: Any
    outbox: Any
    errors: tuple[type[Exception], ...]
    alone: bool


def start(
    inbox_name: str, outbox_name: str, ports: DataPorts, wires: Collection[Wire] = (), *, fabric: bool = False
) -> Started:
    """Start both agents of one transport; see `NixlTransport` for `ports`, `wires` and `fabric`.

    Raises:
        TransportError: NIXL is not installed or does not start, or it listens where it should not.
    """
    # The library reads it when it loads. It would log several INFO lines for each agent.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        import nixl
        import nixl._bindings as bindings
    except ImportError as error:
        raise TransportError("NIXL is not installed: install longshore[nixl]", reason=Reason.UNSUPPORTED) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    kinds = vars(bindings).values()
    theirs = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
    # RuntimeError: there is no plugin, or it does not start.
    errors: tuple[type[Exception], ...] = (*theirs, RuntimeError)
    rdma_devices = ucx.find_rdma_devices(ports.address)
    setup = ucx.setup_for(wires, rdma_devices=rdma_devices, fabric=fabric)

    def make(name: str) -> Any:
        agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"ucx_error_handling_mode": setup.error_handling})
        return agent

    try:
        with ucx.told(ucx.environment(setup, ports.address, rdma_devices)), ports.opening(is_lasting=True):
            return Started(make(inbox_name), make(outbox_name), errors, setup.alone)
    except errors as error:
        raise TransportError(f"NIXL does not start: {error}") from error
