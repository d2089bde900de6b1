"""How long a worker that ends may take, and what ends it where a call to a driver does not return.

Used by the worker's control thread. The memory of an engine that was killed is to be free 2 s later, whatever hangs: all
limits here are made of that.
"""

from __future__ import annotations

import faulthandler

# A worker whose engine is gone tells its peers, and waits this long for their answers, before it ends.
FAREWELL_NS = 3_000_000_000
# The same while a write in place still reads the engine's pages.
FAREWELL_MAPPED_NS = 700_000_000
# The same where the device has failed: until its words are read, as its own end is all that this worker can still do.
FAREWELL_FAILED_NS = 300_000_000
# What a GPU is then waited for, whose last copies take some milliseconds, also beside a busy engine.
COPIES_LIMIT_S = 0.8
# After this the process ends, wherever it is. Only that takes pages from a device that hangs, and the driver needs a while for it.
END_LIMIT_S = 1.7


def end_at_the_latest() -> None:
    """End this process after `END_LIMIT_S`, with a word on where its threads were, unless `call_off` is called."""
    faulthandler.dump_traceback_later(END_LIMIT_S, exit=True)


def call_off() -> None:
    """Nothing that could hang is left to do."""
    faulthandler.cancel_dump_traceback_later()
