"""Checks the arguments of the client's calls, before anything is sent.

Called by `client` and `memory`. A check returns the value in the form of messages: a number of any integer type becomes
an int. Each failure is an ArgumentError that names the argument, its value and the allowed values.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import threading
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import msgspec

from longshore_client.errors import ArgumentError
from longshore_wire import names
from longshore_wire.bindings import BINDING_BYTES_MAX, Binding
from longshore_wire.engine_messages import TOKENS_MAX, DeviceRegion, Endpoint, Half, Hello, RoomEventKind
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import CACHES_MAX, KVLayout, TargetMemory

ROOM_MAX = 2**64 - 1
DESCRIPTOR_MAX = 2**31 - 1
# Characters of a value that an error shows. More would hide the rest of its text.
SHOWN_MAX = 80
_SHOWN_AS_POWER_MIN = 1 << 16
_NUMBERS = (int, float)

S = TypeVar("S", bound=msgspec.Struct)


def whole_number(name: str, value: object, low: int, high: int) -> int:
    """Return a number of any integer type as an int in [low, high]. A bool is refused."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type] # what is no integer raises TypeError
    except TypeError:
        raise ArgumentError(f"{name} is {_shown(value)}: give a whole number, {_range(low, high)}") from None
    if not low <= number <= high:
        raise ArgumentError(f"{name} is {number}: give {_range(low, high)}")
    return number


def room_number(room: object) -> int:
    """Return the number of a room."""
    return whole_number("room", room, 0, ROOM_MAX)


def cache_index(cache: object) -> int:
    """Return the index of a cache."""
    return whole_number("cache", cache, 0, CACHES_MAX - 1)


def token_range(first_token: object, end_token: object) -> tuple[int, int]:
    """Return tokens [first, end) of a sequence."""
    first = whole_number("first_token", first_token, 0, TOKENS_MAX)
    end = whole_number("end_token", end_token, 0, TOKENS_MAX)
    if first > end:
        raise ArgumentError(f"tokens [{first}, {end}) are not a range: give first_token <= end_token")
    return first, end


def text(name: str, value: object) -> str:
    """Return a text that is not empty, has no NUL and can be encoded as UTF-8."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ArgumentError(f"{name} is {_shown(value)}: give a text that is not empty and has no NUL")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{name} is not a valid text: {error}") from error
    return value


def engine_instance(value: object) -> str:
    """Return the name of an engine's instance. The names of test engines are refused: an operator does not count those."""
    found = text("instance", value)
    if found.startswith(names.TEST_INSTANCE_PREFIX):
        raise ArgumentError(
            f"instance is {_shown(found)}: {names.TEST_INSTANCE_PREFIX} is for test engines of `longshore verify`, which no "
            f"status counts: give another name, or another {names.INSTANCE_PREFIX_VARIABLE}"
        )
    return found


def path_text(name: str, value: object) -> str:
    """Return a path as text."""
    try:
        found = os.fspath(value)  # type: ignore[call-overload] # what is no path raises TypeError
    except TypeError:
        found = None
    return text(name, found if isinstance(found, str) else value)


def engine_socket(path: object) -> str:
    """Return the path of the engine socket: the given one, or that of the environment, or that without a deployment."""
    if path is not None:
        name, found = "path", path_text("path", path)
    elif (given := os.environ.get(names.ENGINE_SOCKET_VARIABLE)) is not None:
        name, found = names.ENGINE_SOCKET_VARIABLE, text(names.ENGINE_SOCKET_VARIABLE, given)
    else:
        return f"{names.RUN_DIRECTORY}/{names.SOCKET_FILE}"
    length = len(os.fsencode(found))
    if length > names.SOCKET_PATH_BYTES_MAX:
        raise ArgumentError(
            f"{name} has {length} bytes: the kernel connects to sockets whose paths have at most "
            f"{names.SOCKET_PATH_BYTES_MAX}"
        )
    return found


def flag(name: str, value: object) -> bool:
    """Return True or False; other truthy or falsy values are refused."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {_shown(value)}: give True or False")
    return value


def timeout(value: object) -> float:
    """Return a timeout in seconds."""
    number = float(value) if isinstance(value, _NUMBERS) and not isinstance(value, bool) else math.nan
    if not 0 <= number <= threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"timeout_s is {_shown(value)}: give seconds from 0 to {threading.TIMEOUT_MAX:.0f}, or None where there is no limit"
        )
    return number


def timeout_or_none(value: object) -> float | None:
    """Return a timeout in seconds; None: no limit."""
    return None if value is None else timeout(value)


def half_of(half: object) -> Half:
    """Return a half. A string is refused: it would match no event, so a wait would never end."""
    if not isinstance(half, Half):
        raise ArgumentError(f"half is {_shown(half)}: give Half.SOURCE or Half.TARGET")
    return half


def roles_of(roles: object) -> tuple[Half, ...]:
    """Return at least one half, each once."""
    found = tuple(roles) if isinstance(roles, Collection) else ()
    if not found or len(set(map(id, found))) != len(found) or not all(isinstance(role, Half) for role in found):
        raise ArgumentError(f"roles is {_shown(roles)}: give Half.SOURCE, Half.TARGET or both, each once")
    return found


def kinds_of(kinds: object) -> frozenset[RoomEventKind]:
    """Return at least one kind of event."""
    found = tuple(kinds) if isinstance(kinds, Collection) else ()
    if not found or not all(isinstance(kind, RoomEventKind) for kind in found):
        raise ArgumentError(f"kinds is {_shown(kinds)}: give at least one RoomEventKind")
    return frozenset(found)


def memory_of(memory: object) -> TargetMemory:
    """Return a memory of pages. A number is refused, as in `half_of`."""
    if not isinstance(memory, TargetMemory):
        raise ArgumentError(f"memory is {_shown(memory)}: give TargetMemory.DEVICE or TargetMemory.HOST")
    return memory


def host_hello(hello: Hello, layout: object) -> Hello:
    """Return the Hello for the pages in host memory of a rank whose device says `hello`."""
    if Half.TARGET not in hello.roles:
        raise ArgumentError("host_layout is given and roles has no TARGET: only claims have pages in host memory")
    found = struct("host_layout", layout, KVLayout)
    found.check()
    fixed = [[(each.name, each.model, each.parallel) for each in layout.caches] for layout in (found, hello.layout)]
    if fixed[0] != fixed[1]:
        one, other = next(pair for pair in zip_longest(*fixed) if pair[0] != pair[1])
        raise ArgumentError(f"host_layout has {one}, layout has {other}: only page size and order may differ")
    return msgspec.structs.replace(hello, layout=found, device="cpu", roles=(Half.TARGET,), memory=TargetMemory.HOST)


class CacheTokens(NamedTuple):
    """Tokens [first, end) of one cache of a sequence, and the pages that hold them; as the arguments of `Client.send`.

    Attributes:
        cache: its index in the layout's `caches`, from 1 on.
    """

    cache: int
    pages: Sequence[int] | bytes
    first_token: int
    end_token: int


def others_of(others: object, count: int) -> list[CacheTokens]:
    """Return the tokens of further caches than the first, of `count` caches, each at most once."""
    if not isinstance(others, (list, tuple)) or not all(isinstance(each, CacheTokens) for each in others):
        raise ArgumentError(f"others is {_shown(others)}: give a list of CacheTokens")
    found: dict[int, CacheTokens] = {}
    for each in others:
        cache = whole_number("others.cache", each.cache, 1, CACHES_MAX - 1)
        if cache >= count or cache in found:
            raise ArgumentError(f"others has cache {cache}: the layout has {count} caches, give each at most once")
        found[cache] = CacheTokens(cache, each.pages, *token_range(each.first_token, each.end_token))
    return [found[cache] for cache in sorted(found)]


def region_lists(regions: object, count: int, count_max: int) -> tuple[tuple[int, ...], tuple[DeviceRegion, ...]]:
    """Return descriptors and regions on a GPU; one of the two tuples is empty.

    Args:
        count: number of regions in the pool's geometry.
    """
    found: tuple[object, ...] | None = None
    if isinstance(regions, Sequence) and not isinstance(regions, str | bytes | bytearray | memoryview):
        found = tuple(regions)
    if found is None or len(found) != count or not 1 <= count <= count_max:
        given = f"{len(found)} regions" if found is not None else f"regions is {_shown(regions)}"
        raise ArgumentError(
            f"{given} for {count} of geometry.region_bytes: give one file descriptor or DeviceRegion each, at most {count_max}"
        )
    on_device = tuple(
        struct(f"regions[{index}]", region, DeviceRegion)
        for index, region in enumerate(found)
        if isinstance(region, DeviceRegion)
    )
    if on_device and len(on_device) != len(found):
        raise ArgumentError("regions are partly on a GPU and partly not: register a pool for each memory")
    if on_device:
        return (), on_device
    return tuple(whole_number(f"regions[{index}]", region, 0, DESCRIPTOR_MAX) for index, region in enumerate(found)), ()


def struct(name: str, value: object, kind: type[S]) -> S:
    """Return a struct of ours if each field has its declared type, since an agent would refuse it otherwise."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} is {_shown(value)}: give a {kind.__name__}")
    try:
        found: S = _decoder(kind).decode(msgspec.msgpack.encode(value))
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        place, wrong = _place(value, path)
        raise ArgumentError(f"{name}{place} is {_shown(wrong)}: {said}") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ArgumentError(f"{name} has a field that no agent can read: {error}") from error
    return found


def binding_of(prompt: object, capability: object) -> Binding:
    """Return what ties a half to its request."""
    return Binding(_secret("prompt", prompt), _secret("capability", capability))


def _secret(name: str, value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) > BINDING_BYTES_MAX:
        # It is never shown.
        raise ArgumentError(f"{name} is none: give up to {BINDING_BYTES_MAX} bytes")
    return value


def endpoint_of(value: object) -> Endpoint:
    """Return an endpoint that an agent can dial."""
    found = struct("endpoint", value, Endpoint)
    try:
        found.check()
    except LongshoreError as error:
        raise ArgumentError(f"endpoint is none of an agent: {error}") from error
    return found


@functools.cache
def _decoder(kind: type[S]) -> msgspec.msgpack.Decoder[S]:
    return msgspec.msgpack.Decoder(kind)


def _place(value: Any, path: str) -> tuple[str, object]:
    """Return the name and the value of a place within a value. Structs are arrays in messages."""
    place = ""
    for index in map(int, re.findall(r"\[(\d+)\]", path)):
        if isinstance(value, msgspec.Struct):
            field = value.__struct_fields__[index]
            place, value = f"{place}.{field}", getattr(value, field)
        else:
            place, value = f"{place}[{index}]", value[index]
    return place, value


def _shown(value: object) -> str:
    try:
        found = repr(value)
    except Exception as error:
        raise ArgumentError(f"a {type(value).__name__} that cannot be shown was given: {error}") from error
    return found if len(found) <= SHOWN_MAX else f"{found[:SHOWN_MAX]}..."


def _range(low: int, high: int) -> str:
    power = high.bit_length()
    is_power = high == 2**power - 1 and high > _SHOWN_AS_POWER_MIN
    return f"{low} to 2**{power} - 1" if is_power else f"{low} to {high}"
