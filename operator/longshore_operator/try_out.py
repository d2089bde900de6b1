"""Runs `helm test`: creates a small deployment, waits until its agents are ready and deletes it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from longshore_operator import kinds
from longshore_operator.api import Api
from longshore_spec import names

_REQUEST_LIMIT_S = 10.0
_LOOK_EVERY_S = 2.0
# Small ranks: if an engine registered, staging would take 8 MiB a lane.
_SPEC: dict[str, Any] = {
    "model": {"attention": "GQA", "layers": 2, "kvHeads": 2, "headDim": 64, "dtype": "bfloat16"},
    "prefill": {"tensorParallel": 2, "pageSize": 16, "staging": {"bufferSize": "8Mi", "lanes": 1}},
    "decode": {"tensorParallel": 1, "pageSize": 16, "staging": {"poolSize": "64Mi"}},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when the agents are ready. At the time limit, print the last conditions and return 1."""
    parser = argparse.ArgumentParser(prog="python -m longshore_operator.try_out", description=__doc__)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--limit-s", type=float, default=240.0, help="give up after this")
    parser.add_argument("--role", action="append", default=[], metavar="KEY=VALUE", help="nodes to use; none: all")
    parser.add_argument("--http-port", type=int, default=names.HTTP_PORT, help="HTTP port of the agents")
    chosen = parser.parse_args(arguments)
    return asyncio.run(_try(chosen))


async def _try(chosen: argparse.Namespace) -> int:
    api = Api.connect(_REQUEST_LIMIT_S)
    name = f"try-out-{uuid.uuid4().hex[:6]}"
    selector = dict(entry.split("=", 1) for entry in chosen.role)
    roles = {role: _SPEC[role] | {"nodeSelector": selector} for role in ("prefill", "decode")}
    body = {
        "apiVersion": names.API_GROUP_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": chosen.namespace},
        "spec": _SPEC | roles | {"agents": {"httpPort": chosen.http_port}},
    }
    await api.create(kinds.DEPLOYMENT, body)
    try:
        conditions = await _wait(api, chosen.namespace, name, chosen.limit_s)
    finally:
        await api.delete(kinds.DEPLOYMENT, chosen.namespace, name)
        api.close()
    for entry in conditions:
        sys.stdout.write(f"{entry['type']}: {entry['status']} {entry['reason']}: {entry['message']}\n")
    ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
    sys.stdout.write(f"{'passed' if ready else 'failed'}: {name}\n")
    return 0 if ready else 1


async def _wait(api: Api, namespace: str, name: str, limit_s: float) -> list[dict[str, Any]]:
    """Return the conditions when Ready is True or the time limit has passed."""
    conditions: list[dict[str, Any]] = []
    for _ in range(max(1, round(limit_s / _LOOK_EVERY_S))):
        found = await api.get(kinds.DEPLOYMENT, namespace, name)
        conditions = (found.get("status") or {}).get("conditions") or []
        if any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions):
            break
        await asyncio.sleep(_LOOK_EVERY_S)
    return conditions


if __name__ == "__main__":
    sys.exit(main())
