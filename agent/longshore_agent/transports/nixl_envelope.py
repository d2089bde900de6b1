"""Packs NIXL metadata for peers, and names the NIXL agents in it.

Called by nixl.py only; pure. See `envelope` for the reason of the seal.
"""

from __future__ import annotations

import struct

import msgspec

from longshore_agent.errors import PeerMetadataError, TransportError
from longshore_agent.transports.envelope import NAME_BYTES_MAX, is_name, seal, unseal
from longshore_wire.errors import Reason

_MAGIC = b"LSNIXL01"
_NIXL_HEAD = b"nixlSerDes|Agent"


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A worker's name, life, host kernel and NIXL metadata.

    `device_index` and `device` are index and UUID of the GPU whose memory is registered; -1 and empty: host memory.
    `alone`: the worker writes only inside its host and opens no port for others.
    """

    name: str
    life: str
    host: str
    blob: bytes
    device_index: int = -1
    device: str = ""
    alone: bool = False


def inbox_name(name: str, life: str) -> str:
    """Return the name of the NIXL agent that receives. It is new for each life: NIXL never forgets a name fully."""
    return f"{name}~{life}"


def outbox_name(inbox: str) -> str:
    """Return the name of the NIXL agent that writes, which is the sender of its notices."""
    return f"{inbox}~o"


def pack(envelope: Envelope) -> bytes:
    """Return the bytes that `unpack` reads."""
    return seal(_MAGIC, envelope)


def unpack(data: bytes) -> Envelope:
    """Return a peer's envelope. Raises PeerMetadataError."""
    envelope = unseal(_MAGIC, data, Envelope)
    name = inbox_name(envelope.name, envelope.life).encode()
    head_of_blob = _NIXL_HEAD + struct.pack("<Q", len(name)) + name + b"|"
    if not is_name(envelope.name) or not envelope.blob.startswith(head_of_blob):
        raise PeerMetadataError(f"peer metadata of {envelope.name[:NAME_BYTES_MAX]!r} holds another NIXL agent's name")
    return envelope


def check_reach(peer: Envelope, host: str, *, alone: bool) -> None:
    """Raise TransportError if a peer and a worker on `host` cannot reach each other; see `Envelope` for `alone`."""
    if peer.alone != alone:
        fault = (
            f"one of peer {peer.name!r} and this worker may use wires inside its host alone, and the other may not: give both "
            "agents the same transfer.wires (LONGSHORE_WIRES)"
        )
    elif alone and peer.host != host:
        fault = (
            f"peer {peer.name!r} is on another host, and transfer.wires (LONGSHORE_WIRES) allows wires inside one alone: add TCP "
            "or RDMA to the list"
        )
    else:
        return
    raise TransportError(fault, reason=Reason.WIRE_NOT_ALLOWED)
