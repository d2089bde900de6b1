"""Interprets claims: rank pairs, slab sizes, reassembly of page lists, late copies. Called by both cores. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.effects import PeerId, SessionConfig
from longshore_wire.engine_messages import PAGES_PER_MESSAGE_MAX, TOKENS_MAX, CachePages, Endpoint
from longshore_wire.errors import LayoutError, Reason, RingError, RoomError
from longshore_wire.peer_messages import Attach, Claim, Demand, PairKey, PoolInfo, RoomKey
from longshore_wire.plan import Pair, Plan
from longshore_wire.room import TargetPair
from longshore_wire.slabs import SlabGrid, slab_limit_bytes, slab_units, staged_tokens
from longshore_wire.ways import IN_PLACE, Open, Way, Why, check_place, given_way

# Limit of the slabs that a peer can make us track for one claim.
SLABS_MAX = 1 << 18
# Bytes of all incomplete page lists of all peers: enough for about a hundred of the longest prompts.
PARTS_BYTES_MAX = 64 << 20
# Claims that may overtake an older one: more than the open rooms of a worker.
SERIALS_MAX = 65_536
# A target does not know the limit of its source's lanes. The source applies it.
_ANY_LANE = 1 << 62

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An engine's request: for each cache, in order, tokens [first, end) of a room into these pages; end is the total."""

    key: RoomKey
    endpoint: Endpoint
    caches: tuple[CachePages, ...]
    mappable: bool = True  # workers of the same agent may map the pages and write them
    adjacent: bool = True  # the elements of a row are adjacent, as kernels of GPUs need them
    digest: bool = False  # compare digests, even if the deployment does not
    binding: Binding = UNBOUND


class PageParts(Generic[K]):
    """Reassembles page lists from several messages, which may be reordered and repeated.

    Each message of a list except the last holds PAGES_PER_MESSAGE_MAX pages. So the size of a list is known from its first
    message, and the cost of a message does not depend on earlier ones.
    """

    def __init__(self, bytes_max: int = PARTS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lists: dict[K, _PartialList] = {}
        self.bytes_kept = 0

    def __len__(self) -> int:
        return len(self._lists)

    def add(self, name: K, page_offset: int, page_count: int, pages: bytes) -> bytes | None:
        """Add a part; return the whole list `name` of `page_count` pages once it is complete, else None.

        Raises:
            RoomError: the part does not fit the list, or too many lists are incomplete (BUSY). This list is dropped.
        """
        if page_offset == 0 and len(pages) == 4 * page_count:
            self.drop(name)
            return pages
        part, rest = divmod(page_offset, PAGES_PER_MESSAGE_MAX)
        found = self._lists.get(name)
        inside = rest == 0 and 0 <= page_offset < page_count and (found is None or 4 * page_count == len(found.pages))
        if not inside or len(pages) != 4 * min(PAGES_PER_MESSAGE_MAX, page_count - page_offset):
            self.drop(name)
            raise RoomError(
                f"{len(pages)} bytes of pages at page {page_offset} are not part of {page_count} pages: send the list in order, "
                f"{PAGES_PER_MESSAGE_MAX} pages of 4 bytes a message",
                reason=Reason.MALFORMED_MESSAGE,
            )
        if found is None:
            if self.bytes_kept + 4 * page_count > self._bytes_max:
                raise RoomError("too many claims lack parts of their pages: claim fewer at once", reason=Reason.BUSY)
            self.bytes_kept += 4 * page_count
            found = self._lists[name] = _PartialList(bytearray(4 * page_count))
        if part not in found.parts:
            found.parts.add(part)
            found.pages[4 * page_offset : 4 * page_offset + len(pages)] = pages
        if len(found.parts) * PAGES_PER_MESSAGE_MAX < page_count:
            return None
        self.drop(name)
        return bytes(found.pages)

    def drop(self, name: K) -> None:
        """Drop the parts of a list."""
        found = self._lists.pop(name, None)
        if found is not None:
            self.bytes_kept -= len(found.pages)

    def forget(self, is_gone: Callable[[K], bool]) -> None:
        """Drop the parts of all lists whose names satisfy `is_gone`."""
        for name in [name for name in self._lists if is_gone(name)]:
            self.drop(name)


@dataclass(slots=True)
class _PartialList:
    pages: bytearray
    parts: set[int] = field(default_factory=set)


@dataclass(slots=True)
class UsedSerials:
    """The used claims of a target's life. Its source has opened or aborted them, and ignores late copies.

    A target numbers its claims to each source from 1 on, so nearly all used numbers lie below `floor`.
    """

    epoch: int
    floor: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, serial: int) -> bool:
        """Whether a claim was used."""
        return serial <= self.floor or serial in self.above

    def add(self, serial: int) -> None:
        """Note that a claim is used."""
        if serial not in self:
            self.above.add(serial)
        if len(self.above) > SERIALS_MAX:
            # Claims below the lowest known one are too old to be answered.
            self.floor = min(self.above) - 1
        while self.floor + 1 in self.above:
            self.floor += 1
            self.above.discard(self.floor)


@dataclass(frozen=True, slots=True)
class Route:
    """The meaning of one claim at its source.

    Attributes:
        pair: the slices that move; None if nothing moves and the source only needs to know that.
        expected: target ranks that must claim from this source, each with the cache.
        writer_count: source ranks that write to that target, in any cache; each pair of a cache counts.
    """

    pair: Pair | None
    expected: frozenset[tuple[int, int]]
    writer_count: int


def route(planned: tuple[Plan, ...], source_rank: int, target_rank: int, cache: int) -> Route:
    """Return the meaning of a claim of `target_rank` at `source_rank`. Raises LayoutError if the ranks have no pair.

    Args:
        planned: of each cache.
    """
    writers = writer_count(planned, target_rank)
    sent = [
        (pair, index) for index, each in enumerate(planned) for pair in each.pairs if pair.source_rank == source_rank
    ]
    for pair, index in sent:
        if (pair.target_rank, index) == (target_rank, cache):
            return Route(pair, frozenset([(each.target_rank, at) for each, at in sent]), writers)
    if (source_rank, target_rank) in planned[cache].idle_sources:
        return Route(None, frozenset({(target_rank, cache)}), max(1, writers))
    raise LayoutError(f"decode rank {target_rank} has no pair with prefill rank {source_rank}")


def writer_count(planned: tuple[Plan, ...], target_rank: int) -> int:
    """Return the pairs of all caches that write to a target rank, and share its ring."""
    return sum([pair.target_rank == target_rank for each in planned for pair in each.pairs])


def grid(config: SessionConfig, attach: Attach, claim: Claim, found: Route, sound: dict[int, PoolInfo]) -> SlabGrid:
    """Return the slabs of a claim at its source.

    Args:
        sound: by cache, pools of `attach` that earlier claims found to fit its layout. This call adds the claim's pool.
    Raises:
        RingError: the target has no ring, or its ring is too small for one unit of each writer twice.
        LayoutError: the target's pool cannot hold its layout.
        RoomError: the tokens are no range or split an opaque page; or the way writes in place, and our pages cannot be read
            in place or the target's pool or pages are unknown.
    """
    if not 0 <= claim.first_token <= claim.end_token <= TOKENS_MAX:
        raise RoomError(
            f"tokens [{claim.first_token}, {claim.end_token}) are not a range: give 0 <= first <= end <= {TOKENS_MAX}",
            reason=Reason.TOKENS_MISSING,
        )
    if found.pair is None or claim.first_token >= claim.end_token:
        return SlabGrid(claim.end_token, claim.end_token, 1)
    check_prefix(claim.first_token, found.pair)
    check_place(claim.way, f"prefill {config.instance}", in_place=config.in_place)
    if claim.way in IN_PLACE:
        _check_in_place(attach, claim, sound)
        # It needs no buffer. Only the duration of one write limits it.
        limit = max(config.slab_bytes_max, found.pair.unit_bytes)
    elif attach.ring is None:
        raise RingError(f"decode {attach.instance} has no ring: it cannot take staged slabs")
    else:
        limit = slab_limit_bytes(config.slab_bytes_max, attach.ring.length_bytes, found.writer_count)
    first, end = found.pair.units_of(claim.first_token, claim.end_token)
    count, unit = end - first, (found.pair.unit_bytes, found.pair.unit_tokens)
    cache = claim.pair.cache
    page = max(config.layout.caches[cache].page_size, attach.layout.caches[cache].page_size)
    if found.pair.slot:
        page = 1
    if claim.way in IN_PLACE:
        count_min = 2 * config.lane_count
        if claim.way is Way.DIRECT and config.direct_slab_bytes:
            limit, count_min = max(config.direct_slab_bytes, found.pair.unit_bytes), 1
        tokens = unit[1] * slab_units(unit[0], -(-count // unit[1]), limit, config.slab_bytes_min, count_min)
        if tokens < count:
            # Whole pages of both sides if possible, which keeps runs long.
            tokens = max(tokens // page, 1) * page
    else:
        least, lanes = config.slab_bytes_min, config.lane_count
        tokens = staged_tokens(count, unit, limit_bytes=limit, minimum_bytes=least, lane_count=lanes, page=page)
    cut = SlabGrid(first, end, tokens)
    if cut.count > SLABS_MAX:
        raise RoomError(
            f"{count} tokens make {cut.count} slabs, at most {SLABS_MAX} are allowed: enlarge the staging buffers",
            reason=Reason.UNSUPPORTED,
        )
    return cut


def demanded_grid(config: SessionConfig, pair: TargetPair, wanted: CachePages, demand: Demand) -> SlabGrid:
    """Return the slabs that a source's demand defines for the claimed tokens of a cache.

    Raises:
        RoomError: MALFORMED_MESSAGE: the demand contradicts itself, splits opaque pages, has too many slabs, or
            has slabs of which the ring cannot hold two.
    """
    first, end = wanted.first_token, wanted.end_token
    if pair.route is None:
        first = end
    else:
        first, end = pair.route.units_of(first, end)
    cut = SlabGrid(first, end, max(demand.slab_tokens, 1))
    if (cut.slab_tokens, cut.count) != (demand.slab_tokens, demand.slab_count):
        raise RoomError(
            f"cuts [{first}, {end}) into {demand.slab_count} slabs of {demand.slab_tokens}",
            reason=Reason.MALFORMED_MESSAGE,
        )
    if cut.count > SLABS_MAX:
        raise RoomError(
            f"slab_count is {cut.count}, and at most {SLABS_MAX} are allowed", reason=Reason.MALFORMED_MESSAGE
        )
    if cut.count and pair.route is not None and cut.slab_tokens % pair.route.unit_tokens:
        raise RoomError(
            f"slab_tokens is {cut.slab_tokens}, no multiple of the {pair.route.unit_tokens} tokens of a page whose content is opaque",
            reason=Reason.MALFORMED_MESSAGE,
        )
    if cut.count and pair.route is not None and pair.way is Way.STAGED:
        slab_bytes, limit = pair.route.payload_bytes(*cut.tokens(0)), slab_limit_bytes(_ANY_LANE, config.ring_bytes, 1)
        if slab_bytes > limit:
            raise RoomError(
                f"cuts slabs of {slab_bytes} bytes, and this ring takes none above {limit}",
                reason=Reason.MALFORMED_MESSAGE,
            )
    return cut


def check_prefix(first_token: int, pair: Pair) -> None:
    """Raise RoomError if the target's prefix ends within an opaque page, or a slot is not wanted whole."""
    if pair.slot and first_token:
        raise RoomError(
            f"tokens from {first_token} on are wanted of a slot, which has the state after all of them: begin at token 0",
            reason=Reason.UNSUPPORTED,
        )
    if first_token % pair.unit_tokens:
        raise RoomError(
            f"tokens from {first_token} on are wanted, within a page of {pair.unit_tokens} tokens whose content is opaque: "
            f"begin at a multiple of {pair.unit_tokens}",
            reason=Reason.UNSUPPORTED,
        )


def _check_in_place(attach: Attach, claim: Claim, sound: dict[int, PoolInfo]) -> None:
    cache = claim.pair.cache
    layout = attach.layout.caches[cache]
    pool = attach.pool(cache)
    if pool is None or len(pool.region_addresses) != len(pool.geometry.region_bytes):
        raise RoomError(
            f"way {claim.way.name} writes pages in place, and decode {attach.instance} has not registered the pages of "
            f"cache {cache} for that: register it first, or use STAGED",
            reason=Reason.UNKNOWN_POOL,
        )
    if sound.get(cache) is not pool:
        # With several hundred planes this takes 0.5 ms, once for each pool.
        pool.geometry.check(layout)
        if not all(0 <= address < 2**63 for address in pool.region_addresses):
            raise RoomError(
                f"the pool of cache {cache} of decode {attach.instance} is at no address",
                reason=Reason.MALFORMED_MESSAGE,
            )
        sound[cache] = pool
    needed = layout.pages_of(claim.first_token, claim.end_token)[1]
    if claim.page_count != needed:
        raise RoomError(
            f"tokens [{claim.first_token}, {claim.end_token}) lie in {needed} pages, the claim lists {claim.page_count}",
            reason=Reason.PAGE_OUT_OF_RANGE,
        )


def target_pairs(config: SessionConfig, wanted: Wanted, planned: tuple[Plan, ...]) -> list[TargetPair]:
    """Return the pairs that a claim opens at its target: its sources by cache, and those of which it needs nothing.

    Raises:
        RoomError: the endpoint lacks a rank, the prefix ends within an opaque page, or our pages cannot be written in place.
        RingError: the ring could never hold two slabs of one unit for each source rank and cache.
    """
    rank, place = config.layout.rank, config.layout.parallel
    known = {rank.rank: rank for rank in wanted.endpoint.ranks}
    writers = writer_count(planned, rank)
    pairs = []
    for cache, each in enumerate(planned):
        routes: list[tuple[int, Pair | None]] = [(pair.source_rank, pair) for pair in each.of_target(rank)]
        routes += [(source, None) for source, teller in each.idle_sources if teller == rank]
        for source, pair in routes:
            if source not in known:
                raise RoomError(
                    f"the endpoint of {wanted.endpoint.instance} lacks rank {source}: pass it on only when complete",
                    reason=Reason.UNKNOWN_INSTANCE,
                )
            way, why, left_open = _first_way(config, wanted.caches[cache], each, pair, writers)
            peer = PeerId(wanted.endpoint.instance, wanted.endpoint.layout.parallel.dp_rank, source)
            # The source's epoch is filled in when it has attached.
            pair_key = PairKey(
                wanted.key, source, rank, 0, config.epoch, config.instance, place.dp_rank, config.memory, cache
            )
            named = known[source]
            pairs.append(
                TargetPair(pair_key, peer, pair, way, why, left_open, address=named.address, named_engine=named.engine)
            )
    return pairs


def _first_way(
    config: SessionConfig, wanted: CachePages, planned: Plan, pair: Pair | None, writers: int
) -> tuple[Way, Why, Open | None]:
    """Return the way of a pair as far as its target knows it, and the choice that is left. Raises RoomError, RingError."""
    way, why, left_open = Way.STAGED, Why.DEFAULT, None
    if pair is not None:
        way, why = given_way(pair.way, config.force_way, config.staging)
    if pair is not None and wanted.first_token < wanted.end_token:
        check_prefix(wanted.first_token, pair)
        if why is Why.UNDECIDED:
            tokens = (wanted.first_token, wanted.end_token)
            left_open = planned.open_pair(
                pair, tokens, lane_bytes=_ANY_LANE, ring_bytes=config.ring_bytes, writer_count=writers
            )
        else:
            check_place(way, f"decode {config.instance}", in_place=config.in_place)
        # No ring is a valid choice; a ring that is too small is a mistake.
        if way is Way.STAGED and (why is not Why.UNDECIDED or config.ring_bytes):
            _check_ring(config, pair, writers)
    elif why is Why.UNDECIDED:
        why = Why.DEFAULT
    return way, why, left_open


def _check_ring(config: SessionConfig, pair: Pair, writer_count: int) -> None:
    if pair.unit_bytes > slab_limit_bytes(_ANY_LANE, config.ring_bytes, writer_count):
        unit = "one layer of a slot" if pair.slot else f"{pair.unit_tokens} tokens"
        raise RingError(
            f"staging.poolSize of {config.ring_bytes} bytes cannot hold two slabs of even {unit} ({pair.unit_bytes} bytes) for "
            f"each of {writer_count} source ranks, counted once for each cache: enlarge it"
        )
