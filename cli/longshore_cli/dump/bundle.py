"""Writes the files of a dump into one .tar.gz, with an index of what is there and what is not. Called by `command`."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from longshore_cli.arguments import ArgumentsError
from longshore_cli.dump.clean import masked
from longshore_cli.words import plain

INDEX = "README.txt"
# Only for the user who has made it.
_MODE = 0o600


class Part(NamedTuple):
    """One file: its path in the bundle, and its text or why it could not be read."""

    path: str
    content: str | Exception


class Counts(NamedTuple):
    """The files of a bundle, without its index, and those that are missing."""

    written: int
    missing: int


def write(path: Path, head: str, parts: Iterable[Part], removed: set[str]) -> Counts:
    """Write a bundle; a file of that name is replaced when it is complete.

    Args:
        head: the first lines of the index.
        removed: texts that no file may have. Parts may add to it until they are written.
    Raises:
        ArgumentsError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
    except OSError as error:
        raise ArgumentsError(f"{path} cannot be written: {error.strerror}: give -o FILE in another folder") from error
    try:
        with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            counts = _fill(archive, path.name.removesuffix(".gz").removesuffix(".tar"), head, parts, removed)
        partial.replace(path)
    except OSError as error:
        raise ArgumentsError(f"{path} cannot be written: {error.strerror}: give -o FILE on another disk") from error
    finally:
        partial.unlink(missing_ok=True)
    return counts


def _fill(archive: tarfile.TarFile, folder: str, head: str, parts: Iterable[Part], removed: set[str]) -> Counts:
    there, missing = [], []

    def add(name: str, text: str) -> None:
        data = masked(text, removed).encode(errors="replace")
        entry = tarfile.TarInfo(f"{folder}/{name}")
        entry.size, entry.mode, entry.mtime = len(data), _MODE, int(time.time())
        archive.addfile(entry, io.BytesIO(data))

    for name, content in parts:
        if isinstance(content, Exception):
            missing.append(f"{name}: {plain(str(content))}")
        else:
            there.append(name)
            add(name, content)
    lists = [("Files", there), ("Not read", missing)]
    body = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {each}" for each in found or ["(none)"])]) for title, found in lists
    )
    add(INDEX, f"{head}\n\n{body}\n")
    return Counts(len(there), len(missing))
