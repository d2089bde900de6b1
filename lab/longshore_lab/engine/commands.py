"""Messages between the driver of a tensor-parallel engine and its rank processes.

msgpack over a socket pair, one reply to each command. Both ends are of this tree, so there is no version. The last types
are answers of the process that starts the ranks.
"""

from __future__ import annotations

import msgspec

from longshore_wire.layout import KVLayout, PoolGeometry


class HeadDigest(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Digest of one global KV head's bytes in one global layer, of K (`values` False) or of V."""

    layer: int
    values: bool
    head: int
    digest: bytes


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute KV of prompt tokens [first, end). `pages` must hold [0, first). Answered by `Tokens`."""

    prompt: list[int]
    pages: list[int]
    first: int
    end: int


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Feed `token` at `position`, then its successors, `count` steps in all. Answered by `Tokens`."""

    pages: list[int]
    position: int
    token: int
    count: int


class Dump(msgspec.Struct, frozen=True, tag=True):
    """Copy the bytes of tokens [first, end). Answered by `Dumped`."""

    pages: list[int]
    first: int
    end: int


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Compute the digests of tokens [first, end). Answered by `Digests`."""

    pages: list[int]
    first: int
    end: int


class Zero(msgspec.Struct, frozen=True, tag=True):
    """Set KV of tokens [first, end) to zero. Answered by `Done`."""

    pages: list[int]
    first: int
    end: int


class Poison(msgspec.Struct, frozen=True, tag=True):
    """Fill whole pages with NaN. Answered by `Done`."""

    pages: list[int]


class Extra(msgspec.Struct, frozen=True, tag=True):
    """Bytes for the rank's extension. Answered by `ExtraReply`."""

    body: bytes


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process. Not answered."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank holds its weights and its pool; the answer to its options."""

    layout: KVLayout
    geometry: PoolGeometry


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The greedy tokens, and for each the margin of its logit over the next best one."""

    tokens: list[int]
    margins: list[float]


class Dumped(msgspec.Struct, frozen=True, tag=True):
    """float32 bytes of [2 * layers, tokens, local heads, head_dim], K planes first."""

    shape: list[int]
    content: bytes


class Digests(msgspec.Struct, frozen=True, tag=True):
    """One entry for each layer, K or V, and head of this rank."""

    entries: list[HeadDigest]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command was carried out."""


class ExtraReply(msgspec.Struct, frozen=True, tag=True):
    """The result of the extension."""

    body: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command was refused or failed; `reason` is the number of a `Reason`."""

    reason: int
    message: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The process that starts ranks has loaded torch."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The starter has started a rank for its next connection; the rank's pidfd is attached to this message."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended; `status` is negative for a signal, as in subprocess."""

    pid: int
    status: int


Command = Prefill | Decode | Dump | Digest | Zero | Poison | Extra | Stop
Reply = Ready | Tokens | Dumped | Digests | Done | ExtraReply | Failed
StarterAnswer = Loaded | Started | Ended
