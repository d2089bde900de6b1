"""Makes events for the engine, and metrics, from ends of rooms and states of cores. Called by `loop` and `status`."""

from __future__ import annotations

from collections.abc import Mapping

from longshore_agent.status.metrics import Metrics
from longshore_wire.effects import RoomEnded, RoomReleased
from longshore_wire.engine_messages import Half, RoomEvent, RoomEventKind
from longshore_wire.errors import Reason
from longshore_wire.granting import Granter
from longshore_wire.peers import PeerState
from longshore_wire.session import Session

_PEER_STATES = {
    PeerState.DIALING: "connecting",
    PeerState.ATTACHED: "attached",
    PeerState.REFUSED: "refused",
    PeerState.LOST: "lost",
}


def ended_event(effect: RoomEnded) -> RoomEvent:
    """Return the engine's event for a room that is done or has failed."""
    kind = RoomEventKind.DONE if effect.reason is Reason.NONE else RoomEventKind.FAILED
    key = effect.key
    return RoomEvent(
        effect.half, key.instance, key.room, key.pool, kind, effect.reason, effect.text, effect.bytes_moved
    )


def released_event(effect: RoomReleased) -> RoomEvent:
    """Return the engine's event for a room whose pages are no longer used."""
    key = effect.key
    return RoomEvent(effect.half, key.instance, key.room, key.pool, RoomEventKind.RELEASED)


def count_ended(metrics: Metrics, effect: RoomEnded) -> None:
    """Count the end of one room."""
    outcome = "done" if effect.reason is Reason.NONE else "failed"
    if effect.reason is Reason.CANCELLED:
        outcome = "cancelled"
    half = effect.half.name.lower()
    metrics.add("longshore_rooms_total", 1, half=half, outcome=outcome, reason=effect.reason.name.lower())


def count_session(metrics: Metrics, half: Half, session: Session, rooms_open: int) -> None:
    """Update the gauges and counters of one core."""
    metrics.set("longshore_rooms_open", rooms_open, half=half.name.lower())
    metrics.advance("longshore_retries_total", session.counters["retries"], message="all")
    for name, count in session.counters.items():
        kind, _, rest = name.partition(".")
        if kind == "claims":
            way, _, why = rest.partition(".")
            metrics.advance("longshore_claims_total", count, way=way, why=why)


def count_peers(metrics: Metrics, sessions: list[Session]) -> None:
    """Update the gauge of peers."""
    counts = dict.fromkeys(_PEER_STATES.values(), 0)
    for session in sessions:
        for peer in session.peers.values():
            counts[_PEER_STATES[peer.state]] += 1
    for state, count in counts.items():
        metrics.set("longshore_peers", count, state=state)


def count_ring(metrics: Metrics, granter: Granter) -> None:
    """Update the gauges and counters of the ring."""
    ring = granter.ring
    metrics.set("longshore_ring_capacity_bytes", ring.capacity_bytes)
    metrics.set("longshore_ring_used_bytes", ring.used_bytes + ring.held_bytes)
    metrics.set("longshore_ring_held_bytes", ring.held_bytes)
    metrics.advance("longshore_ring_rounds_total", ring.rounds)
    metrics.advance("longshore_credit_waits_total", granter.credit_waits)


def count_refused(metrics: Metrics, counters: Mapping[str, int]) -> None:
    """Update the counters of refused messages."""
    for name, count in counters.items():
        kind, _, what = name.partition(".")
        if kind == "refused":
            metrics.advance("longshore_refused_messages_total", count, reason=what.lower())


def peer_state(state: PeerState) -> str:
    """Return the name of a peer's state in metrics and status."""
    return _PEER_STATES[state]
