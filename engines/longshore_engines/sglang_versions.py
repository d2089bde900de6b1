"""Gives SGLang 0.5.16 what the connector uses of 0.5.23.

The connector's other modules use these classes instead of SGLang's. Its hooks differ by `sglang_checks.HOOKED_BY_VERSION`.
0.5.23 needs torch 2.14, and 0.5.16 is pinned to torch 2.11.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver, CommonKVSender
from sglang.version import __version__ as sglang_version

from longshore_engines.sglang_checks import V0_5_16
from longshore_wire.names import room_name

_log = logging.getLogger("longshore.sglang")

IS_0_5_16 = sglang_version == V0_5_16
# How often a rank looks whether its pages were released, and the interval of the warnings that this takes long.
RELEASE_LOOK_S = 0.001
RELEASE_WARNING_S = 10.0
# An agent ends a worker that hangs within its lease, a minute, and starts another one. Beyond this limit it hangs itself.
RELEASE_LIMIT_S = 300.0


def disaggregation() -> Any:
    """Return the options of this process that name its backend and its role."""
    if IS_0_5_16:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    from sglang.srt.runtime_context import get_disagg

    return get_disagg()


def replicas(parallel: Any, server_args: Any) -> int:
    """Return the data parallel size of an engine without DP attention."""
    return int(server_args.dp_size if IS_0_5_16 else parallel.dp_size)


class _Manager(CommonKVManager):  # type: ignore[misc] # SGLang is not installed where types are checked
    def __init__(self, *arguments: Any) -> None:
        self._send_lock = threading.Lock()
        super().__init__(*arguments)

    def _send_multipart_locked(self, endpoint: str, parts: Sequence[bytes], is_ipv6: bool = False) -> None:
        with self._send_lock:
            self._connect(endpoint, is_ipv6=is_ipv6).send_multipart(parts)


class _Sender(CommonKVSender):  # type: ignore[misc] # as above
    # The hook on `create_sender` sets it.
    prompt_tokens = 0
    _early_send_wait_event: Any = None

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int, is_rank_known: bool) -> None:
        # 0.5.16 requires a destination and a stage, and does not use them.
        super().__init__(mgr, bootstrap_addr, bootstrap_room, [], 0, is_rank_known)

    def failure_exception(self) -> None:
        self.conclude_state = _failed()
        self.clear()
        raise _error(self)


class _Receiver(CommonKVReceiver):  # type: ignore[misc] # as above
    def poll(self) -> Any:
        if self.conclude_state is not None:
            return self.conclude_state
        # Another request with the same room may have been cleared.
        return self.kv_mgr.request_status.get(self.bootstrap_room, _failed())

    def clear(self) -> None:
        super().clear()
        # 0.5.16 leaves this to its own backends.
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)

    def invalidate_cached_bootstrap_infos(self) -> None:
        manager = self.kv_mgr
        with manager.connection_lock:
            for key in [key for key in manager.connection_pool if key.startswith(f"{self.bootstrap_addr}_")]:
                del manager.connection_pool[key]

    def failure_exception(self) -> None:
        """Raise the reason when no process writes this rank's pages: 0.5.16 frees them at once when this returns.

        Ends the engine if its agent does not release them in time.
        """
        self.ensure_abort_notified()
        manager, room, begin_s = self.kv_mgr, self.bootstrap_room, time.monotonic()
        warned_s = begin_s
        while not manager.is_abort_release_safe(room, 0):
            time.sleep(RELEASE_LOOK_S)
            if time.monotonic() - begin_s >= RELEASE_LIMIT_S:
                _end_engine(
                    f"room {room_name(room)}: the agent has not released its pages for {RELEASE_LIMIT_S:g} s: restart the agent"
                )
            if time.monotonic() - warned_s >= RELEASE_WARNING_S:
                warned_s = time.monotonic()
                _log.warning("a failed prompt waits for the agent for %.0f s to release its pages", warned_s - begin_s)
        manager.clear_deferred_abort_state(room)
        self.conclude_state = _failed()
        self.clear()
        raise _error(self)


def _end_engine(text: str) -> None:
    """End the engine, as SGLang does when a scheduler fails. Its pages may still be written, so that it cannot go on."""
    _log.critical("%s; this engine ends", text)
    os.kill(os.getppid(), signal.SIGQUIT)
    raise SystemExit(text)


def _failed() -> Any:
    from sglang.srt.disaggregation.base.conn import KVPoll

    return KVPoll.Failed


def _error(request: Any) -> Exception:
    """Return SGLang's error with the reason of a request."""
    from sglang.srt.disaggregation.common.conn import KVTransferError

    manager = request.kv_mgr
    with manager.failure_lock:
        reason = manager.failure_records.pop(request.bootstrap_room, None)
    text = reason or "Failed due to an unknown reason from another rank"
    return KVTransferError(request.bootstrap_room, text, is_from_another_rank=reason is None)  # type: ignore[no-any-return]


ManagerBase: Any = _Manager if IS_0_5_16 else CommonKVManager
SenderBase: Any = _Sender if IS_0_5_16 else CommonKVSender
ReceiverBase: Any = _Receiver if IS_0_5_16 else CommonKVReceiver
