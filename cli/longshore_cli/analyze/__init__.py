"""The command `longshore analyze`: finds faults of manifests, and says what they take and what a change restarts."""

from longshore_cli.analyze.command import add_arguments, run

__all__ = ["add_arguments", "run"]
