"""Reads, checks and plans a manifest with the same types that agents use."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longshore_operator.render.wanted import ImageChoice
from longshore_spec import agent_pods, manifest, permission
from longshore_spec.agent_config import AgentConfig, Backend
from longshore_wire.errors import ConfigError
from longshore_wire.plan import Summary

# Faults in one status message; well below the message's limit.
FAULTS_SHOWN_MAX = 8
# Cached results: several times the deployments of a large cluster. One takes a few KiB.
KEPT_COUNT_MAX = 1024


@dataclass(frozen=True, slots=True)
class Judged:
    """A valid spec with `config` and `plan`, or its faults and the reason of Compatible.

    Attributes:
        caches: the part of each cache in `plan`, by its name.
        unread: paths of fields that this release does not know, and ignores.
    """

    manifest: manifest.DisaggDeployment | None
    config: AgentConfig | None
    plan: Summary | None
    faults: tuple[str, ...] = ()
    reason: str = "InvalidSpec"
    unread: tuple[str, ...] = ()
    caches: Mapping[str, Summary] = field(default_factory=dict)

    @property
    def paused(self) -> bool:
        """Whether nothing but the status may be written."""
        return self.manifest is not None and self.manifest.spec.paused


def judge(body: dict[str, Any]) -> Judged:
    """Check a DisaggDeployment as the API server returns it."""
    return judge_text(text_of(body))


def permitted(judged: Judged, images: ImageChoice) -> Judged:
    """Return `judged`, as refused if a valid spec asks for more than the cluster's administrator allows."""
    if judged.manifest is None or judged.config is None:
        return judged
    faults = permission.refusals(judged.manifest.spec, images.allowed, has_mps=bool(images.mps.host))
    if not faults:
        return judged
    return dataclasses.replace(judged, config=None, plan=None, faults=tuple(faults), reason="NotAllowed")


def text_of(body: dict[str, Any]) -> str:
    """Return the cache key: every field that the check depends on."""
    metadata = {key: body["metadata"][key] for key in ("name", "namespace") if key in body["metadata"]}
    parts = {key: body[key] for key in ("apiVersion", "kind", "spec") if key in body}
    return json.dumps({**parts, "metadata": metadata}, sort_keys=True)


# Cached because a rollout reconciles a deployment each second while its spec stays the same.
@functools.lru_cache(maxsize=KEPT_COUNT_MAX)
def judge_text(text: str) -> Judged:
    """Check a DisaggDeployment given as `text_of` writes it."""
    read: manifest.DisaggDeployment | None = None
    unread: tuple[str, ...] = ()
    try:
        read, unread = manifest.read_known(json.loads(text))
        config = read.agent_config()
    except ConfigError as error:
        return Judged(read, None, None, tuple(error.faults), unread=unread)
    faults = agent_pods.faults(read.spec)
    if config.transfer.backend is Backend.LOOPBACK:
        faults = [*faults, "spec.transfer.backend: Loopback stays within one process: use NIXL or Mooncake"]
    if faults:
        return Judged(read, None, None, tuple(faults), unread=unread)
    caches = config.summaries()
    return Judged(read, config, Summary.of_all(tuple(caches.values())), unread=unread, caches=caches)


def message(faults: tuple[str, ...]) -> str:
    """Return the faults as one text."""
    rest = len(faults) - FAULTS_SHOWN_MAX
    return "; ".join([*faults[:FAULTS_SHOWN_MAX], *([f"and {rest} more"] if rest > 0 else [])])
