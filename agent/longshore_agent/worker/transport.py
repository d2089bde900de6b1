"""Which transport a worker uses: that of its settings, for memory of its device."""

from __future__ import annotations

from longshore_agent.errors import TransportError
from longshore_agent.memory.cuda import Device
from longshore_agent.settings import Settings
from longshore_agent.transports import create
from longshore_agent.transports.base import PreparingTransport
from longshore_agent.transports.loopback_faults import parse_faults
from longshore_wire.agent_config import Backend
from longshore_wire.errors import Reason


def make_transport(settings: Settings, name: str, device: Device | None = None) -> PreparingTransport:
    """Make the transport that the settings ask for, for memory of `device`. Raises TransportError."""
    if device is not None:
        return _make_device_transport(settings, name, device)
    if settings.backend is Backend.LOOPBACK and settings.loopback_faults:
        return create(settings.backend.value, name, faults=parse_faults(settings.loopback_faults))
    if settings.backend is Backend.MOONCAKE:
        return create(settings.backend.value, name, host=settings.bind_host)
    return create(settings.backend.value, name)


def _make_device_transport(settings: Settings, name: str, device: Device) -> PreparingTransport:
    backend, known = settings.backend, {"device_index": device.index, "device": device.name}
    if backend is Backend.MOONCAKE:
        return create(backend.value, name, host=settings.bind_host, enter=device.enter, **known)
    if backend is not Backend.NIXL:
        raise TransportError(
            f"backend is {backend.value}: memory of a GPU is moved by NIXL or Mooncake, choose one of them",
            reason=Reason.UNSUPPORTED,
        )
    return create(backend.value, name, **known)
