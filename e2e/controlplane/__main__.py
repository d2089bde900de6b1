"""Builds all programs (`python -m controlplane build`), or runs a cluster until interrupted (`python -m controlplane up`)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from controlplane import binaries
from controlplane.cluster import ControlPlane
from controlplane.nodes import add_nodes, start_kwok


def main() -> int:
    """Run one of the two commands; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m controlplane", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="find or build all programs and print their paths")
    up = commands.add_parser("up", help="run a control plane until interrupted")
    up.add_argument("nodes", nargs="?", type=int, default=2, help="KWOK nodes, half of them for prefill")
    chosen = parser.parse_args()
    if chosen.command == "build":
        for name in (name for name, program in binaries.PROGRAMS.items() if program.first):
            sys.stdout.write(f"{binaries.find(name)}\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="controlplane-") as folder, ControlPlane(Path(folder)) as plane:
        start_kwok(plane)
        roles = ("prefill", "decode")
        add_nodes(plane, {f"node-{i}": {"longshore.dev/role": roles[i % 2]} for i in range(chosen.nodes)})
        sys.stdout.write(f"export KUBECONFIG={plane.kubeconfig}\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


if __name__ == "__main__":
    sys.exit(main())
