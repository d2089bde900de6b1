"""A minimal fake of the part of SGLang that the connector imports, since SGLang cannot be installed with our torch.

It is 0.5.23, or 0.5.16 with what that lacks. `installed` makes `import sglang` find it. e2e/sglang tests the connector with the real SGLang.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import ClassVar

from aiohttp import web

from longshore_client import Endpoint, KVLayout, ModelShape, Parallel
from longshore_engines.handover import HANDOVER_VERSION, Handover
from longshore_wire.engine_messages import RankAddress

OURS = ("sglang", "sglang_bootstrap", "sglang_decode", "sglang_manager", "sglang_prefill", "sglang_versions")
OLD = "0.5.16"
PAGE_TOKENS, LAYERS, HEADS, DIM = 4, 2, 2, 8
AUX_LENGTHS = (8, 4)
# A prompt of six tokens at a prefill engine.
ROOM = 7
LAYOUT = KVLayout(ModelShape.kv(LAYERS, HEADS, DIM, 4), Parallel(), PAGE_TOKENS)
ENDPOINT = Endpoint("prefill-0", LAYOUT, (RankAddress(0, "10.0.0.1:7000", 5),))
HANDOVER = Handover(HANDOVER_VERSION, ROOM, 6, ENDPOINT, "tokens of float32")


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class Backend(Enum):
    NIXL = "nixl"


class Mode(Enum):
    PREFILL, DECODE = "prefill", "decode"


class KVArgs:
    pass


class HookKind(Enum):
    BEFORE, AFTER, AROUND, REPLACE = range(4)


class Hooks:
    registered: ClassVar[list] = []

    @classmethod
    def register(cls, target, hook, kind):
        cls.registered.append((target, hook, kind))


class TransferError(Exception):
    def __init__(self, _room, text, is_from_another_rank=False):
        super().__init__(text)
        self.is_from_another_rank = is_from_another_rank


class Manager:
    """What every backend's manager has. Messages to peers are kept in `sent`; `heard` are those from peers."""

    def __init__(self, args, mode, server_args, is_mla_backend=False):
        self.kv_args, self.request_status, self.failure_records = args, {}, {}
        self.attn_tp_rank, self.pp_rank = WORLD["parallel"].attn_tp_rank, 0
        self.local_ip, self.rank_port = "127.0.0.1", 7001
        self.bootstrap_timeout = self.waiting_timeout = 300
        self.sent, self.heard = [], SimpleQueue()
        self.server_socket = SimpleNamespace(recv_multipart=self.heard.get)
        self.has_heartbeat = False
        self.connection_lock, self.failure_lock = threading.Lock(), threading.Lock()
        self.prefill_info_table, self.connection_pool = {}, {}
        self.addr_to_rooms_tracker = defaultdict(set)

    def update_status(self, room, status):
        self.request_status[room] = status

    def record_failure(self, room, text):
        self.failure_records[room] = text

    def try_ensure_parallel_info(self, address):
        raise RuntimeError(f"{address} has another kv_cache_dtype")

    def _start_heartbeat_checker_thread(self):
        self.has_heartbeat = True

    def _send_multipart_locked(self, address, parts, is_ipv6=False):
        self.sent.append((address, parts))


class _Request:
    def __init__(self, mgr, address, room, *_more):
        self.kv_mgr, self.bootstrap_addr, self.bootstrap_room = mgr, address, room
        self.conclude_state = None
        mgr.update_status(room, KVPoll.Bootstrapping)

    def clear(self):
        self.kv_mgr.request_status.pop(self.bootstrap_room, None)

    def failure_exception(self):
        self.conclude_state = KVPoll.Failed
        self.clear()
        raise TransferError(0, self.kv_mgr.failure_records.pop(self.bootstrap_room, "unknown"))


class Sender(_Request):
    _early_send_wait_event = None
    curr_idx = 0

    def init(self, pages, aux_index):
        self.num_kv_indices, self.aux_index = pages, aux_index

    def _record_transfer_indices(self, pages, state):
        pass


class Receiver(_Request):
    abort_notified = False

    def __init__(self, mgr, address, room, *more):
        super().__init__(mgr, address, room, *more)
        mgr.addr_to_rooms_tracker[address].add(room)

    def clear(self):
        super().clear()
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)

    def init(self, dp_rank):
        self.prefill_dp_rank = dp_rank
        self.bootstrap_infos = [{"rank_ip": "10.0.0.1", "rank_port": 7000}]
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def poll(self):
        return self.conclude_state if self.conclude_state is not None else KVPoll.WaitingForInput

    def invalidate_cached_bootstrap_infos(self):
        pass

    def _get_bootstrap_info_from_server(self, *_place):
        return {"rank_ip": "10.0.0.9", "rank_port": 7009}


class OldManager(Manager):
    _send_multipart_locked = None

    def _connect(self, address, is_ipv6=False):
        return SimpleNamespace(send_multipart=lambda parts: self.sent.append((address, parts)))


class OldSender(Sender):
    def __init__(self, mgr, address, room, dest_tp_ranks, pp_rank, is_rank_known):
        super().__init__(mgr, address, room)

    failure_exception = None


class OldReceiver(Receiver):
    poll = failure_exception = invalidate_cached_bootstrap_infos = None
    clear = _Request.clear


class BootstrapServer:
    """Has one rank of prefill at `port`, once a test has set it."""

    dp_size, port = None, 0

    def __init__(self, host, port):
        self.app = web.Application()
        self._setup_routes()

    def _setup_routes(self):
        pass

    def _is_ready(self):
        return bool(self.port)

    @property
    def prefill_port_table(self):
        return {0: {0: {0: {0: SimpleNamespace(rank_ip="127.0.0.1", rank_port=self.port)}}}}


class Rows:
    """SGLang's rows on first tokens, as its scheduler sees them."""

    def __init__(self, torch):
        self.output_ids = torch.zeros((2, 16), dtype=torch.int32)
        self.cached_tokens = torch.full((2, 16), 7, dtype=torch.int32)
        self.output_token_logprobs_val = torch.full((2, 16), -9.0)
        self.output_token_logprobs_idx = torch.zeros((2, 16), dtype=torch.int32)
        self.output_top_logprobs_val = torch.zeros((2, 128))
        self.output_top_logprobs_idx = torch.zeros((2, 128), dtype=torch.int32)
        self.bootstrap_room = torch.zeros((2, 8), dtype=torch.uint64)


class Pool:
    def __init__(self, pages, torch):
        self.k_buffer = [torch.zeros(pages * PAGE_TOKENS, HEADS, DIM) for _ in range(LAYERS)]
        self.v_buffer = [torch.zeros(pages * PAGE_TOKENS, HEADS, DIM) for _ in range(LAYERS)]
        self.dtype = torch.float32
        self.layer_num, self.kv_cache_layout, self.head_dim, self.v_head_dim = LAYERS, "nhd", DIM, DIM


class Group:
    """This rank's values, and `others`' after them."""

    rank_in_group = 0

    def __init__(self, *others):
        self.others = others

    def broadcast_object(self, value, src):
        return value

    def all_gather_object(self, value):
        return [value, *self.others]


def hooked(function):
    @functools.wraps(function)
    def wrapper(*arguments, **named):
        return function(*arguments, **named)

    return wrapper


class Queue:
    @hooked
    def _init_kv_manager(self):
        pass

    @hooked
    def _create_receiver_and_enqueue(self):
        pass

    @hooked
    def create_sender(self):
        pass

    @hooked
    def abort_request(self):
        pass

    @hooked
    def __init__(self):
        pass


class HookedPool:
    @hooked
    def _create_buffers(self):
        pass

    _create_buffers_normal = _create_buffers

    @hooked
    def __init__(self):
        pass


WORLD: dict = {}


def parallel(**changes):
    plain = {
        "attn_tp_size": 1,
        "attn_tp_rank": 0,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "dp_size": 1,
        "pp_size": 1,
        "attn_cp_size": 1,
        "attn_dcp_size": 1,
        "enable_kv_cache_sharding": False,
        "world_group": Group(),
        "pp_group": Group(),
    }
    return SimpleNamespace(**{**plain, **changes})


def content(version):
    is_old = version == OLD
    options = {"get_server_args" if is_old else "get_disagg": lambda: WORLD["disagg"]}
    return {
        "sglang.version": {"__version__": version},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": Hooks, "HookType": HookKind},
        "sglang.srt.server_args": {"add_disagg_transfer_backend_choices": WORLD.setdefault("choices", []).extend},
        "sglang.srt.disaggregation.utils": {
            "TransferBackend": Backend,
            "DisaggregationMode": Mode,
            "get_kv_class": hooked(lambda: None),
        },
        "sglang.srt.disaggregation.base.conn": {"KVPoll": KVPoll, "KVArgs": KVArgs},
        "sglang.srt.disaggregation.common.conn": {
            "CommonKVManager": OldManager if is_old else Manager,
            "CommonKVSender": OldSender if is_old else Sender,
            "CommonKVReceiver": OldReceiver if is_old else Receiver,
            "KVTransferError": TransferError,
            "CommonKVBootstrapServer": BootstrapServer,
            "PrefillServerInfo": SimpleNamespace,
        },
        "sglang.srt.disaggregation.decode": {"DecodePreallocQueue": Queue, "DecodeTransferQueue": Queue},
        "sglang.srt.disaggregation.prefill": {"PrefillBootstrapQueue": Queue},
        "sglang.srt.managers.scheduler": {"Scheduler": Queue},
        "sglang.srt.mem_cache.memory_pool": dict.fromkeys(
            ("MHATokenToKVPool", "MLATokenToKVPool", "MambaPool"), HookedPool
        ),
        "sglang.srt.runtime_context": {"get_parallel": lambda: WORLD["parallel"], **options},
        "sglang.srt.utils.network": {
            "NetworkAddress": lambda host, port: SimpleNamespace(to_tcp=lambda: f"tcp://{host}:{port}", is_ipv6=False),
            "get_local_ip_auto": lambda: "127.0.0.1",
        },
    }


@contextmanager
def installed(version: str = "0.5.23") -> Iterator[None]:
    """During the block `import sglang` finds the fake; afterwards no module that used it is left."""
    WORLD.clear()
    Hooks.registered = []
    WORLD["parallel"] = parallel()
    WORLD["disagg"] = SimpleNamespace(disaggregation_transfer_backend="longshore", disaggregation_mode="decode")
    before = dict(sys.modules)
    for name, members in content(version).items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(members)
    try:
        yield
    finally:
        for name in list(sys.modules):
            ours = name.removeprefix("longshore_engines.") in OURS and name.startswith("longshore_engines.")
            if ours or (name.partition(".")[0] == "sglang" and name not in before):
                del sys.modules[name]
