"""Runs one pair of layouts: prefill computes prompts while their KV moves, decode continues, and transfers are measured.

Called by `command` with running processes. The first round computes; its pages and tokens are checked. The next rounds
only transfer, staged and slice by slice (on GPUs: directly); their pages are checked, too. For a further transport the
prompts are not computed again: prefill sends the pages of some rooms once more, chunk by chunk.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from longshore_lab.demo import compare
from longshore_lab.demo.cluster import DIRECT, HOST, PAGE_SIZE, SLICES, STAGED, Agents, Engines
from longshore_lab.demo.counts import Counts, PairResult, Transfer, lane_shares, of_instance, ring_rounds, wires_of
from longshore_lab.demo.errors import DifferenceError
from longshore_lab.demo.progress import Progress
from longshore_lab.demo.prompts import Request
from longshore_lab.engine import commands
from longshore_lab.engine.connector import Arrived, Await, Claim, GetEndpoint, Offer, Offered, Part
from longshore_lab.engine.pages import pages_for
from longshore_lab.engine.processes import EngineProcesses
from longshore_wire.engine_messages import Endpoint

# A transfer of the demo takes a second; slices on a busy machine take longer.
TRANSFER_TIMEOUT_S = 120.0
# Polling interval for the arrival of a chunk.
_LOOK_S = 0.02
# Minimum slabs of each chunk of the long prompt between each pair of ranks, and minimum wraps of each ring.
CHUNK_SLABS_MIN = 2
RING_ROUNDS_MIN = 3
ROUNDS = 3
# A further transport moves only the first rooms, which are the longest, and slices once.
FURTHER_ROOMS = 2
FURTHER_SLICES_ROUNDS = 1
_IN_WORDS = {SLICES: "slice by slice", DIRECT: "directly"}

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Room:
    """One request, with its pages on both sides."""

    number: int
    request: Request
    prefill_pages: list[int]
    decode_pages: list[int]

    @property
    def interval(self) -> tuple[int, int]:
        """The interval of tokens that are moved."""
        return self.request.prefix, self.request.total

    def offered(self, first: int, end: int) -> Part:
        """Return prefill's offer of tokens [first, end)."""
        return _part(self.number, self.prefill_pages, first, end, last=end == self.request.total)

    def claimed(self) -> Part:
        """Return decode's claim."""
        return _part(self.number, self.decode_pages, *self.interval, last=True)


class PairRun:
    """Runs the rounds of one pair. Raises DifferenceError if a check fails.

    Args:
        agents: the agents of one transport.
        earlier: the same pair's run by another transport, whose prefill pages are sent again.
    """

    def __init__(
        self,
        agents: Agents,
        engines: Engines,
        requests: Sequence[Request],
        progress: Progress,
        earlier: PairRun | None = None,
    ) -> None:
        self._agents, self._engines = agents, engines
        self._prefill, self._decode = engines.prefill, engines.decode
        self._requests = requests[:FURTHER_ROOMS] if earlier else requests
        self._progress = progress
        self._earlier = earlier
        self._rooms: list[Room] = []
        self._first_tokens: list[int] = []
        self._numbers = itertools.count(1)
        # Room ids start at 1: they must be unique per prefill instance and agent, and no other run shares both.
        self._endpoint = self._find_endpoint()

    def run(self) -> PairResult:
        """Carry out all rounds."""
        rooms = self._rooms = self._open_rooms()
        first_tokens = self._first_tokens = self._compute(rooms)
        compared_bytes = self._judge_pages(rooms)
        compared_tokens = self._judge_tokens(rooms, first_tokens)
        self._release(rooms)
        staged = self._measure(rooms, STAGED, ROUNDS)
        other_way = self._agents.other_way
        other = self._measure(rooms, other_way, FURTHER_SLICES_ROUNDS if self._earlier else ROUNDS)
        rounds = ring_rounds(self._agents.decode[STAGED].metrics(), self._engines.decode_instances[STAGED])
        if not rounds or min(rounds) < RING_ROUNDS_MIN:
            raise DifferenceError(f"rings wrapped {rounds} times, and {RING_ROUNDS_MIN} are asked for")
        self._say(
            f"{staged.payload_bytes / 1e6:.0f} MB again, {_times(staged)} staged in {staged.median_s:.2f} s, "
            f"{_times(other)} {_IN_WORDS[other_way]} in {other.median_s:.2f} s; rings wrapped {_ends(rounds)} times"
        )
        transfers = [staged, other]
        if self._engines.has_host and not self._earlier:
            host = self._measure(rooms, HOST, 1)
            transfers.append(host)
            self._say(
                f"{host.payload_bytes / 1e6:.0f} MB into pages of one token in decode's host memory in {host.median_s:.2f} s"
            )
        shares = lane_shares(self._agents.prefill.metrics(), self._engines.prefill_instance)
        name, backend = self._engines.name, self._agents.backend
        return PairResult(name, backend, tuple(transfers), rounds, shares, compared_bytes, compared_tokens)

    def _say(self, text: str) -> None:
        self._progress.say(f"{self._engines.name} by {self._agents.backend}: {text}")

    # -- the round with computation --------------------------------------------------------------------------------

    def _open_rooms(self) -> list[Room]:
        return [
            Room(
                next(self._numbers),
                request,
                self._earlier._rooms[place].prefill_pages  # noqa: SLF001
                if self._earlier
                else self._prefill.allocator.allocate(pages_for(request.total, PAGE_SIZE)),
                self._decode.allocator.allocate(pages_for(request.total + len(request.expected), PAGE_SIZE)),
            )
            for place, request in enumerate(self._requests)
        ]

    def _compute(self, rooms: Sequence[Room]) -> list[int]:
        """Claim every room at decode, then prefill and send chunk by chunk; return each prompt's first token."""
        for room in rooms:
            if room.request.prefix:
                self._decode.prefill(room.request.tokens, room.decode_pages, 0, room.request.prefix)
        marks = [compare.Fingerprint(self._decode, room.decode_pages, *room.interval) for room in rooms]
        self._claim(STAGED, rooms, digest=True)
        self._say(f"decode has claimed {len(rooms)} rooms; prefill begins")
        first_tokens = []
        for place, room in enumerate(rooms):
            for first, end in room.request.chunks:
                token = self._first_token(place, room, first, end)
                if first and end == room.request.total:
                    self._check_chunks(room, first)
                self._offer([room.offered(first, end)])
            first_tokens.append(token)
        self._arrived(STAGED, rooms)
        self._check_compared()
        for room, mark in zip(rooms, marks, strict=True):
            mark.check(room.number)
        return first_tokens

    def _check_compared(self) -> None:
        """Check that decode's agent has compared the digests of every slab with prefill's."""
        page, instance = self._agents.decode[STAGED].metrics(), self._engines.decode_instances[STAGED]
        slabs = of_instance(page, instance, "longshore_slabs_total", way=STAGED, half="target")
        equal = of_instance(page, instance, "longshore_digests_total", result="equal")
        if not 0 < slabs == equal:
            raise DifferenceError(f"{equal:.0f} of {slabs:.0f} slabs were compared by digest and equal")
        self._say(f"{equal:,.0f} slabs had the same digests in prefill's pages and in decode's")

    def _first_token(self, place: int, room: Room, first: int, end: int) -> int:
        """Compute a chunk, unless an earlier run has; return the token that follows it."""
        if self._earlier:
            return self._earlier._first_tokens[place]  # noqa: SLF001
        return self._prefill.prefill(room.request.tokens, room.prefill_pages, first, end).tokens[0]

    def _check_chunks(self, room: Room, sent_end: int) -> None:
        """Before the last chunk leaves, the earlier ones must have arrived, each in two slabs or more for every pair."""
        deadline_s = time.monotonic() + TRANSFER_TIMEOUT_S
        while True:
            halves = self._agents.decode[STAGED].room(room.number)["halves"]
            pairs = [pair for half in halves for pair in half["room"]["pairs"]]
            sent_tokens = sent_end - room.request.prefix
            # A slab that also needs tokens of the next chunk cannot have arrived yet.
            if pairs and all(pair["slabs_done"] >= sent_tokens // _slab_tokens_max(pair, room) > 0 for pair in pairs):
                break
            if time.monotonic() > deadline_s:
                raise DifferenceError(
                    f"room {room.number}: tokens up to {sent_end} were sent and have not arrived while the next chunk waits"
                )
            time.sleep(_LOOK_S)
        slabs = min(
            (end - max(first, room.request.prefix)) // _slab_tokens_max(pair, room)
            for pair in pairs
            for first, end in room.request.chunks
        )
        if slabs < CHUNK_SLABS_MIN:
            raise DifferenceError(f"room {room.number}: a chunk went in {slabs} slabs: {CHUNK_SLABS_MIN} are asked for")
        chunks = len(room.request.chunks)
        self._say(
            f"{room.request.total:,} tokens in {chunks} chunks of {slabs} slabs or more; "
            f"{chunks - 1} chunks had arrived before the last was sent"
        )

    def _judge_pages(self, rooms: Sequence[Room]) -> int:
        for room in rooms:
            self._check_digests(room)
        compared = compare.check_bytes(
            rooms[0].number,
            self._prefill,
            rooms[0].prefill_pages,
            self._decode,
            rooms[0].decode_pages,
            rooms[0].interval,
        )
        self._say(
            f"pages of {len(rooms)} rooms are equal, {compared / 1e6:.0f} MB of them byte for byte; "
            "nothing beside them was touched"
        )
        return compared

    def _judge_tokens(self, rooms: Sequence[Room], first_tokens: Sequence[int]) -> int:
        for room, first in zip(rooms, first_tokens, strict=True):
            compare.check_tokens(room.number, self._generated(room, first), room.request.expected)
        for room, first in zip(rooms, first_tokens, strict=True):
            self._decode.zero(room.decode_pages, *room.interval)
            compare.check_control(room.number, self._generated(room, first), room.request.expected)
        count = sum(len(room.request.expected) for room in rooms)
        self._say(
            f"{count} tokens equal those of one engine alone; with the moved KV zeroed, every room's tokens change"
        )
        return count

    def _generated(self, room: Room, first: int) -> list[int]:
        count = len(room.request.expected) - 1
        return [first, *self._decode.decode(room.decode_pages, room.request.total, first, count).tokens]

    # -- rounds of transfer alone ----------------------------------------------------------------------------------

    def _measure(self, rooms: Sequence[Room], way: str, rounds: int) -> Transfer:
        """Move all rooms concurrently, several times, each time into other pages; check the pages each time."""
        # Not measured: the first transfer of two workers attaches them and probes the wire.
        self._move(rooms[-1:], way)
        seconds, moved = [], []
        before = self._counted(way)
        for _ in range(rounds):
            round_s, round_bytes = self._move(rooms, way)
            seconds.append(round_s)
            moved.append(round_bytes)
        total = self._counted(way).since(before)
        if not total.writes:
            raise DifferenceError(
                f"{self._engines.name}: nothing was written {_IN_WORDS.get(way, way)}: agents stage between GPUs that do not "
                "reach each other's memory; name others, or one"
            )
        counts = Counts(total.slabs // rounds, total.writes // rounds, total.pieces // rounds)
        agent = self._agents.host if way == HOST else self._agents.decode[way]
        wires = wires_of(agent.status()["workers"], self._engines.decode_instances[way])
        return Transfer(way, len(rooms), counts, moved[0], tuple(seconds), wires)

    def _move(self, rooms: Sequence[Room], way: str) -> tuple[float, int]:
        """Move rooms again under new ids; return the seconds from the first accepted send to the last DONE, and the bytes."""
        again = [
            Room(
                next(self._numbers),
                room.request,
                room.prefill_pages,
                self._decode.allocator.allocate(pages_for(room.request.total, PAGE_SIZE)),
            )
            for room in rooms
        ]
        self._claim(way, again)
        numbers = [room.number for room in again]
        self._decode.post(
            commands.Extra(msgspec.msgpack.encode(Await(self._agents.registration(way), numbers, TRANSFER_TIMEOUT_S)))
        )
        first_ns = self._offer([room.offered(0, room.request.total) for room in again])
        arrived = _decoded(self._decode.collect(commands.ExtraReply), Arrived)
        self._extra(self._prefill, Await(self._agents.registration(STAGED), numbers, TRANSFER_TIMEOUT_S))
        for room in again:
            self._check_digests(room)
        self._release(again)
        return (max(one.done_ns for one in arrived) - first_ns) / 1e9, sum(one.bytes_moved for one in arrived)

    def _release(self, rooms: Sequence[Room]) -> None:
        for room in rooms:
            self._decode.release(room.decode_pages)

    def _counted(self, way: str) -> Counts:
        counted = self._agents.host_way if way == HOST else way
        return Counts.of(self._agents.prefill.metrics(), self._engines.prefill_instance, counted)

    # -- both ------------------------------------------------------------------------------------------------------

    def _check_digests(self, room: Room) -> None:
        compare.check_digests(
            room.number, self._prefill, room.prefill_pages, self._decode, room.decode_pages, room.interval
        )

    def _find_endpoint(self) -> Endpoint:
        replies = self._extra(self._prefill, GetEndpoint(self._agents.registration(STAGED)))
        return msgspec.msgpack.decode(replies[0].body, type=Endpoint)

    def _claim(self, way: str, rooms: Sequence[Room], *, digest: bool = False) -> None:
        parts = [room.claimed() for room in rooms]
        self._extra(self._decode, Claim(self._agents.registration(way), self._endpoint, parts, digest))

    def _offer(self, parts: list[Part]) -> int:
        """Offer parts on every rank; return the time at which the first was accepted."""
        return min(
            one.first_ns
            for one in _decoded(self._extra(self._prefill, Offer(self._agents.registration(STAGED), parts)), Offered)
        )

    def _arrived(self, way: str, rooms: Sequence[Room]) -> None:
        numbers = [room.number for room in rooms]
        self._extra(self._decode, Await(self._agents.registration(way), numbers, TRANSFER_TIMEOUT_S))
        self._extra(self._prefill, Await(self._agents.registration(STAGED), numbers, TRANSFER_TIMEOUT_S))

    @staticmethod
    def _extra(engine: EngineProcesses, command: msgspec.Struct) -> list[commands.ExtraReply]:
        return engine.call(commands.Extra(msgspec.msgpack.encode(command)), commands.ExtraReply)


def _decoded(replies: Sequence[commands.ExtraReply], kind: type[Answer]) -> list[Answer]:
    return [msgspec.msgpack.decode(reply.body, type=kind) for reply in replies]


def _part(room: int, pages: Sequence[int], first: int, end: int, *, last: bool) -> Part:
    return Part(room, list(pages[first // PAGE_SIZE : pages_for(end, PAGE_SIZE)]), first, end, last)


def _slab_tokens_max(pair: dict[str, int], room: Room) -> int:
    """Return an upper bound of the tokens in a slab of this pair, computed from the number of slabs."""
    tokens = room.request.total - room.request.prefix
    return tokens if pair["slabs_total"] < 2 else (tokens - 1) // (pair["slabs_total"] - 1)  # noqa: PLR2004


def _times(transfer: Transfer) -> str:
    return "once" if len(transfer.seconds) == 1 else f"{len(transfer.seconds)} times"


def _ends(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
