"""A test engine of `longshore verify` that takes host memory for that of a GPU, beside agents for prefill."""

from __future__ import annotations

import sys

from longshore_lab.test_engine import __main__ as program
from longshore_lab.test_engine.headroom import on_host

GPUS = any("/prefill-" in word for word in sys.argv)
program.chosen = lambda wanted, _: ("gpu" if GPUS and wanted != "host" else "host", on_host)
sys.exit(program.main())
