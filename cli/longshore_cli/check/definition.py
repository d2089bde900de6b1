"""Judges the CRD: whether it is served, and whether its content is what the installed operator expects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longshore_cli.check.lines import Line, error, ok, warning
from longshore_cli.operator_deployments import Operator
from longshore_spec import definition, names

_SECTION = "definition"
_CHECK = "crd"
_PAGE = "docs/how-to/kubernetes.md#releases-and-the-definition"
NAME = f"{names.PLURAL}.{names.API_GROUP}"
_VERSION_LABEL = "app.kubernetes.io/version"
_UPDATE = f"kubectl apply --server-side --force-conflicts -f crds/{NAME}.yaml, of the operator's release"

Body = dict[str, Any]


def lines(found: Body | None, operators: Sequence[Operator], release: str, *, before: bool) -> list[Line]:
    """Return what is said of the CRD.

    Args:
        found: None if there is none.
        operators: those that serve a namespace which is checked.
        release: the version of this command.
        before: nothing need be installed yet.
    """
    if found is None:
        if before:
            return [ok(_SECTION, _CHECK, f"the CRD {NAME} is not there yet, and the chart installs it")]
        text = f"the CRD {NAME} is not there"
        return [error(_SECTION, _CHECK, text, "install the chart, or kubectl apply --server-side -f crds/", _PAGE)]
    if fault := _not_served(found):
        way_out = f"see its conditions by `kubectl get crd {NAME} -o yaml`, and update it: {_UPDATE}"
        return [error(_SECTION, _CHECK, fault, way_out, _PAGE)]
    return [_content(found, operators, release)]


def _not_served(found: Body) -> str:
    """Return why objects of our version are not served; empty if they are."""
    conditions = {entry["type"]: entry for entry in found.get("status", {}).get("conditions") or ()}
    established = conditions.get("Established", {})
    if established.get("status") != "True":
        why = conditions.get("NamesAccepted", {}).get("message") or established.get("message") or "no reason is given"
        return f"the API server does not serve the CRD {NAME}: {why}"
    served = {entry["name"] for entry in found["spec"]["versions"] if entry.get("served")}
    if names.API_VERSION in served:
        return ""
    return f"the CRD {NAME} serves {', '.join(sorted(served)) or 'no version'}, not {names.API_VERSION}"


def _content(found: Body, operators: Sequence[Operator], release: str) -> Line:
    metadata = found["metadata"]
    own = definition.digest(found["spec"])
    told = (metadata.get("annotations") or {}).get(definition.ANNOTATION, "")
    version = (metadata.get("labels") or {}).get(_VERSION_LABEL, "")
    shown = f"release {version}" if version else "an unknown release"
    for operator in operators:
        if operator.definition and operator.definition != own:
            text = (
                f"the CRD is of {shown} with content {own}, and operator {operator} of release {operator.version} "
                f"expects content {operator.definition}"
            )
            return error(_SECTION, _CHECK, text, _UPDATE, _PAGE)
    if told != own:
        text = (
            f"the content of the CRD ({own}) is not what its annotation {definition.ANNOTATION} says ({told or 'none'})"
        )
        return warning(_SECTION, _CHECK, f"{text}: it was changed, or is of an older release", _UPDATE, _PAGE)
    if any(operator.definition for operator in operators):
        return ok(_SECTION, _CHECK, f"the CRD serves {names.API_VERSION}, and its content is what the operator expects")
    if version != release:
        text = f"the CRD is of {shown}, and this command of release {release}"
        return warning(_SECTION, _CHECK, text, f"if you install another release: {_UPDATE}", _PAGE)
    return ok(_SECTION, _CHECK, f"the CRD serves {names.API_VERSION}, with the content of release {version}")
