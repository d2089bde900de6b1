"""Limits the time in which a worker ends, and kills it if a driver call does not return.

Used by the worker's control thread. All limits follow from one rule: the memory of a killed engine is free 2 s later,
even if a device hangs.
"""

from __future__ import annotations

import faulthandler

# After its engine is gone, a worker notifies its peers and waits this long for their answers.
FAREWELL_NS = 3_000_000_000
# The limit on that wait while a write in place still reads the engine's pages.
FAREWELL_MAPPED_NS = 700_000_000
# The limit on that wait if the device has failed: time for peers and engine to read the last messages.
FAREWELL_FAILED_NS = 300_000_000
# Then the worker waits this long for a GPU's last copies, which take some milliseconds even with a busy engine.
COPIES_LIMIT_S = 0.5
# After this time the process is ended, whatever it does. Only that takes pages from a device that hangs, and the driver
# needs some time for it.
END_LIMIT_S = 1.5


def end_at_the_latest() -> None:
    """Dump the threads' stacks and end this process after `END_LIMIT_S`, unless `call_off` is called first."""
    faulthandler.dump_traceback_later(END_LIMIT_S, exit=True)


def call_off() -> None:
    """Cancel `end_at_the_latest`: no call that could hang is left."""
    faulthandler.cancel_dump_traceback_later()
