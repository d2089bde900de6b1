"""Prints analyses as a table for people, or as JSON. Pure. Called by `command`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longshore_cli import words
from longshore_cli.aligned import aligned
from longshore_cli.analyze.changes import Effect
from longshore_cli.analyze.findings import Severity
from longshore_cli.analyze.inspect_manifests import Analysis, counts
from longshore_cli.analyze.sizes import PairSizes, RingSizes, RoleMemory, Sizes
from longshore_cli.words import binary, count, plain
from longshore_spec import names

# Rows of a table. JSON has all pairs.
PAIRS_SHOWN_MAX = 24
_LEFT = frozenset({0, 1})


def as_json(analyses: Sequence[Analysis], notes: Sequence[str], unreadable: Sequence[str]) -> str:
    """Return all analyses as one JSON document."""
    return words.as_json({"deployments": analyses, "notes": notes, "unreadable": unreadable})


def table(analyses: Sequence[Analysis], notes: Sequence[str]) -> str:
    """Return the report for people."""
    lines = [line for analysis in analyses for line in (*_deployment(analysis), "")]
    found = counts(tuple(analyses))
    lines += [f"note: {note}" for note in notes]
    lines.append(
        f"{len(analyses)} analyzed: {count(found[Severity.ERROR], 'error')}, {count(found[Severity.WARNING], 'warning')}"
    )
    return "\n".join(map(plain, lines))


def _deployment(analysis: Analysis) -> Iterator[str]:
    yield f"{names.KIND} {analysis.namespace}/{analysis.name or '(no name)'} ({analysis.place})"
    for finding in analysis.findings:
        refuses = f"the {finding.by.value} refuses it: " if finding.severity is Severity.ERROR else ""
        yield f"  {finding.severity.value} {finding.path}: {refuses}{finding.message}"
    if analysis.needs:
        yield f"  It needs the administrator's permission by these values of the chart: {'; '.join(analysis.needs)}"
    if analysis.sizes is not None:
        yield from _sizes(analysis.sizes)
    if analysis.changes is not None:
        yield from _changes(analysis.changes)


def _sizes(found: Sizes) -> Iterator[str]:
    devices = ", ".join(f"{role} on {device}s" for role, device in found.devices.items())
    yield f"  Plan for pages of {devices}"
    for way in found.ways:
        over = f" over {', '.join(way.wires)}" if way.wires else ""
        caches = "" if way.caches == found.caches else f" of {', '.join(way.caches)}"
        yield f"    between {way.between}{over}{caches}: {way.way} ({way.meaning})"
    if found.replicas > 1:
        yield f"    {found.replicas} prefill ranks hold each head; each pair reads from one, which rooms share evenly"
    yield from (f"    {line}" for line in _pairs(found.pairs, is_named=len(found.caches) > 1))
    if found.idle_sources:
        yield f"    prefill ranks without a pair in one room: {_listed(found.idle_sources)}"
    states = f", {binary(found.slot_bytes)} of states a request" if found.slot_bytes else ""
    yield f"    {found.bytes_per_token} bytes a token{states}; {found.slices_per_chunk} slices a chunk"
    yield "  Sizes"
    if found.ring is not None:
        yield from (f"    {line}" for line in _ring(found.ring))
    yield from (f"    {line}" for line in _memory(found.memory))
    for agent in found.agents:
        limit = f", limit {agent.limit}" if agent.limit else ""
        origin = "given" if agent.is_given else "computed"
        nodes = "nodes of both roles" if agent.roles == names.BOTH else f"nodes of {agent.roles}"
        yield f"    agent on {nodes}: memory request {agent.request or 'none'}{limit} ({origin})"


def _pairs(pairs: Sequence[PairSizes], *, is_named: bool) -> list[str]:
    rows = [("cache", "prefill rank", "decode rank", "layers", "heads", "bytes a token", "a chunk", "slabs a chunk")]
    rows += [
        (
            pair.cache,
            str(pair.source_rank),
            str(pair.target_rank),
            _interval(pair.layers),
            _interval(pair.heads),
            str(pair.bytes_per_token or "-"),
            binary(pair.chunk_bytes),
            str(pair.chunk_slabs or "-"),
        )
        for pair in pairs[:PAIRS_SHOWN_MAX]
    ]
    left_out = len(pairs) - PAIRS_SHOWN_MAX
    return [
        *aligned([row if is_named else row[1:] for row in rows], _LEFT),
        *([f"and {left_out} more pairs: -o json shows them"] if left_out > 0 else []),
    ]


def _ring(ring: RingSizes) -> Iterator[str]:
    yield f"a chunk of {ring.chunk_tokens} tokens needs {count(ring.chunk_slabs, 'slab')} ({binary(ring.chunk_bytes)}) of a decode rank's ring"
    yield f"the ring ({binary(ring.ring_bytes)}) holds {count(ring.rooms, 'room')} of {ring.tokens} tokens ({binary(ring.room_bytes)} each)"
    yield f"one room gets at most {binary(ring.share_bytes)} of it at a time, or one slab"


def _memory(memory: Sequence[RoleMemory]) -> Iterator[str]:
    for role in memory:
        kind = "lanes" if role.role == names.PREFILL else "ring"
        each = f"{role.memories} x {binary(role.rank_bytes)}" if role.memories > 1 else binary(role.rank_bytes)
        ranks = count(role.ranks_per_node, "rank")
        yield f"{role.role} staging ({kind}): {each} a rank, {binary(role.node_bytes)} a node with {ranks}, in {role.place} memory"


def _changes(changes: Sequence[Effect]) -> Iterator[str]:
    yield "  Change from the running deployment"
    if not changes:
        yield "    none: the two are equal"
    for effect in changes:
        causes = f" (because of {', '.join(effect.fields)})" if effect.fields else ""
        yield f"    {effect.subject}: {effect.effect}{causes}"
        yield f"      {effect.message}"


def _interval(ends: tuple[int, int]) -> str:
    return f"{ends[0]}-{ends[1] - 1}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:PAIRS_SHOWN_MAX]))
    return f"{shown} and {len(ranks) - PAIRS_SHOWN_MAX} more" if len(ranks) > PAIRS_SHOWN_MAX else shown
