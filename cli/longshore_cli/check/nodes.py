"""Judges the nodes that a deployment's selectors pick: labels, taints, GPUs, RuntimeClass and RDMA devices. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longshore_cli.check.lines import Line, error, ok, some, unread, warning
from longshore_cli.words import count
from longshore_spec import pod_settings
from longshore_spec.manifest import DecodeSpec, PrefillSpec, Spec
from longshore_spec.quantity import QuantityError, parse_quantity
from longshore_spec.taints import keeping_out, of_node

GPU = "nvidia.com/gpu"
_KUBERNETES = "docs/how-to/kubernetes.md"
_PODS = f"{_KUBERNETES}#settings-of-the-agents-pods"
_CONDITIONS = "docs/reference/conditions.md#agentsready"
_GPUS = "docs/how-to/gpus.md#in-pods"
_WIRES = "docs/how-to/wires.md"

Body = dict[str, Any]


@dataclass(frozen=True)
class Picked:
    """The nodes of one role.

    Attributes:
        usable: ready, and without a taint that the agents do not tolerate.
    """

    role: str
    selector: str
    settings: Body
    all: Sequence[Body]
    usable: Sequence[Body]
    tainted: Mapping[str, str]
    down: Sequence[str]


def lines(
    section: str,
    spec: Spec,
    nodes: Sequence[Body] | Exception,
    runtime_classes: Collection[str] | Exception,
    runtime_class: str,
) -> list[Line]:
    """Return what is said of a deployment's nodes.

    Args:
        nodes: all of the cluster, or why they cannot be read.
        runtime_classes: the names of those there are, or why they cannot be read.
        runtime_class: the operator's default for agents.
    """
    roles: dict[str, PrefillSpec | DecodeSpec] = {"prefill": spec.prefill, "decode": spec.decode}
    settings = {name: pod_settings.merged([spec.agents, role.agents], runtime_class) for name, role in roles.items()}
    said = [_runtime_class(section, settings, runtime_classes)]
    if isinstance(nodes, Exception):
        return [unread(section, "nodes", nodes), *said]
    for name, role in roles.items():
        picked = pick(name, role, settings[name], nodes, host_network=spec.agents.host_network)
        said.append(_placed(section, picked))
        if picked.usable:
            said += [_gpus(section, picked, role), *_devices(section, picked), *_rdma(section, picked, spec)]
    return said


def pick(
    name: str, role: PrefillSpec | DecodeSpec, settings: Body, nodes: Sequence[Body], *, host_network: bool
) -> Picked:
    """Return the nodes of a role."""
    usable, tainted, down, matching = [], {}, [], []
    for node in nodes:
        if not role.node_selector.items() <= (node["metadata"].get("labels") or {}).items():
            continue
        matching.append(node)
        taint = keeping_out(of_node(node), settings.get("tolerations") or (), host_network=host_network)
        if not _is_ready(node):
            down.append(name_of(node))
        elif taint is not None:
            tainted[name_of(node)] = str(taint)
        else:
            usable.append(node)
    selector = ",".join(f"{key}={value}" for key, value in sorted(role.node_selector.items()))
    return Picked(name, selector, settings, matching, usable, tainted, down)


def name_of(node: Body) -> str:
    """Return the name of a node."""
    return str(node["metadata"]["name"])


def _is_ready(node: Body) -> bool:
    conditions = node.get("status", {}).get("conditions") or ()
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _placed(section: str, picked: Picked) -> Line:
    check = f"nodes.{picked.role}"
    chosen = f"the label{'s' if ',' in picked.selector else ''} {picked.selector}" if picked.selector else "no selector"
    if not picked.all:
        text = f"no node has {chosen} of {picked.role}"
        way_out = f"kubectl label node NODE {picked.selector.replace(',', ' ')}, or change {picked.role}.nodeSelector"
        return error(section, check, text, way_out, _CONDITIONS)
    away = [f"{some(picked.down)} not ready"] if picked.down else []
    taints = some(picked.tainted.values())
    away += [f"{some(picked.tainted)} tainted with {taints}, which agents do not tolerate"] if picked.tainted else []
    text = f"{count(len(picked.usable), 'node')} of {len(picked.all)} with {chosen} can run {picked.role}'s agents"
    if not away:
        return ok(section, check, text)
    way_out = (
        "tolerate the taint in agents.tolerations, or remove it" if picked.tainted else "see kubectl describe node"
    )
    make = warning if picked.usable else error
    return make(section, check, f"{text}: {'; '.join(away)}", way_out, _CONDITIONS)


def _gpus(section: str, picked: Picked, role: PrefillSpec | DecodeSpec) -> Line:
    check = f"gpus.{picked.role}"
    offered = {name_of(node): _amount(node, GPU) for node in picked.usable}
    with_gpus = [name for name, number in offered.items() if number]
    if not picked.settings["gpus"]:
        if with_gpus:
            text = (
                f"{picked.role}'s nodes have GPUs ({some(with_gpus)}), and the manifest gives agents no access to them"
            )
            return warning(section, check, text, "set agents.gpuAccess if pages are in GPU memory", _GPUS)
        return ok(section, check, f"the manifest asks for no GPUs, and {picked.role}'s nodes have none")
    ranks = role.tensor_parallel if role.ranks_per_node is None else role.ranks_per_node
    short = [f"{name} ({number})" for name, number in offered.items() if number < ranks]
    if not short:
        return ok(section, check, f"each of {picked.role}'s nodes has {ranks} {GPU} for as many ranks")
    text = f"{some(short)} offer fewer {GPU} than {count(ranks, 'rank')} of {picked.role} on a node"
    if not with_gpus:
        way_out = "install NVIDIA's device plugin, unless engines get GPUs by dynamic resource allocation"
    elif role.ranks_per_node is None:
        way_out = f"give {picked.role}.ranksPerNode, unless an engine's ranks are on several nodes"
    else:
        return error(section, check, text, f"lower {picked.role}.ranksPerNode, or select other nodes", _GPUS)
    return warning(section, check, text, way_out, _GPUS)


def _runtime_class(section: str, settings: Mapping[str, Body], there: Collection[str] | Exception) -> Line:
    check = "runtimeclass"
    asked = sorted({str(found["runtimeClassName"]) for found in settings.values() if found["runtimeClassName"]})
    if not asked:
        return ok(section, check, "agents need no RuntimeClass")
    if isinstance(there, Exception):
        return unread(section, check, there)
    missing = [name for name in asked if name not in there]
    if missing:
        text = f"RuntimeClass {some(missing)} is not there, so no agent's pod can be created"
        way_out = "install the NVIDIA container toolkit or GPU operator, or set agents.gpuAccess to CDI"
        return error(section, check, text, way_out, _GPUS)
    return ok(section, check, f"RuntimeClass {some(asked)} is there")


def _asked(settings: Body) -> dict[str, int]:
    """Return the devices that agents ask the kubelet for."""
    resources = settings.get("resources", {})
    given = {**resources.get("requests", {}), **resources.get("limits", {})}
    return {name: _number(value) for name, value in given.items() if "/" in name}


def _devices(section: str, picked: Picked) -> list[Line]:
    said = []
    for name, wanted in sorted(_asked(picked.settings).items()):
        check = f"devices.{picked.role}"
        short = [name_of(node) for node in picked.usable if _amount(node, name) < wanted]
        if short:
            text = f"{some(short)} offer fewer than the {wanted} {name} that {picked.role}'s agents ask for: they stay Pending"
            way_out = "install the device plugin of that resource, or correct agents.resources"
            said.append(error(section, check, text, way_out, _PODS))
        else:
            said.append(ok(section, check, f"each of {picked.role}'s nodes offers {wanted} {name}"))
    return said


def _rdma(section: str, picked: Picked, spec: Spec) -> list[Line]:
    """Judge whether agents get RDMA devices, if only RDMA may carry bytes to other hosts or nodes offer it."""
    check = f"rdma.{picked.role}"
    settings = picked.settings
    offered = {name for node in picked.usable for name in _allocatable(node) if "rdma" in name or "infiniband" in name}
    asks = any("rdma" in name or "infiniband" in name for name in _asked(settings))
    # Other ways to devices: the node's network with its device files, or a claim of dynamic resource allocation.
    others = settings.get("resourceClaims") or any(
        "infiniband" in str((volume.get("hostPath") or {}).get("path")) for volume in settings.get("volumes") or ()
    )
    if asks or others:
        return []
    wires = {str(getattr(wire, "value", wire)) for wire in spec.transfer.wires}
    if "RDMA" in wires and "TCP" not in wires:
        text = f"transfer.wires allows RDMA between hosts and no TCP, and {picked.role}'s agents ask for no RDMA device"
        way_out = f"ask for {some(offered) if offered else 'rdma/…'} in agents.resources, or allow TCP"
        return [warning(section, check, text, way_out, _WIRES)]
    if offered:
        text = f"{picked.role}'s nodes offer {some(offered)}, and agents ask for none: bytes between hosts take TCP"
        return [warning(section, check, text, "ask for it in agents.resources, if RDMA is to be used", _PODS)]
    return [ok(section, check, f"no RDMA device is asked for, and {picked.role}'s nodes offer none")]


def _allocatable(node: Body) -> Body:
    found = node.get("status", {}).get("allocatable") or {}
    return {name: value for name, value in found.items() if _number(value)}


def _amount(node: Body, name: str) -> int:
    return _number((node.get("status", {}).get("allocatable") or {}).get(name, 0))


def _number(value: object) -> int:
    try:
        return parse_quantity(int(value) if isinstance(value, str) and value.isdecimal() else value)
    except QuantityError:
        return 0
