"""Runs a worker as a program: `python -m longshore_agent.worker.main NAME DESCRIPTOR`, which the supervisor starts.

The descriptor is that of their link, whose first datagram holds the worker's orders. The name is for people who list
processes. The process ends if the worker cannot go on, whatever hangs in it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from longshore_agent.control.node_link import DATAGRAM_BYTES_MAX, NodeLink, NotStarted
from longshore_agent.errors import DeviceError, TransportError
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.loop import Worker
from longshore_wire.errors import Reason

_log = logging.getLogger(__name__)

_EXIT_NOT_STARTED = 69
_EXIT_THREAD_DIED = 70
# How long a thread may keep Python's lock from others. In a GPU's worker one thread does all, but while a wire is probed.
_GPU_SWITCH_S = 0.0001


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """A thread died of a mistake of ours: end the worker, so that its rooms fail at once and a new one takes over."""
    thread = failure.thread.name if failure.thread is not None else "a thread"
    error = failure.exc_value or failure.exc_type()
    _log.critical("%s died", thread, exc_info=(failure.exc_type, error, failure.exc_traceback))
    os._exit(_EXIT_THREAD_DIED)


def main() -> NoReturn:
    """Run the worker that the supervisor orders; the process ends here."""
    end = socket.socket(fileno=int(sys.argv[2]))
    config = WorkerConfig.from_bytes(end.recv(DATAGRAM_BYTES_MAX))
    # A terminal's interrupt goes to the whole group; the supervisor decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=config.settings.log_level.value.upper(), format=f"%(asctime)s {config.name} %(levelname)s %(message)s"
    )
    # A lane or scatter thread never ends by itself; one that does would leave its slab hanging for ever.
    threading.excepthook = _end_process
    sys.excepthook = lambda *error: _end_process(threading.ExceptHookArgs((*error, threading.current_thread())))
    if config.device != "cpu":
        sys.setswitchinterval(_GPU_SWITCH_S)
    link = NodeLink(end)
    try:
        worker = Worker(config, link)
    except (DeviceError, TransportError) as error:
        if isinstance(error, TransportError) and error.reason is not Reason.UNSUPPORTED:
            raise
        # Another start would end the same way: its engine hears of it.
        link.send(NotStarted(error.reason, f"this agent cannot serve the engine's device: {error}"))
        os._exit(_EXIT_NOT_STARTED)
    worker.run()
    logging.shutdown()
    # Lanes may still be inside native code, which the interpreter's own way out would tear down under them.
    os._exit(0)


if __name__ == "__main__":
    main()
