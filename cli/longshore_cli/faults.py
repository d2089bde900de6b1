"""What counts as a fault for `longshore check` and for `longshore status`. Pure."""

from __future__ import annotations

# The share of a ring in quarantine above which the chart's alert LongshoreQuarantineHigh fires.
QUARANTINE_SHARE = 0.1
# The conditions that are not True while all is well.
_GOOD = {"NodesShared": "False", "Progressing": "False"}


def is_good(condition: str, status: str, reason: str) -> bool:
    """Whether a condition of a DisaggDeployment says that all is well."""
    # A rollout that is blocked makes no progress either.
    return status == _GOOD.get(condition, "True") and reason != "Blocked"
