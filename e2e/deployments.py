"""Where the tree's manifests are, and deployments that tests make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CRD = ROOT / "crds" / "disaggdeployments.longshore.dev.yaml"

Body = dict[str, Any]


def manifest(namespace: str, name: str = "llama", **spec: object) -> Body:
    """A deployment that works; `spec` replaces whole parts of it."""
    base: Body = {
        "model": {"attention": "GQA", "layers": 80, "kvHeads": 8, "headDim": 128, "dtype": "bfloat16"},
        "prefill": {"tensorParallel": 4, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "prefill"}},
        "decode": {"tensorParallel": 1, "pageSize": 64, "nodeSelector": {"longshore.dev/role": "decode"}},
    }
    return {
        "apiVersion": "longshore.dev/v1alpha1",
        "kind": "DisaggDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": base | spec,
    }


def to_text(document: object) -> str:
    """As kubectl reads it."""
    return json.dumps(document)
