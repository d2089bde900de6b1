"""Puts known bugs into the protocol core and the client's core, to check that the simulator finds them.

Only tests use this. The first thirteen are those bugs of docs/design/2026-11-21-defects-of-others.md that a core can
have, by their letters. This core once had the others, except the two on a rank with two memories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec

from longshore_client.core import Core
from longshore_wire import source
from longshore_wire.claims import PageParts, UsedSerials
from longshore_wire.effects import PeerId, Send, StartWrite
from longshore_wire.errors import Reason, RingError
from longshore_wire.layout import TargetMemory
from longshore_wire.links import Links, PeerState
from longshore_wire.peer_messages import Attach, EndAck, SlabReady
from longshore_wire.plan import Pair
from longshore_wire.ring import Ring
from longshore_wire.room import RoomTable, SourceRoom, TargetPair, TargetRoom
from longshore_wire.slabs import SlabGrid
from longshore_wire.source import SourceSession
from longshore_wire.states import SourceSlab, TargetPairState, TargetSlab
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way


@dataclass(frozen=True)
class Plant:
    """One bug: its effect, and the mix that finds it."""

    about: str
    put: Callable[[ExitStack], None]
    mixes: tuple[str, ...]


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> Any:
    """Replace an attribute by `value`; return the old value."""
    real = getattr(owner, name)
    stack.enter_context(patch.object(owner, name, value))
    return real


# -- defects of others -------------------------------------------------------------------------------------------------


def _send_again(stack: ExitStack) -> None:
    kept: dict[int, dict[int, Any]] = {}

    def on_grant(self: Any, known: Any, grant: Any, now_ns: int) -> None:
        room, pair = self._find(known.peer, grant.pair)
        again = pair is not None and grant.slab in kept.setdefault(id(pair), {})
        if pair is not None:
            kept[id(pair)][grant.slab] = grant
        real(self, known, grant, now_ns)
        for other in room.pairs.values() if again and room is not None and not room.failed else ():
            for slab, state in enumerate(other.states):
                if state in (SourceSlab.WRITTEN, SourceSlab.ACKED) and slab in kept.get(id(other), {}):
                    other.acked_count -= state is SourceSlab.ACKED
                    other.states[slab] = SourceSlab.WAITING
                    self._begin(room, other, slab, kept[id(other)][slab])

    real = _set(stack, SourceSession, "_on_grant", on_grant)


def _swallow_errors(stack: ExitStack) -> None:
    _set(stack, SourceSession, "write_failed", lambda *_, **__: None)


def _shut_out(stack: ExitStack) -> None:
    def claim(self: Any, wanted: Any, now_ns: int) -> None:
        try:
            real(self, wanted, now_ns)
        except RingError:
            self.fail_all(Reason.TRANSFER_FAILED, "the transport has failed", now_ns)
            raise

    real = _set(stack, TargetSession, "claim", claim)


def _die_of_late_message(stack: ExitStack) -> None:
    def on_demand(self: Any, peer: Any, demand: Any, now_ns: int) -> None:
        assert demand.pair.key in self.rooms, "no such request"
        real(self, peer, demand, now_ns)

    real = _set(stack, TargetSession, "_on_demand", on_demand)


def _count_arrivals(stack: ExitStack) -> None:
    def on_ready(self: Any, peer: Any, ready: Any, now_ns: int) -> None:
        room, pair = self._find(peer, ready.pair)
        known = pair is not None and not room.failed and 0 <= ready.slab < len(pair.states)
        if known and pair.states[ready.slab] in (TargetSlab.LANDED, TargetSlab.DONE):
            for other in room.pairs.values():
                for slab, region in other.regions.items():
                    if other.states[slab] is TargetSlab.GRANTED:
                        payload_bytes = other.route.payload_bytes(*other.grid.tokens(slab))
                        self._land(room, other, SlabReady(other.pair, slab, region.generation, payload_bytes), now_ns)
                        return
        real(self, peer, ready, now_ns)

    real = _set(stack, TargetSession, "_on_ready", on_ready)


def _done_when_allocated(stack: ExitStack) -> None:
    def done(self: Any) -> bool:
        asked = [pair for pair in self.pairs.values() if pair.route is not None and pair.next_grant]
        return bool(asked) and all(pair.state is TargetPairState.COMPLETE for pair in asked)

    _set(stack, TargetRoom, "done", property(done))


def _read_early(stack: ExitStack) -> None:
    real = _set(stack, SlabGrid, "ready", lambda self, end: min(self.count, real(self, end) + 1))


def _confirm_unsettled(stack: ExitStack) -> None:
    def write_failed(self: Any, *given: Any, settled: bool = True) -> None:
        real(self, *given, settled=True)

    real = _set(stack, SourceSession, "write_failed", write_failed)


def _say_once(stack: ExitStack) -> None:
    for owner in (SourceSession, TargetSession):
        _set(stack, owner, "_repeat", lambda *_: None)


def _never_hang_up(stack: ExitStack) -> None:
    def beat(self: Any, peer: Any, now_ns: int) -> None:
        if peer in self.peers:
            self.peers[peer].outcomes_until_ns = 1 << 62
        real(self, peer, now_ns)

    real = _set(stack, TargetSession, "_beat", beat)


def _free_in_order(stack: ExitStack) -> None:
    def allocate(self: Any, length_bytes: int) -> Any:
        occupied = {**self._live, **self._held}
        if occupied:
            oldest, head = occupied[min(occupied)].offset_bytes, self._head_bytes
            length_bytes = -(-length_bytes // self.alignment_bytes) * self.alignment_bytes
            wraps = head > oldest
            fits = head + length_bytes <= (self.capacity_bytes if wraps else oldest)
            if not fits and not (wraps and length_bytes <= oldest):
                return None
        return real(self, length_bytes)

    real = _set(stack, Ring, "allocate", allocate)


def _scatter_unlanded(stack: ExitStack) -> None:
    def on_demand(self: Any, peer: Any, demand: Any, now_ns: int) -> None:
        real(self, peer, demand, now_ns)
        room, pair = self._find(peer, demand.pair)
        for slab, region in list(pair.regions.items()) if pair is not None else ():
            if slab < pair.ready_count and pair.states[slab] is TargetSlab.GRANTED:
                payload_bytes = pair.route.payload_bytes(*pair.grid.tokens(slab))
                self._land(room, pair, SlabReady(pair.pair, slab, region.generation, payload_bytes), now_ns)

    real = _set(stack, TargetSession, "_on_demand", on_demand)


def _forget_a_cache(stack: ExitStack) -> None:
    def done(self: Any) -> bool:
        first = [pair for pair in self.pairs.values() if pair.pair.cache == 0]
        return all(pair.route is None or pair.state is TargetPairState.COMPLETE for pair in first)

    _set(stack, TargetRoom, "done", property(done))


def _take_pages_of_another_cache(stack: ExitStack) -> None:
    def send_claim(self: Any, room: Any, pair: Any, now_ns: int) -> None:
        before = room.caches
        room.caches = tuple(
            msgspec.structs.replace(each, pages=before[0].pages) if len(each.pages) == len(before[0].pages) else each
            for each in before
        )
        real(self, room, pair, now_ns)
        room.caches = before

    real = _set(stack, TargetSession, "_send_claim", send_claim)


def _end_with_one_cache(stack: ExitStack) -> None:
    def done(self: Any) -> bool:
        return bool(self.expected) and self.total_tokens >= 0 and any(pair.done for pair in self.pairs.values())

    _set(stack, SourceRoom, "done", property(done))


def _offer_slots_early(stack: ExitStack) -> None:
    def slot_end(self: Any, pair: Any) -> int:
        return int(pair.grid.end_token) if self.is_offered else -1

    _set(stack, SourceRoom, "slot_end", slot_end)


def _shift_windows(stack: ExitStack) -> None:
    def begun(**fields: Any) -> StartWrite:
        # By more than one page of any size.
        fields["first_claimed_token"] = max(0, fields["first_claimed_token"] - 16)
        return StartWrite(**fields)

    _set(stack, source, "StartWrite", begun)


def _cut_sections_alike(stack: ExitStack) -> None:
    def local_heads(self: Any, layout: Any, section: int = 0) -> range:
        first = real(self, layout, 0)
        count = len(real(self, layout, section))
        return range(first.start, first.start + count)

    real = _set(stack, Pair, "local_heads", local_heads)


def _share_page_table(stack: ExitStack) -> None:
    newest: dict[int, bytes] = {}

    def claim(self: Any, wanted: Any, now_ns: int) -> None:
        newest[id(self)] = wanted.caches[0].pages
        real_claim(self, wanted, now_ns)

    def send_claim(self: Any, room: Any, pair: Any, now_ns: int) -> None:
        before, table = room.caches, newest[id(self)]
        own = before[0].pages
        pages = table + own[len(table) :] if len(table) <= len(own) else table[: len(own)]
        room.caches = (msgspec.structs.replace(before[0], pages=pages),)
        real_send(self, room, pair, now_ns)
        room.caches = before

    real_claim = _set(stack, TargetSession, "claim", claim)
    real_send = _set(stack, TargetSession, "_send_claim", send_claim)


# -- once in this core -------------------------------------------------------------------------------------------------


def _other_address_is_death(stack: ExitStack) -> None:
    def dial(self: Any, peer: Any, endpoint: Any, key: Any, now_ns: int) -> None:
        known = self.peers.get(peer)
        named = next(entry for entry in endpoint.ranks if entry.rank == peer.rank)
        if known is not None and known.attach is not None and known.address != named.address:
            epoch = known.epoch
            self.peer_lost(peer, f"it has moved to {named.address}", now_ns)
            self._writer_dead(known, epoch, now_ns)
        real(self, peer, endpoint, key, now_ns)

    real = _set(stack, TargetSession, "_dial", dial)


def _reopen_by_late_claim(stack: ExitStack) -> None:
    _set(stack, SourceSession, "_used_serials", lambda self, known: UsedSerials(known.epoch))


def _newer_elsewhere_is_death(stack: ExitStack) -> None:
    def on_attach(self: Any, known: Any, attach: Any, now_ns: int) -> bool:
        attached = bool(real(self, known, attach, now_ns))
        for epoch in [epoch for epoch in known.writers if attached and epoch < attach.epoch]:
            self._writer_dead(known, epoch, now_ns)
        return attached

    real = _set(stack, TargetSession, "_on_attach", on_attach)


def _confirm_for_another_life(stack: ExitStack) -> None:
    def on_abort(self: Any, known: Any, abort: Any, now_ns: int) -> None:
        if abort.pair.source_epoch != self.config.epoch:
            self._send(known.peer, EndAck(abort.pair))
            return
        real(self, known, abort, now_ns)

    def take_effects(self: Any) -> list[Any]:
        return sorted(taken(self), key=lambda effect: isinstance(effect, Send))

    real = _set(stack, SourceSession, "_on_abort", on_abort)
    taken = _set(stack, Links, "take_effects", take_effects)


def _believe_late_attach(stack: ExitStack) -> None:
    def on_attach(self: Any, known: Any, attach: Any, now_ns: int) -> bool:
        if known.attach is not None and attach.epoch < known.epoch:
            last = known.epoch
            self.peer_lost(known.peer, "it was restarted", now_ns)
            self._writer_dead(known, last, now_ns)
            known.attach, known.state, known.heard_ns = attach, PeerState.ATTACHED, now_ns
            return True
        return bool(real(self, known, attach, now_ns))

    real = _set(stack, TargetSession, "_on_attach", on_attach)


def _tell_no_completion(stack: ExitStack) -> None:
    def note(self: Any, known: Any, key: Any, cache: int, outcome: Any) -> None:
        if outcome.ended.reason is not Reason.NONE:
            real(self, known, key, cache, outcome)

    real = _set(stack, TargetSession, "_note_outcome", note)


def _tell_no_failure(stack: ExitStack) -> None:
    def note(self: Any, known: Any, key: Any, cache: int, outcome: Any) -> None:
        if outcome.ended.reason is Reason.NONE or key in self.rooms:
            real(self, known, key, cache, outcome)

    real = _set(stack, TargetSession, "_note_outcome", note)


def _wait_for_ever(stack: ExitStack) -> None:
    def idle(self: Any, now_ns: int) -> Iterator[Any]:
        self._deadlines.rooms.pop(now_ns)
        return iter(())

    _set(stack, RoomTable, "_idle", idle)


def _obey_late_abort(stack: ExitStack) -> None:
    def give_up(self: Any, room: Any, pair: Any, reason: Reason, text: str, now_ns: int) -> None:
        if pair.state is TargetPairState.COMPLETE:
            self._fail(room, reason, text, now_ns)
        else:
            real(self, room, pair, reason, text, now_ns)

    real = _set(stack, TargetSession, "_give_up", give_up)


def _believe_late_pong(stack: ExitStack) -> None:
    def on_pong(self: Any, known: Any, pong: Any, now_ns: int) -> None:
        if known.attach is not None and pong.epoch != known.epoch:
            self.peer_lost(known.peer, "it was restarted", now_ns)
        else:
            real(self, known, pong, now_ns)

    real = _set(stack, TargetSession, "_on_pong", on_pong)


def _count_parts(stack: ExitStack) -> None:
    kept: dict[Any, list[tuple[int, bytes]]] = {}

    def add(self: Any, name: Any, page_offset: int, page_count: int, pages: bytes) -> bytes | None:
        if page_offset == 0 and len(pages) == 4 * page_count:
            return pages
        parts = kept.setdefault((id(self), name), [])
        parts.append((page_offset, pages))
        if sum(len(part) for _, part in parts) < 4 * page_count:
            return None
        whole = bytearray(4 * page_count)
        for offset, part in kept.pop((id(self), name)):
            whole[4 * offset : 4 * offset + len(part)] = part
        return bytes(whole)

    _set(stack, PageParts, "add", add)


def _watch_the_ring_alone(stack: ExitStack) -> None:
    def has_bytes_due(self: Any) -> bool:
        return self.way is Way.STAGED and bool(real.__get__(self))

    real = _set(stack, TargetPair, "has_bytes_due", property(has_bytes_due))


def _hide_what_is_due(stack: ExitStack) -> None:
    def next_due_ns(self: Any) -> int | None:
        shown = (self._deadlines.repeats, self._deadlines.peers)
        dues = [due for each in shown if (due := each.next_ns()) is not None]
        return min(dues, default=None)

    _set(stack, RoomTable, "next_due_ns", next_due_ns)


def _drain_nobody(stack: ExitStack) -> None:
    _set(stack, TargetSession, "_drain", lambda self, known, epoch: self._writer_dead(known, epoch, 0))


def _repeat_nothing(stack: ExitStack) -> None:
    _set(stack, Core, "_halves_again", lambda _: iter(()))


def _dial_before_the_room_counts(stack: ExitStack) -> None:
    def dial(self: Any, peer: Any, endpoint: Any, key: Any, now_ns: int) -> None:
        real_beat = self._beat

        def beat(peer: Any, now_ns: int) -> None:
            self.peers[peer].rooms.pop(key, None)
            real_beat(peer, now_ns)
            self.peers[peer].rooms[key] = None

        self._beat = beat
        real(self, peer, endpoint, key, now_ns)
        del self._beat

    real = _set(stack, TargetSession, "_dial", dial)


def _compare_staged_alone(stack: ExitStack) -> None:
    def on_ready(self: Any, peer: Any, ready: Any, now_ns: int) -> None:
        room, pair = self._find(peer, ready.pair)
        was = room is not None and room.digest
        if was and pair is not None:
            room.digest = pair.way is Way.STAGED
        real(self, peer, ready, now_ns)
        if was:
            room.digest = True

    real = _set(stack, TargetSession, "_on_ready", on_ready)


def _send_other_digests(stack: ExitStack) -> None:
    def send_ready(self: Any, room: Any, pair: Any, slab: int) -> None:
        kept = dict(pair.digests)
        pair.digests[slab] = next(iter(kept.values()), b"")
        real(self, room, pair, slab)
        pair.digests = kept

    real = _set(stack, SourceSession, "_send_ready", send_ready)


# -- confusions of an engine rank's two workers ------------------------------------------------------------------------


def _attach_without_memory(stack: ExitStack) -> None:
    def of(named: Any) -> PeerId:
        found: PeerId = real(named)
        return found._replace(memory=TargetMemory.DEVICE) if isinstance(named, Attach) else found

    real = _set(stack, PeerId, "of", of)


def _restart_both_memories(stack: ExitStack) -> None:
    def on_attach(self: Any, peer: Any, attach: Any, now_ns: int) -> None:
        last = self.peers.get(peer)
        if last is not None and last.epoch < attach.epoch:
            for other in [other for other in self.peers if other[:3] == peer[:3] and other != peer]:
                self.peer_lost(other, f"{self._name(other)} was restarted", now_ns)
        real(self, peer, attach, now_ns)

    real = _set(stack, SourceSession, "_on_attach", on_attach)


# Not planted: a starting worker does not get its siblings' failures. The supervisor decides that, and the simulator has
# its own copy of the supervisor's rules (`sim_agent`). There, 19,000 rooms of five mixes did not detect that no sibling
# got a failure.
PLANTS = {
    "A": Plant("a reader that asks again makes slabs be sent again to all", _send_again, ("tiny rings", "late writes")),
    "B": Plant("the error of a write ends nothing", _swallow_errors, ("failed writes",)),
    "C": Plant("a room that never fits blocks the whole decode rank", _shut_out, ("rooms that never fit",)),
    "D": Plant("a message for a room that is gone ends the worker", _die_of_late_message, ("repeats", "calm")),
    "E": Plant("a repeated arrival counts as another writer's", _count_arrivals, ("repeats",)),
    "F": Plant("a room is done when all granted slabs have arrived", _done_when_allocated, ("calm", "loss")),
    "G": Plant("tokens are read that the engine has not offered", _read_early, ("calm",)),
    "H": Plant("an abort is confirmed while a failed write may land", _confirm_unsettled, ("unsettled writes",)),
    "I": Plant("control messages are sent once", _say_once, ("loss",)),
    "J": Plant(
        "a peer that once asked is sent messages without end",
        _never_hang_up,
        ("prefill is lost for good", "engines move"),
    ),
    "K": Plant("ring memory is freed in the order in which it was granted", _free_in_order, ("stalled prefill",)),
    "L": Plant("a slab is scattered before its bytes have landed", _scatter_unlanded, ("calm",)),
    "M": Plant(
        "the list of target pages is read from a table that other claims overwrite",
        _share_page_table,
        ("in place", "near"),
    ),
    "dead by address": Plant(
        "another address is taken for the writer's end", _other_address_is_death, ("twins of prefill", "engines move")
    ),
    "dead by newer epoch": Plant(
        "a newer life at another address is taken for the writer's end",
        _newer_elsewhere_is_death,
        ("hosts vanish and engines start elsewhere",),
    ),
    "confirmed by another": Plant(
        "words to a cut-off life reach the next one, on another node, which confirms that the other writes no more",
        _confirm_for_another_life,
        ("hosts vanish and engines start elsewhere",),
    ),
    "unread bytes": Plant(
        "what a dead writer had sent lands in memory that is another room's",
        _drain_nobody,
        ("workers die", "in place", "everything"),
    ),
    "late claim": Plant(
        "a late copy of a claim opens a room again that its source has forgotten",
        _reopen_by_late_claim,
        ("short memory",),
    ),
    "late attach": Plant(
        "a late Attach of an older life is believed", _believe_late_attach, ("late words of dead workers",)
    ),
    "untold completion": Plant(
        "a new life is not told of rooms that are done", _tell_no_completion, ("full hits and dying workers",)
    ),
    "untold failure": Plant(
        "a new life is not told of rooms that have failed", _tell_no_failure, ("unsettled writes",)
    ),
    "no room timeout": Plant(
        "nothing ends a room without a claim or an offer", _wait_for_ever, ("prefill cancels", "agents die")
    ),
    "counted parts": Plant(
        "a repeated part of a page list counts as a missing one", _count_parts, ("in place", "repeats")
    ),
    "late abort": Plant("an Abort ends a room that is complete with its sender", _obey_late_abort, ("repeats",)),
    "late pong": Plant("a late Pong of an older life is believed", _believe_late_pong, ("late words of dead workers",)),
    "endless in place": Plant(
        "no limit on a write in place that never ends", _watch_the_ring_alone, ("endless writes",)
    ),
    "hidden due times": Plant(
        "leases, room timeouts and memory are not part of what is due",
        _hide_what_is_due,
        ("calm", "prefill is lost for good", "decode is lost for good"),
    ),
    "lost at the claim": Plant(
        "a source that is found lost when a room names its new address is not dialled there",
        _dial_before_the_room_counts,
        ("engines of lost hosts start elsewhere",),
    ),
    "unchecked in place": Plant(
        "digests of pages that were written in place are not compared", _compare_staged_alone, ("damage",)
    ),
    "another slab's digests": Plant(
        "a slab is announced with the digests of an older one", _send_other_digests, ("digests",)
    ),
    "one for both memories": Plant(
        "a source takes a decode rank's workers of both memories for one", _attach_without_memory, ("host memory",)
    ),
    "restart of the other": Plant(
        "the restart of one memory's worker is taken for that of the other's, too",
        _restart_both_memories,
        ("host memory and dying workers",),
    ),
    "a cache forgotten in DONE": Plant(
        "a room is done at decode when its first cache is there", _forget_a_cache, ("caches", "caches near")
    ),
    "pages of the wrong cache": Plant(
        "a claim lists the pages of the first cache for another one", _take_pages_of_another_cache, ("caches in place",)
    ),
    "one cache for all": Plant(
        "a room is done at prefill when one cache is acknowledged", _end_with_one_cache, ("caches",)
    ),
    "a slot before its time": Plant(
        "a slot is sent with the first chunk, and again with the last", _offer_slots_early, ("states",)
    ),
    "a shifted window": Plant("the pages of a window are taken for earlier ones", _shift_windows, ("states in place",)),
    "sections in one piece": Plant(
        "all sections of a state are cut as the first one", _cut_sections_alike, ("states", "states near")
    ),
    "forgetful client": Plant("a client repeats no open half to a new worker", _repeat_nothing, ("workers die",)),
}


@contextmanager
def planted(name: str) -> Iterator[Plant]:
    """Put one bug into the core during the block; none if the name is empty."""
    with ExitStack() as stack:
        if name:
            PLANTS[name].put(stack)
        yield PLANTS.get(name, Plant("", lambda _: None, ()))
