"""Claims one prompt for SGLang's decode engine.

SGLang makes a receiver for each request in each decode rank. `sglang_manager` passes prefill's answers to it. If the
request has a handover of a prefill engine other than SGLang, that and the first token in the request replace the answers.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.base.conn import KVPoll

from longshore_client.arguments import CacheTokens
from longshore_client.errors import ArgumentError
from longshore_engines.asks import Decline, FirstToken, Grant, Left
from longshore_engines.handover import KEY, Handover, handover_of
from longshore_engines.sglang_prefill import FAILURE_PAUSE_S, answers_fault, digest_of, room_fault, room_number
from longshore_engines.sglang_versions import ReceiverBase
from longshore_wire.bindings import Binding
from longshore_wire.names import room_name

if TYPE_CHECKING:
    from longshore_engines.halves import OpenHalf

_log = logging.getLogger("longshore.sglang")
_ABORTED = "Aborted by AbortReq."
# An answer of prefill may be lost, and prefill may have been restarted, which SGLang notices late or never.
ASK_AGAIN_S = 5.0
# SGLang's ids of tokens are signed numbers of 32 bits.
TOKEN_END = 1 << 31
FLOAT32_MAX = 3.4e38


class HandedOver(NamedTuple):
    """What a router passes on of a prefill engine other than SGLang, in a request's `custom_params`."""

    handover: Handover
    first_token: int
    first_logprob: float


def handed_over(found: Handover, parameters: Mapping[str, Any], request: Any) -> HandedOver:
    """Return what a router passed on beside a handover.

    Raises:
        ArgumentError: a part is missing or wrong; names it.
    """
    token, logprob = parameters.get("first_token"), parameters.get("first_logprob")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < TOKEN_END:
        raise ArgumentError(
            f"custom_params.first_token is {str(token)[:60]}: give the id of the token that prefill sampled"
        )
    if not request.return_logprob:
        logprob = 0.0
    elif request.logprob.top_logprobs_num:
        raise ArgumentError(
            "the request wants top logprobs, which are not handed over for the first token: ask for none"
        )
    # SGLang keeps it as a float32, whose overflow would end the engine.
    if not isinstance(logprob, int | float) or isinstance(logprob, bool) or not abs(logprob) <= FLOAT32_MAX:
        raise ArgumentError(
            f"custom_params.first_logprob is {str(logprob)[:60]}: the request wants logprobs, so give that of the first token"
        )
    return HandedOver(found, token, float(logprob))


class LongshoreReceiver(ReceiverBase):  # type: ignore[misc] # SGLang is not installed where types are checked
    """One prompt at one decode rank.

    Attributes:
        prompt_tokens: length of the prompt, once SGLang has given it pages.
        half: its half of the room; None until prefill has told where it is.
        failure: why it failed before that.
    """

    prompt_tokens = 0
    conclude_state: Any
    abort_notified: bool

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        super().__init__(mgr, bootstrap_addr, room_number(bootstrap_room))
        self._room_fault = room_fault(bootstrap_room)
        self.half: OpenHalf | None = None
        self.failure = ""
        self._ask = 0  # 0: SGLang has not given it pages yet
        self._has_first_token = False
        self._has_left = False
        self._pages: list[int] = []
        self._others: list[CacheTokens] = []
        self._first_token = 0
        self._aux_index = 0
        self._asked_s = 0.0
        self._failed_s: float | None = None
        self._handover: Handover | None = None
        self._handed: HandedOver | None = None
        self._buffers: Any = None
        self._prompt_length: Callable[[], int] = int
        self._digest = b""

    def told(self, request: Any, buffers: Any, prompt_length: Callable[[], int]) -> None:
        """Take a request, which may have a handover, SGLang's rows on first tokens, and how to get a prompt's length."""
        if self._room_fault:
            request.bootstrap_room = self.bootstrap_room
        self._prompt_length, self._digest = prompt_length, digest_of(request)
        self.failure = answers_fault(request)
        parameters = request.sampling_params.custom_params
        if not isinstance(parameters, Mapping) or KEY not in parameters:
            return
        self.kv_mgr.know_prefill(self.bootstrap_addr)
        self._buffers = buffers
        try:
            self._handover = handover_of(parameters, "custom_params")
            self._handed = handed_over(self._handover, parameters, request)
        except ArgumentError as error:
            self.failure = str(error)

    def init(self, prefill_dp_rank: int) -> None:
        """Find prefill's first rank, unless the request has a handover."""
        if self._room_fault:
            self._conclude_failed(self._room_fault)
        elif self.failure:
            self._conclude_failed(self.failure)
        elif self._handed is not None:
            # SGLang counts the ranks of prefill that it would have to tell of an abort.
            self.bootstrap_infos: list[Any] = []
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)
        else:
            super().init(prefill_dp_rank)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = "device",
        device_kv_indices: Any = None,  # noqa: ARG002 -- of another destination
    ) -> None:
        """Ask prefill for the prompt, whose tokens after `decode_prefix_len` belong into these pages."""
        assert destination == "device"
        assert aux_index is not None
        self.prompt_tokens = self._prompt_length()
        if self._handed is None and not getattr(self, "bootstrap_infos", None):
            self._conclude_failed(f"prefill at {self.bootstrap_addr} does not say where its ranks are")
            return
        self._pages, self._first_token, self._aux_index = kv_indices.tolist(), decode_prefix_len or 0, aux_index
        self._others = self.kv_mgr.pools.state_tokens(state_indices or (), self.prompt_tokens)
        self.init_time = time.time()
        self._ask = self.kv_mgr.new_ask(self)
        self._asked_s = time.monotonic()
        if self._handed is None:
            self.kv_mgr.ask(self, self._ask)
        else:
            with self.kv_mgr.lock:
                self._take_handed(self._handed)

    def answered(self, message: Grant | FirstToken | Decline) -> None:
        """Take an answer of prefill; the manager's lock is held."""
        match message:
            case Grant():
                self._claim(message)
            case FirstToken():
                self._take_rows(message.rows)
            case Decline():
                self._give_up(message.text)

    def _take_handed(self, handed: HandedOver) -> None:
        tokens, theirs = handed.handover.tokens, handed.handover.binding
        if tokens != self.prompt_tokens:
            self.failure = (
                f"the prompt has {self.prompt_tokens} tokens here and {tokens} at prefill: let the router pass the prompt "
                "on as token ids, and give prefill kv_transfer_params.longshore_whole"
            )
        elif theirs.prompt and self._digest and theirs.prompt != self._digest:
            self.failure = (
                "the handover is of another prompt: let the router pass on what prefill answered for the same one"
            )
        if self.failure:
            # The room is left to the request whose prompt it is.
            self._has_left = True
            return
        self._claim(handed.handover, theirs.capability)
        if self.failure:
            return
        buffers, row = self._buffers, self._aux_index
        for each in (buffers.cached_tokens, buffers.output_top_logprobs_val, buffers.output_top_logprobs_idx):
            each[row] = 0
        buffers.output_ids[row, 0] = buffers.output_token_logprobs_idx[row, 0] = handed.first_token
        buffers.output_token_logprobs_val[row, 0] = handed.first_logprob
        # SGLang takes the row as written when it has the room.
        buffers.bootstrap_room[row, 0] = self.bootstrap_room
        self._has_first_token = True

    def _claim(self, grant: Grant | Handover, capability: bytes = b"") -> None:
        if self.half is not None or self.failure:
            return
        manager = self.kv_mgr
        if grant.content != manager.content:
            self.failure = (
                f"pages hold {grant.content!r} at prefill and {manager.content!r} here: give both engines the same data "
                "type of the KV cache, and vLLM the option pages: tokens. Recurrent states and latents move between two engines of "
                "SGLang alone"
            )
            return
        try:
            self.half = manager.halves.claim(
                grant.room,
                grant.endpoint,
                self._pages,
                self._first_token,
                self.prompt_tokens,
                binding=Binding(self._digest, capability),
                others=self._others,
            )
        except ArgumentError as error:
            self.failure = str(error)

    def _take_rows(self, rows: tuple[bytes, ...]) -> None:
        args = self.kv_mgr.kv_args
        if [len(row) for row in rows] != list(args.aux_item_lens):
            self._give_up(
                f"the first token came in rows of {[len(row) for row in rows]} bytes and this engine has "
                f"{list(args.aux_item_lens)}: give both engines the same options, such as "
                "--disaggregation-enable-kv-checksum"
            )
            return
        for address, length, row in zip(args.aux_data_ptrs, args.aux_item_lens, rows, strict=True):
            ctypes.memmove(address + self._aux_index * length, row, length)
        self._has_first_token = True

    def _give_up(self, text: str) -> None:
        """Fail the request; its pages are in use until its half has ended."""
        if self.half is not None:
            self.kv_mgr.halves.cancel(self.half, text)
        self.failure = self.failure or text

    def poll(self) -> int:
        """Return the state. It is final only when no process writes the pages."""
        if self.conclude_state is not None or not self._ask:
            return int(super().poll())
        state, text = self._look()
        if state == KVPoll.Failed:
            self._failed_s = self._failed_s or time.monotonic()
            if time.monotonic() - self._failed_s < FAILURE_PAUSE_S:
                return int(KVPoll.Transferring)
            self._conclude_failed(text)
        elif state == KVPoll.Success:
            self.conclude_state = state
        return state

    def _look(self) -> tuple[int, str]:
        manager, half = self.kv_mgr, self.half
        if half is not None and half.ended:
            if not half.done:
                return KVPoll.Failed, half.failure
            if self._has_first_token:
                return KVPoll.Success, ""
        text = self.failure or self._overdue()
        if text:
            with manager.lock:
                # The peers' thread may have made the claim just now.
                self._give_up(text)
                half = self.half
        if half is None or half.ended:
            if text:
                return KVPoll.Failed, self.failure
            self._ask_again()
        return KVPoll.Transferring, ""

    def _ask_again(self) -> None:
        """Ask again, if prefill's answer or its first token does not come. The ask goes to prefill's present address."""
        if time.monotonic() - self._asked_s > ASK_AGAIN_S:
            self._asked_s = time.monotonic()
            self.invalidate_cached_bootstrap_infos()
            self.kv_mgr.ask(self, self._ask, is_repeated=True)

    def failure_exception(self) -> None:
        """Raise SGLang's error with the reason. SGLang calls it in every rank when any rank has failed."""
        text = self.half.failure if self.half is not None else self.failure
        if text and self.bootstrap_room not in self.kv_mgr.failure_records:
            self.kv_mgr.record_failure(self.bootstrap_room, text)
        super().failure_exception()

    def _overdue(self) -> str:
        manager = self.kv_mgr
        if manager.request_status.get(self.bootstrap_room) == KVPoll.Failed:
            known = manager.failure_records.get(self.bootstrap_room)
            return known or "SGLang has lost the prefill engine"
        assert self.init_time is not None
        if time.time() - self.init_time > manager.waiting_timeout:
            return (
                f"the prompt did not come within {manager.waiting_timeout:g} s (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
            )
        return ""

    def abort(self) -> None:
        """Give the request up, because the client has left or prefill cannot serve it."""
        text = self.kv_mgr.mismatches.get(self.bootstrap_addr, _ABORTED)
        if self.conclude_state is not None:
            return
        if not self._ask:
            self._conclude_failed(text)
            return
        with self.kv_mgr.lock:
            self._give_up(text)
        self._leave(text)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:  # noqa: ARG002 -- SGLang's signature
        """Give the request up, because it has failed at another rank. Its pages are kept until its half has ended."""
        if self.abort_notified:
            return
        self.abort_notified = True
        with self.kv_mgr.lock:
            self._give_up("it failed at another rank of decode")
        if self.half is not None:
            self.kv_mgr.drain(self.bootstrap_room, self.half)
        self._leave(self.failure)

    def clear(self) -> None:
        """Forget the request."""
        self.kv_mgr.forget_ask(self._ask)
        super().clear()

    def _conclude_failed(self, text: str) -> None:
        self.kv_mgr.forget_ask(self._ask)
        self.kv_mgr.record_failure(self.bootstrap_room, text)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        self._leave(text)

    def _leave(self, text: str) -> None:
        """Tell prefill, once, that the prompt is not needed. It otherwise keeps the pages until its limit."""
        manager, infos = self.kv_mgr, getattr(self, "bootstrap_infos", None)
        if self._has_left:
            return
        if (found := self._handover) is not None and self.half is None:
            self._has_left = True
            binding = Binding(b"", found.binding.capability)
            try:
                manager.halves.claim(found.room, found.endpoint, [], found.tokens, found.tokens, binding=binding)
            except ArgumentError as error:
                _log.warning("prefill keeps the pages of room %s until its limit: %s", room_name(found.room), error)
        if not self._ask or not infos:
            return
        self._has_left = True
        manager.tell_prefill(infos[0], Left(self.bootstrap_room, manager.local_ip, manager.rank_port, text))
