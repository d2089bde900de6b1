"""`python -m longshore_lab.bench`: the same as `longshore bench`."""

from __future__ import annotations

import argparse
import sys

from longshore_lab.bench import add_arguments, run


def main() -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(prog="longshore bench", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
