"""Names the content of the CRD, so that the definition on an API server can be compared with the one of a release. Pure.

`operator.reference` writes the name into the CRD's annotation, and the chart copies it to the operator's Deployment. An API
server adds defaults to what it is given, which the name leaves out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# On the CRD and on the operator's Deployment.
ANNOTATION = "longshore.dev/definition"
# The parts that a release decides. `conversion` and what is below it is the API server's default.
_PARTS = ("group", "names", "scope", "versions")
_CHARACTERS = 16


def digest(spec: Mapping[str, Any]) -> str:
    """Return a short name of a CRD's `spec`, the same for a manifest and for the object that the API server made of it."""
    own = {part: spec.get(part) for part in _PARTS}
    text = json.dumps(own, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_CHARACTERS]
