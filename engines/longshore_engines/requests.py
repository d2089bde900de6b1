"""Decides, in an engine's scheduler, which requests offer or claim KV, and gives orders to the ranks.

Called by an engine's connector in its scheduler's process, by one thread. It uses no socket, knows no engine and holds
no pages; `rooms.RankRooms` in every rank carries out its orders.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from longshore_client.errors import ArgumentError
from longshore_engines.handover import (
    HANDOVER_VERSION,
    WANTS_DECODE,
    WANTS_PREFILL,
    Claim,
    Fail,
    Handover,
    Offer,
    Order,
    Withdraw,
    handover_of,
    parameters_for_decode,
)
from longshore_wire.engine_messages import Endpoint, Half

_log = logging.getLogger("vllm.longshore")

# Ranks report their agent in every step. An older report may be of an agent that is gone. A prompt then waits for the
# next report, which takes one empty step, before it is computed.
ENDPOINT_AGE_MAX_S = 1.0
# A restarted agent is back in seconds. A prompt waits this long for it, and is then computed without an offer.
AGENT_AWAY_MAX_S = 30.0


class RequestBook:
    """The transfers of one engine's requests, as its scheduler knows them.

    Args:
        page_size: tokens of a page.
        roles: SOURCE if this engine may offer KV, TARGET if it may claim KV; until the ranks have reported theirs.
        first_room: number of its first room. An instance must not use a number twice.
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

    def matched(
        self, parameters: Mapping[str, Any] | None, prompt_tokens: int, computed_tokens: int, now_s: float
    ) -> int | None:
        """Return the number of tokens after `computed_tokens` to claim; None: ask again in the next step."""
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
            # Let the load fail, so that the engine's policy for that applies.
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
        """Record the pages of a request that claims `external_tokens`, and order the claim once."""
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
        """Record the end of a request. If its pages are offered, keep them and return the parameters for decode.

        Args:
            pages: of its computed tokens, in order.
            complete: True: it ended normally, so its whole prompt is computed; False: by an abort or an error.
        """
        if request_id in self._loading:
            self._orders.append(Withdraw(request_id))
        if not parameters:
            return None
        if parameters.get(WANTS_PREFILL):
            # It ended before it got pages. Make an empty claim, since the prefill engine keeps its pages for one.
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
        return parameters_for_decode(handover)

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

    def _decline(self, request_id: str, parameters: Mapping[str, Any]) -> None:
        """Order an empty claim, so that prefill releases its pages, if its handover can be read."""
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
