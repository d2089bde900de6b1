"""Detects drift: whether a child differs from its rendering. Server defaults and fields of others do not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longshore_operator import names

Body = dict[str, Any]


def differs(wanted: Body, found: Body) -> bool:
    """Whether applying `wanted` would change `found`.

    The digest annotation detects fields that are no longer rendered. The field-by-field comparison detects changes by
    others.
    """
    if _rendered(found) != _rendered(wanted):
        return True
    return not _holds(found, {key: value for key, value in wanted.items() if key not in {"apiVersion", "kind"}})


def _rendered(body: Body) -> str | None:
    annotations: Mapping[str, str] = body["metadata"].get("annotations") or {}
    return annotations.get(names.RENDERED_ANNOTATION)


def _holds(found: object, wanted: object) -> bool:
    """Whether `found` contains `wanted`. Both are parsed JSON."""
    # Most parts are equal, which Python finds much faster than this function.
    if found == wanted:
        return True
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(_holds(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list | tuple) and isinstance(found, list | tuple):
        return len(found) == len(wanted) and all(map(_holds, found, wanted))
    # The server omits False, 0, and what is empty.
    return found is None and not wanted
