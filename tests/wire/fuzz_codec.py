"""Fuzzes the codec: checks the rules that a decoder must keep for any bytes, and searches for bytes that break them.

make fuzz                          a million inputs beside those of the corpus
make fuzz RUNS=10000000 FUZZ_SEED=7 GROW=1    more of them; what is new goes into the corpus
make fuzz INPUT=0199…              one input again, in hexadecimal

atheris (libFuzzer) searches. It measures coverage of Python lines, but not of msgspec's C code. So each outcome of a
decoder (the message's type, or the place and reason of its error) has its own line of Python here. Half of the inputs are
mutated as bytes, half as the list that they encode. `tests/wire/test_codec.py` runs `check` on the corpus, without
atheris.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType

import msgspec

from longshore_wire.codec import Codec
from longshore_wire.engine_messages import TO_AGENT, TO_ENGINE
from longshore_wire.errors import CodecError
from longshore_wire.peer_messages import PEER

CODECS: dict[str, Codec[object]] = {"peer": PEER, "to agent": TO_AGENT, "to engine": TO_ENGINE}  # type: ignore[dict-item]
CORPUS = Path(__file__).with_name("codec_corpus.txt")
RUNS = 1_000_000
# The longest input. Longer messages only have longer lists.
INPUT_BYTES_MAX = 1024
# Ten times what a decoder of messages of a kilobyte needs, Python and atheris included.
MEMORY_MIB_MAX = 512
INPUT_S_MAX = 5
# A peer must not control the length of our log lines.
ERROR_CHARACTERS_MAX = 300
OUTCOMES_MAX = 4096
STATISTICS = ("number_of_executed_units", "peak_rss_mb")
NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)]


def check(data: bytes) -> list[str]:
    """Decode `data` by every codec, and return each outcome.

    Raises:
        AssertionError: A decoder raised anything but CodecError, with a long text, or made a message which does not come
            out of its own bytes as it went in.
    """
    outcomes = []
    for name, codec in CODECS.items():
        before = bytes(data)
        try:
            message = codec.decode(data)
        except CodecError as error:
            text = str(error)
            assert len(text) <= ERROR_CHARACTERS_MAX, f"{name}: an error of {len(text)} characters: {text[:100]}"
            outcomes.append(f"{name} {re.sub(r'[0-9]+', '#', text)}")
            continue
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__} instead of CodecError: {error}") from error
        assert data == before
        again = codec.encode(message)
        assert codec.decode(again) == message, f"{name}: {message} came out as another"
        assert codec.encode(codec.decode(again)) == again, f"{name}: {message} has two encodings"
        outcomes.append(f"{name} {type(message).__name__}")
    return outcomes


def read_corpus(path: Path = CORPUS) -> list[bytes]:
    """Return the inputs of the corpus: one a line, in hexadecimal."""
    return [bytes.fromhex(line) for line in path.read_text(encoding="ascii").splitlines()]


def shortest(inputs: Iterable[bytes]) -> list[bytes]:
    """Return the shortest input for each outcome, in order."""
    chosen: dict[str, bytes] = {}
    for data in sorted(inputs, key=lambda data: (len(data), data)):
        for outcome in check(data):
            chosen.setdefault(outcome, data)
    return sorted(set(chosen.values()))


def mutate(data: bytes, seed: int, others: list[bytes]) -> bytes:
    """Change one place in the list that `data` encodes. Bytes that encode nothing become one of `others`."""
    chance = random.Random(seed)
    try:
        version, tree = data[:1], msgspec.msgpack.decode(data[1:])
        part = msgspec.msgpack.decode(chance.choice(others)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return chance.choice(others)
    places = list(_places(tree))
    if not places:
        return chance.choice(others)
    where, at = chance.choice(places)
    taken = [inner for inner, _ in _places(part)]
    for _ in range(chance.randint(1, 2)):
        change: Callable[[], object] = chance.choice(
            [
                lambda: where.__setitem__(at, chance.choice(NUMBERS)),
                lambda: where.__setitem__(at, chance.choice([None, True, 0.5, "", "x", b"", b"\x00" * 33, [], {}])),
                lambda: where.__setitem__(at, chance.choice(taken) if taken else part),
                lambda: where.__setitem__(at, [where[at]]),
                lambda: where.insert(at, chance.choice(NUMBERS)),
                lambda: where.append(chance.choice(NUMBERS)),
                lambda: where.extend(list(where)),
                lambda: where.__delitem__(slice(at, None)),
            ]
        )
        if at < len(where):
            change()
    try:
        return version + msgspec.msgpack.encode(tree)
    except (OverflowError, RecursionError, ValueError):  # a list in itself, or an integer of more than 64 bits
        return chance.choice(others)


def _places(tree: object) -> Iterable[tuple[list[object], int]]:
    """Yield each place of each list in `tree`."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            yield from ((node, at) for at in range(len(node)))
            todo.extend(node)


def _outcome() -> None:
    """Represent one outcome."""


def _search(arguments: list[str]) -> None:
    """Search in this process. Does not return: libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["longshore_wire"]):
        for name in [name for name in sys.modules if name.startswith("longshore_wire")]:
            del sys.modules[name]
        import longshore_wire.engine_messages as engine_link
        import longshore_wire.errors as instrumented
        import longshore_wire.peer_messages as between_workers
    CODECS.update(zip(CODECS, (between_workers.PEER, engine_link.TO_AGENT, engine_link.TO_ENGINE), strict=True))
    globals()["CodecError"] = instrumented.CodecError
    # Each has its own instrumentation, and so its own count.
    lines = [atheris.instrument_func(FunctionType(_outcome.__code__, {})) for _ in range(OUTCOMES_MAX)]
    others = read_corpus()

    def one(data: bytes) -> None:
        for outcome in check(data):
            lines[zlib.crc32(outcome.encode()) % OUTCOMES_MAX]()

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        if seed % 2:
            return bytes(atheris.Mutate(data, max_size))
        return mutate(bytes(data), seed, others)[:max_size]

    atheris.Setup([sys.argv[0], *arguments], one, custom_mutator=mutator)
    atheris.Fuzz()


def _run(arguments: list[str]) -> tuple[int, str]:
    child = [sys.executable, __file__, "--search", *arguments]
    done = subprocess.run(child, check=False, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode, done.stderr


def fuzz(runs: int, seed: int, grow: bool) -> int:
    """Search, print the number of inputs, and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="longshore-fuzz-") as folder:
        found, wrong = Path(folder, "found"), Path(folder, "wrong")
        found.mkdir()
        wrong.mkdir()
        for data in read_corpus():
            (found / hashlib.sha256(data).hexdigest()).write_bytes(data)
        begun_s = time.monotonic()
        status, said = _run([
            f"-runs={runs}", f"-seed={seed}", f"-max_len={INPUT_BYTES_MAX}", f"-rss_limit_mb={MEMORY_MIB_MAX}",
            f"-timeout={INPUT_S_MAX}", f"-artifact_prefix={wrong}/", "-print_final_stats=1", "-verbosity=0", str(found),
        ])  # fmt: skip
        spent_s = time.monotonic() - begun_s
        for path in wrong.iterdir():
            print(f"FAILED  make fuzz INPUT={path.read_bytes().hex()}")
        if status:
            return status
        tried, memory_mib = (int(re.findall(rf"stat::{name}: +([0-9]+)", said)[0]) for name in STATISTICS)
        print(f"{tried:,} inputs from seed {seed} in {spent_s:.0f} s, {tried / spent_s:,.0f} a second: none failed")
        print(f"at most {memory_mib} MiB of memory; {len(list(found.iterdir())):,} inputs had an outcome of their own")
        if grow:
            inputs = shortest(path.read_bytes() for path in found.iterdir())
            CORPUS.write_text("".join(f"{data.hex()}\n" for data in inputs), encoding="ascii")
            print(f"the corpus has {len(inputs):,} inputs")
        return status


def main() -> int:
    """Search, or try one input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grow", action="store_true", help="write what is new into the corpus")
    parser.add_argument("--input", type=bytes.fromhex, help="one input, in hexadecimal")
    given = parser.parse_args()
    if given.input is not None:
        print("\n".join(check(given.input)))
        return 0
    return fuzz(given.runs, given.seed, given.grow)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--search"]:
        _search(sys.argv[2:])
    sys.exit(main())
