"""Examples for the help of the commands, which `main` and `laboratory` add to their parsers."""

from __future__ import annotations

import argparse

# By command; lines of a shell.
EXAMPLES = {
    "up": (
        "longshore up -f examples/llama-70b.yaml --scale 0.01 --instances 1:1",
        "longshore up -f examples/vllm/tiny.yaml --directory /tmp/longshore-vllm",
    ),
    "keys": ("longshore keys keys/", "LONGSHORE_KEYS_DIRECTORY=keys longshore-agent"),
    "rooms": (
        "longshore rooms --agent http://10.0.0.1:9470 --agent http://10.0.0.2:9470",
        "longshore rooms --agent http://10.0.0.1:9470 --ended false -o json",
    ),
    "trace": ("longshore trace room 12 --agent http://10.0.0.1:9470 --agent http://10.0.0.2:9470 -o room.json",),
    "demo": ("longshore demo --quick", "longshore demo --devices cuda:0,cuda:1", "longshore demo --pairs 4:1,2:3"),
    "bench": (
        "longshore bench transfer",
        "longshore bench rooms --rooms 100",
        "longshore bench crossover --write crossover.json",
    ),
    "completion": (
        "source <(longshore completion bash)        # in ~/.bashrc",
        "source <(longshore completion zsh)         # in ~/.zshrc, after compinit",
    ),
}


def add(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the examples of a command, if it has any, below its help."""
    if command in EXAMPLES:
        program = parser.prog.removesuffix(f" {command}")
        lines = [
            f"{program}{line.removeprefix('longshore')}" if line.startswith("longshore ") else line
            for line in EXAMPLES[command]
        ]
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = "\n".join(["examples:", *(f"  {line}" for line in lines)])
