"""Runs a worker as a program: `python -m longshore_agent.worker.main NAME DESCRIPTOR`.

Started by the supervisor. DESCRIPTOR is the worker's end of their link, whose first datagram holds the orders. NAME is
for people who list processes. If the worker cannot continue, the process ends even if a thread hangs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from longshore_agent import logs
from longshore_agent.control.node_link import DATAGRAM_BYTES_MAX, NodeLink, NotStarted
from longshore_agent.errors import DeviceError, TransportError
from longshore_agent.worker.config import WorkerConfig
from longshore_agent.worker.loop import Worker
from longshore_wire.errors import Reason

_log = logging.getLogger(__name__)

_EXIT_NOT_STARTED = 69
_EXIT_THREAD_DIED = 70
# Switch interval of Python's lock. In a GPU's worker, one thread does everything except probing and compiling.
_GPU_SWITCH_S = 0.0001


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """End the worker after a bug has ended a thread, so that its rooms fail at once and a new worker replaces it."""
    thread = failure.thread.name if failure.thread is not None else "a thread"
    error = failure.exc_value or failure.exc_type()
    _log.critical("%s died", thread, exc_info=(failure.exc_type, error, failure.exc_traceback))
    os._exit(_EXIT_THREAD_DIED)


def main() -> NoReturn:
    """Run the worker, then end the process."""
    end = socket.socket(fileno=int(sys.argv[2]))
    config = WorkerConfig.from_bytes(end.recv(DATAGRAM_BYTES_MAX))
    # A terminal interrupts the whole process group, but the supervisor decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.begin(config.settings, config.name)
    # If a lane or scatter thread ended while this process lived, its slab would never end.
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
        # Another start would fail the same way, so the engine is refused.
        link.send(NotStarted(error.reason, f"this agent cannot serve the engine's device: {error}"))
        os._exit(_EXIT_NOT_STARTED)
    worker.run()
    logging.shutdown()
    # Lanes may still run native code, which the interpreter's normal exit would tear down under them.
    os._exit(0)


if __name__ == "__main__":
    main()
