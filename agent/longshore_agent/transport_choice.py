"""Creates the transport of an agent's settings. Called by workers, for memory of their device, and by the self-test."""

from __future__ import annotations

from typing import Any

from longshore_agent.errors import TransportError
from longshore_agent.memory.cuda import Allocation, Device
from longshore_agent.settings import Settings
from longshore_agent.transports import create
from longshore_agent.transports.base import Transport
from longshore_agent.transports.data_ports import DataPorts
from longshore_agent.transports.loopback import parse_faults
from longshore_spec.agent_config import Backend
from longshore_wire.errors import Reason


def make_ports(settings: Settings) -> DataPorts:
    """Return the guard of a transport's ports, which does not admit peers yet. Raises TransportError."""
    ports = DataPorts(settings.bind_host, allow_open=settings.allow_open_data_path)
    ports.admit(())
    return ports


def make_transport(settings: Settings, name: str, ports: DataPorts, device: Device | None = None) -> Transport:
    """Create the configured transport for memory of `device`; `ports` guards its ports. Raises TransportError."""
    backend = settings.backend
    options: dict[str, Any] = {}
    if device is not None:
        options = {"device_index": device.index, "device": device.name}
    if backend is Backend.NIXL:
        fabric = settings.gpu_staging_memory is Allocation.CU_MEM_CREATE
        return create(backend.value, name, ports=ports, wires=settings.wires, fabric=fabric, **options)
    if backend is Backend.MOONCAKE:
        if device is not None:
            options["enter"] = device.enter
        return create(backend.value, name, ports=ports, **options)
    if device is not None:
        raise TransportError(
            f"backend is {backend.value}: only NIXL and Mooncake move memory of a GPU: choose one of them",
            reason=Reason.UNSUPPORTED,
        )
    if settings.loopback_faults:
        options["faults"] = parse_faults(settings.loopback_faults)
    return create(backend.value, name, **options)
