"""Finds what a change from a running deployment to a manifest replaces, restarts and leaves alone. Pure.

Called by `inspect_manifests`. A test compares the answers with the objects that the operator renders, for every field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from longshore_spec import names
from longshore_spec.agent_template import template_parts
from longshore_spec.manifest import DisaggDeployment, Spec, UpdateType
from longshore_spec.node_groups import groups, role_names

Body = dict[str, Any]
Path = tuple[str, ...]
_ABSENT = object()
# Fields of a role by which agents know the engines that they accept.
_LAYOUT = ("tensorParallel", "pipelineParallel", "dataParallel", "pageSize", "pageOrder")


class Effect(msgspec.Struct, frozen=True, rename="camel"):
    """One effect of a change.

    Attributes:
        subject: such as `agents of prefill` or `engines of decode`.
        effect: replaced, kept, moved, created, deleted, restart, reconnect, in place, waits.
        fields: the fields that cause it.
        message: what happens, and what to do.
    """

    subject: str
    effect: str
    fields: tuple[str, ...]
    message: str


def effects(before: DisaggDeployment, after: DisaggDeployment) -> list[Effect]:
    """Return the effects of a change between two manifests of one deployment, each of which may be invalid."""
    paths = list(_changed(_plain(before.spec), _plain(after.spec), ()))
    if not paths:
        return []
    found = [*_agents(before, after, paths)]
    ending = {effect.subject for effect in found if effect.effect in {"replaced", "deleted"}}
    groups_of = {_subject(roles): role_names(roles) for roles in (*names.ROLES, names.BOTH)}
    replaced = {role for subject in ending for role in groups_of[subject]}
    found += _engines(before, after, paths, replaced)
    caused = {field for effect in found for field in effect.fields}
    rest = [path for path in paths if _named(path) not in caused]
    if rest:
        fields = tuple(dict.fromkeys(map(_named, rest)))
        found.append(Effect("no agent and no engine", "in place", fields, "the operator applies it; nothing restarts"))
    if after.spec.paused:
        waits = "spec.paused is true: nothing of this happens until it is false"
        found.append(Effect("all of this", "waits", ("spec.paused",), waits))
    return found


def _agents(before: DisaggDeployment, after: DisaggDeployment, paths: Sequence[Path]) -> Iterator[Effect]:
    old, new = ({group.roles: group for group in groups(each.spec)} for each in (before, after))
    selectors = [_named(path) for path in paths if path[1:2] == ("nodeSelector",)]
    nodes = tuple(dict.fromkeys(selectors))
    for roles, group in new.items():
        subject = _subject(roles)
        if roles not in old:
            yield Effect(subject, "created", nodes, "nodes that the selectors now pick get agents")
            continue
        if causes := _causes(before, after, paths, partial(template_parts, group=group)):
            yield Effect(subject, "replaced", causes, _replacement(after.spec))
        if old[roles].affinity() != group.affinity():
            text = "nodes that are picked no longer lose their agents, new ones get one, and the others keep theirs"
            yield Effect(subject, "moved", nodes, text)
    for roles in old.keys() - new.keys():
        text = "the selectors leave no such node: these agents end, and those of other groups start in their place"
        yield Effect(_subject(roles), "deleted", nodes, text)


def _replacement(spec: Spec) -> str:
    strategy = spec.agents.update_strategy
    if strategy.type is UpdateType.ON_DELETE:
        return "each when its pod is deleted (updateStrategy OnDelete); an ending agent first finishes its open rooms"
    count = strategy.rolling_update.max_unavailable
    return f"{count} at a time (updateStrategy RollingUpdate); an ending agent first finishes its open rooms"


def _engines(
    before: DisaggDeployment, after: DisaggDeployment, paths: Sequence[Path], replaced: set[str]
) -> Iterator[Effect]:
    for role in names.ROLES:
        if causes := _causes(before, after, paths, partial(_engine_parts, role=role)):
            text = f"restart their pods with the variables of the ConfigMap {after.deployment.name}-engine-{role}: agents refuse another layout"
            if all(cause == "spec.gpu.mps" for cause in causes):
                text = "restart their pods: they get or lose the node's MPS daemon"
            yield Effect(f"engines of {role}", "restart", causes, text)
        elif role in replaced:
            text = "they connect to the new agents by themselves; rooms wait meanwhile"
            yield Effect(f"engines of {role}", "reconnect", (), text)
    if before.spec.decode.target is not after.spec.decode.target:
        text = f"claims that name no memory go to {after.spec.decode.target.value} pages: engines must have registered such pages"
        yield Effect(f"engines of {names.DECODE}", "check", ("spec.decode.target",), text)


def _engine_parts(found: DisaggDeployment, role: str) -> Body:
    """Return what engines of a role read from their ConfigMap when their pod starts."""
    spec = found.spec
    declared = _plain(spec)[role]
    return {
        "layout": {name: declared[name] for name in _LAYOUT},
        "mps": spec.gpu.mps,
    }


def _causes(
    before: DisaggDeployment,
    after: DisaggDeployment,
    paths: Sequence[Path],
    look: Callable[[DisaggDeployment], Body],
) -> tuple[str, ...]:
    """Return the changed fields that change what `look` sees, alone if one does; none if it sees no change."""
    if look(before) == look(after):
        return ()
    found = [
        _named(path)
        for path in paths
        if look(_with(before, after, path)) != look(before) or look(_with(after, before, path)) != look(after)
    ]
    # Fields that change something only together cause it together.
    return tuple(dict.fromkeys(found or map(_named, paths)))


def _with(base: DisaggDeployment, other: DisaggDeployment, path: Path) -> DisaggDeployment:
    """Return `base` with the value that `other` has at a path."""
    spec, source = copy.deepcopy(_plain(base.spec)), _plain(other.spec)
    place = spec
    for key in path[:-1]:
        place, source = place.setdefault(key, {}), source.get(key, {})
    if path[-1] in source:
        place[path[-1]] = source[path[-1]]
    else:
        place.pop(path[-1], None)
    return msgspec.structs.replace(base, spec=msgspec.convert(spec, Spec))


def _changed(one: Any, other: Any, path: Path) -> Iterator[Path]:
    """Yield the paths at which two values differ; lists are compared whole."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _changed(one.get(key, _ABSENT), other.get(key, _ABSENT), (*path, key))
    elif one is _ABSENT or other is _ABSENT or one != other:
        yield path


def _plain(spec: Spec) -> Body:
    found: Body = msgspec.to_builtins(spec)
    return found


def _named(path: Path) -> str:
    return ".".join(("spec", *path))


def _subject(roles: str) -> str:
    return "agents of nodes with both roles" if roles == names.BOTH else f"agents of {roles}"
