"""Examples for the help of the commands, which `main` and `laboratory` add to their parsers."""

from __future__ import annotations

import argparse

# What the exit statuses of a command mean, beyond 0, 1 if it failed, and 2 for invalid arguments.
_STATUSES = {
    "check": "0 without errors, 1 with an error, 2 for invalid arguments",
    "status": "0 if each deployment is Ready and each agent answers, else 1; of --watch 0; 2 for invalid arguments",
}
# By command; lines of a shell.
EXAMPLES = {
    "up": (
        "longshore up -f examples/llama-70b.yaml --scale 0.01 --instances 1:1",
        "longshore up -f examples/vllm/tiny.yaml --directory /tmp/longshore-vllm",
    ),
    "keys": ("longshore keys keys/", "LONGSHORE_KEYS_DIRECTORY=keys longshore-agent"),
    "analyze": (
        "longshore analyze -f examples/llama-70b.yaml",
        "kubectl get dgdep llama-70b -o yaml | longshore analyze -f examples/llama-70b.yaml --running -",
    ),
    "model": (
        "longshore model Qwen3.5-397B-A17B/config.json",
        "longshore model DeepSeek-V3.2 --kv-dtype float8_e4m3fn --draft-layers 1",
    ),
    "check": (
        "longshore check --pre -f examples/llama-70b.yaml   # before an installation",
        "longshore check llama-70b                          # after it: one deployment of the context's namespace",
        "longshore check -A -o json --strict                # all deployments, for CI: a warning is a failure",
        "longshore check llama-70b --wait 300               # until no check fails, at most five minutes",
    ),
    "status": (
        "longshore status                     # one line for each deployment of the namespace; -A: of all namespaces",
        "longshore status llama-70b --watch   # the tree of one deployment, again every second",
        "longshore status llama-70b -o json   # all facts, for programs",
        "longshore status --wait 300          # until all deployments are Ready, at most five minutes",
        "longshore status --agent http://127.0.0.1:9470 --agent http://127.0.0.1:9471",
        "longshore status --directory /tmp/longshore   # agents of `longshore up --directory`",
    ),
    "dump": (
        "longshore dump                                    # all deployments of the namespace; -A: of all namespaces",
        "longshore dump llama-70b -n serving -o dump.tar.gz",
    ),
    "verify": (
        "longshore verify llama-70b -n serving             # every pair of agents of a deployment",
        "longshore verify llama-70b --pairs 50 -o json     # 50 pairs, for a program",
        "longshore verify --directory /tmp/longshore       # agents of `longshore up --directory`",
    ),
    "rooms": (
        "longshore rooms llama-70b -n serving",
        "longshore rooms --agent http://10.0.0.1:9470 --agent http://10.0.0.2:9470 --ended false -o json",
        "longshore rooms --directory /tmp/longshore    # agents of `longshore up --directory`",
    ),
    "trace": (
        "longshore trace room 12 llama-70b -n serving -o room.json",
        "longshore trace room 12 --agent http://10.0.0.1:9470 --agent http://10.0.0.2:9470",
        "longshore trace room 12 --directory /tmp/longshore",
    ),
    "demo": ("longshore demo --quick", "longshore demo --devices cuda:0,cuda:1", "longshore demo --pairs 4:1,2:3"),
    "bench": (
        "longshore bench transfer",
        "longshore bench rooms --rooms 100",
        "longshore bench crossover --write crossover.json",
    ),
    "bench cluster": (
        "longshore bench cluster llama-70b -n serving",
        "longshore bench cluster llama-70b --sizes 1Mi,64Mi --concurrency 1,8 --seconds 5 -o json",
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
        statuses = ["", f"exit status: {_STATUSES[command]}"] if command in _STATUSES else []
        parser.epilog = "\n".join(["examples:", *(f"  {line}" for line in lines), *statuses])
