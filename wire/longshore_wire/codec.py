"""Encodes and decodes the messages of one protocol, with its version and its limit.

Used by `peer_messages` and `engine_messages`, which define the messages. Knows no message and no socket.
A message is one version byte, then msgpack. Decoding checks the size before it parses and every type while it does.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from longshore_wire.errors import CodecError, Reason

# The version and one byte of msgpack.
_MESSAGE_BYTES_MIN = 2

_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Codec(Generic[T]):
    """One direction of one protocol: its version, its limit, its messages."""

    def __init__(self, version: int, limit_bytes: int, kind: object) -> None:
        self._version = version
        self._limit_bytes = limit_bytes
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def encode(self, message: T) -> bytes:
        """Return the bytes of `message`. Raises CodecError if they exceed the limit."""
        data = bytes((self._version,)) + _ENCODER.encode(message)
        if len(data) > self._limit_bytes:
            raise CodecError(f"{type(message).__name__} of {len(data)} bytes: at most {self._limit_bytes} are allowed")
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """Return the message in `data`. Raises CodecError naming the version, the size or the field."""
        if not _MESSAGE_BYTES_MIN <= len(data) <= self._limit_bytes:
            raise CodecError(f"a message of {len(data)} bytes: {_MESSAGE_BYTES_MIN} to {self._limit_bytes} are allowed")
        if data[0] != self._version:
            raise CodecError(
                f"protocol version {data[0]} is unknown here: this side speaks {self._version}; run the same release on both",
                reason=Reason.UNKNOWN_VERSION,
            )
        try:
            return self._decoder.decode(memoryview(data)[1:])
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            raise CodecError(f"not a message: {error}") from error
