"""The commands `longshore verify` and `longshore bench cluster`: rooms of test bytes between the running agents."""

from __future__ import annotations

from longshore_cli.verify.command import add_bench_arguments, add_verify_arguments, bench, verify

__all__ = ["add_bench_arguments", "add_verify_arguments", "bench", "verify"]
