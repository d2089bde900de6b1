"""Defines the messages of a connector: handovers from prefill to decode, and orders from scheduler to ranks. Pure.

Used by `requests`, `rooms` and the connectors. A handover travels with its request from the prefill engine to the
decode engine, through a router that must not read it. Orders go from an engine's scheduler to each of its ranks. Knows
no engine.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from longshore_client.errors import ArgumentError
from longshore_wire.bindings import BINDING_BYTES_MAX, UNBOUND, Binding
from longshore_wire.engine_messages import Endpoint
from longshore_wire.errors import LongshoreError
from longshore_wire.names import room_name

HANDOVER_VERSION = 1
# The key of a request's `kv_transfer_params` that holds the handover.
KEY = "longshore"
# The key that holds the number of the prompt's room, if the router names it. Both engines then begin at once, and decode
# gets the handover of an earlier prompt of the same prefill engine.
ROOM = "longshore_room"
# The key of a short text that changes when decode can no longer use a handover of an earlier prompt.
LIFE = "longshore_life"
# The key by which a router tells prefill, in any request, that it no longer needs a prompt: the prompt's handover.
RELEASE = "longshore_release"
# The key by which a router tells a prefill engine that decode computes no token of the prompt, as SGLang's decode engines.
WHOLE = "longshore_whole"
ROOM_END = 1 << 64
# The flags with which routers for vLLM control prefill and decode.
WANTS_DECODE, WANTS_PREFILL = "do_remote_decode", "do_remote_prefill"
# An endpoint of 2,048 ranks is about 130 kB. A router must not make an engine decode much more.
HANDOVER_CHARACTERS_MAX = 1 << 20
_PROMPT_LABEL = b"longshore prompt 1\0"
_ID_BYTES = 4


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """The place of a prompt's KV: its first `tokens` tokens, in room `room` of the instance at `endpoint`."""

    version: int
    room: int
    tokens: int
    endpoint: Endpoint
    content: str  # meaning of a page's bytes, beyond the layout; equal on both sides
    binding: Binding = UNBOUND  # of the room, which decode's claim must show


@dataclass(frozen=True)
class Prompt:
    """A request's prompt, as its engine has it.

    Attributes:
        length: number of tokens.
        tokens: their ids; None: the engine got no ids, for example embeddings.
        lora: name of the request's LoRA adapter; empty: none.
        salt: the request's cache salt; empty: none.
        multimodal: hashes of its images and other inputs that are no text, in order.
    """

    length: int
    tokens: Sequence[int] | None
    lora: str = ""
    salt: str = ""
    multimodal: tuple[str, ...] = ()

    def digest(self, length: int) -> bytes:
        """Return the digest of the prompt's first `length` tokens and of all else that their KV depends on.

        It is SHA-256, cut to 128 bits, over a text of our own, so that it does not depend on an engine's release: a label with
        our version, `length`, the ids as uint32, then adapter, salt and hashes, each after its length; numbers little-endian.

        Raises:
            ArgumentError: there are no ids, or one that is no uint32.
        """
        if self.tokens is None:
            raise ArgumentError("the prompt has no token ids: prompts of embeddings cannot be handed over")
        try:
            ids = array("I", self.tokens[:length])
        except (TypeError, OverflowError) as error:
            raise ArgumentError(f"the prompt has a token id that is no uint32: {error}") from error
        assert ids.itemsize == _ID_BYTES
        if sys.byteorder == "big":
            ids.byteswap()
        found = hashlib.sha256(_PROMPT_LABEL + length.to_bytes(8, "little") + ids.tobytes())
        for text in (self.lora, self.salt, *self.multimodal):
            data = text.encode("utf-8", "surrogatepass")
            found.update(len(data).to_bytes(8, "little") + data)
        return found.digest()[:BINDING_BYTES_MAX]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Handover)


def token_content(dtype: object) -> str:
    """Return the `content` of pages in which each token's K and V of a head can be found, whatever the engine.

    Args:
        dtype: of an element, such as torch.float32.
    """
    return f"tokens of {str(dtype).removeprefix('torch.')}"


def parameters_for_decode(handover: Handover) -> dict[str, Any]:
    """Return the `kv_transfer_params` with which a router passes a prompt on to a decode engine."""
    found = {WANTS_PREFILL: True, WANTS_DECODE: False, KEY: packed_handover(handover)}
    return found | {LIFE: _life(handover.endpoint, handover.content)}


def _life(endpoint: Endpoint, content: str) -> str:
    # Decode also finds a worker that was restarted, at the same address with another epoch.
    addresses = [(each.rank, each.address, each.engine) for each in endpoint.ranks]
    place = _ENCODER.encode((endpoint.instance, endpoint.layout, addresses, endpoint.seals, content))
    return hashlib.blake2b(place, digest_size=8).hexdigest()


def packed_handover(handover: Handover) -> str:
    """Return a handover as text, in which every router keeps numbers above 2**53 intact."""
    return base64.b64encode(_ENCODER.encode(handover)).decode()


def handover_of(parameters: Mapping[str, Any], of: str = "kv_transfer_params") -> Handover:
    """Return the handover in a request's parameters.

    Args:
        of: the name of these parameters in the request.
    Raises:
        ArgumentError: there is none, or this version cannot read it; names the likely cause.
    """
    text, name = parameters.get(KEY), f"{of}.{KEY}"
    if not isinstance(text, str) or len(text) > HANDOVER_CHARACTERS_MAX:
        raise ArgumentError(
            f"{name} is {'missing' if text is None else 'no handover'}: the router must pass on what the prefill engine "
            "answered, and that engine must use this connector"
        )
    try:
        found = _DECODER.decode(base64.b64decode(text, validate=True))
        found.endpoint.layout.check()
        found.endpoint.check()
    except (binascii.Error, msgspec.MsgspecError, LongshoreError, ValueError) as error:
        raise ArgumentError(f"{name} is no handover of this version: {error}") from error
    if found.version != HANDOVER_VERSION:
        raise ArgumentError(
            f"{name} has version {found.version}, this side reads {HANDOVER_VERSION}: "
            "run the same release at prefill and decode"
        )
    if found.tokens < 0 or found.room < 0:
        raise ArgumentError(f"{name} names room {room_name(found.room)} of {found.tokens} tokens")
    return found


def room_of(parameters: Mapping[str, Any]) -> int | None:
    """Return the room that the router has named; None: it has not.

    Raises:
        ArgumentError: it is no number of a room.
    """
    room = parameters.get(ROOM)
    if room is None:
        return None
    if not isinstance(room, int) or isinstance(room, bool) or not 0 <= room < ROOM_END:
        raise ArgumentError(
            f"kv_transfer_params.{ROOM} is {room!r}: give a random whole number from 0 to 2**64 - 1 for each prompt"
        )
    return room


def is_promised(parameters: Mapping[str, Any]) -> bool:
    """Whether the router has named the room, so that prefill may not have computed the prompt yet."""
    return parameters.get(ROOM) is not None


def promised_handover(parameters: Mapping[str, Any], prompt_tokens: int) -> Handover:
    """Return the handover of a prompt of `prompt_tokens`, which prefill may not have computed yet.

    Raises:
        ArgumentError: as `handover_of` and `room_of`.
    """
    found, room = handover_of(parameters), room_of(parameters)
    if room is None:
        return found
    # The room's number is its capability, and the handover is of another prompt.
    return msgspec.structs.replace(found, room=room, tokens=prompt_tokens, binding=UNBOUND)


class GroupPages(NamedTuple):
    """Tokens [first_token, end_token) of one group of layers, whose pages an engine allots together, and these pages.

    A group that keeps recurrent states has one page, for all tokens or for none.
    """

    pages: tuple[int, ...]
    first_token: int
    end_token: int


class Offer(NamedTuple):
    """To a prefill rank: offer tokens [first_token, end_token) of a request's prompt, which this step computes, as `room`.

    Chunks of a room follow each other. `pages` holds these tokens in the engine's first group; all chunks but the last end
    with a page. `others` has what further groups offer with this chunk.
    """

    request_id: str
    room: int
    pages: tuple[int, ...]
    first_token: int
    end_token: int
    last: bool
    binding: Binding = UNBOUND
    others: tuple[GroupPages, ...] = ()
    is_next: bool = False  # a chunk of this room was offered before

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        """All groups."""
        return GroupPages(self.pages, self.first_token, self.end_token), *self.others


class ReportSent(NamedTuple):
    """To a prefill rank: the engine keeps the pages of this room for it. Report the request when the room has ended."""

    request_id: str
    room: int


class TakeBack(NamedTuple):
    """To a prefill rank: the engine needs this request's pages now. Cancel its room, and wait for its end."""

    request_id: str


class Ask(NamedTuple):
    """To a decode rank: report when prefill has offered the first tokens of this room. A Claim or a Withdraw follows."""

    request_id: str
    room: int
    endpoint: Endpoint
    binding: Binding = UNBOUND


class Claim(NamedTuple):
    """To a decode rank: claim tokens [first_token, end_token) into these pages. If both are equal, claim nothing.

    `pages` are of the engine's first group; `others` has what further groups claim.
    """

    request_id: str
    room: int
    endpoint: Endpoint
    pages: tuple[int, ...]
    first_token: int
    end_token: int
    binding: Binding = UNBOUND
    others: tuple[GroupPages, ...] = ()

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        """All groups."""
        return GroupPages(self.pages, self.first_token, self.end_token), *self.others


class Withdraw(NamedTuple):
    """To a rank: cancel this request's room, which is no longer needed."""

    request_id: str


class Fail(NamedTuple):
    """To a decode rank: report this request's claim as failed, since it cannot be made."""

    request_id: str
    text: str


Order = Offer | ReportSent | TakeBack | Ask | Claim | Withdraw | Fail
