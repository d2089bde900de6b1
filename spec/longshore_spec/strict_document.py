"""Reads a JSON or YAML document into msgspec structs and reports all faults together, each with its path.

Called by `agent_config` and `manifest`. msgspec itself stops at the first fault. This module walks the structs field by
field and lets msgspec check one leaf at a time. Pure.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from longshore_spec.quantity import QuantityError, format_quantity, parse_quantity
from longshore_wire.errors import ConfigError

# A config with all fields takes 2 KiB. A much larger document is no config and would give long lists of faults.
DOCUMENT_BYTES_MAX = 64 << 10
SHOWN_CHARACTERS_MAX = 60

S = TypeVar("S", bound=msgspec.Struct)
# Values of a document after its aliases are replaced. A few nested aliases can expand to more than fit into memory.
VALUES_MAX = 1_000_000
# PyYAML's error for a file with several documents, which is valid YAML.
_SEVERAL = "expected a single document in the stream"


class Mapping(dict[Any, Any]):
    """A mapping of the document that records repeated keys.

    Args:
        entries: its keys and values.
        merged: entries of mappings that YAML's `<<` merges into it, where it has no such key.
    """

    def __init__(self, entries: list[tuple[Any, Any]], merged: Sequence[tuple[Any, Any]] = ()) -> None:
        super().__init__([*merged, *entries])
        counts = Counter(key for key, _ in entries)
        self.repeated = [key for key, count in counts.items() if count > 1]


def parse(text: str | bytes, bytes_max: int = DOCUMENT_BYTES_MAX) -> object:
    """Parse the document in `text`: JSON if it begins with a brace, else YAML. Mappings become `Mapping`.

    Raises:
        ConfigError: the text is too large or no document; names the line.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if len(data) > bytes_max:
        raise ConfigError([f"(document): {len(data)} bytes: at most {bytes_max} are allowed"])
    try:
        decoded = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError([f"(document): not UTF-8: {error}"]) from error
    if not decoded.lstrip().startswith("{"):
        return _parse_yaml(decoded)
    try:
        return json.loads(decoded, object_pairs_hook=Mapping)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"(document): not JSON: {error}"]) from error


def _parse_yaml(text: str) -> object:
    # PyYAML is imported only here, so that the client, which never reads YAML, stays light.
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError(["(document): it is YAML and PyYAML is not installed: write JSON or install it"]) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """A safe loader whose mappings record repeated keys."""

        def get_single_node(self) -> Any:
            found = super().get_single_node()
            if found is not None and _value_count(found, {}) > VALUES_MAX:
                raise yaml.composer.ComposerError(
                    None, None, f"its aliases make more than {VALUES_MAX} values of it", found.start_mark
                )
            return found

    def construct(loader: Any, node: Any) -> Mapping:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        loader.flatten_mapping(node)
        entries = []
        for key, value in node.value:
            name = loader.construct_object(key, deep=True)
            if not isinstance(name, Hashable):
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "a key is a mapping or a list: render templates first, as with `helm template`",
                    key.start_mark,
                )
            entries.append((name, loader.construct_object(value, deep=True)))
        merged_count = len(entries) - len(own)
        return Mapping(entries[merged_count:], entries[:merged_count])

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct)
    try:
        # The loader is a SafeLoader, which builds only plain values.
        return yaml.load(text, Loader=Loader)  # noqa: S506
    except yaml.composer.ComposerError as error:
        if error.context == _SEVERAL:
            line = error.problem_mark.line + 1
            raise ConfigError([f"(document): a second document begins at line {line}: give one a file"]) from error
        raise ConfigError([f"(document): not YAML: {' '.join(str(error).split())}"]) from error
    except (yaml.YAMLError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # PyYAML passes on Python's errors for invalid scalars, such as month 13 or an empty !!int.
        raise ConfigError([f"(document): not YAML: {' '.join(str(error).split())}"]) from error


def _value_count(node: Any, counts: dict[int, int]) -> int:
    """Return the number of values of a node, each alias counted with all that it stands for.

    Raises RecursionError: a node contains itself.
    """
    if id(node) not in counts:
        children = node.value if isinstance(node.value, list) else ()
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        counts[id(node)] = 1 + sum(_value_count(part, counts) for part in parts)
    return counts[id(node)]


def read_struct(kind: type[S], raw: object, path: str, faults: list[str]) -> S | None:
    """Return `raw` as a `kind`, or None after adding all faults below `path` to `faults`.

    A kind whose keys depend on each other has a method `faults_of(keys)`; each of its texts begins with a key.
    """
    if not isinstance(raw, dict):
        faults.append(f"{path or '(document)'}: give a mapping, not {_shown(raw)}")
        return None
    before = len(faults)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    hints = _hints(kind)
    unknown = [key for key in raw if key not in fields]
    faults += [f"{_join(path, key)}: unknown key{_nearest(str(key), list(fields))}" for key in unknown]
    faults += [f"{_join(path, key)}: given more than once" for key in getattr(raw, "repeated", ())]
    values = {}
    for key, field in fields.items():
        if key in raw:
            values[field.name] = _read_value(hints[field.name], raw[key], _join(path, key), faults)
        elif field.required:
            faults.append(f"{_join(path, key)}: missing")
    if (of_keys := getattr(kind, "faults_of", None)) is not None:
        faults += [_join(path, fault) for fault in of_keys([key for key, value in raw.items() if value is not None])]
    return kind(**values) if len(faults) == before else None


def known_part(kind: Any, raw: Any, path: str, unknown: list[str]) -> Any:
    """Return `raw` without the keys of which `kind` has no field; add their paths to `unknown`."""
    if isinstance(raw, list):
        item = next((part for part in get_args(kind) if part is not Ellipsis), None)
        return [known_part(item, entry, f"{path}[{at}]", unknown) for at, entry in enumerate(raw)]
    struct = next((part for part in (kind, *get_args(kind)) if _is_struct(part)), None)
    if not isinstance(raw, dict) or struct is None:
        return raw
    hints = _hints(struct)
    fields = {field.encode_name: hints[field.name] for field in msgspec.structs.fields(struct)}
    unknown += [_join(path, key) for key in raw if key not in fields]
    return {key: known_part(fields[key], raw[key], _join(path, key), unknown) for key in raw if key in fields}


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# Of a few dozen structs, whose hints never change.
@functools.cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read_value(kind: Any, raw: object, path: str, faults: list[str]) -> object:
    if _is_struct(kind):
        return read_struct(kind, raw, path, faults)
    try:
        if _is_quantity(kind):
            return parse_quantity(raw)
        return msgspec.convert(raw, kind)
    except QuantityError as error:
        faults.append(f"{path}: {error}")
    except msgspec.ValidationError as error:
        # msgspec appends the path below this value, if there is one: "... - at `$[0]`".
        text, _, place = str(error).replace(" | null", "").partition(" - at `$")
        allowed = ", ".join(str(value.value) for value in _choices(kind))
        hint = f"; use one of {allowed}" if allowed else ""
        faults.append(f"{path}{place.rstrip('`')}: {text} (given: {_shown(raw)}){hint}")
    return None


def _choices(kind: Any) -> list[Enum]:
    """Return the members of the enum that `kind` is or holds, if any."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _is_quantity(kind: Any) -> bool:
    return any((getattr(meta, "extra", None) or {}).get("quantity") for meta in getattr(kind, "__metadata__", ()))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _nearest(key: str, known: list[str]) -> str:
    """Return a hint: the nearest known key, or all known keys."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _shown(raw: object) -> str:
    """Return a short text of a value for a fault."""
    text = repr(raw)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[: SHOWN_CHARACTERS_MAX - 3]}..."


def plain(value: msgspec.Struct) -> dict[str, object]:
    """Return a struct as JSON's values, with sizes as quantities and without what equals its default."""
    hints = _hints(type(value))
    found: dict[str, object] = {}
    for field in msgspec.structs.fields(value):
        entry = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if entry == default:
            continue
        if isinstance(entry, msgspec.Struct):
            found[field.encode_name] = plain(entry)
        elif isinstance(entry, tuple) and any(isinstance(each, msgspec.Struct) for each in entry):
            found[field.encode_name] = [plain(each) for each in entry]
        elif _is_quantity(hints[field.name]):
            found[field.encode_name] = format_quantity(entry)
        else:
            found[field.encode_name] = msgspec.to_builtins(entry)
    return found
