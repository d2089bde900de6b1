"""The envelope in which NIXL metadata travels between workers, and the names of NIXL agents in it.

Called by nixl.py only; pure. NIXL crashes on metadata with a few wrong bytes, so nothing reaches it whose digest is wrong.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from longshore_agent.errors import PeerMetadataError
from longshore_agent.transports.base import METADATA_BYTES_MAX

NAME_BYTES_MAX = 200
_MAGIC = b"LSNIXL01"
_DIGEST_BYTES = 16
_NIXL_HEAD = b"nixlSerDes|Agent"


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A worker's name, which of its lives this is, the kernel that it runs on, and what NIXL wants its peers to know."""

    name: str
    life: str
    host: str
    blob: bytes


def inbox_name(name: str, life: str) -> str:
    """Return the name of the NIXL agent that receives. A life of its own, because NIXL never forgets a name fully."""
    return f"{name}~{life}"


def outbox_name(inbox: str) -> str:
    """Return the name of the NIXL agent that writes, by which its notices arrive."""
    return f"{inbox}~o"


def pack(envelope: Envelope) -> bytes:
    """Return the bytes that `unpack` reads."""
    body = msgspec.msgpack.encode(envelope)
    return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def unpack(data: bytes) -> Envelope:
    """Return what a peer sent, or raise PeerMetadataError. The digest finds damage; who sent it is not its matter."""
    head = len(_MAGIC) + _DIGEST_BYTES
    if not head < len(data) <= METADATA_BYTES_MAX or not data.startswith(_MAGIC):
        raise PeerMetadataError(f"peer metadata of {len(data)} bytes is not NIXL metadata of a version that we speak")
    body = data[head:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[len(_MAGIC) : head]:
        raise PeerMetadataError("peer metadata is damaged: its digest does not match")
    try:
        envelope = msgspec.msgpack.decode(body, type=Envelope)
    except msgspec.MsgspecError as error:
        raise PeerMetadataError(f"peer metadata cannot be read: {error}") from error
    name = inbox_name(envelope.name, envelope.life).encode()
    head_of_blob = _NIXL_HEAD + struct.pack("<Q", len(name)) + name + b"|"
    if not 1 <= len(envelope.name.encode()) <= NAME_BYTES_MAX or not envelope.blob.startswith(head_of_blob):
        raise PeerMetadataError(f"peer metadata of {envelope.name[:NAME_BYTES_MAX]!r} holds another NIXL agent's name")
    return envelope
