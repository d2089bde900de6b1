"""Runs one operator, configured by its environment, until SIGTERM or SIGINT: the command `longshore-operator`.

If any part ends by itself, the process exits with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from longshore_operator import handlers, health, logs
from longshore_operator.api import Api
from longshore_operator.lease import Mutex
from longshore_operator.metrics import Metrics
from longshore_operator.polling import Poller
from longshore_operator.reconcile import Reconciler, look_at_all
from longshore_operator.settings import Settings
from longshore_operator.watches import WatchCheck
from longshore_operator.work_queue import WorkQueue
from longshore_operator.world import World
from longshore_spec import distribution
from longshore_wire.errors import ConfigError

_log = logging.getLogger(__name__)
_EXIT_BAD_CONFIG = 2
# New objects between two garbage collections. The default of 700 would traverse the world many times a second while
# watches deliver. Cycles are rare here, and this many objects take a few MiB.
_GARBAGE_COUNT = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator; return the exit status: 1 if a part failed, 2 for an invalid configuration."""
    parser = argparse.ArgumentParser(
        prog="longshore-operator",
        description=__doc__,
        epilog="Its settings are environment variables: docs/reference/operator.md has them all.",
    )
    parser.add_argument("--version", action="version", version=f"longshore-operator {distribution.installed_version()}")
    parser.parse_args(arguments)
    try:
        return _served(Settings.from_environment(os.environ))
    except ConfigError as error:
        logs.complain(error.faults)
        return _EXIT_BAD_CONFIG


def _served(settings: Settings) -> int:
    logs.begin(settings)
    gc.set_threshold(_GARBAGE_COUNT)
    return asyncio.run(_run(settings))


async def _run(settings: Settings) -> int:
    world, queue, metrics = World(), WorkQueue(), Metrics()
    api = Api.connect(settings.request_timeout_s)
    # The Lease has its own connection and thread, so that many writes cannot delay a renewal.
    lease_api = Api.connect(min(settings.request_timeout_s, settings.lease_renew_s))
    mutex = Mutex(lease_api, settings, settings.identity or f"{socket.gethostname()}-{os.getpid()}")
    poller = Poller(world, queue, mutex, settings)
    check = WatchCheck(api, world, settings)
    reconciler = Reconciler(world, api, queue, mutex, settings, metrics)

    def show() -> bytes:
        calls = {call: api.calls.get(call, 0) + lease_api.calls.get(call, 0) for call in {*api.calls, *lease_api.calls}}
        return metrics.show(
            leader=mutex.is_held,
            queue_length=len(queue),
            silent_count=poller.silent_count,
            left_count=len(world.left),
            lags_s=check.lags_s(),
            calls=calls,
        )

    server = await health.serve(settings, check, show)
    parts: dict[str, Coroutine[Any, Any, None]] = {
        "lease": mutex.run(),
        "polls": _after(check.started, poller.run()),
        "watch check": check.run(),
        "timer": look_at_all(world, queue, settings.resync_s),
        **{
            f"worker {number}": _after(check.started, reconciler.work(poller.ready))
            for number in range(settings.worker_count)
        },
    }
    tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
    watching = [asyncio.create_task(part, name=name) for name, part in handlers.watches(world, queue, settings).items()]
    try:
        done, _ = await asyncio.wait([*tasks, *watching], return_when=asyncio.FIRST_COMPLETED)
        return _judge(done, watching)
    finally:
        for task in [*tasks, *watching]:
            task.cancel()
        for task in [*tasks, *watching]:
            with suppress(asyncio.CancelledError, Exception):
                await task
        await mutex.release()
        await server.cleanup()
        api.close()
        lease_api.close()


async def _after(started: asyncio.Event, part: Coroutine[Any, Any, None]) -> None:
    await started.wait()
    await part


def _judge(done: set[asyncio.Task[None]], watching: Sequence[asyncio.Task[None]]) -> int:
    """Return the exit status. Watches end on a signal; every other task that ends is a fault."""
    failed = [task for task in done if task not in watching or task.exception() is not None]
    for task in failed:
        _log.error("%s ended", task.get_name(), exc_info=task.exception())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
