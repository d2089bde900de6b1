"""Makes transports between workers. Each backend has a file of its own, and `create` loads only the requested one.

Called by the worker. No module here imports a backend's library before a transport of that backend is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longshore_agent.errors import TransportError
from longshore_wire.errors import Reason

if TYPE_CHECKING:
    from longshore_agent.transports.base import Transport

BACKENDS = ("NIXL", "Mooncake", "Loopback")


def create(backend: str, name: str, **options: Any) -> Transport:
    """Make the transport of one worker.

    Args:
        backend: one of BACKENDS, spelled as in the CR.
        name: this worker's name for peers, unique among the workers that may meet, at most 200 bytes of UTF-8.
        options: of that backend's class, for example `faults` of the loopback or `ports` of Mooncake.
    Raises:
        TransportError: the backend is unknown, not installed, or does not start.
    """
    if backend == "NIXL":
        from longshore_agent.transports.nixl import NixlTransport

        return NixlTransport(name, **options)
    if backend == "Mooncake":
        from longshore_agent.transports.mooncake import MooncakeTransport

        return MooncakeTransport(name, **options)
    if backend == "Loopback":
        from longshore_agent.transports.loopback import LoopbackTransport

        return LoopbackTransport(name, **options)
    raise TransportError(f"backend is {backend!r}: use one of {', '.join(BACKENDS)}", reason=Reason.UNSUPPORTED)
