"""Tests rooms of several caches between real agents: heads, latents, states, windows and draft layers move as one room."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import pytest
from agent_fleet import World, over
from agent_world import EVENT_LIMIT_S, START_LIMIT_S, Agent, room_ids
from cache_oracle import Memory, content, state_geometry

from longshore_client import (
    ArgumentError,
    CacheTokens,
    Client,
    Half,
    KVLayout,
    LayoutError,
    PageOrder,
    Parallel,
    Reason,
    RoomError,
    RoomEvent,
    RoomEventKind,
    connect,
)
from longshore_client.memory import pool_geometry
from longshore_wire.layout import ModelShape, Plane

TOKENS = 300
PAGE_COUNT = 40
MODELS = {
    "kv": ModelShape.kv(4, 4, 32, 2),
    "latent": ModelShape.latent(3, 72, 2),
    "index": ModelShape.latent(2, 16, 1),
    "draft": ModelShape.kv(1, 4, 16, 4),
    "uneven": ModelShape(2, (Plane(4, 48), Plane(4, 32)), 2),
    # A conv state of q, k and v with other heads each, one of x, B and C with one group, and recurrent states.
    "gdn": ModelShape(5, (Plane(4, 32, 3), Plane(4, 32, 3), Plane(8, 32, 3), Plane(8, 64, 16)), 2),
    "mamba": ModelShape(3, (Plane(8, 32, 3), Plane(1, 32, 3), Plane(1, 32, 3), Plane(8, 64, 8)), 2),
    "window": ModelShape.kv(2, 4, 32, 2),
}
# Of each cache at prefill and at decode: tokens of a page, and the order; of a slot, layers of a page. Opaque pages are equal.
PAGES = {
    "kv": ((16, PageOrder.NHD), (32, PageOrder.HND)),
    "latent": ((16, PageOrder.NHD), (64, PageOrder.NHD)),
    "index": ((64, PageOrder.OPAQUE), (64, PageOrder.OPAQUE)),
    "draft": ((8, PageOrder.NHD), (16, PageOrder.NHD)),
    "uneven": ((16, PageOrder.NHD), (8, PageOrder.HND)),
    "gdn": ((2, PageOrder.SLOT), (3, PageOrder.SLOT)),
    "mamba": ((64, PageOrder.SLOT), (64, PageOrder.SLOT)),
    "window": ((16, PageOrder.NHD), (32, PageOrder.HND)),
}
# The tokens before the end that a windowed cache keeps.
WINDOW = 50


FAMILIES = {
    "latents, index keys, draft": ("kv", "latent", "index", "draft"),
    "hybrid": ("kv", "gdn", "window", "draft", "uneven"),
    "hybrid with one group": ("mamba", "kv"),
}


def layout_of(half: Half, tp: int, names: Sequence[str] = FAMILIES["latents, index keys, draft"]) -> KVLayout:
    """Return the layout of rank 0 with these caches."""
    caches = []
    for name in names:
        size, order = PAGES[name][half is Half.TARGET]
        blob_bytes = 64 * 16 + 64 * 4 if order is PageOrder.OPAQUE else 0
        caches.append(KVLayout(MODELS[name], Parallel(tp), size, order, blob_bytes=blob_bytes, name=name))
    return msgspec.structs.replace(caches[0], others=tuple(caches[1:]))


@dataclass
class Rank:
    """One rank with pages of each cache, which an agent knows."""

    layout: KVLayout
    client: Client
    pages: list[Memory]
    free: random.Random = field(default_factory=lambda: random.Random(1))

    @classmethod
    def start(cls, agent: Agent, instance: str, half: Half, layout: KVLayout) -> Rank:
        client = connect(agent.socket, instance=instance, layout=layout, roles=(half,), timeout_s=START_LIMIT_S)
        pages = []
        for index, cache in enumerate(layout.caches):
            geometry = (state_geometry if cache.order is PageOrder.SLOT else pool_geometry)(cache, PAGE_COUNT)
            memory, descriptors = Memory.shared(cache, geometry)
            client.register_pool(index, geometry, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            pages.append(memory)
        return cls(layout, client, pages)


@dataclass
class Side:
    """All ranks of an instance. Every rank has a sequence in the same pages of a cache."""

    ranks: list[Rank]

    def draw(self, first_tokens: Sequence[int]) -> list[list[int]]:
        """Return pages of each cache for tokens [first, TOKENS), in any order."""
        rank = self.ranks[0]
        return [
            rank.free.sample(range(PAGE_COUNT), cache.pages_of(first, TOKENS)[1])
            for cache, first in zip(rank.layout.caches, first_tokens, strict=True)
        ]

    def send(self, room: int, pages: list[list[int]], tokens: dict[int, tuple[int, int]], *, last: bool) -> None:
        """Offer tokens [first, end) of these caches at every rank. Their pages end with that of the last token."""
        for rank in self.ranks:
            chosen = {
                index: _from_end(pages[index], rank.layout.caches[index], *interval)
                for index, interval in tokens.items()
            }
            others = [CacheTokens(index, chosen[index], *tokens[index]) for index in tokens if index]
            rank.client.send(room, chosen[0], *tokens[0], last=last, others=others)

    def close(self) -> None:
        for rank in self.ranks:
            rank.client.close()


def _from_end(pages: list[int], cache: KVLayout, first_token: int, end_token: int) -> list[int]:
    """Return the pages of tokens [first, end) from a list that ends with the sequence's last page."""
    if cache.order is PageOrder.SLOT:
        return pages if first_token < end_token else []
    skipped = -(-TOKENS // cache.page_size) - len(pages)
    first, count = cache.pages_of(first_token, end_token)
    return pages[first - skipped : first - skipped + count]


@pytest.fixture(scope="module", params=over("NIXL", "Loopback", "Mooncake"))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("caches"), LONGSHORE_BACKEND=request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def agents(world: World) -> tuple[Agent, Agent]:
    return world.agent("one"), world.agent("two")


def started(agent: Agent, instance: str, half: Half, layout: KVLayout) -> Side:
    with ThreadPoolExecutor() as starters:
        layouts = [layout.at(rank) for rank in range(layout.rank_count)]
        return Side(list(starters.map(lambda each: Rank.start(agent, instance, half, each), layouts)))


def put(side: Side, attribute: str, pages: list[list[int]], seed: int, first_tokens: Sequence[int]) -> None:
    """Write the content of a sequence into the pages of all ranks, or into what they should hold."""
    for rank in side.ranks:
        for index, each in enumerate(rank.pages):
            if first_tokens[index] == TOKENS:
                continue
            data = content(seed + index, each.layout, TOKENS)
            each.put(getattr(each, attribute), pages[index], data, first_tokens[index], TOKENS)


def ends(side: Side, half: Half, room: int, instance: str | None = None) -> set[tuple[RoomEventKind, Reason]]:
    events = [rank.client.wait(room, half, instance, timeout_s=EVENT_LIMIT_S) for rank in side.ranks]
    for rank in side.ranks:
        rank.client.wait(room, half, instance, [RoomEventKind.RELEASED], EVENT_LIMIT_S)
    return {(event.kind, event.reason) for event in events}


def failed(event: RoomEvent) -> tuple[RoomEventKind, Reason]:
    return event.kind, event.reason


DONE = {(RoomEventKind.DONE, Reason.NONE)}


@pytest.mark.shows("argument.send.others", "argument.receive.others")
@pytest.mark.parametrize(("tp", "target_tp"), [(2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("digest", [False, True])
def test_one_room_moves_all_caches_between_unequal_ranks(
    agents: tuple[Agent, Agent], tp: int, target_tp: int, family: str, *, digest: bool
) -> None:
    names, called = FAMILIES[family], f"{next(room_ids)}"
    prefill = started(agents[0], f"p-{called}", Half.SOURCE, layout_of(Half.SOURCE, tp, names))
    decode = started(agents[1], f"d-{called}", Half.TARGET, layout_of(Half.TARGET, target_tp, names))
    endpoint = prefill.ranks[0].client.endpoint(EVENT_LIMIT_S)
    caches, numbers = prefill.ranks[0].layout.caches, range(len(names))
    least = [TOKENS - WINDOW if name == "window" else 0 for name in names]
    slots = [index for index in numbers if caches[index].order is PageOrder.SLOT]
    # No prefix; one that each cache has up to another page; all of some caches; all of every cache.
    prefixes = [32, 64, 128, 17, 48]
    for held in (least, prefixes, [0 if index % 2 == 0 else TOKENS for index in numbers], [TOKENS] * len(names)):
        firsts = [
            max(least[index], held[index] if index not in slots or held[index] == TOKENS else 0) for index in numbers
        ]
        room = next(room_ids)
        sent, wanted = prefill.draw(least), decode.draw(firsts)
        put(prefill, "data", sent, room, least)
        # Caches are offered up to different tokens until the last chunk; slots and windows come with that.
        cuts = {index: (160, 100, 128, 0, 77)[index] for index in numbers if index not in slots and not least[index]}
        if 0 in cuts:
            prefill.send(room, sent, {index: (0, cut) for index, cut in cuts.items()}, last=False)
        else:
            cuts = {}
        for rank in decode.ranks:
            others = [CacheTokens(index, wanted[index], firsts[index], TOKENS) for index in numbers[1:]]
            rank.client.receive(room, endpoint, wanted[0], firsts[0], TOKENS, others=others, digest=digest)
        prefill.send(room, sent, {index: (cuts.get(index, least[index]), TOKENS) for index in numbers}, last=True)
        assert ends(decode, Half.TARGET, room) == DONE
        assert ends(prefill, Half.SOURCE, room) == DONE
        put(decode, "expected", wanted, room, firsts)
        assert all(each.intact() for rank in decode.ranks for each in rank.pages)
    for cache in numbers:
        assert agents[0].metric("longshore_cache_bytes_total", cache=str(cache)) > 0
    prefill.close()
    decode.close()


@pytest.fixture(scope="module")
def hybrid(agents: tuple[Agent, Agent]) -> Iterator[tuple[Side, Side]]:
    prefill = started(agents[0], "hybrid-p", Half.SOURCE, layout_of(Half.SOURCE, 1, ["kv", "gdn", "window"]))
    decode = started(agents[1], "hybrid-d", Half.TARGET, layout_of(Half.TARGET, 1, ["kv", "gdn", "window"]))
    yield prefill, decode
    prefill.close()
    decode.close()


def test_a_slot_is_offered_once_and_wanted_whole(agents: tuple[Agent, Agent], hybrid: tuple[Side, Side]) -> None:
    (source,), (target,) = (side.ranks for side in hybrid)
    endpoint, pages = source.client.endpoint(EVENT_LIMIT_S), list(range(PAGE_COUNT))
    (engine,) = agents[0].worker("hybrid-p")["engines"]
    shown = [engine["layout"], *engine["layout"]["others"]]
    assert [(each["name"], each["order"]) for each in shown] == [("kv", "NHD"), ("gdn", "SLOT"), ("window", "NHD")]
    window = CacheTokens(2, pages[:4], TOKENS - WINDOW, TOKENS)
    text = "cache 'gdn' is a slot, which has the state after all tokens: offer it once, from token 0 and with `last`"
    for first, last in ((0, False), (16, True)):
        others = [CacheTokens(1, pages[:3], first, TOKENS), window]
        with pytest.raises(RoomError, match=text) as caught:
            source.client.send(next(room_ids), pages[:19], 0, TOKENS, last=last, others=others)
        assert caught.value.reason is Reason.MALFORMED_MESSAGE
    with pytest.raises(
        ArgumentError, match=r"others: cache 'gdn': 1 pages for tokens .*: pages of 2 layers that hold them are 3"
    ):
        source.client.send(next(room_ids), pages[:19], 0, TOKENS, last=True, others=[CacheTokens(1, [1], 0, TOKENS)])
    others = [CacheTokens(1, pages[:2], 16, TOKENS), CacheTokens(2, pages[:3], TOKENS - WINDOW, TOKENS)]
    with pytest.raises(RoomError, match="tokens from 16 on are wanted of a slot") as refused:
        target.client.receive(next(room_ids), endpoint, pages[:10], 0, TOKENS, others=others)
    assert refused.value.reason is Reason.UNSUPPORTED


def test_a_room_without_its_slot_does_not_end_and_one_before_its_window_fails(hybrid: tuple[Side, Side]) -> None:
    (source,), (target,) = (side.ranks for side in hybrid)
    endpoint, pages = source.client.endpoint(EVENT_LIMIT_S), list(range(PAGE_COUNT))
    kept = CacheTokens(2, pages[:4], TOKENS - WINDOW, TOKENS)
    with pytest.raises(RoomError, match="`last` comes with cache 'gdn' offered up to 0 of 300 tokens"):
        source.client.send(next(room_ids), pages[:19], 0, TOKENS, last=True, others=[kept])
    room = next(room_ids)
    others = [CacheTokens(1, pages[:2], 0, TOKENS), CacheTokens(2, pages[: 10 - 4], 128, TOKENS)]
    target.client.receive(room, endpoint, pages[:10], 0, TOKENS, others=others)
    others = [CacheTokens(1, pages[:3], 0, TOKENS), kept]
    source.client.send(room, pages[:19], 0, TOKENS, last=True, others=others)
    events = target.client.wait(room, Half.TARGET, timeout_s=EVENT_LIMIT_S), source.client.wait(room, Half.SOURCE)
    assert {failed(event) for event in events} == {(RoomEventKind.FAILED, Reason.TOKENS_MISSING)}
    text = "cache 'window': decode wants tokens from 128, prefill offers from 250"
    assert all(text in event.text for event in events)


@pytest.fixture(scope="module")
def sides(agents: tuple[Agent, Agent]) -> Iterator[tuple[Side, Side]]:
    prefill = started(agents[0], "p", Half.SOURCE, layout_of(Half.SOURCE, 1, ["kv", "draft"]))
    decode = started(agents[1], "d", Half.TARGET, layout_of(Half.TARGET, 1, ["kv", "draft"]))
    yield prefill, decode
    prefill.close()
    decode.close()


def test_a_room_ends_when_every_cache_is_there_and_not_before(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    (source,), (target,) = prefill.ranks, decode.ranks
    room, endpoint = next(room_ids), source.client.endpoint(EVENT_LIMIT_S)
    sent, wanted = prefill.draw([0, 0]), decode.draw([0, 0])
    put(prefill, "data", sent, room, [0, 0])
    target.client.receive(room, endpoint, wanted[0], 0, TOKENS, others=[CacheTokens(1, wanted[1], 0, TOKENS)])
    source.client.send(room, sent[0], 0, TOKENS, last=False)
    with pytest.raises(RoomError, match="`last` comes with cache 'draft' offered up to 0 of 300 tokens") as caught:
        source.client.send(room, [], TOKENS, TOKENS, last=True)
    assert caught.value.reason is Reason.TOKENS_MISSING
    assert target.client.poll() == source.client.poll() == []
    source.client.send(room, [], TOKENS, TOKENS, last=True, others=[CacheTokens(1, sent[1], 0, TOKENS)])
    assert ends(decode, Half.TARGET, room) == ends(prefill, Half.SOURCE, room) == DONE
    put(decode, "expected", wanted, room, [0, 0])
    assert all(each.intact() for each in target.pages)


def test_a_cache_that_is_cancelled_or_claimed_twice_leaves_no_page_held(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    (source,), (target,) = prefill.ranks, decode.ranks
    endpoint, wanted = source.client.endpoint(EVENT_LIMIT_S), decode.draw([0, 0])
    rooms = [next(room_ids) for _ in range(3)]
    others = [CacheTokens(1, wanted[1], 0, TOKENS)]
    target.client.receive(rooms[0], endpoint, wanted[0], 0, TOKENS, others=others)
    free = [page for page in range(PAGE_COUNT) if page not in wanted[0]][: len(wanted[0])]
    with pytest.raises(RoomError, match=r"pages\[0\] is .*, which room .* of p writes") as caught:
        target.client.receive(rooms[1], endpoint, free, 0, TOKENS, others=others)
    assert caught.value.reason is Reason.TOKENS_OVERLAP
    target.client.cancel(rooms[0], Half.TARGET)
    assert ends(decode, Half.TARGET, rooms[0]) == {(RoomEventKind.FAILED, Reason.CANCELLED)}
    target.client.receive(rooms[2], endpoint, wanted[0], 0, TOKENS, others=others)
    target.client.cancel(rooms[2], Half.TARGET)
    assert ends(decode, Half.TARGET, rooms[2]) == {(RoomEventKind.FAILED, Reason.CANCELLED)}
    assert all(each.intact() for each in target.pages)


def test_what_is_wrong_with_the_caches_of_a_call_is_named(sides: tuple[Side, Side]) -> None:
    (source,), (target,) = sides[0].ranks, sides[1].ranks
    endpoint, pages = source.client.endpoint(EVENT_LIMIT_S), list(range(PAGE_COUNT))
    draft = CacheTokens(1, pages[:19], 0, TOKENS)
    wrong = [
        ("others has 0 of 1 caches: claim every cache, also one of which no token moves", []),
        ("others has cache 2: the layout has 2 caches", [CacheTokens(2, pages[:19], 0, TOKENS)]),
        ("others has cache 1: the layout has 2 caches", [draft, draft]),
        ("others: cache 'draft' ends at token 299, and the first one at 300", [CacheTokens(1, pages[:19], 0, 299)]),
        ("others: cache 'draft': 18 pages for tokens", [CacheTokens(1, pages[:18], 0, TOKENS)]),
    ]
    for text, others in wrong:
        with pytest.raises(ArgumentError, match=text):
            target.client.receive(next(room_ids), endpoint, pages[:10], 0, TOKENS, others=others)
    with pytest.raises(RoomError, match="pages\\[0\\] is 40"):
        target.client.receive(
            next(room_ids), endpoint, pages[:10], 0, TOKENS, others=[CacheTokens(1, [40, *pages[:18]], 0, TOKENS)]
        )
    assert target.client.poll() == []


def test_peers_with_other_caches_are_refused_and_the_difference_is_named(
    agents: tuple[Agent, Agent], sides: tuple[Side, Side]
) -> None:
    (source,), room = sides[0].ranks, next(room_ids)
    endpoint = source.client.endpoint(EVENT_LIMIT_S)
    alone = started(agents[1], "alone", Half.TARGET, layout_of(Half.TARGET, 1, ["kv"]))
    with pytest.raises(RoomError, match="caches is kv, draft at the source and kv at the target"):
        alone.ranks[0].client.receive(room, endpoint, list(range(10)), 0, TOKENS)
    draft = msgspec.structs.replace(layout_of(Half.TARGET, 1, ["draft"]), model=ModelShape.kv(2, 4, 16, 4))
    layout = msgspec.structs.replace(layout_of(Half.TARGET, 1, ["kv"]), others=(draft,))
    longer = started(agents[1], "longer", Half.TARGET, layout)
    with pytest.raises(RoomError, match="cache 'draft': model\\.layers is 1 at the source and 2 at the target"):
        longer.ranks[0].client.receive(
            room, endpoint, list(range(10)), 0, TOKENS, others=[CacheTokens(1, list(range(19)), 0, TOKENS)]
        )
    same = msgspec.structs.replace(layout, others=(msgspec.structs.replace(draft, name="kv"),))
    with pytest.raises(LayoutError, match="caches have the names kv, kv: give each its own"):
        connect(agents[1].socket, instance="names", layout=same, timeout_s=START_LIMIT_S)
    for side in (alone, longer):
        side.close()


def test_a_long_claim_of_several_caches_comes_in_parts(agents: tuple[Agent, Agent]) -> None:
    tokens = 40_000
    small = {"kv": ModelShape.kv(1, 1, 4, 1), "draft": ModelShape.kv(1, 1, 2, 1)}
    caches = [KVLayout(model, Parallel(), 4 if name == "kv" else 2, name=name) for name, model in small.items()]
    layout = msgspec.structs.replace(caches[0], others=(caches[1],))
    clients, held = [], []
    for agent, half in zip(agents, Half, strict=True):
        client = connect(
            agent.socket, instance=f"long-{half.name}", layout=layout, roles=(half,), timeout_s=START_LIMIT_S
        )
        pools = []
        for index, each in enumerate(caches):
            memory, descriptors = Memory.shared(each, pool_geometry(each, tokens // each.page_size))
            client.register_pool(index, memory.geometry, descriptors)
            os.close(descriptors[0])
            pools.append(memory)
        clients.append(client)
        held.append(pools)
    room = next(room_ids)
    lists = [list(range(tokens // each.page_size)) for each in caches]
    for index in range(2):
        data = content(room + index, caches[index], tokens)
        held[0][index].put(held[0][index].data, lists[index], data, 0, tokens)
        held[1][index].put(held[1][index].expected, lists[index], data, 0, tokens)
    others = [CacheTokens(1, lists[1], 0, tokens)]
    clients[0].send(room, lists[0], 0, tokens, last=True, others=others)
    clients[1].receive(room, clients[0].endpoint(EVENT_LIMIT_S), lists[0], 0, tokens, others=others)
    for client, half in zip(clients, Half, strict=True):
        assert failed(client.wait(room, half, "long-SOURCE", timeout_s=EVENT_LIMIT_S)) in DONE
    assert all(each.intact() for each in held[1])
    for client in clients:
        client.close()
