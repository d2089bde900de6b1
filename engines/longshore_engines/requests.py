"""The scheduler's side of a connector: which request wants its KV handed out or brought in, and what ranks must do.

Called by an engine's connector in its scheduler's process, by one thread. Decides only: touches no socket, knows no
engine and holds no page; its orders are carried out by `rooms.RankRooms` in every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from longshore_client.errors import ArgumentError
from longshore_engines.handover import (
    HANDOVER_VERSION,
    KEY,
    WANTS_DECODE,
    WANTS_PREFILL,
    Claim,
    Fail,
    Handover,
    Offer,
    Order,
    Withdraw,
    handover_of,
    packed_handover,
)
from longshore_wire.engine_messages import Endpoint, Half

_log = logging.getLogger("vllm.longshore")

# Ranks speak of their agent in every step. What they said longer ago may be of an agent that is gone, so that a
# prompt is not computed for it before they have said it again: that takes one empty step.
ENDPOINT_AGE_MAX_S = 1.0
# An agent that is restarted is back in seconds. A prompt waits for it so long, and then is computed and not handed out.
AGENT_AWAY_MAX_S = 30.0


class RequestBook:
    """What an engine's scheduler knows of its requests' transfers.

    Args:
        page_size: tokens of a page.
        roles: SOURCE if this engine may hand KV out, TARGET if it may bring it in; until the ranks have said more.
        first_room: where the numbers of its rooms begin; a number is not used twice in an instance's name.
    """

    def __init__(self, page_size: int, roles: Collection[Half], first_room: int) -> None:
        self._page_size = page_size
        self._roles = frozenset(roles)
        self._room = first_room
        self._endpoint: Endpoint | None = None
        self._content = ""
        self._heard_s = float("-inf")
        self._away_since_s: float | None = None
        self._orders: list[Order] = []
        self._loading: set[str] = set()

    def introduced(self, roles: Collection[Half], content: str) -> None:
        """Note how a rank is registered, and what its pages hold; `content` is equal on ranks that can exchange pages."""
        self._roles &= frozenset(roles)
        self._content = content

    def heard(self, endpoint: Endpoint | None, now_s: float, *, away: bool = False) -> None:
        """Note what a rank said of this instance's endpoint; None: it is as it was.

        Args:
            away: it is not whole now, because an agent or a rank is being restarted.
        """
        self._heard_s = now_s
        if endpoint is not None:
            self._endpoint = endpoint
        if not away:
            self._away_since_s = None
        elif self._away_since_s is None:
            self._away_since_s = now_s

    def matched(
        self, parameters: Mapping[str, Any] | None, prompt_tokens: int, computed_tokens: int, now_s: float
    ) -> int | None:
        """Return how many tokens behind `computed_tokens` come from elsewhere; None: ask again in the next step."""
        if not parameters:
            return 0
        if parameters.get(WANTS_DECODE) and Half.SOURCE in self._roles:
            fresh = now_s - self._heard_s <= ENDPOINT_AGE_MAX_S
            waiting = self._away_since_s is not None and now_s - self._away_since_s <= AGENT_AWAY_MAX_S
            return 0 if fresh and not waiting else None
        if not parameters.get(WANTS_PREFILL):
            return 0
        try:
            found = handover_of(parameters)
            self._check(found, prompt_tokens)
            tokens = found.tokens
        except ArgumentError:
            # It ends as a load that failed, so that the engine's policy decides.
            tokens = prompt_tokens
        return max(0, tokens - computed_tokens)

    def allocated(
        self,
        request_id: str,
        parameters: dict[str, Any] | None,
        pages: Sequence[int],
        prompt_tokens: int,
        external_tokens: int,
    ) -> None:
        """Note the pages of a request of which `external_tokens` come from elsewhere; orders their claim, once."""
        if not parameters or not parameters.get(WANTS_PREFILL):
            return
        parameters[WANTS_PREFILL] = False
        try:
            found = handover_of(parameters)
            self._check(found, prompt_tokens)
        except ArgumentError as error:
            if external_tokens:
                self._loading.add(request_id)
                self._orders.append(Fail(request_id, str(error)))
            self._decline(request_id, parameters)
            return
        if not external_tokens:
            self._orders.append(_nothing_of(found, request_id))
            return
        first_token = found.tokens - external_tokens
        first_page, end_page = first_token // self._page_size, -(-found.tokens // self._page_size)
        self._loading.add(request_id)
        self._orders.append(
            Claim(request_id, found.room, found.endpoint, tuple(pages[first_page:end_page]), first_token, found.tokens)
        )

    def finished(
        self,
        request_id: str,
        parameters: dict[str, Any] | None,
        pages: Sequence[int],
        prompt_tokens: int,
        *,
        complete: bool,
    ) -> dict[str, Any] | None:
        """Note the end of a request; return what decode must be told if its pages are handed out, which keeps them.

        Args:
            pages: those of its computed tokens, in order.
            complete: it ended by itself, so that its whole prompt is computed; not by an abort or an error.
        """
        if request_id in self._loading:
            self._orders.append(Withdraw(request_id))
        if not parameters:
            return None
        if parameters.get(WANTS_PREFILL):
            # It ended before it got pages. The prefill engine waits with its own for a claim: make an empty one.
            parameters[WANTS_PREFILL] = False
            self._decline(request_id, parameters)
            return None
        if not (parameters.get(WANTS_DECODE) and complete and Half.SOURCE in self._roles):
            return None
        page_count = -(-prompt_tokens // self._page_size)
        if not page_count or len(pages) < page_count:
            return None
        if self._endpoint is None or self._away_since_s is not None:
            _log.error(
                "request %s is not handed out: the agent of this engine, or of one of its ranks, is away", request_id
            )
            return None
        room, self._room = self._room, self._room + 1
        self._orders.append(Offer(request_id, room, tuple(pages[:page_count]), prompt_tokens))
        handover = Handover(HANDOVER_VERSION, room, prompt_tokens, self._endpoint, self._content)
        return {WANTS_PREFILL: True, WANTS_DECODE: False, KEY: packed_handover(handover)}

    def received(self, request_ids: Collection[str]) -> None:
        """Note that every rank has reported these requests' claims as over."""
        self._loading.difference_update(request_ids)

    @property
    def has_orders(self) -> bool:
        """Whether ranks must be told something."""
        return bool(self._orders)

    def take_orders(self) -> tuple[Order, ...]:
        """Return what the ranks must do that they were not told yet."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def _decline(self, request_id: str, parameters: Mapping[str, Any]) -> None:
        """Tell prefill, if its handover can be read, that nobody will take its pages."""
        if Half.TARGET not in self._roles:
            return
        try:
            self._orders.append(_nothing_of(handover_of(parameters), request_id))
        except ArgumentError as error:
            _log.warning("request %s: prefill keeps its pages until its limit: %s", request_id, error)

    def _check(self, found: Handover, prompt_tokens: int) -> None:
        if Half.TARGET not in self._roles:
            raise ArgumentError(f"{WANTS_PREFILL} is set, and this engine only produces KV: use kv_role kv_both")
        if self._content != found.content:
            raise ArgumentError(
                f"pages hold {found.content!r} at prefill and {self._content!r} here: bytes of one mean nothing to the "
                "other; give both engines the same attention backend, data type and kind of processor"
            )
        if prompt_tokens < found.tokens:
            raise ArgumentError(
                f"the prompt has {prompt_tokens} tokens and prefill computed {found.tokens}: give both the same prompt"
            )


def _nothing_of(found: Handover, request_id: str) -> Claim:
    return Claim(request_id, found.room, found.endpoint, (), found.tokens, found.tokens)
