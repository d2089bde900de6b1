"""The mixes of faults of the simulator, by name. A scenario is drawn from one by `sim_scenarios`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim_world import MS, SECOND, Odds

from longshore_wire.errors import Reason
from longshore_wire.ways import Way

# (KV heads, TP and PP of each prefill instance, of decode): TPs that divide each other or not, replicas, stages, and
# unequal prefill instances.
Shape = tuple[int, tuple[tuple[int, int], ...], tuple[int, int]]
SHAPES: tuple[Shape, ...] = (
    (2, ((1, 1),), (1, 1)),
    (2, ((1, 1),), (2, 1)),
    (2, ((2, 1),), (1, 1)),
    (6, ((2, 1),), (3, 1)),
    (6, ((3, 1),), (2, 1)),
    (2, ((4, 1),), (1, 1)),
    (1, ((1, 1),), (2, 1)),
    (2, ((1, 2),), (2, 1)),
    (2, ((2, 1),), (1, 3)),
    (2, ((1, 1), (2, 1)), (1, 1)),
    (6, ((3, 1), (1, 1)), (2, 1)),
)
SHAPE_WEIGHTS = (4, 4, 4, 2, 2, 1, 2, 1, 1, 2, 1)
# Those in which each prefill instance has another TP than decode.
UNEQUAL: dict[str, Any] = {
    "shapes": SHAPES[1:9] + SHAPES[10:],
    "shape_weights": SHAPE_WEIGHTS[1:9] + SHAPE_WEIGHTS[10:],
}


@dataclass(frozen=True)
class Mix:
    """The ingredients of a scenario of this name: the network's odds, and the number of each fault.

    Attributes:
        faults: kind of fault: (fewest, most).
        rings: sizes of decode's ring in slabs' limits, of which one is drawn.
        ways: of which one is drawn; None: the table's.
        sure: no fault here can fail a room: all must be done.
        aftermath: some rooms begin after the last fault, while late messages still arrive; they must be done, too.
        alone: rooms whose instances met no fault must be done, whatever happens to other instances.
        prompt_ns: time limit for such rooms, from when both halves are open; 0: none.
        reasons: reasons with which rooms may fail; None: any.
        forgets: workers remember fewer rooms than there are.
        host_memory: decode's ranks also have pages in host memory, of one token each, and rooms go to either.
        twins_stay: two engines of one name live to the end of the run.
        caches: (fewest, most) of each rank.
        states: some caches are slots or windows.
        never_fits: rooms of the prefill instance with the most ranks can never be staged; other rooms must not suffer.
    """

    odds: Odds = field(default_factory=Odds)
    faults: dict[str, tuple[int, int]] = field(default_factory=dict)
    rings: tuple[int, ...] = (4096, 8192, 32768)
    ways: tuple[Way | None, ...] = (None, None, None, Way.SLICES)
    rooms: tuple[int, int] = (10, 60)
    full_hits: float = 0.1
    lies: float = 0.0
    stale: float = 0.2
    sure: bool = False
    aftermath: bool = False
    alone: bool = False
    prompt_ns: int = 0
    reasons: frozenset[Reason] | None = None
    forgets: bool = False
    twins_stay: bool = False
    never_fits: bool = False
    host_memory: bool = False
    caches: tuple[int, int] = (1, 1)
    states: bool = False
    shapes: tuple[Shape, ...] = SHAPES
    shape_weights: tuple[int, ...] = SHAPE_WEIGHTS
    wire: bool = False
    near: bool = False
    clocks_ns: int = 20 * MS  # how far the clocks of hosts are apart
    settings: dict[str, Any] = field(default_factory=dict)


LATE = Odds(slow_write=0.15)
CALM = Odds()
BAD = Odds(loss=0.1, repeat=0.1, late=0.05)
WORSE = Odds(loss=0.1, repeat=0.1, late=0.05, slow_write=0.1, failed_write=0.01, unsettled_write=0.005)
TINY = (1024, 2048)
DIGESTS = {"digest": True, "digest_key": b"sim"}
CANCELS = frozenset({Reason.CANCELLED, Reason.TIMED_OUT})

MIXES: dict[str, Mix] = {
    "calm": Mix(sure=True, rings=(2048, 4096, 32768)),
    "loss": Mix(Odds(loss=0.01), sure=True),
    "repeats": Mix(Odds(repeat=0.3, slow_write=0.02, slow_write_ns=2 * SECOND), sure=True),
    "delays": Mix(Odds(late=0.05, late_ns=2 * SECOND), sure=True),
    "storm": Mix(Odds(loss=0.25, repeat=0.25, late=0.1), reasons=frozenset({Reason.PEER_LOST})),
    "tiny rings": Mix(Odds(repeat=0.1), rings=TINY, sure=True),
    "tiny rings and cancels": Mix(LATE, {"cancel": (2, 12)}, rings=TINY, reasons=CANCELS, alone=True),
    "table and wires": Mix(Odds(loss=0.02, repeat=0.1), ways=(None,), wire=True, sure=True),
    "late writes": Mix(
        Odds(slow_write=0.3, slow_write_ns=4 * SECOND), {"cancel": (2, 15)}, reasons=CANCELS, alone=True
    ),
    "failed writes": Mix(Odds(failed_write=0.05, repeat=0.05)),
    "unsettled writes": Mix(Odds(unsettled_write=0.03, slow_write=0.05)),
    "endless writes": Mix(Odds(endless_write=0.01, slow_write=0.05), {"cancel": (0, 5)}),
    "prefill cancels": Mix(Odds(repeat=0.05), {"cancel_prefill": (3, 20)}, reasons=CANCELS, alone=True),
    "decode cancels": Mix(Odds(repeat=0.05), {"cancel_decode": (3, 20)}, reasons=CANCELS, alone=True),
    "cancels in a storm": Mix(BAD, {"cancel": (3, 20)}),
    "prefill worker dies": Mix(CALM, {"kill_prefill_worker": (1, 1)}, alone=True),
    "decode worker dies": Mix(CALM, {"kill_decode_worker": (1, 1)}, alone=True),
    "full hits and dying workers": Mix(CALM, {"kill_prefill_worker": (1, 2)}, full_hits=0.6, alone=True),
    "workers die": Mix(LATE, {"kill_worker": (2, 5)}, alone=True),
    "workers die in a storm": Mix(WORSE, {"kill_worker": (1, 4)}),
    "late words of dead workers": Mix(
        Odds(repeat=0.2, late=0.05, late_ns=14 * SECOND), {"kill_worker": (1, 2)}, rooms=(5, 15), aftermath=True
    ),
    "late words of dead engines": Mix(
        Odds(repeat=0.2, late=0.05, late_ns=14 * SECOND), {"kill_engine": (1, 2)}, rooms=(5, 15), aftermath=True
    ),
    "workers die amid cancels": Mix(LATE, {"kill_worker": (2, 4), "cancel": (3, 12)}),
    "prefill engine dies": Mix(CALM, {"kill_prefill_engine": (1, 2)}, alone=True),
    "decode engine dies": Mix(CALM, {"kill_decode_engine": (1, 2)}, alone=True),
    "engines die": Mix(LATE, {"kill_engine": (2, 5)}, alone=True),
    "prefill is lost for good": Mix(LATE, {"lose_prefill": (1, 1)}, ways=(None, Way.SLICES), alone=True),
    "decode is lost for good": Mix(LATE, {"lose_decode": (1, 1)}, ways=(None, Way.SLICES), alone=True),
    "agents die": Mix(LATE, {"kill_agent": (1, 3)}, alone=True),
    "hosts vanish": Mix(LATE, {"cut": (1, 2)}),
    "hosts vanish and come back empty": Mix(LATE, {"reboot": (1, 2)}),
    "hosts vanish and engines start elsewhere": Mix(
        Odds(slow_write=0.3, slow_write_ns=4 * SECOND), {"replace_prefill": (1, 1)}, rooms=(30, 60)
    ),
    "engines of lost hosts start elsewhere": Mix(LATE, {"depart_prefill": (1, 1)}, rooms=(2, 6)),
    "stopped processes": Mix(LATE, {"stop_worker": (1, 4), "stop_engine": (0, 2)}),
    "clocks": Mix(LATE, {"jump": (1, 5)}, clocks_ns=100 * SECOND),
    "engines move between clocks": Mix(LATE, {"move": (1, 3)}, clocks_ns=100 * SECOND),
    "twins of prefill": Mix(LATE, {"twin_prefill": (1, 1)}, alone=True),
    "twins of decode": Mix(LATE, {"twin_decode": (1, 1)}, alone=True),
    "twins of prefill stay": Mix(LATE, {"twin_prefill": (1, 1), "kill_prefill_worker": (1, 4)}, twins_stay=True),
    "engines move": Mix(LATE, {"move": (1, 3)}, alone=True),
    "in place": Mix(WORSE, {"cancel": (0, 10), "kill_worker": (0, 2)}, ways=(Way.SLICES,)),
    "rooms that never fit": Mix(
        Odds(repeat=0.1),
        rings=(256,),
        ways=(Way.STAGED,),
        sure=True,
        never_fits=True,
        shapes=((2, ((1, 1), (2, 1)), (1, 1)),),
        shape_weights=(1,),
    ),
    "stalled prefill": Mix(
        CALM,
        {"stop_prefill_worker": (1, 1)},
        rings=(16384,),
        ways=(Way.STAGED,),
        rooms=(60, 120),
        alone=True,
        prompt_ns=4 * SECOND,
        shapes=((2, ((2, 1), (1, 1)), (1, 1)),),
        shape_weights=(1,),
    ),
    "near": Mix(Odds(slow_write=0.1, slow_write_ns=50 * MS), {"cancel": (0, 10), "kill_worker": (0, 2)}, near=True),
    "caches": Mix(Odds(loss=0.02, repeat=0.1), sure=True, caches=(2, 5)),
    "caches in tiny rings": Mix(Odds(repeat=0.1), rings=TINY, sure=True, caches=(2, 5)),
    "caches in a storm": Mix(BAD, {"cancel": (0, 10), "kill_worker": (0, 2)}, caches=(2, 5)),
    "caches and dying workers": Mix(CALM, {"kill_prefill_worker": (1, 2)}, full_hits=0.4, alone=True, caches=(2, 5)),
    "caches and dying engines": Mix(LATE, {"kill_engine": (1, 3), "cancel": (0, 5)}, caches=(2, 5)),
    "caches near": Mix(LATE, {"cancel": (0, 10), "kill_worker": (0, 2)}, near=True, caches=(2, 5)),
    "caches in place": Mix(WORSE, {"cancel": (0, 10)}, ways=(Way.SLICES,), caches=(2, 5)),
    "states": Mix(Odds(loss=0.02, repeat=0.1), sure=True, caches=(2, 5), states=True),
    "states in a storm": Mix(BAD, {"cancel": (0, 10), "kill_worker": (0, 2)}, caches=(2, 5), states=True),
    "states near": Mix(LATE, {"cancel": (0, 10), "kill_worker": (0, 2)}, near=True, caches=(2, 5), states=True),
    "states in place": Mix(WORSE, {"cancel": (0, 10)}, ways=(Way.SLICES,), caches=(2, 5), states=True),
    "states with digests": Mix(CALM, caches=(2, 5), states=True, settings=DIGESTS),
    "contradictions": Mix(Odds(repeat=0.1), {"cancel": (0, 3)}, lies=0.3, reasons=CANCELS | {Reason.TOTAL_MISMATCH}),
    "few rooms": Mix(
        Odds(repeat=0.1), {"cancel": (0, 5), "kill_worker": (0, 1)}, settings={"rooms_max": 4, "ended_rooms_max": 64}
    ),
    "short memory": Mix(
        Odds(repeat=0.1),
        {"cancel": (0, 5), "kill_worker": (0, 1)},
        settings={"ended_rooms_max": 3},
        forgets=True,
    ),
    "digests": Mix(Odds(loss=0.02, repeat=0.1, slow_write=0.05), sure=True, settings=DIGESTS),
    "digests nearby": Mix(Odds(repeat=0.1), sure=True, near=True, settings=DIGESTS),
    "damage": Mix(
        Odds(damage=0.02, repeat=0.05), rooms=(20, 60), reasons=frozenset({Reason.DIGEST_MISMATCH}), settings=DIGESTS
    ),
    "damage nearby": Mix(
        Odds(damage=0.02), rooms=(20, 60), near=True, reasons=frozenset({Reason.DIGEST_MISMATCH}), settings=DIGESTS
    ),
    "damage and deaths": Mix(
        Odds(damage=0.02, loss=0.05, slow_write=0.1),
        {"kill_worker": (1, 2), "cancel": (0, 10)},
        ways=(None, Way.STAGED, Way.SLICES),
        settings=DIGESTS,
    ),
    "host memory": Mix(Odds(loss=0.02, repeat=0.1, late=0.02), sure=True, host_memory=True, **UNEQUAL),
    "host memory and dying workers": Mix(
        LATE, {"kill_decode_worker": (1, 3), "kill_worker": (0, 2)}, alone=True, host_memory=True, **UNEQUAL
    ),
    "host memory nearby": Mix(
        Odds(slow_write=0.1, slow_write_ns=50 * MS),
        {"cancel": (0, 10), "kill_worker": (0, 2)},
        near=True,
        host_memory=True,
        **UNEQUAL,
    ),
    "host memory and everything": Mix(
        WORSE,
        {
            "cancel": (0, 10),
            "kill_worker": (0, 3),
            "kill_engine": (0, 1),
            "kill_agent": (0, 1),
            "cut": (0, 1),
            "stop_worker": (0, 2),
            "stop_engine": (0, 1),
            "move": (0, 1),
        },
        rings=(1024, 4096, 32768),
        host_memory=True,
        **UNEQUAL,
    ),
    "everything": Mix(
        WORSE,
        {
            "cancel": (0, 10),
            "kill_worker": (0, 2),
            "kill_engine": (0, 1),
            "kill_agent": (0, 1),
            "cut": (0, 1),
            "stop_worker": (0, 2),
            "jump": (0, 2),
            "move": (0, 1),
        },
        rings=(1024, 4096, 32768),
        lies=0.02,
    ),
}
