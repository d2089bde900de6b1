"""What the driver of a tensor-parallel engine and its rank processes say to each other.

msgpack over a socket pair, one reply a command; both ends are this tree, so there is no version. At the end what the
process that starts the ranks answers.
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
    """Compute KV of prompt tokens [first, end); `pages` hold [0, first) already. Answered by `Tokens`."""

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
    """Answered by `Dumped`: the bytes of tokens [first, end)."""

    pages: list[int]
    first: int
    end: int


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Digests` of tokens [first, end)."""

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
    """The greedy tokens, and for each how far its logit was above the next best one."""

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
    """What the extension returned."""

    body: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The command was refused or failed; `reason` is the number of a `Reason`."""

    reason: int
    message: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The process that starts ranks has loaded torch."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """It has started a rank, for the next connection that it was given; the rank's pidfd comes beside this."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended; `status` as subprocess has it, negative for a signal."""

    pid: int
    status: int


Command = Prefill | Decode | Dump | Digest | Zero | Poison | Extra | Stop
Reply = Ready | Tokens | Dumped | Digests | Done | ExtraReply | Failed
StarterAnswer = Loaded | Started | Ended
