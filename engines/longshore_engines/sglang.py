"""Adds Longshore to SGLang's transfer backends: `--disaggregation-transfer-backend longshore`.

SGLang calls `register` in each of its processes, by the entry point `sglang.srt.plugins`. Every hook does nothing unless
that backend is chosen. SGLang only logs a plug-in's errors, so `sglang_manager` checks at start that all hooks took.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import add_disagg_transfer_backend_choices
from sglang.version import __version__ as sglang_version

from longshore_client.errors import ArgumentError
from longshore_engines.asks import own_key
from longshore_engines.sglang_checks import (
    BACKEND,
    HOOKED,
    HOOKED_BY_VERSION,
    V0_5_16,
    V0_5_23,
    check_version,
    is_chosen,
)
from longshore_engines.sglang_pools import Model, record, share_early, tell


def register() -> None:
    """Register the backend's name and the hooks. SGLang calls it before it reads the command line.

    Raises:
        SystemExit: the backend is chosen, and this version of SGLang was not tested. SGLang does not catch it.
    """
    try:
        check_version(sglang_version)
    except ArgumentError as error:
        if is_chosen(sys.argv):
            raise SystemExit(f"longshore: {error}") from error
        return
    from sglang.srt.disaggregation.utils import TransferBackend

    # Before SGLang starts the processes of its ranks.
    own_key(os.environ)
    add_disagg_transfer_backend_choices([BACKEND])
    TransferBackend._missing_ = classmethod(_backend)
    before, after, around = HookType.BEFORE, HookType.AFTER, HookType.AROUND
    of_version = {
        V0_5_16: ((_aborted, before),),
        V0_5_23: ((_release_waits, after), (_shared, after)),
    }
    hooks = (
        (_kv_class, around),
        (_shared, after),
        (_shared, after),
        (_begins, before),
        (_begins, before),
        (_receiver_made, after),
        (_sender_made, after),
        *of_version[sglang_version],
    )
    for path, (hook, kind) in zip((*HOOKED, *HOOKED_BY_VERSION[sglang_version]), hooks, strict=True):
        HookRegistry.register(path.replace(":", "."), hook, kind)


def _backend(enumeration: Any, value: object) -> Any:
    """Return the member of SGLang's enumeration of backends for our name. Called for values that it does not have."""
    if value != BACKEND:
        return None
    found = object.__new__(enumeration)
    found._name_, found._value_ = BACKEND.upper(), BACKEND
    enumeration._value2member_map_[BACKEND] = found
    return found


def _kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value != BACKEND:
        return original(transfer_backend, class_type)
    from sglang.srt.disaggregation.base.conn import KVArgs

    from longshore_engines import sglang_bootstrap, sglang_decode, sglang_manager, sglang_prefill

    return {
        "KVARGS": KVArgs,
        "MANAGER": sglang_manager.LongshoreManager,
        "SENDER": sglang_prefill.LongshoreSender,
        "RECEIVER": sglang_decode.LongshoreReceiver,
        "BOOTSTRAP_SERVER": sglang_bootstrap.LongshoreBootstrapServer,
    }[class_type.name]


def _shared(_result: Any, pool: Any, *_arguments: Any, **_named: Any) -> None:
    """Move the memory of a new pool, before SGLang takes pointers to it."""
    if _is_ours():
        share_early(pool)
        record(pool)


def _begins(queue: Any) -> None:
    """Record what SGLang does not tell its backends of the model."""
    if _is_ours():
        scheduler = queue.scheduler
        model = scheduler.model_config
        tell(Model(model.get_total_num_kv_heads(), vars(model.hf_text_config), _window_tokens(scheduler)))


def _window_tokens(scheduler: Any) -> int:
    """Return how many tokens before the next one layers with a window read; 0: there are none.

    SGLang's scheduler keeps one more for some models.
    """
    layers = scheduler.tp_worker.model_runner.model.modules()
    own = [size for layer in layers if (size := getattr(layer, "sliding_window_size", None)) and size > 0]
    return max(own, default=getattr(scheduler, "sliding_window_size", None) or 0)


def _receiver_made(decode_req: Any, queue: Any, *_arguments: Any, **_named: Any) -> None:
    """Tell a receiver of its request, of which SGLang tells it the number of pages.

    A router may have passed on in it what a prefill engine other than SGLang said.
    """
    # SGLang makes its own receivers for requests with which it tests its health.
    tell = getattr(decode_req.kv_receiver, "told", None)
    if queue.transfer_backend.value == BACKEND and tell is not None:
        # `_rebootstrap_prefill_len` also counts the tokens of a request that prefill computes again.
        length = partial(queue._rebootstrap_prefill_len, decode_req.req)  # noqa: SLF001
        tell(decode_req.req, queue.metadata_buffers, length)


def _sender_made(made: Any, queue: Any, request: Any, *_arguments: Any, **_named: Any) -> None:
    """Tell a sender of its request, of which SGLang tells it the room and the number of pages."""
    # SGLang makes its own senders for requests with which it tests its health.
    tell = getattr(request.disagg_kv_sender, "told", None)
    if made and queue.transfer_backend.value == BACKEND and tell is not None:
        tell(request)


def _aborted(scheduler: Any, abort: Any, *_arguments: Any, **_named: Any) -> None:
    """Tell the senders of waiting prompts that SGLang 0.5.16 is about to drop them."""
    if not _is_ours() or scheduler.disaggregation_mode.value != "prefill":
        return
    for request in scheduler.waiting_queue:
        sender = getattr(request, "disagg_kv_sender", None)
        if sender is not None and (abort.abort_all or request.rid.startswith(abort.rid)):
            sender.abort()


def _release_waits(_result: Any, queue: Any, *_arguments: Any, **_named: Any) -> None:
    """Let pages of a failed transfer be freed when no process writes them, however long that takes.

    SGLang otherwise frees them after 30 s.
    """
    if _is_ours():
        queue.enable_deferred_kv_release = True
        queue.deferred_kv_release_timeout = float("inf")


def _is_ours() -> bool:
    from longshore_engines.sglang_versions import disaggregation

    chosen = disaggregation()
    return chosen.disaggregation_transfer_backend == BACKEND and chosen.disaggregation_mode in {"prefill", "decode"}
