"""Passes workers' reports on rooms to OpenTelemetry, in a thread of its own. Called by the supervisor's loop and `main`.

Nothing waits for it: reports that do not fit its queue are dropped and counted, as are those that the collector does not
take.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from longshore_agent.control.node_link import RoomReported
from longshore_agent.settings import Settings
from longshore_agent.status.metrics import Metrics
from longshore_agent.status.room_report import RoomReport

if TYPE_CHECKING:
    from longshore_agent.status.otel import SpanSender

_log = logging.getLogger(__name__)
# Of the library, which logs each request that fails: up to four a second and worker.
_library_log = logging.getLogger("opentelemetry.exporter")

# Reports that wait: of at most 100 steps each, usually some 10 KB; a datagram of 64 KiB at most.
REPORTS_MAX = 1024
# Spans of one request to the collector, about 1 MB.
_BATCH_SPANS_MAX = 4096
# When the agent stops, the last reports get this long, and then the library this long to give up.
_LAST_S = 2.0
_GIVE_UP_S = 1.0


class Telemetry:
    """See the module. Without `settings.otel` it has no thread and loads no library."""

    def __init__(self, settings: Settings, metrics: Metrics, version: str) -> None:
        self._settings = settings
        self._metrics = metrics
        self._version = version
        self._queue: queue.Queue[RoomReported | None] = queue.Queue(REPORTS_MAX)
        self._sender: SpanSender | None = None
        self._thread: threading.Thread | None = None
        if settings.otel:
            self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
            self._thread.start()

    def take(self, message: RoomReported) -> None:
        """Queue a worker's report, or drop it."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._metrics.add("longshore_dropped_spans_total", message.span_count)

    def close(self) -> None:
        """Send the last reports, but wait at most some seconds."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=_LAST_S)
            self._thread.join(_LAST_S)
        except queue.Full:
            pass
        if self._thread.is_alive() and self._sender is not None:
            self._sender.close()
            self._thread.join(_GIVE_UP_S)

    def _run(self) -> None:
        # It takes half a second to load.
        from longshore_agent.status.otel import SpanSender

        settings = self._settings
        about = {
            "service.version": self._version,
            "host.name": settings.node,
            "longshore.deployment": settings.deployment,
        }
        try:
            self._sender = SpanSender(settings.deployment, about)
        except Exception as error:  # noqa: BLE001 - the library reads its variables, and raises what it likes
            _log.error("OpenTelemetry cannot begin, and rooms are dropped: see its variables: %s", error)
        is_open, was_taken = True, self._sender is not None
        while is_open:
            batch, is_open = self._batch()
            count = sum(report.span_count for report in batch)
            is_taken = self._send(batch) if batch else was_taken
            self._metrics.add("longshore_sent_spans_total" if is_taken else "longshore_dropped_spans_total", count)
            if is_taken != was_taken:
                text = (
                    "takes rooms again"
                    if is_taken
                    else "takes no rooms: see OTEL_EXPORTER_OTLP_ENDPOINT; they are dropped until it does"
                )
                _log.log(logging.INFO if is_taken else logging.WARNING, "the collector of OpenTelemetry %s", text)
            _library_log.setLevel(logging.NOTSET if is_taken else logging.CRITICAL)
            was_taken = is_taken
        _library_log.setLevel(logging.NOTSET)

    def _send(self, batch: list[RoomReport]) -> bool:
        if self._sender is None:
            return False
        try:
            return self._sender.send(batch)
        except Exception:  # noqa: BLE001 - as above
            # Without this thread, all later rooms would be lost, too.
            _log.exception("rooms cannot be sent to OpenTelemetry")
            return False

    def _batch(self) -> tuple[list[RoomReport], bool]:
        """Wait for a report; return it with those that wait behind it, and whether more will come."""
        batch: list[RoomReport] = []
        span_count = 0
        message = self._queue.get()
        while message is not None:
            batch.append(RoomReport.from_bytes(message.data))
            span_count += message.span_count
            if span_count >= _BATCH_SPANS_MAX:
                return batch, True
            try:
                message = self._queue.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False
