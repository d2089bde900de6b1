"""Defines the faults of the loopback transport's writes, as a value that tests and operators make.

As JSON in `LONGSHORE_LOOPBACK_FAULTS`, a list of rules: `[{"kind": "hold", "first": 2, "until": "/run/test/go"}]`.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import msgspec

from longshore_agent.errors import TransportError
from longshore_wire.errors import Reason

ENVIRONMENT_NAME = "LONGSHORE_LOOPBACK_FAULTS"


class FaultKind(Enum):
    """The kind of a write's fault."""

    DROP = "drop"  # the bytes land and the write is DONE, but its notice is lost
    DELAY = "delay"  # nothing lands before `delay_ns` have passed; then the write succeeds
    REPEAT = "repeat"  # the notice arrives twice
    FAIL = "fail"  # the first half of the first piece lands, then the write is FAILED and settled
    LATE = "late"  # FAILED at once, but its bytes (as they were when it began) land when it is released
    HOLD = "hold"  # OPEN until it is released; then the bytes of that moment land and the write succeeds
    MUTE = "mute"  # the bytes land, but it is OPEN and its notice waits until it is released; then the write succeeds


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule: `kind` hits the writes numbered `first`, `first + every`, … of one transport, `count` of them.

    Writes are numbered from 0 in the order of `start`, over all peers. Probe writes are not numbered and never fail.
    """

    kind: FaultKind
    first: int = 0
    count: int | None = 1  # None: no limit
    every: int = 1
    peer: str | None = None  # only writes to this peer; the numbering stays that of all writes
    delay_ns: int = 0  # DELAY: its length; LATE, HOLD and MUTE: time until release, 0: never by itself
    until: str | None = None  # LATE, HOLD and MUTE: release when a file of this path exists
    when: str | None = None  # the rule hits only writes that begin while a file of this path exists
    mark: str | None = None  # a file that is created, and gets `<number> <peer>\n` appended, when a write is hit

    def hits(self, number: int, peer: str) -> bool:
        """Whether the rule hits write `number`, to `peer`."""
        if number < self.first or (self.peer is not None and peer != self.peer):
            return False
        if self.when is not None and not Path(self.when).exists():
            return False
        turn, rest = divmod(number - self.first, self.every)
        return rest == 0 and (self.count is None or turn < self.count)


class FaultPlan(msgspec.Struct, frozen=True):
    """Rules in order. The first rule that hits a write applies."""

    rules: tuple[Fault, ...] = ()

    def fault_of(self, number: int, peer: str) -> Fault | None:
        """Return the rule that hits write `number` to `peer`; None: no rule."""
        return next((rule for rule in self.rules if rule.hits(number, peer)), None)


def parse_faults(text: str) -> FaultPlan:
    """Return the plan of a JSON list of rules; an empty text has no rule. Raises TransportError."""
    if not text.strip():
        return FaultPlan()
    try:
        rules = msgspec.json.decode(text, type=tuple[Fault, ...])
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"{ENVIRONMENT_NAME} is not a list of faults: {error}", reason=Reason.UNSUPPORTED
        ) from error
    for rule in rules:
        if rule.first < 0 or rule.every < 1 or rule.delay_ns < 0 or (rule.count is not None and rule.count < 1):
            raise TransportError(
                f"{ENVIRONMENT_NAME}: give first >= 0, every >= 1, count >= 1 and delay_ns >= 0, not {rule}",
                reason=Reason.UNSUPPORTED,
            )
    return FaultPlan(rules)
