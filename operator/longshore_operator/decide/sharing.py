"""Decides NodesShared: whether agents of other deployments take memory on the same nodes."""

from __future__ import annotations

from longshore_operator.decide import spec
from longshore_operator.decide.verdict import Verdict, some, verdict
from longshore_operator.observe import Observed
from longshore_spec.agent_config import AgentConfig
from longshore_spec.condition_reasons import ConditionType
from longshore_spec.quantity import format_quantity

_SHARED = ConditionType.NODES_SHARED


def judge(observed: Observed, config: AgentConfig | None) -> Verdict:
    """Return NodesShared, with the staging of all deployments on those nodes summed."""
    if not observed.neighbours:
        return verdict(_SHARED, "NodesOwn", "no other deployment's agents run on these nodes")
    configs = [config, *(spec.judge(other.body).config for other in observed.neighbours)]
    known = [entry for entry in configs if entry is not None]
    prefill_bytes = sum(entry.prefill.staging.buffer_size * entry.prefill.staging.lanes for entry in known)
    decode_bytes = sum(entry.decode.staging.pool_size for entry in known)
    # Users of this namespace must not see names of other namespaces.
    near = [other.key.name for other in observed.neighbours if other.key.namespace == observed.key.namespace]
    far = len(observed.neighbours) - len(near)
    others = " and ".join(filter(None, (some(near), f"{far} of other namespaces" if far else "")))
    nodes = some(node for other in observed.neighbours for node in other.nodes)
    text = (
        f"{others} on {nodes}: together up to {format_quantity(prefill_bytes)} of staging a prefill rank and "
        f"{format_quantity(decode_bytes)} a decode rank"
    )
    return verdict(_SHARED, "NodesShared", text)
