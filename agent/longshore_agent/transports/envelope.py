"""Seals a transport's metadata with a digest for its way between workers.

Called by the transports; pure. Libraries crash on metadata with a few wrong bytes, so metadata with a wrong digest is
refused before it reaches them. The digest detects damage only; the control protocol authenticates the sender.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from longshore_agent.errors import PeerMetadataError
from longshore_agent.transports.base import METADATA_BYTES_MAX

NAME_BYTES_MAX = 200
_DIGEST_BYTES = 16

_T = TypeVar("_T")


def seal(magic: bytes, content: msgspec.Struct) -> bytes:
    """Return the bytes that `unseal` reads; `magic` names the library and the version of the content."""
    body = msgspec.msgpack.encode(content)
    return magic + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def unseal(magic: bytes, data: bytes, kind: type[_T]) -> _T:
    """Return a peer's sealed content. Raises PeerMetadataError: another library or version, too long, or damaged."""
    head = len(magic) + _DIGEST_BYTES
    if not head < len(data) <= METADATA_BYTES_MAX or not data.startswith(magic):
        raise PeerMetadataError(
            f"peer metadata of {len(data)} bytes does not begin with {magic.decode()}: it is of another library or version"
        )
    body = data[head:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[len(magic) : head]:
        raise PeerMetadataError("peer metadata is damaged: its digest does not match")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerMetadataError(f"peer metadata cannot be read: {error}") from error


def is_name(name: str) -> bool:
    """Whether a worker may have this name."""
    return 1 <= len(name.encode()) <= NAME_BYTES_MAX
