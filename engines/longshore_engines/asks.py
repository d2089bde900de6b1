"""Decides, at a prefill rank, what to answer decode ranks that ask for a prompt by its number. Pure.

Called by connectors of engines whose router gives both sides the same number of a prompt, before prefill has computed
it. A decode rank asks once for each prompt. It is told the room and the endpoint as soon as prefill knows the prompt,
and gets the prompt's first token when that is sampled. Knows no engine, no socket and no clock.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from longshore_client.errors import ArgumentError
from longshore_wire.engine_messages import Endpoint

VERSION = 2
# The frame before a message, on sockets that also carry an engine's own messages.
TAG = b"LONGSHORE"
# Prompts that decode ranks ask for before prefill knows them. A router sends a prompt to both sides at once, so more
# than a few are asks for prompts that prefill never got.
WAITING_MAX = 65_536
# Ended prompts that are remembered: how often a number was used, and why the last prompt failed.
REMEMBERED_MAX = 65_536
# Frames of a message. A peer cannot make us decode much more; a row of the first token is about 2 kB.
MESSAGE_BYTES_MAX = 1 << 20
_SEAL_BYTES = 16
# The variable that holds the key of one engine's processes.
OWN_KEY = "SGLANG_LONGSHORE_KEY"


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """From a decode rank: where is prompt `prompt`? `ask` is a random number, which an answer repeats."""

    version: int
    ask: int
    prompt: int
    host: str
    port: int


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """From a decode rank: this prompt is no longer needed."""

    prompt: int
    host: str
    port: int
    text: str


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """To a decode rank: claim room `room` at `endpoint`. `content` is the meaning of a page's bytes."""

    ask: int
    room: int
    content: str
    endpoint: Endpoint


class FirstToken(msgspec.Struct, frozen=True, array_like=True, tag="first"):
    """To a decode rank: the engine's rows on the first token of the prompt."""

    ask: int
    rows: tuple[bytes, ...]


class Decline(msgspec.Struct, frozen=True, array_like=True, tag="decline"):
    """To a decode rank: the prompt will not come; says why."""

    ask: int
    text: str


Message = Ask | Left | Grant | FirstToken | Decline
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def own_key(environment: MutableMapping[str, str]) -> bytes:
    """Return the key of one engine's processes, by which those without an agent are known. The first process draws it.

    Args:
        environment: of this process. Its children inherit the key.
    """
    return bytes.fromhex(environment.setdefault(OWN_KEY, secrets.token_hex(32)))


def new_ask() -> int:
    """Return the number of an ask, which nobody can guess; never 0."""
    return 1 + secrets.randbelow((1 << 64) - 1)


def frames_of(message: Message, keys: Sequence[bytes]) -> list[bytes]:
    """Return a message's frames: the tag, the message, and its seal by each key of the deployment's engines."""
    data = _ENCODER.encode(message)
    return [TAG, data, *_seals(data, keys)]


def message_of(frames: Sequence[bytes], keys: Sequence[bytes]) -> Message | None:
    """Return the message in a peer's frames; None: they are of the engine.

    Args:
        keys: of the deployment's engines. If there are any, a message has a seal by one of them. Keys are replaced one engine
            after the other, so a peer may lack the newest.
    Raises:
        ArgumentError: it has no such seal, or another version.
    """
    if len(frames) < 2 or frames[0] != TAG:  # noqa: PLR2004 -- the tag and the message
        return None
    _, data, *seals = frames
    if len(data) > MESSAGE_BYTES_MAX:
        raise ArgumentError(f"a peer's message has {len(data)} bytes: at most {MESSAGE_BYTES_MAX} are read")
    if keys and not any(hmac.compare_digest(own, seal) for own in _seals(data, keys) for seal in seals):
        raise ArgumentError(
            "a peer's message has no seal of this deployment's engines: run the same release of Longshore on both sides, with "
            "agents of one deployment; otherwise a stranger has sent it"
        )
    try:
        found: Message = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ArgumentError(
            f"a peer's message is not of this version: {error}; run the same release of Longshore on both sides"
        ) from error
    return found


def _seals(data: bytes, keys: Sequence[bytes]) -> list[bytes]:
    return [hmac.digest(key, data, "sha256")[:_SEAL_BYTES] for key in keys]


class Asker(NamedTuple):
    """A decode rank, by its address, and the number of its ask."""

    host: str
    port: int
    ask: int


class ToGrant(NamedTuple):
    """Send a `Grant` of this room to this asker."""

    asker: Asker
    room: int


class ToTell(NamedTuple):
    """Send this message to this asker."""

    asker: Asker
    message: FirstToken | Decline


@dataclass(slots=True)
class _Prompt:
    room: int
    askers: list[Asker] = field(default_factory=list)
    rows: tuple[bytes, ...] | None = None


class Asks:
    """The prompts that a prefill rank has, by their numbers, and the decode ranks that asked for them."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}
        self._waiting: OrderedDict[int, list[Asker]] = OrderedDict()
        self._waiting_count = 0
        self._uses: OrderedDict[int, int] = OrderedDict()
        self._failures: OrderedDict[int, str] = OrderedDict()

    def opened(self, prompt: int) -> tuple[int, Sequence[ToGrant]]:
        """Record a prompt that prefill will compute; return its room and what to send.

        The room has the prompt's number. If a number is used again, as engines do for a prompt that decode had to drop,
        the room has another one, since an agent must not see a room's number twice. Every rank of the engine gets the
        same room, because all get the same prompts in the same order.
        """
        uses = self._uses.pop(prompt, 0)
        self._uses[prompt] = uses + 1
        while len(self._uses) > REMEMBERED_MAX:
            self._uses.popitem(last=False)
        self._failures.pop(prompt, None)
        found = self._prompts[prompt] = _Prompt(_room(prompt, uses), self._waiting.pop(prompt, []))
        self._waiting_count -= len(found.askers)
        return found.room, [ToGrant(asker, found.room) for asker in found.askers]

    def asked(self, message: Ask) -> Sequence[ToGrant | ToTell]:
        """Record a decode rank's ask; return what to send."""
        asker = Asker(message.host, message.port, message.ask)
        if message.version != VERSION:
            text = (
                f"decode asks in version {message.version}, prefill reads {VERSION}: run the same release on both sides"
            )
            return [ToTell(asker, Decline(asker.ask, text))]
        found = self._prompts.get(message.prompt)
        if found is not None:
            # A rank repeats its ask when an answer may have been lost.
            if asker not in found.askers:
                found.askers.append(asker)
            first = [] if found.rows is None else [ToTell(asker, FirstToken(asker.ask, found.rows))]
            return [ToGrant(asker, found.room), *first]
        if message.prompt in self._failures:
            return [ToTell(asker, Decline(asker.ask, self._failures[message.prompt]))]
        waiting = self._waiting.setdefault(message.prompt, [])
        if asker in waiting:
            return []
        waiting.append(asker)
        self._waiting_count += 1
        declined: list[ToTell] = []
        while self._waiting_count > WAITING_MAX:
            _, oldest = self._waiting.popitem(last=False)
            self._waiting_count -= len(oldest)
            text = f"prefill has not got the prompt, and {WAITING_MAX} later asks wait: check the router"
            declined += [ToTell(each, Decline(each.ask, text)) for each in oldest]
        return declined

    def sampled(self, prompt: int, rows: tuple[bytes, ...]) -> Sequence[ToTell]:
        """Record the rows on a prompt's first token; return what to send."""
        found = self._prompts.get(prompt)
        if found is None:
            return []
        found.rows = rows
        return [ToTell(asker, FirstToken(asker.ask, rows)) for asker in found.askers]

    def left(self, message: Left) -> int | None:
        """Record that a decode rank no longer needs a prompt; return the room to cancel, if there is one."""
        waiting = self._waiting.get(message.prompt, [])
        kept = [asker for asker in waiting if (asker.host, asker.port) != (message.host, message.port)]
        self._waiting_count -= len(waiting) - len(kept)
        if kept:
            self._waiting[message.prompt] = kept
        else:
            self._waiting.pop(message.prompt, None)
        found = self._prompts.get(message.prompt)
        if found is None or (message.host, message.port) not in {(each.host, each.port) for each in found.askers}:
            return None
        return found.room

    def closed(self, prompt: int, room: int, failure: str) -> Sequence[ToTell]:
        """Record the end of a prompt; an empty `failure`: decode has all of it. Return what to send."""
        found = self._prompts.get(prompt)
        if found is None or found.room != room:
            return []
        del self._prompts[prompt]
        if not failure:
            return []
        self._failures[prompt] = failure
        while len(self._failures) > REMEMBERED_MAX:
            self._failures.popitem(last=False)
        return [ToTell(asker, Decline(asker.ask, failure)) for asker in found.askers]


def _room(prompt: int, uses: int) -> int:
    if not uses:
        return prompt
    digest = hashlib.blake2b(f"{prompt} {uses}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
