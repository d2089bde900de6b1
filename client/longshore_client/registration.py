"""Registers an engine rank at its node's agent: the beginning of every client, and the name of an engine instance.

Called by engines and connectors. `client.Client` offers everything that follows.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from longshore_client import arguments
from longshore_client.client import Client
from longshore_client.connection import open_links
from longshore_wire.engine_messages import ENGINE_PROTOCOL_VERSION, Half, Hello
from longshore_wire.layout import KVLayout, TargetMemory
from longshore_wire.names import INSTANCE_PREFIX_VARIABLE


def connect(
    path: str | None = None,
    *,
    instance: str,
    layout: KVLayout,
    device: str = "cpu",
    roles: Collection[Half] = (Half.SOURCE, Half.TARGET),
    host_layout: KVLayout | None = None,
    timeout_s: float = 120.0,
) -> Client:
    """Register this engine rank at its node's agent. Retries until an agent accepts it or `timeout_s` is over.

    Args:
        path: the agent's engine socket. None: the path in LONGSHORE_ENGINE_SOCKET, or /run/longshore/agent.sock.
        instance: the engine instance, the same for all its ranks. No name that begins with "longshore.test-", which only
            test engines of `longshore verify` have.
        layout: this rank's share of the cache.
        device: "cpu", or the UUID of the GPU that holds the pages (never an index).
        roles: SOURCE to offer (prefill), TARGET to claim (decode).
        host_layout: this rank's share in pages in host memory, beside those of the device; page size and order may
            differ. Pools there are registered and claimed with memory HOST. None: there are none.
    Raises:
        ArgumentError: an argument is of another type, or out of range; or `host_layout` without TARGET among the roles.
        LayoutError: the layout cannot exist.
        HelloRefused: the agent refuses this engine; `reason` says why. If the cause may pass (BUSY: an engine rank of
            this name is registered), this is raised only when `timeout_s` is over.
        CodecError: the process that listens there does not speak this protocol.
        NotPermitted: this process may not use the socket; says which group it lacks. Raised at once.
        ConnectError: no agent answered in time; or the path is no agent's socket, which is raised at once. Meanwhile the
            logger longshore.client warns each 10 s.
    """
    hello = Hello(
        ENGINE_PROTOCOL_VERSION,
        arguments.engine_instance(instance),
        arguments.struct("layout", layout, KVLayout),
        arguments.text("device", device),
        arguments.roles_of(roles),
        engine=1 + int.from_bytes(os.urandom(7), "little"),
        pid=os.getpid(),
        host=os.uname().nodename,
    )
    hello.layout.check()
    path, timeout_s = arguments.engine_socket(path), arguments.timeout(timeout_s)
    hellos = {TargetMemory.DEVICE: hello}
    if host_layout is not None:
        hellos[TargetMemory.HOST] = arguments.host_hello(hello, host_layout)
    return Client(hello, open_links(path, hellos, timeout_s))


def new_instance() -> str:
    """Return an instance name that no other start of an engine has. Draw it once, for all ranks of the engine.

    It begins with LONGSHORE_ENGINE_INSTANCE_PREFIX, or "engine".
    """
    return f"{os.environ.get(INSTANCE_PREFIX_VARIABLE) or 'engine'}-{os.urandom(6).hex()}"
