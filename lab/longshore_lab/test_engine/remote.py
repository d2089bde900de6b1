"""Calls an object in a process of its own, which may be stopped or killed: lines of JSON on its standard input and output.

Called by tests whose engines have processes. Both ends are of this tree, so there is no version.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

# For an answer: the process may first load a tensor library, beside others.
_ANSWER_LIMIT_S = 240.0
# For the end of a process after that of its input.
_END_LIMIT_S = 5.0


class Remote:
    """The caller's end of a process that runs `serve`.

    Args:
        command: of the process.
        environment: is added to this process's, with this process's module path.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method and return its result. Raises AssertionError: the method raised, or the process has ended."""
        self.begin(method, *arguments, **named)
        return self.result()

    def begin(self, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method; `result` must follow before the next call."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, arguments, named]).encode() + b"\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """Return the result of the call that `begin` made. Raises as `ask`."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], _ANSWER_LIMIT_S)[0], f"{self.process.args!r} is silent"
        line = self.process.stdout.readline()
        assert line, f"{self.process.args!r} has ended with {self.process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process: it may leave its agent first."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def serve(served: object) -> None:
    """Call a method of `served` for each line of the standard input, until that ends."""
    for line in sys.stdin:
        method, arguments, named = json.loads(line)
        try:
            answer = {"value": getattr(served, method)(*arguments, **named)}
        except Exception as error:  # noqa: BLE001 -- the other end raises it again
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
