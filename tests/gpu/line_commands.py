"""Executes commands by lines, so that a test can act in a separate process. Run by scripts in this folder."""

from __future__ import annotations

import json
import sys


def obey(actor: object) -> None:
    """Answer each line of standard input, [method, arguments] in JSON, by a line with what `actor` returned or raised."""
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = {"value": getattr(actor, command)(**arguments)}
        except Exception as error:  # noqa: BLE001 - the other end raises it again
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer
