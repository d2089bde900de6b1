"""Ties both halves of a room to one request: by a digest of its prompt, and by a secret of the room.

Each engine states a binding with its half. Prefill's worker compares them before it sends a byte.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

# Of a prompt's digest, and of a capability.
BINDING_BYTES_MAX = 16
_Secret = Annotated[bytes, msgspec.Meta(max_length=BINDING_BYTES_MAX)]


class Binding(msgspec.Struct, frozen=True, array_like=True):
    """What ties both halves of a room to one request. It is never shown or logged. Empty fields: the engine states none.

    Attributes:
        prompt: a digest of the prompt. If both halves state one and they differ, the room fails.
        capability: a secret of the room. A claim that does not show the offer's is refused.
    """

    prompt: _Secret = b""
    capability: _Secret = b""

    def __repr__(self) -> str:
        """Show nothing, since messages may be logged."""
        return "Binding(...)"


# Of an engine that states none.
UNBOUND = Binding()
