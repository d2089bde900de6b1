"""What the author of a DisaggDeployment may set only if the cluster's administrator allows it. Pure.

Called by the operator, which refuses the rest, and by `longshore analyze`, which lists what a manifest asks for. An
author who may write DisaggDeployments may not be allowed to create pods, so agents must run no code and see no part of a
node that the author chose. docs/security.md has the same as a table.
"""

from __future__ import annotations

import difflib
import posixpath
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import msgspec

from longshore_spec.agent_pods import sections
from longshore_spec.manifest import Spec
from longshore_spec.pod_settings import LIBRARY_VARIABLES, PodSettings
from longshore_wire.names import ENVIRONMENT_PREFIX

# The SELinux type that containers have anyway.
_USUAL_TYPE = "container_t"
# A longer value of an annotation is not repeated in a message.
_NAMED_VALUE_MAX = 64


class Allowed(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What deployments may use: the chart's value `allow`. In an entry of a list, `*` stands for any text.

    Attributes:
        annotations: each `key` or `key=value`.
        host_paths: each with all below it.
        tolerations: keys of taints, each `key` or `key=value`. A toleration of every taint needs `*`.
    """

    image: bool = False
    host_network: bool = False
    host_ipc: bool = msgspec.field(default=False, name="hostIPC")
    no_network_policy: bool = False
    annotations: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    csi_drivers: tuple[str, ...] = ()
    host_paths: tuple[str, ...] = ()
    priority_classes: tuple[str, ...] = ()
    se_linux_types: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


NOTHING_ALLOWED = Allowed()


class Ask(NamedTuple):
    """One thing that needs permission.

    Attributes:
        path: the manifest's field.
        what: the refused entry, empty for a field with one value.
        value: the field of `Allowed`, as the chart names it.
        fits: texts of which an entry of that field must match one; empty if the field is true or false.
        hint: another way out, for the end of the refusal.
    """

    path: str
    what: str
    value: str
    fits: tuple[str, ...] = ()
    hint: str = ""

    @property
    def chart_value(self) -> str:
        """The value of the chart that would allow it, as YAML has it."""
        return f"allow.{self.value}: {f'[{self.fits[0]}]' if self.fits else 'true'}"

    def is_granted(self, allowed: Allowed) -> bool:
        """Whether the administrator allows it."""
        given = getattr(allowed, _ATTRIBUTES[self.value])
        if isinstance(given, bool):
            return given
        return any(fnmatchcase(text, entry) for text in self.fits for entry in given)


_ATTRIBUTES = {field.encode_name: field.name for field in msgspec.structs.fields(Allowed)}


def asks(spec: Spec) -> Iterator[Ask]:
    """Yield everything in a deployment that needs permission, without `gpu.mps`, whose directory is a value of its own."""
    agents = spec.agents
    fields = (
        ("image", agents.image is not None, "image"),
        ("hostNetwork", agents.host_network, "hostNetwork"),
        ("hostIPC", agents.host_ipc, "hostIPC"),
        ("networkPolicy", not agents.network_policy, "noNetworkPolicy"),
    )
    yield from (Ask(f"spec.agents.{field}", "", value) for field, is_asked, value in fields if is_asked)
    for path, settings in sections(spec):
        yield from _asks_of_pods(path, settings)


def refusals(spec: Spec, allowed: Allowed, *, has_mps: bool) -> list[str]:
    """Return what a deployment asks for and may not have, each with the field and the value that would allow it.

    Args:
        has_mps: whether the chart names the directory of the nodes' MPS daemon.
    """
    found = [
        f"{ask.path}: {f'{ask.what}: ' if ask.what else ''}{_refusal(ask.chart_value)}{ask.hint}"
        for ask in asks(spec)
        if not ask.is_granted(allowed)
    ]
    if spec.gpu.mps and not has_mps:
        found.append(f"spec.gpu.mps: {_refusal('gpu.mps.hostDirectory')}")
    return found


def _refusal(value: str) -> str:
    return f"the cluster's administrator does not allow it: leave it out, or ask for the chart's value {value}"


def _asks_of_pods(path: str, settings: PodSettings) -> Iterator[Ask]:
    for key, value in settings.annotations.items():
        yield Ask(f"{path}.annotations", key, "annotations", _narrowest_first(key, value))
    for name in (entry.name for entry in settings.env):
        if name not in LIBRARY_VARIABLES and not name.startswith(ENVIRONMENT_PREFIX):
            near = difflib.get_close_matches(name, LIBRARY_VARIABLES, n=1, cutoff=0.8)
            yield Ask(f"{path}.env", name, "variables", (name,), f"; {near[0]} needs no permission" if near else "")
    if (priority := settings.priority_class_name) is not None:
        yield Ask(f"{path}.priorityClassName", priority, "priorityClasses", (priority,))
    for taint in settings.tolerations:
        fits = _narrowest_first(taint.key, taint.value or "") if taint.key else ("*",)
        yield Ask(f"{path}.tolerations", taint.key or "every taint", "tolerations", fits)
    for name in settings.security_context.capabilities.add:
        yield Ask(f"{path}.securityContext.capabilities.add", name, "capabilities", (name,))
    if (kind := settings.security_context.se_linux_options.type) is not None and kind != _USUAL_TYPE:
        yield Ask(f"{path}.securityContext.seLinuxOptions.type", kind, "seLinuxTypes", (kind,))
    for volume in settings.volumes:
        if volume.csi is not None:
            driver = _text(volume.csi, "driver")
            yield Ask(f"{path}.volumes", f"csi {driver}", "csiDrivers", (driver,))
        if volume.host_path is not None:
            node = posixpath.normpath(_text(volume.host_path, "path"))
            yield Ask(f"{path}.volumes", f"hostPath {node}", "hostPaths", tuple(_with_parents(node)))


def _narrowest_first(key: str, value: str) -> tuple[str, ...]:
    """Return the texts of a key and its value. Refusals name the first one."""
    pair = f"{key}={value}"
    return (pair, key) if value and len(value) <= _NAMED_VALUE_MAX else (key, pair)


def _with_parents(path: str) -> Iterator[str]:
    yield path
    while path not in {"", "/", "//"}:
        path = posixpath.dirname(path)
        yield path


def _text(source: dict[str, Any], field: str) -> str:
    return str(source.get(field, ""))
