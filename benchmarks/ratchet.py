"""Counts the work of fixed scenes, and fails if a count is more than 3 % above that of `benchmarks/ratchet.json`.

    make ratchet                       compare with the file
    make ratchet RATCHET=--write       write the file
    make ratchet RATCHET='--against HEAD~9'   compare with a commit, which is counted in the same run

A change that makes a count grow writes the file anew in the same commit, and says why in its message. Counts of instructions
depend on the interpreter and the processor. On others than those of the file, the parent commit is counted in the same run;
a number that this commit has raised in the file may then be as much higher.

callgrind counts the instructions of `ratchet_scenes`, and strace the system calls of a room between the real agents of
`ratchet_agents`. Needs valgrind and strace.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE_IN_TREE = Path("benchmarks/ratchet.json")
FILE = ROOT / FILE_IN_TREE
SCENES = Path("benchmarks/ratchet_scenes.py")
AGENTS = Path("benchmarks/ratchet_agents.py")
PACKAGES = ("wire", "spec", "client", "engines", "agent", "operator", "cli", "lab")
GROWTH_MAX = 0.03
# How often threads of real processes sleep and call the kernel depends on how they happen to share the processors.
GROWTH_MAX_OF = {"room of real agents: wake-ups": 0.5, "room of real agents: system calls": 0.5}
IMPORT = "import longshore_client"
# Each process imports everything anew, so there is one for each core of a small machine. Both take about equally long.
SHARES = (
    ("64 rooms at once", "staged room of 32 slabs", "claim of 4,096 pages"),
    (
        "staged room of 1 slab",
        "direct room",
        "staged room of 3 caches",
        "direct room of 3 caches",
        "GPU control thread",
        "idle second with 100 peers",
        "reconcile without a change",
    ),
)
_TOTAL = re.compile(r"^totals: (\d+)$", re.MULTILINE)
_LIMIT_S = 900.0


class RatchetError(Exception):
    """The work cannot be counted; says why."""


def identity() -> dict[str, str]:
    """Return what counts of instructions depend on besides the tree."""
    executable = Path(sys.executable).resolve()
    digest = hashlib.sha256(executable.read_bytes()).hexdigest()[:12]
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "interpreter": f"{sys.implementation.name} {sys.version.split()[0]} ({digest})",
        "processor": model[1] if model else "unknown",
    }


def count(*roots: Path) -> list[dict[str, float]]:
    """Return the counts of trees: instructions of each scene, and what a room between real agents takes."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        scenes = [[pool.submit(count_scenes, root, names) for names in SHARES] for root in roots]
        imports = [pool.submit(count_import, root) for root in roots]
        found: list[dict[str, float]] = [
            {name: counted for share in shares for name, counted in share.result().items()} for shares in scenes
        ]
        for counts, imported in zip(found, imports, strict=True):
            counts[IMPORT] = imported.result()
    # Nothing else runs beside real agents.
    return [counts | count_agents(root) for counts, root in zip(found, roots, strict=True)]


def count_scenes(root: Path, names: tuple[str, ...]) -> dict[str, float]:
    """Return the instructions of one repetition of each scene."""
    said, totals = callgrind(root, str(root / SCENES), *names)
    lines = [line.rpartition(" ") for line in said.splitlines()]
    found = {}
    # Before each scene and behind its last run there are parts that belong to no run.
    for place, (name, _, count_of_runs) in enumerate(lines):
        shorter, longer = totals[3 * place + 1], totals[3 * place + 2]
        found[name] = (longer - shorter) / int(count_of_runs)
    return found


def count_again(now: Mapping[str, float], names: list[str]) -> dict[str, float]:
    """Return counts of this tree after another run of scenes that took more, each without others before it.

    Where the memory of earlier scenes lies decides what an allocation costs: once in dozens of runs, a claim took 5 % more.
    """
    scenes = [name for name in names if any(name in share for share in SHARES)]
    return {**now, **{name: min(now[name], count_scenes(ROOT, (name,))[name]) for name in scenes}}


def count_import(root: Path) -> float:
    """Return the instructions of the import that every engine makes."""
    with_it, without = (callgrind(root, "-c", code)[1][-1] for code in (IMPORT, "pass"))
    return with_it - without


def callgrind(root: Path, *words: str) -> tuple[str, list[int]]:
    """Run Python under callgrind; return its output, and the instructions of each part in the order of the marks."""
    if shutil.which("valgrind") is None:
        raise RatchetError("valgrind is not installed: install Debian's package valgrind")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "part"
        command = [
            "valgrind",
            "--tool=callgrind",
            "--dump-before=getpgrp",
            f"--callgrind-out-file={out}",
            sys.executable,
        ]
        done = run(root, [*command, *words], Path(directory))
        parts = sorted(Path(directory).glob("part.*"), key=lambda part: int(part.suffix[1:]))
        totals = [_TOTAL.findall(part.read_text(encoding="utf-8")) for part in (*parts, out)]
    return done, [int(found[-1]) for found in totals]


def count_agents(root: Path) -> dict[str, float]:
    """Return messages, wake-ups and system calls of one room between real agents."""
    if shutil.which("strace") is None:
        raise RatchetError("strace is not installed: install Debian's package strace")
    with tempfile.TemporaryDirectory() as directory:
        return dict(json.loads(run(root, [sys.executable, str(root / AGENTS)], Path(directory)).splitlines()[-1]))


def run(root: Path, command: list[str], directory: Path) -> str:
    """Run a command with the packages of a tree; return its output. Raises RatchetError with its messages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LONGSHORE_")}
    path = [*(str(root / package) for package in PACKAGES), str(root / "tests/agent"), str(root / "tests/operator")]
    environment |= {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(path)}
    # The first run with callgrind must not compile what later ones read.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        raise RatchetError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def grown(now: Mapping[str, float], before: Mapping[str, float], raised: Mapping[str, float]) -> list[str]:
    """Return the counts that have grown by more than is allowed.

    Args:
        raised: factors by which this commit has raised numbers in the file.
    """
    found = []
    for name, counted in now.items():
        limit = 1 + GROWTH_MAX_OF.get(name, GROWTH_MAX)
        if name in before and counted > before[name] * max(1.0, raised.get(name, 1.0)) * limit:
            found.append(name)
    return found


def table(now: Mapping[str, float], before: Mapping[str, float], title: str) -> str:
    """Return a table of both counts."""
    width = max(map(len, now))
    lines = [f"{'':{width}}  {title:>14}  {'now':>14}"]
    for name, counted in now.items():
        old = f"{before[name]:14,.0f}" if name in before else f"{'-':>14}"
        change = f"  {counted / before[name] - 1:+.1%}" if before.get(name) else ""
        lines.append(f"{name:{width}}  {old}  {counted:14,.0f}{change}")
    return "\n".join(lines)


def git(*words: str) -> str:
    """Return the output of git in the tree; empty if it fails."""
    program = shutil.which("git") or "git"
    done = subprocess.run([program, "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the tree of a commit."""
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "tree.tar"
        git("archive", "--output", str(archive), commit)
        if not archive.exists():
            raise RatchetError(f"git has no commit {commit} here")
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
        yield Path(directory)


def parent() -> str:
    """Return the commit that the tree is a change of: HEAD with changes that are not committed, otherwise its parent."""
    return git("rev-parse", "HEAD" if git("status", "--porcelain") else "HEAD^")


def compare_with_commit(commit: str) -> int:
    """Count this tree and that of a commit, print both and return the exit status."""
    with tree_of(commit) as tree:
        if not (tree / SCENES).exists():
            print(f"ratchet: NOT COMPARED: {commit} has no scenes")
            return 0
        now, before = count(ROOT, tree)
        old = json.loads((tree / FILE_IN_TREE).read_text(encoding="utf-8"))["counts"]
    new = json.loads(FILE.read_text(encoding="utf-8"))["counts"]
    raised = {name: new[name] / old[name] for name in new if old.get(name)}
    return verdict(now, before, raised, commit[:12])


def verdict(now: dict[str, float], before: dict[str, float], raised: Mapping[str, float], title: str) -> int:
    """Print the table and what has grown in two runs; return the exit status."""
    now = count_again(now, grown(now, before, raised))
    print(table(now, before, title))
    found = grown(now, before, raised)
    for name in found:
        print(
            f"ratchet: {name} takes more than before: find out what costs, or write the counts anew "
            "(make ratchet RATCHET=--write) in the commit that is worth it, and say why in its message"
        )
    return 1 if found else 0


def main() -> int:
    """Compare or write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"write {FILE_IN_TREE}")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit instead")
    options = parser.parse_args()
    recorded: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    try:
        if options.write:
            (now,) = count(ROOT)
            FILE.write_text(json.dumps(identity() | {"counts": rounded(now)}, indent=1) + "\n", encoding="utf-8")
            print(table(now, recorded.get("counts", {}), "file"))
            return 0
        if options.against:
            return compare_with_commit(options.against)
        if {name: recorded.get(name) for name in identity()} == identity():
            (now,) = count(ROOT)
            return verdict(now, recorded["counts"], {}, "file")
        print(f"ratchet: the file has counts of {recorded.get('interpreter')} on {recorded.get('processor')}")
        commit = parent()
        if not commit:
            print("ratchet: NOT COMPARED: the parent commit is not here")
            return 0
        return compare_with_commit(commit)
    except RatchetError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return 2


def rounded(counts: Mapping[str, float]) -> dict[str, float]:
    """Return counts as they are written."""
    return {name: round(counted) for name, counted in counts.items()}


if __name__ == "__main__":
    sys.exit(main())
