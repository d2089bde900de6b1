"""Whether a deployment can work: its manifest read, checked and planned by the types that agents use, too."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from longshore_wire import manifest
from longshore_wire.agent_config import AgentConfig, Backend
from longshore_wire.errors import ConfigError
from longshore_wire.plan import Summary
from longshore_wire.slabs import slab_limit_bytes

# What a status may hold, with room to spare.
FAULTS_SHOWN_MAX = 8
# Specs whose judgement is kept: several times the deployments of a large cluster. One takes a few KiB.
KEPT_COUNT_MAX = 1024


@dataclass(frozen=True, slots=True)
class Judged:
    """A spec that can work (`config` and `plan` are there), or its faults."""

    manifest: manifest.DisaggDeployment | None
    config: AgentConfig | None
    plan: Summary | None
    faults: tuple[str, ...] = ()


def judge(body: dict[str, Any]) -> Judged:
    """Return what becomes of a DisaggDeployment as the API server gives it."""
    return judge_text(text_of(body))


def text_of(body: dict[str, Any]) -> str:
    """Return all that a judgement depends on; equal texts are judged alike."""
    metadata = {key: body["metadata"][key] for key in ("name", "namespace") if key in body["metadata"]}
    parts = {key: body[key] for key in ("apiVersion", "kind", "spec") if key in body}
    return json.dumps({**parts, "metadata": metadata}, sort_keys=True)


# During a rollout a deployment is looked at each second while its spec stays as it is.
@functools.lru_cache(maxsize=KEPT_COUNT_MAX)
def judge_text(text: str) -> Judged:
    """Return what becomes of a DisaggDeployment of this text."""
    read = None
    try:
        read = manifest.read(json.loads(text))
        config = read.agent_config()
    except ConfigError as error:
        return Judged(read, None, None, tuple(error.faults))
    if config.transfer.backend is Backend.LOOPBACK:
        fault = "spec.transfer.backend: Loopback stays within one process: use NIXL or Mooncake"
        return Judged(read, None, None, (fault,))
    return Judged(read, config, _summary(config))


def _summary(config: AgentConfig) -> Summary:
    """Return the plan in numbers. A slab is as large as the lane's buffer and the ring's share allow."""
    plan = config.plan()
    writers = max(len(plan.of_target(rank)) for rank in {pair.target_rank for pair in plan.pairs})
    lane_bytes = config.prefill.staging.buffer_size
    ring_bytes = config.decode.staging.pool_size
    return plan.summary(config.transfer.chunk_tokens, max(1, slab_limit_bytes(lane_bytes, ring_bytes, writers)))


def message(faults: tuple[str, ...]) -> str:
    """Return the faults as one text."""
    rest = len(faults) - FAULTS_SHOWN_MAX
    return "; ".join([*faults[:FAULTS_SHOWN_MAX], *([f"and {rest} more"] if rest > 0 else [])])
