"""Splits files into documents and finds the DisaggDeployments in them. Pure. Called by `analyze` and `check`, which read the files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from longshore_spec import names
from longshore_spec.strict_document import parse
from longshore_wire.errors import ConfigError

# Of one file: the rendered chart with its CRD takes 0.2 MB, and a deployment with its status about 10 KB.
FILE_BYTES_MAX = 8 << 20
# The line that ends a document, as kubectl splits a file.
_SEPARATOR = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_KIND = re.compile(r"^kind:[ \t]*[\"']?(\w+)", re.MULTILINE)
_LISTS = frozenset({"List", f"{names.KIND}List"})
_METADATA_FIELDS = ("name", "namespace")


@dataclass(frozen=True, slots=True)
class Document:
    """One DisaggDeployment and its place, such as `a.yaml:12`."""

    place: str
    body: dict[str, Any]

    @property
    def name(self) -> tuple[str, str]:
        """Its namespace and name, as far as it has them."""
        metadata = self.body.get("metadata")
        found = metadata if isinstance(metadata, dict) else {}
        name, namespace = (found.get(key) for key in _METADATA_FIELDS)
        return str(namespace or "default"), str(name or "")


@dataclass(slots=True)
class Found:
    """The content of files.

    Attributes:
        notes: documents that are left out, with the reason.
        unreadable: documents that are neither YAML nor JSON, with the fault.
    """

    documents: list[Document] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def read(text: str, name: str, found: Found) -> None:
    """Add the documents in `text` to `found`. Places begin with `name`."""
    for line, part in _parts(text):
        place = f"{name}:{line}" if line > 1 else name
        try:
            body = parse(part, FILE_BYTES_MAX)
        except ConfigError as error:
            kind = _KIND.search(part)
            if kind is not None and kind[1] not in {names.KIND, *_LISTS}:
                # Other kinds may use all of YAML.
                found.notes.append(f"{place}: {kind[1]} is left out")
            else:
                found.unreadable += [f"{place}: {fault}" for fault in error.faults]
            continue
        _sort(body, place, found)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Yield each document and its first line. A document of JSON is one part, whatever its texts hold."""
    if text.lstrip().startswith("{"):
        yield 1, text
        return
    ends = [*(match.start() for match in _SEPARATOR.finditer(text)), len(text)]
    first = 0
    for end in ends:
        part = text[first:end]
        content = part.removeprefix("---")
        if any(line.strip() and not line.lstrip().startswith(("#", "%")) for line in content.splitlines()):
            line = text.count("\n", 0, first) + 1
            # Empty lines in front let the parser's messages name lines of the file.
            yield line, "\n" * (line - 1) + content
        first = end


def _sort(body: object, place: str, found: Found) -> None:
    if body is None:
        return
    if not isinstance(body, dict):
        found.unreadable.append(f"{place}: it is no mapping: give a {names.KIND}")
    elif body.get("kind") in _LISTS and isinstance(body.get("items"), list):
        for number, item in enumerate(body["items"]):
            _sort(item, f"{place} items[{number}]", found)
    elif body.get("kind") == names.KIND and str(body.get("apiVersion", "")).partition("/")[0] == names.API_GROUP:
        _add(Document(place, body), found)
    elif body.get("kind") == names.KIND:
        found.unreadable.append(
            f"{place}: apiVersion is {body.get('apiVersion')!r} with kind {names.KIND}: write {names.API_GROUP_VERSION}"
        )
    elif difflib.get_close_matches(str(body.get("kind")), [names.KIND], cutoff=0.8):
        found.unreadable.append(f"{place}: kind is {body['kind']!r}: did you mean {names.KIND}?")
    else:
        found.notes.append(f"{place}: {body.get('kind', 'a document without a kind')} is left out")


def _add(document: Document, found: Found) -> None:
    twin = next((other for other in found.documents if other.name == document.name), None)
    if twin is not None:
        name = "/".join(document.name)
        found.notes.append(
            f"{document.place}: {name} is also at {twin.place}: kubectl applies both, and the later one holds"
        )
    found.documents.append(document)
