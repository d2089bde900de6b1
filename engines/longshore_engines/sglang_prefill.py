"""Offers one prompt of SGLang's prefill engine, chunk by chunk, and tells decode ranks where to claim it.

SGLang makes a sender for each request in each prefill rank. `sglang_manager` calls it when decode has left its prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import KVPoll

from longshore_client.errors import ArgumentError
from longshore_engines.handover import Prompt
from longshore_engines.sglang_versions import SenderBase
from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.errors import Reason

if TYPE_CHECKING:
    from longshore_engines.halves import OpenHalf

# A failure is reported this long after it is final. SGLang answers with the reason of its first rank as soon as any rank
# has failed, and ranks hear of one failure within milliseconds.
FAILURE_PAUSE_S = 0.2
# In this time all ranks of an engine offer the last chunk of a prompt.
SIBLINGS_S = 1.0
# SGLang keeps the number in a tensor of uint64, or of int64 on devices that lack it.
_ROOM_MAX = 2**63 - 1


def room_number(bootstrap_room: object) -> int:
    """Return the number under which SGLang may keep a request: 0 in place of a list or text, which would end the engine."""
    return bootstrap_room if isinstance(bootstrap_room, int) and not isinstance(bootstrap_room, bool) else 0


def room_fault(bootstrap_room: object) -> str:
    """Return why SGLang can move no prompt with this number; empty: it can.

    Its metadata has 0 where a prompt's first token has not arrived, so decode would wait for room 0 until its limit. A number
    that the tensor cannot hold ends the engine.
    """
    if 0 < room_number(bootstrap_room) <= _ROOM_MAX:
        return ""
    meaning = ", which SGLang also uses for 'not yet'" if bootstrap_room == 0 else ""
    return f"bootstrap_room is {str(bootstrap_room)[:60]}{meaning}: let the router draw numbers from 1 to 2**63 - 1"


def digest_of(request: Any) -> bytes:
    """Return the digest of a request's prompt, see `handover.Prompt`; empty: it has none.

    Of adapters and images SGLang has names that other engines do not know, and it adds its own settings to `extra_key`. A prompt
    that decode dropped is computed again with what was generated.
    """
    named = (request.lora_id, request.multimodal_inputs, request.input_embeds, request.extra_key)
    if any(each is not None for each in named) or getattr(request, "pd_rebootstrap_in_progress", False):
        return b""
    ids = request.origin_input_ids
    try:
        return Prompt(len(ids), ids, salt=getattr(request, "cache_salt", None) or "").digest(len(ids))
    except ArgumentError:
        # An id that is none of a vocabulary.
        return b""


def answers_fault(request: Any) -> str:
    """Return why a request for several answers cannot be moved; empty: it is for one.

    SGLang makes a request of each answer, and gives all of them one bootstrap_room.
    """
    count = getattr(request.sampling_params, "n", 1)
    if count == 1:
        return ""
    return f"n is {count}, and a bootstrap_room is for one answer: send a request with a room of its own for each"


class LongshoreSender(SenderBase):  # type: ignore[misc] # SGLang is not installed where types are checked
    """One prompt at one prefill rank. It is offered without waiting for decode.

    Attributes:
        room: the number of its room.
        half: its half of the room; None until the first chunk.
        failure: why it failed before the first chunk.
    """

    conclude_state: Any
    _early_send_wait_event: Any

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
        **_unused: Any,
    ) -> None:
        number = room_number(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, number, req_has_disagg_prefill_dp_rank)
        self.half: OpenHalf | None = None
        self.failure = room_fault(bootstrap_room)
        self._binding = UNBOUND
        self._first_token = 0
        self._is_complete = False
        self._failed_s: float | None = None
        with mgr.lock:
            self.room, replies = mgr.asks.opened(number)
            mgr.senders[self.room] = self
        mgr.post(replies)
        mgr.update_status(number, KVPoll.WaitingForInput)

    def told(self, request: Any) -> None:
        """Take the request, before anything is computed for it."""
        if self.failure:
            # With pipeline stages SGLang computes it nevertheless, and writes the number to its metadata, which cannot hold it.
            request.bootstrap_room = 0
        self.prompt_tokens = len(request.origin_input_ids)
        self.failure = self.failure or answers_fault(request)
        self._binding = Binding(digest_of(request), b"")

    def send(
        self,
        kv_indices: Any,
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,  # noqa: ARG002 -- SGLang passes it only to senders that ask for it
    ) -> None:
        """Offer the next chunk. SGLang calls it when the chunk is computed, or in the stream that computes it."""
        if self.conclude_state is not None or self.failure:
            return
        manager = self.kv_mgr
        self.curr_idx += len(kv_indices)
        self._is_complete = self.curr_idx == self.num_kv_indices
        first = self._first_token
        if num_kv_tokens is None:
            # SGLang 0.5.16 does not say it. All chunks but the last end with a page.
            pages_tokens = len(kv_indices) * manager.kv_args.page_size
            num_kv_tokens = self.prompt_tokens - first if self._is_complete else pages_tokens
        self._first_token = first + num_kv_tokens
        if self._is_complete and manager.answers_asks:
            rows = manager.aux_rows(self.aux_index)
            with manager.lock:
                replies = manager.asks.sampled(self.bootstrap_room, rows)
            manager.post(replies)
        half = manager.halves.offer(
            self.room,
            kv_indices.tolist(),
            first,
            self._first_token,
            last=self._is_complete,
            others=manager.pools.state_tokens(state_indices or (), self._first_token) if self._is_complete else (),
            binding=self._binding,
            fence=self._fence(),
            half=self.half,
        )
        with manager.lock:
            self.half = half
            if self.failure:
                manager.halves.cancel(half, self.failure)
        self._record_transfer_indices(kv_indices, state_indices)

    def poll(self) -> int:
        """Return the state. It is final only when no process reads the pages."""
        if self.conclude_state is None:
            state, text = self._look()
            if state == KVPoll.Failed and self.half is not None:
                self._failed_s = self._failed_s or time.monotonic()
                if time.monotonic() - self._failed_s < FAILURE_PAUSE_S:
                    return int(KVPoll.Transferring)
            if state == KVPoll.Failed:
                self.kv_mgr.record_failure(self.bootstrap_room, text)
            if state in {KVPoll.Failed, KVPoll.Success}:
                self.conclude_state = state
            return state
        return int(self.conclude_state)

    def _look(self) -> tuple[int, str]:
        half, manager = self.half, self.kv_mgr
        if half is None:
            status = manager.request_status.get(self.bootstrap_room, KVPoll.Failed)
            if self.failure or status == KVPoll.Failed:
                known = manager.failure_records.get(self.bootstrap_room, "SGLang has dropped it")
                return KVPoll.Failed, self.failure or known
            return KVPoll.WaitingForInput, ""
        limit_s = manager.bootstrap_timeout
        late = f"no decode engine took it within {limit_s:g} s (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)"
        waited_s = time.monotonic() - half.touched_s if self._is_complete else 0.0
        if half.ended:
            # A sibling rank whose limit has passed a moment earlier cancels the room of all ranks.
            is_late = waited_s > limit_s - SIBLINGS_S and half.failure.startswith(Reason.CANCELLED.name)
            return (KVPoll.Success, "") if half.done else (KVPoll.Failed, late if is_late else half.failure)
        if waited_s > limit_s:
            manager.halves.cancel(half, late)
        return KVPoll.Transferring, ""

    def failure_exception(self) -> None:
        """Raise SGLang's error with the reason. SGLang calls it in every rank when any rank has failed."""
        text = self.half.failure if self.half is not None else self.failure
        if text and self.bootstrap_room not in self.kv_mgr.failure_records:
            self.kv_mgr.record_failure(self.bootstrap_room, text)
        super().failure_exception()

    def fail(self, text: str) -> None:
        """Give the prompt up; `manager.lock` is held. Its state is final when no process reads its pages."""
        if self.half is not None:
            self.kv_mgr.halves.cancel(self.half, text)
        self.failure = self.failure or text

    def abort(self) -> None:
        """Give the prompt up, because SGLang's client has left.

        SGLang may reuse pages of a prompt at once that it has not computed to the end. The agent may then read other
        bytes, and nobody gets them: such a room is never done, because its last chunk was not offered.
        """
        with self.kv_mgr.lock:
            self.fail("Aborted by AbortReq.")
        if self.half is None:
            self.conclude_state = KVPoll.Failed
        self._close(self.failure)

    def clear(self) -> None:
        """Forget the prompt."""
        half = self.half
        if half is not None:
            self.kv_mgr.halves.cancel(half, "another rank of prefill failed")
        done = half is not None and half.done
        known = self.kv_mgr.failure_records.get(self.bootstrap_room, "another rank of prefill failed")
        self._close("" if done else self.failure or known)
        super().clear()

    def _close(self, failure: str) -> None:
        manager = self.kv_mgr
        with manager.lock:
            replies = manager.asks.closed(self.bootstrap_room, self.room, f"prefill: {failure}" if failure else "")
            if manager.senders.get(self.room) is self:
                del manager.senders[self.room]
        manager.post(replies)

    def _fence(self) -> Callable[[], None] | None:
        """Return a wait for the device's work up to here, and for the event that SGLang may have left."""
        early, self._early_send_wait_event = self._early_send_wait_event, None
        if not self.kv_mgr.on_device:
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

        def wait() -> None:
            event.synchronize()
            if early is not None:
                early.synchronize()

        return wait
