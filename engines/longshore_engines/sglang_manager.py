"""Connects a rank of SGLang to its agent and to the ranks of the other side. One object a process.

SGLang makes it by `sglang.get_kv_class` when its scheduler starts. `sglang_prefill` and `sglang_decode` use it for one
request each. Peers' messages come by SGLang's own sockets and carry no KV.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import pkgutil
import threading
import time
from functools import partial
from typing import Any

from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.network import NetworkAddress
from sglang.version import __version__ as sglang_version

from longshore_client.errors import ArgumentError, ClientClosed, WaitTimeout
from longshore_client.registration import new_instance
from longshore_engines.agents import registered
from longshore_engines.asks import (
    TAG,
    VERSION,
    Ask,
    Asks,
    Decline,
    FirstToken,
    Grant,
    Left,
    Message,
    ToGrant,
    ToTell,
    frames_of,
    message_of,
    new_ask,
    own_key,
)
from longshore_engines.halves import CallThread, Halves, OpenHalf
from longshore_engines.sglang_checks import HOOKED, HOOKED_BY_VERSION, check_engine, check_hooks
from longshore_engines.sglang_pools import content_of, found_pools, shared_pools, told
from longshore_engines.sglang_versions import ManagerBase, replicas
from longshore_wire.engine_messages import Half
from longshore_wire.layout import Parallel

_log = logging.getLogger("longshore.sglang")

# A starting engine may be faster than its agent.
CONNECT_LIMIT_S = 120.0
# All ranks register at about the same time, and a restarted agent is back in seconds.
ENDPOINT_LIMIT_S = 30.0
# Strangers must not fill the engine's log.
WARNING_PAUSE_S = 10.0


class LongshoreManager(ManagerBase):  # type: ignore[misc] # SGLang is not installed where types are checked
    """One rank's connection to its agent, and its messages to peers.

    Attributes:
        pools: its memory.
        halves: its open rooms.
        content: meaning of a page's bytes, beyond the layout; equal on both sides.
        senders: at prefill, the senders of prompts that have not ended, by their rooms.
        receivers: at decode, the receivers that wait for a grant or a first token, by their asks.
        lock: guards `asks`, `senders`, `receivers`, and what peers' messages change in these.
    Raises:
        ArgumentError: from the constructor: this engine has a property that cannot be served; names it.
    """

    supports_deferred_decode_kv_release = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        parallel = get_parallel()
        check_hooks({path: pkgutil.resolve_name(path) for path in (*HOOKED, *HOOKED_BY_VERSION[sglang_version])})
        check_engine(args, server_args, parallel, os.environ, sglang_version)
        self.is_source = disaggregation_mode == DisaggregationMode.PREFILL
        self.lock = threading.Lock()
        self.asks = Asks()
        self.senders: dict[int, Any] = {}
        self.receivers: dict[int, Any] = {}
        self.mismatches: dict[str, str] = {}
        self._own_key = own_key(os.environ)
        self._draining: dict[int, list[OpenHalf]] = {}
        self._letters = CallThread("longshore-letters", _log)
        # Before the base class tells decode ranks of this rank.
        self._connect_agent(args, _place(args, parallel, replicas(parallel, server_args)), parallel)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        # Pages of a failed transfer are kept until `is_abort_release_safe`.
        self.enable_deferred_decode_kv_release = True
        threading.Thread(target=self._hear, name="longshore-peers", daemon=True).start()
        if not self.is_source:
            self._start_heartbeat_checker_thread()

    def _connect_agent(self, args: Any, place: Parallel, parallel: Any) -> None:
        model = told()
        self.pools = pools = found_pools(args, model.window_tokens)
        layers = parallel.pp_group.all_gather_object(pools.layer_counts)
        shared = shared_pools(pools, model, layers, place)
        world = parallel.world_group
        instance = world.broadcast_object(new_instance() if world.rank_in_group == 0 else None, src=0)
        role = Half.SOURCE if self.is_source else Half.TARGET
        try:
            self.client, _ = registered(None, instance, shared, (role,), CONNECT_LIMIT_S, _log)
            for cache, geometry in enumerate(shared.geometries):
                self.client.register_pool(cache, geometry, shared.regions)
        finally:
            for region in shared.regions:
                if isinstance(region, int):
                    os.close(region)
        self.on_device = shared.device != "cpu"
        self.content = content_of(pools)
        # SGLang cannot compute at decode what prefill does not send, so it waits for an agent that restarts.
        self.halves = Halves(self.client, _log, waits_for_agent=True)
        self.halves.listen()
        _log.info("registered as %s of %s", role.name, instance)

    # -- what SGLang calls -----------------------------------------------------------------------------------------

    def build_receiver_registration_message(self) -> list[bytes]:
        """Return SGLang's first message from a decode rank to a prefill rank. Its content is not needed."""
        return [TAG]

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return whether a prefill engine's properties are known. A mismatch fails its requests, not this engine."""
        try:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))
        except RuntimeError as error:
            _log.error("prefill at %s cannot serve this engine: %s", bootstrap_addr, error)
            self.mismatches[bootstrap_addr] = str(error)
            return False

    def know_prefill(self, address: str) -> None:
        """Take requests of a prefill engine other than SGLang, which has no bootstrap server.

        Args:
            address: of its HTTP server. SGLang asks it for `/health`, and fails its requests when it is gone.
        """
        with self.connection_lock:
            if address in self.prefill_info_table:
                return
            info = PrefillServerInfo(
                attn_tp_size=1,
                attn_cp_size=1,
                dp_size=1,
                pp_size=1,
                page_size=None,
                kv_cache_dtype=None,
                follow_bootstrap_room=True,
            )
            self._resolve_rank_mapping(info)
            self.prefill_info_table[address] = info

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:  # noqa: ARG002
        """Return whether no process writes the pages of a failed request any more."""
        safe: bool = all(half.ended for half in self._draining.get(bootstrap_room, ()))
        return safe

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Forget a failed request whose pages were freed."""
        self._draining.pop(bootstrap_room, None)

    def _resolve_rank_mapping(self, info: Any) -> None:
        """Let every decode rank talk to the first rank of prefill's replica. Pages come by the agents, from all ranks.

        SGLang's own mapping needs tensor parallel sizes of which one divides the other.
        """
        info.target_tp_rank = 0
        info.target_tp_ranks, info.target_cp_ranks, info.target_pp_ranks = [0], [0], [0]
        info.required_dst_info_num = info.required_prefill_response_num = 1

    # -- what senders and receivers call ---------------------------------------------------------------------------

    @property
    def answers_asks(self) -> bool:
        """Whether this is the rank of prefill that decode ranks ask."""
        return bool(self.attn_tp_rank == 0 and self.pp_rank == 0)

    def drain(self, bootstrap_room: int, half: OpenHalf) -> None:
        """Keep the pages of a failed request until its half has ended."""
        self._draining.setdefault(bootstrap_room, []).append(half)

    def new_ask(self, receiver: Any) -> int:
        """Return the number of an ask, whose answers go to this receiver."""
        ask = new_ask()
        with self.lock:
            self.receivers[ask] = receiver
        return ask

    def forget_ask(self, ask: int) -> None:
        """Ignore later answers to an ask."""
        with self.lock:
            self.receivers.pop(ask, None)

    def aux_rows(self, index: int) -> tuple[bytes, ...]:
        """Return SGLang's rows on the first token of a prompt."""
        pairs = zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens, strict=True)
        return tuple(ctypes.string_at(address + index * length, length) for address, length in pairs)

    def post(self, replies: Any) -> None:
        """Send answers to decode ranks, in their order; return at once."""
        for reply in replies:
            self._letters.put(partial(self._post, reply))

    def ask(self, receiver: Any, ask: int, *, is_repeated: bool = False) -> None:
        """Ask prefill for a receiver's prompt; return at once.

        Args:
            is_repeated: find out first where prefill's first rank is now.
        """
        self._letters.put(partial(self._ask, receiver, ask, is_repeated=is_repeated))

    def _ask(self, receiver: Any, ask: int, *, is_repeated: bool) -> None:
        if is_repeated:
            found = receiver._get_bootstrap_info_from_server(receiver.prefill_dp_rank, 0, 0, 0)  # noqa: SLF001
            if found is None:
                return
            receiver.bootstrap_infos = [{**found, "is_dummy": False}]
        rank = receiver.bootstrap_infos[0]
        message = Ask(VERSION, ask, receiver.bootstrap_room, self.local_ip, self.rank_port)
        self._send(rank["rank_ip"], rank["rank_port"], message)

    def tell_prefill(self, rank: Any, message: Ask | Left) -> None:
        """Send a message to a prefill rank, as SGLang's bootstrap server described it; return at once."""
        self._letters.put(partial(self._send, rank["rank_ip"], rank["rank_port"], message))

    # -- threads ---------------------------------------------------------------------------------------------------

    def _post(self, reply: ToGrant | ToTell) -> None:
        message: Message
        if isinstance(reply, ToTell):
            message = reply.message
        else:
            try:
                endpoint = self.client.endpoint(ENDPOINT_LIMIT_S)
                message = Grant(reply.asker.ask, reply.room, self.content, endpoint)
            except (WaitTimeout, ClientClosed) as error:
                message = Decline(reply.asker.ask, f"prefill's agent is away: {error}")
        self._send(reply.asker.host, reply.asker.port, message)

    def _send(self, host: str, port: int, message: Message) -> None:
        address = NetworkAddress(host, port)
        frames = frames_of(message, (*self.client.engine_keys, self._own_key))
        self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)

    def _hear(self) -> None:
        warned_s = -math.inf
        while True:
            frames, keys = self.server_socket.recv_multipart(), self.client.engine_keys
            try:
                message = message_of(frames, (*keys, self._own_key) if keys else ())
            except ArgumentError as error:
                if time.monotonic() - warned_s > WARNING_PAUSE_S:
                    warned_s = time.monotonic()
                    _log.error("%s", error)
                continue
            if message is not None:
                self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Ask():
                with self.lock:
                    replies = self.asks.asked(message)
                self.post(replies)
            case Left():
                with self.lock:
                    room = self.asks.left(message)
                    sender = None if room is None else self.senders.get(room)
                    if sender is not None:
                        sender.fail(f"decode no longer needs it: {message.text}")
            case Grant() | FirstToken() | Decline():
                with self.lock:
                    receiver = self.receivers.get(message.ask)
                    if receiver is not None:
                        receiver.answered(message)


def _place(args: Any, parallel: Any, replica_count: int) -> Parallel:
    """Return this rank's place. With DP attention a replica is a group of attention ranks."""
    by_attention = parallel.attn_dp_size > 1
    return Parallel(
        tp=parallel.attn_tp_size,
        tp_rank=parallel.attn_tp_rank,
        pp=parallel.pp_size,
        pp_rank=args.pp_rank,
        dp=parallel.attn_dp_size if by_attention else replica_count,
        dp_rank=parallel.attn_dp_rank if by_attention else args.system_dp_rank or 0,
    )
