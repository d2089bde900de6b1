"""Decides, in an engine's scheduler, which requests offer or claim KV, and gives orders to the ranks.

Called by an engine's connector in its scheduler's process, by one thread. It uses no socket, knows no engine and holds
no pages; `rooms.RankRooms` in every rank carries out its orders.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longshore_client.errors import ArgumentError
from longshore_engines.handover import (
    HANDOVER_VERSION,
    KEY,
    RELEASE,
    ROOM,
    WANTS_DECODE,
    WANTS_PREFILL,
    WHOLE,
    Ask,
    Claim,
    Fail,
    GroupPages,
    Handover,
    Offer,
    Order,
    Prompt,
    ReportSent,
    TakeBack,
    Withdraw,
    handover_of,
    is_promised,
    parameters_for_decode,
    promised_handover,
    room_of,
)
from longshore_wire.bindings import BINDING_BYTES_MAX, Binding
from longshore_wire.engine_messages import Endpoint, Half

_log = logging.getLogger("vllm.longshore")

# Ranks report their agent in every step. An older report may be of an agent that is gone. A prompt then waits for the
# next report, which takes one empty step, before it is computed.
ENDPOINT_AGE_MAX_S = 1.0
# A restarted agent is back in seconds. A prompt waits this long for it, and is then computed without an offer.
AGENT_AWAY_MAX_S = 30.0
ROOM_BYTES = 8
_FOREIGN_MAX = 1024


class PageGroup(NamedTuple):
    """A group of layers whose pages of a sequence an engine allots together.

    Attributes:
        page_size: tokens of a page.
        window: tokens that its layers read, with the one that is computed; 0: all.
        chunk: tokens of the pieces into which a sequence is cut, where layers read only the one that is computed; 0: it is not cut.
        unit_tokens: `page_size` if pages cannot be cut, otherwise 1.
        is_state: the last page of a sequence, but for `spares`, is its recurrent state.
        spares: pages behind the state's, for speculation.
    """

    page_size: int
    window: int = 0
    unit_tokens: int = 1
    is_state: bool = False
    spares: int = 0
    chunk: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the next token of a sequence needs all earlier ones, one by one."""
        return not (self.is_state or self.window or self.chunk)

    def held(self, pages: Sequence[int], first_token: int, end_token: int, tokens: int) -> GroupPages:
        """Return what the next token of a sequence of `tokens` tokens needs of tokens [first, end).

        Args:
            pages: of the sequence, from its first token on.
        """
        if self.is_state:
            # A state is of all tokens before it.
            if first_token == end_token or end_token < tokens:
                return GroupPages((), end_token, end_token)
            return GroupPages((pages[-1 - self.spares],), 0, end_token)
        if self.window or self.chunk:
            begin = max(0, tokens - self.window + 1) if self.window else tokens - tokens % self.chunk
            first_token = max(first_token, begin - begin % self.unit_tokens)
        if first_token >= end_token:
            return GroupPages((), first_token, first_token)
        first_page, end_page = first_token // self.page_size, -(-end_token // self.page_size)
        return GroupPages(tuple(pages[first_page:end_page]), first_token, end_token)


@dataclass(slots=True)
class _Prompt:
    """A prompt that decode wants. What is `computed` of it is offered as `room`, which a rank may have lost since.

    Attributes:
        tokens: of the prompt; those of other attributes count from its first.
        is_offered: some tokens are.
    """

    room: int
    tokens: int
    binding: Binding
    computed: int = 0
    is_offered: bool = False
    is_lost: bool = False


class RequestBook:
    """The transfers of one engine's requests, as its scheduler knows them.

    Args:
        groups: of the engine's layers.
        roles: SOURCE if this engine may offer KV, TARGET if it may claim KV; until the ranks have reported theirs.
        draw: returns this many random bytes. Numbers of rooms must be unique in an instance, and nobody may guess them.
        recompute_after_s: a prompt that prefill has not begun to offer after this time is computed here.
        held_back: the last tokens of a prompt, which prefill does not compute, see `shortened`.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        roles: Collection[Half],
        draw: Callable[[int], bytes] = secrets.token_bytes,
        recompute_after_s: float = math.inf,
        held_back: int = 0,
    ) -> None:
        self._recompute_after_s = recompute_after_s
        self._groups = groups
        self._held_back = held_back
        self._roles = frozenset(roles)
        self._draw = draw
        self._endpoint: Endpoint | None = None
        self._content = ""
        self._heard_s = float("-inf")
        self._away_since_s: float | None = None
        self._orders: list[Order] = []
        self._loading: set[str] = set()
        # The requests whose rooms are asked for, since when; and those of them whose ask is answered.
        self._asked_s: dict[str, float] = {}
        self._answered: set[str] = set()
        self._prompts: dict[str, _Prompt] = {}
        # The requests that were handed out and whose pages are lent, and what their routers must show to give them back, by room.
        self._lent: dict[int, tuple[str, bytes]] = {}
        # Rooms of other requests that failed ones of ours have named. vLLM reports each failed request once more, without its
        # prompt, so that prefill may free its pages.
        self._foreign: OrderedDict[int, None] = OrderedDict()

    def introduced(self, roles: Collection[Half], content: str) -> None:
        """Record a rank's roles and the content of its pages; `content` is equal on ranks that can exchange pages."""
        self._roles &= frozenset(roles)
        self._content = content

    def heard(self, endpoint: Endpoint | None, now_s: float, *, away: bool = False) -> None:
        """Record a rank's report of this instance's endpoint; None: unchanged.

        Args:
            away: True: the endpoint is incomplete, because an agent or a rank is being restarted.
        """
        self._heard_s = now_s
        if endpoint is not None:
            self._endpoint = endpoint
        if not away:
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s = now_s

    def arrived(self, request_id: str, parameters: Mapping[str, Any] | None) -> None:
        """Record a new request. It may give a prompt back, also while no page is free for the request itself."""
        if parameters and RELEASE in parameters:
            self._give_back(request_id, parameters[RELEASE])

    def shortened(self, parameters: Mapping[str, Any] | None) -> int:
        """Return how many of its last tokens a new request must lose, since decode computes them.

        Decode computes a prompt's last token to get the next one. Where a state or a window moves, prefill must stop before
        it: a state that has taken in a token cannot give it back, and a window that has moved on lacks its first token. A decode
        engine other than vLLM needs all of them.
        """
        if parameters is None or parameters.get(WHOLE) or Half.SOURCE not in self._roles:
            return 0
        return self._held_back if parameters.get(WANTS_DECODE) else 0

    def matched(
        self,
        request_id: str,
        parameters: dict[str, Any] | None,
        prompt_tokens: int,
        computed_tokens: int,
        now_s: float,
        *,
        has_ids: bool = True,
    ) -> int | None:
        """Return the number of tokens after `computed_tokens` to claim; None: ask again in the next step.

        A prompt that prefill may not have computed gets no pages before prefill has offered its first tokens. Otherwise prompts
        of a full cache here and those of a full cache at prefill would wait for each other.
        """
        prompt_tokens = self._moved(prompt_tokens)
        if request_id in self._asked_s and request_id not in self._answered:
            return self._waited(request_id, parameters or {}, prompt_tokens, now_s)
        if not parameters:
            return 0
        if parameters.get(WANTS_DECODE) and Half.SOURCE in self._roles:
            fresh = now_s - self._heard_s <= ENDPOINT_AGE_MAX_S
            waiting = self._away_since_s is not None and now_s - self._away_since_s <= AGENT_AWAY_MAX_S
            return 0 if fresh and not waiting else None
        if not parameters.get(WANTS_PREFILL) or not prompt_tokens:
            return 0
        if not has_ids:
            # Prefill does not offer it, see `Prompt.digest`.
            parameters[WANTS_PREFILL] = False
            self._decline(request_id, parameters, prompt_tokens)
            return 0
        try:
            found = promised_handover(parameters, prompt_tokens)
            self._check(found)
            tokens = min(found.tokens, prompt_tokens)
        except ArgumentError:
            # Let the load fail, so that the engine's policy for that applies.
            return max(0, prompt_tokens - computed_tokens)
        if tokens <= computed_tokens:
            return 0
        if is_promised(parameters) and request_id not in self._asked_s:
            self._asked_s[request_id] = now_s
            self._orders.append(Ask(request_id, found.room, found.endpoint, found.binding))
            return None
        return tokens - computed_tokens

    def _waited(self, request_id: str, parameters: dict[str, Any], prompt_tokens: int, now_s: float) -> int | None:
        """Return what `matched` does while an ask has no answer."""
        waited_s = now_s - self._asked_s[request_id]
        if waited_s < self._recompute_after_s:
            return None
        _log.warning("request %s is computed here: prefill has not begun it within %.1f s", request_id, waited_s)
        del self._asked_s[request_id]
        parameters[WANTS_PREFILL] = False
        self._decline(request_id, parameters, prompt_tokens)
        return 0

    def answered(self, request_ids: Collection[str]) -> None:
        """Record that prefill has offered rooms that were asked for, or that these have failed, as their claims will."""
        self._answered.update(request_id for request_id in request_ids if request_id in self._asked_s)

    def allocated(
        self,
        request_id: str,
        parameters: dict[str, Any] | None,
        pages: Sequence[Sequence[int]],
        prompt: Prompt,
        external_tokens: int,
    ) -> None:
        """Record that a request has got pages. Open its room, or order once the claim of `external_tokens`.

        Args:
            pages: of each group, from the first token on.
        """
        if not parameters:
            return
        if parameters.get(WANTS_DECODE) and Half.SOURCE in self._roles:
            self._open(request_id, parameters, prompt)
            return
        if not parameters.get(WANTS_PREFILL):
            return
        parameters[WANTS_PREFILL] = False
        self._forget_ask(request_id)
        length = self._moved(prompt.length)
        if not length:
            return
        try:
            found = promised_handover(parameters, length)
            self._check(found)
            binding = Binding(prompt.digest(found.tokens), found.binding.capability)
        except ArgumentError as error:
            self._fail(request_id, str(error), external_tokens)
            self._decline(request_id, parameters, length)
            return
        if length < found.tokens or found.binding.prompt not in (b"", binding.prompt):
            text = f"the handover is of another prompt, of {found.tokens} tokens, and this one has {length}"
            self._fail(request_id, f"{text}: pass on what prefill answered for the same prompt", external_tokens)
            # Its own request may still claim the room.
            self._foreign[found.room] = None
            while len(self._foreign) > _FOREIGN_MAX:
                self._foreign.popitem(last=False)
            return
        if not external_tokens:
            self._orders.append(self._nothing_of(found, request_id, binding))
            return
        first_token = found.tokens - external_tokens
        first, *others = (
            group.held(own, first_token, found.tokens, found.tokens)
            for group, own in zip(self._groups, pages, strict=True)
        )
        self._loading.add(request_id)
        self._orders.append(Claim(request_id, found.room, found.endpoint, *first, binding, tuple(others)))

    @property
    def computing(self) -> Collection[str]:
        """The requests whose prompts are not offered whole."""
        return [request_id for request_id, prompt in self._prompts.items() if prompt.computed < prompt.tokens]

    def computed(self, request_id: str, pages: Sequence[Sequence[int]], end_token: int) -> None:
        """Record that this step computes a request up to `end_token`, and order the offer of its new whole pages.

        Args:
            pages: of each group, from the request's first token on.
        """
        prompt = self._prompts[request_id]
        before, tokens, last = prompt.computed, prompt.tokens, end_token >= prompt.tokens
        prompt.computed = min(end_token, tokens)
        found = []
        for group, own in zip(self._groups, pages, strict=True):
            end = tokens if last else end_token - end_token % group.page_size
            held = group.held(own, before - before % group.page_size, end, tokens)
            if last and not held.pages:
                # The next token begins a chunk. A room has tokens of each cache, and decode claims none of these.
                first_token = tokens - 1 - (tokens - 1) % group.page_size
                held = GroupPages((own[first_token // group.page_size],), first_token, tokens)
            found.append(held)
        if any(each.pages for each in found):
            first, *others = found
            binding, is_next = prompt.binding, prompt.is_offered
            self._orders.append(Offer(request_id, prompt.room, *first, last, binding, tuple(others), is_next))
            prompt.is_offered = True

    def preempted(self, request_id: str) -> None:
        """Record that a request has lost its pages. It will be computed again, and offered as another room.

        It may have ended in the meantime.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None or prompt.is_offered:
            self._orders.append(TakeBack(request_id))
        if prompt is None:
            return
        prompt.computed = 0
        if prompt.is_offered:
            binding = Binding(prompt.binding.prompt, self._draw(BINDING_BYTES_MAX))
            self._prompts[request_id] = _Prompt(self._next_room(), prompt.tokens, binding)

    def finished(
        self, request_id: str, parameters: dict[str, Any] | None, prompt_tokens: int, *, complete: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record the end of a request.

        Args:
            complete: True: it ended normally, so its whole prompt is computed; False: by an abort or an error.
        Returns:
            Whether the engine must keep its pages until the ranks report it as sent, and the parameters for decode if its
            prompt is offered.
        """
        if request_id in self._loading:
            self._orders.append(Withdraw(request_id))
        self._forget_ask(request_id)
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            return self._hand_out(request_id, prompt, complete=complete)
        if parameters and parameters.get(WANTS_PREFILL):
            # It ended before it got pages. Make an empty claim, since the prefill engine keeps its pages for one.
            parameters[WANTS_PREFILL] = False
            self._decline(request_id, parameters, self._moved(prompt_tokens))
        return False, None

    def _moved(self, prompt_tokens: int) -> int:
        """Return the tokens that decode takes of a prompt."""
        return max(0, prompt_tokens - self._held_back)

    def _forget_ask(self, request_id: str) -> None:
        self._asked_s.pop(request_id, None)
        self._answered.discard(request_id)

    def lost(self, rooms: Collection[int]) -> None:
        """Record that rooms of prompts have failed, so that these are not handed out."""
        if rooms:
            for prompt in self._prompts.values():
                prompt.is_lost = prompt.is_lost or prompt.room in rooms

    def received(self, request_ids: Collection[str]) -> None:
        """Record that every rank has reported the end of these requests' claims."""
        self._loading.difference_update(request_ids)

    @property
    def has_orders(self) -> bool:
        """Whether there are orders for the ranks."""
        return bool(self._orders)

    def take_orders(self) -> tuple[Order, ...]:
        """Return the orders since the last call."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def _open(self, request_id: str, parameters: dict[str, Any], prompt: Prompt) -> None:
        """Choose the room of a prompt, unless it has one. Its pages are offered when they are computed."""
        if request_id in self._prompts:
            return
        if self._present_endpoint(request_id) is None:
            return
        try:
            digest = prompt.digest(prompt.length)
        except ArgumentError as error:
            _log.error("request %s is not handed out: %s", request_id, error)
            return
        try:
            room = room_of(parameters)
            if room in self._lent or any(room == each.room for each in self._prompts.values()):
                raise ArgumentError(
                    f"kv_transfer_params.{ROOM} is that of another prompt: give a new one for each prompt"
                )
        except ArgumentError as error:
            # Decode gets the same number, and its load fails. The router can send it again with prefill's answer.
            _log.error("request %s: %s", request_id, error)
            room = None
        # A room is used once, even if the request is.
        parameters.pop(ROOM, None)
        if room is None:
            room, capability = self._next_room(), self._draw(BINDING_BYTES_MAX)
        else:
            # Decode has only the number, which the router drew at random.
            capability = b""
        self._prompts[request_id] = _Prompt(room, prompt.length, Binding(digest, capability))

    def _hand_out(self, request_id: str, prompt: _Prompt, *, complete: bool) -> tuple[bool, dict[str, Any] | None]:
        """Return what `finished` does for a prompt that decode wants."""
        if not prompt.is_offered:
            return False, None
        told: dict[str, Any] | None = None
        if prompt.is_lost:
            _log.warning("request %s is not handed out: its room has failed", request_id)
        elif complete and prompt.computed == prompt.tokens:
            endpoint = self._present_endpoint(request_id)
            if endpoint is not None:
                handover = Handover(
                    HANDOVER_VERSION, prompt.room, prompt.tokens, endpoint, self._content, prompt.binding
                )
                told = parameters_for_decode(handover)
                self._lent[prompt.room] = request_id, prompt.binding.capability
        if told is None:
            self._orders.append(Withdraw(request_id))
        self._orders.append(ReportSent(request_id, prompt.room))
        return True, told

    def _give_back(self, request_id: str, handover: object) -> None:
        """Release the pages of a prompt whose router no longer needs them, if it shows the prompt's handover."""
        try:
            found = handover_of({KEY: handover})
        except ArgumentError as error:
            _log.warning("request %s releases nothing: %s", request_id, error)
            return
        lent, capability = self._lent.get(found.room, ("", b""))
        if lent and capability == found.binding.capability:
            self._orders.append(Withdraw(lent))
        else:
            _log.warning("request %s releases nothing: no prompt of this handover is lent", request_id)

    def sent(self, request_ids: Collection[str]) -> None:
        """Record that the pages of these requests, which were handed out, are this engine's again."""
        if request_ids:
            self._lent = {room: lent for room, lent in self._lent.items() if lent[0] not in request_ids}

    def _next_room(self) -> int:
        return int.from_bytes(self._draw(ROOM_BYTES), "little")

    def _present_endpoint(self, request_id: str) -> Endpoint | None:
        """Return this instance's endpoint; None, with a log message on the request, while an agent is away."""
        if self._endpoint is not None and self._away_since_s is None:
            return self._endpoint
        _log.error(
            "request %s is not handed out: the agent of this engine, or of one of its ranks, is away", request_id
        )
        return None

    def _decline(self, request_id: str, parameters: Mapping[str, Any], prompt_tokens: int) -> None:
        """Order an empty claim, so that prefill releases its pages, if its handover can be read."""
        if Half.TARGET not in self._roles:
            return
        try:
            found = promised_handover(parameters, prompt_tokens)
            if found.room in self._foreign:
                return
            self._orders.append(self._nothing_of(found, request_id, Binding(b"", found.binding.capability)))
        except ArgumentError as error:
            _log.warning("request %s: prefill keeps its pages until its limit: %s", request_id, error)

    def _fail(self, request_id: str, text: str, external_tokens: int) -> None:
        """Let the load of a request fail, if it waits for one."""
        if external_tokens:
            self._loading.add(request_id)
            self._orders.append(Fail(request_id, text))

    def _check(self, found: Handover) -> None:
        if Half.TARGET not in self._roles:
            raise ArgumentError(f"{WANTS_PREFILL} is set, and this engine only produces KV: use kv_role kv_both")
        if self._content != found.content:
            raise ArgumentError(
                f"pages hold {found.content!r} at prefill and {self._content!r} here: bytes of one mean nothing to the "
                "other; give both engines the same attention backend, data type and kind of processor. Recurrent states and latents "
                "move between two engines of vLLM alone"
            )

    def _nothing_of(self, found: Handover, request_id: str, binding: Binding) -> Claim:
        """Return a claim of no token, for all groups."""
        first, *others = (GroupPages((), found.tokens, found.tokens) for _ in self._groups)
        return Claim(request_id, found.room, found.endpoint, *first, binding, tuple(others))
