"""The type of one decided condition, before the comparison with the current status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longshore_spec.condition_reasons import ConditionType, Truth, reason

# Names in one message. More would be hard to read.
NAMES_SHOWN_MAX = 5
# The CRD's limit.
MESSAGE_CHARACTERS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    """One condition's reason, from the table, and its message."""

    condition: ConditionType
    reason: str
    message: str

    @property
    def truth(self) -> Truth:
        """The condition's status, which the table gives."""
        return reason(self.condition, self.reason).truth

    @property
    def holds(self) -> bool:
        """Whether the status is True."""
        return self.truth is Truth.TRUE


def verdict(condition: ConditionType, name: str, message: str) -> Verdict:
    """Return a verdict whose reason is in the table."""
    return Verdict(condition, reason(condition, name).name, message[:MESSAGE_CHARACTERS_MAX])


def some(entries: Iterable[str]) -> str:
    """Return the first entries in sorted order and the count of the rest."""
    found: Sequence[str] = sorted(set(entries))
    shown = ", ".join(found[:NAMES_SHOWN_MAX])
    return f"{shown} and {len(found) - NAMES_SHOWN_MAX} more" if len(found) > NAMES_SHOWN_MAX else shown
