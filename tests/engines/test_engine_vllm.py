"""Tests the connector's reaction to vLLM's calls, with a fake vLLM: from a prompt's end to the agent, and back."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import msgspec
import pytest
import torch
from fake_agent import FakeAgent
from prometheus_client import CollectorRegistry, Counter, Histogram
from scene import DONE, RELEASED, event
from stand_in_vllm import (
    CacheConfig,
    Factory,
    FullAttentionSpec,
    Layer,
    Role,
    SlidingWindowSpec,
    Status,
    cache_group,
    installed,
)

from longshore_client import ArgumentError, ConnectError, Endpoint, Half, KVLayout, ModelShape, PageOrder, Parallel
from longshore_engines.handover import ROOM, handover_of, parameters_for_decode
from longshore_engines.vllm_plugin import register
from longshore_wire.engine_messages import (
    Ask,
    Cancel,
    EndpointUpdate,
    Hello,
    Offer,
    RankAddress,
    Receive,
    RegisterPool,
    RoomEvent,
    RoomEventKind,
)

HEADS, TOKENS, DIM = 2, 32, 8
LAYOUT = KVLayout(ModelShape.kv(2, 2, DIM, 4), Parallel(), TOKENS, PageOrder.OPAQUE, blob_bytes=TOKENS * 2 * DIM * 4)


def endpoint(instance, address="10.0.0.1:7000"):
    return Endpoint(instance, LAYOUT, (RankAddress(0, address, 5),))


def config(socket, instance, **extra):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=instance,
            is_kv_producer=True,
            is_kv_consumer=True,
            kv_connector_extra_config={"socket": socket, **extra},
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_match_unit=None),
        model_config=SimpleNamespace(
            use_mla=False,
            enable_cumem_allocator=False,
            get_total_num_hidden_layers=lambda: 2,
            get_total_num_kv_heads=lambda: HEADS,
            hf_text_config=SimpleNamespace(),
            get_head_size=lambda: DIM,
        ),
    )


def cache_config():
    return CacheConfig(6, [cache_group(FullAttentionSpec(TOKENS, DIM), *(f"model.layers.{n}.attn" for n in range(2)))])


class Engine:
    """A scheduler's and a worker's connector, with vLLM's order of calls in a step."""

    def __init__(self, module, tmp_path, instance, **extra):
        self.agent = FakeAgent(str(tmp_path / instance))
        settings = config(self.agent.path, instance, **extra), cache_config()
        self.scheduler = module.LongshoreConnector(settings[0], Role.SCHEDULER, settings[1])
        self.worker = module.LongshoreConnector(settings[0], Role.WORKER, settings[1])
        shape = (6, HEADS, TOKENS, 2 * DIM)
        self.worker.register_kv_caches({f"model.layers.{n}.attn": torch.zeros(shape) for n in range(2)})
        self.agent.say(EndpointUpdate(endpoint(instance)))
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

    def prefill(self, name="p", tokens=70, status=Status.FINISHED_LENGTH_CAPPED, numbers=(4, 2, 5)):
        """Compute a prompt in one step; return what its end returns."""
        prompt = request(name, {"do_remote_decode": True}, tokens, status)
        self.scheduler.update_state_after_alloc(prompt, blocks(*numbers), 0)
        self.step(scheduled(numbers, **{name: (0, tokens)}))
        return self.scheduler.request_finished(prompt, list(numbers))

    def step(self, output=None):
        metadata = self.scheduler.build_connector_meta(output or scheduled())
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(SimpleNamespace(attn_metadata=object()))
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        output = SimpleNamespace(
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
            finished_recving=results.finished_recving,
            finished_sending=results.finished_sending,
        )
        self.scheduler.update_connector_output(output)
        return results

    def step_until(self, predicate):
        client = self.worker._client
        for _ in range(2000):
            results = self.step()
            if predicate(results):
                return results
            with client._changed:
                client._changed.wait(0.01)
        raise AssertionError("it did not come to that")

    def stop(self):
        self.worker.shutdown()
        self.agent.stop()


@pytest.fixture
def module():
    with installed():
        yield importlib.import_module("longshore_engines.vllm")


@pytest.fixture
def engines(module, tmp_path):
    made = Engine(module, tmp_path, "prefill"), Engine(module, tmp_path, "decode")
    yield made
    for engine in made:
        engine.stop()


def request(name, parameters, tokens=70, status=Status.FINISHED_LENGTH_CAPPED):
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=parameters,
        num_prompt_tokens=tokens,
        prompt_token_ids=list(range(tokens)),
        prompt_embeds=None,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        status=status,
    )


def blocks(*numbers):
    return SimpleNamespace(get_block_ids=lambda: (list(numbers),))


def scheduled(numbers=(), *, preempted=(), new=True, **tokens):
    """Return vLLM's output for a step that computes tokens (those before it, and how many) of requests."""
    before = {name: first for name, (first, _) in tokens.items()}
    cached = {} if new else before
    return SimpleNamespace(
        preempted_req_ids=set(preempted),
        num_scheduled_tokens={name: count for name, (_, count) in tokens.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=first) for name, first in before.items() if new
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (list(numbers),)),
    )


@pytest.mark.shows("option.socket")
def test_a_prompt_goes_from_one_engines_blocks_to_the_others(engines):
    prefill, decode = engines
    prompt = request("p", {"do_remote_decode": True})
    assert prefill.scheduler.get_num_new_matched_tokens(prompt, 0) == (0, False)
    kept, told = prefill.prefill()
    assert kept
    prefill.agent.expect(lambda: prefill.agent.of(Offer))

    wanting = request("d", told)
    assert decode.scheduler.get_num_new_matched_tokens(wanting, 32) == (38, True)
    decode.scheduler.update_state_after_alloc(wanting, blocks(1, 3, 0), 38)
    decode.step()
    decode.agent.expect(lambda: decode.agent.of(Receive))
    (offer,), (claim,) = prefill.agent.of(Offer), decode.agent.of(Receive)
    assert (claim.room, claim.endpoint) == (offer.room, endpoint("prefill"))
    assert (claim.caches[0].first_token, claim.caches[0].end_token, claim.caches[0].page_count) == (32, 70, 2)

    decode.agent.say(event(DONE, room=claim.room, half=Half.TARGET, instance="prefill"))
    decode.agent.say(event(RELEASED, room=claim.room, half=Half.TARGET, instance="prefill"))
    results = decode.step_until(lambda found: found.finished_recving)
    assert (results.finished_recving, results.failed_recving) == ({"d"}, set())
    prefill.agent.say(event(DONE, room=offer.room, instance="prefill"))
    prefill.agent.say(event(RELEASED, room=offer.room, instance="prefill"))
    assert prefill.step_until(lambda found: found.finished_sending).finished_sending == {"p"}


def test_a_cache_is_registered_once_for_its_whole_life(engines):
    prefill, _ = engines
    (registered,) = prefill.agent.of(RegisterPool)
    assert [plane.head_stride for plane in registered.geometry.planes] == [LAYOUT.opaque_bytes] * 2


def test_an_engine_without_requests_goes_on_until_its_workers_were_told(engines):
    prefill, decode = engines
    _, told = prefill.prefill()
    assert not decode.scheduler.has_pending_push_work()
    # The client disconnected before the request got blocks. Prefill must not wait for a claim that never comes.
    decode.scheduler.request_finished(request("d", told, status=Status.FINISHED_ABORTED), [])
    assert decode.scheduler.has_pending_push_work()
    decode.step()
    assert not decode.scheduler.has_pending_push_work()
    decode.agent.expect(lambda: decode.agent.of(Receive))
    (claim,) = decode.agent.of(Receive)
    assert (claim.caches[0].first_token, claim.caches[0].end_token, claim.caches[0].page_count) == (70, 70, 0)


@pytest.mark.parametrize("parameters", ["longshore_release", 5, [1]])
def test_parameters_that_are_no_mapping_are_ignored(engines, parameters, caplog):
    prefill, _ = engines
    asked = request("p", parameters)
    prefill.scheduler.on_new_request(asked)
    assert "request p: kv_transfer_params is no mapping" in caplog.text
    # vLLM reads them, too.
    assert asked.kv_transfer_params is None
    assert prefill.scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)


def test_an_aborted_prompt_keeps_no_blocks(engines):
    prefill, _ = engines
    aborted = request("p", {"do_remote_decode": True}, status=Status.FINISHED_ABORTED)
    assert prefill.scheduler.request_finished(aborted, [4, 2, 5]) == (False, None)


def test_chunks_are_offered_in_the_steps_that_compute_them(engines):
    prefill, _ = engines
    prompt = request("p", {"do_remote_decode": True, "longshore_room": 99})
    prefill.scheduler.update_state_after_alloc(prompt, blocks(4, 2, 5), 0)
    # 32 tokens were in prefill's own cache.
    prefill.step(scheduled((4, 2), p=(32, 20)))
    prefill.step(scheduled((4, 2, 5), new=False, p=(52, 18), other=(0, 40)))
    prefill.agent.expect(lambda: len(prefill.agent.of(Offer)) == 2)
    assert [
        (each.room, each.caches[0].first_token, each.caches[0].end_token, each.last) for each in prefill.agent.of(Offer)
    ] == [
        (99, 0, 32, False),
        (99, 32, 70, True),
    ]
    assert not prefill.scheduler.has_pending_push_work()
    kept, told = prefill.scheduler.request_finished(prompt, [4, 2, 5])
    assert (kept, handover_of(told).room) == (True, 99)


def test_a_step_whose_model_work_fails_offers_nothing(engines):
    prefill, _ = engines
    prompt = request("p", {"do_remote_decode": True})
    prefill.scheduler.update_state_after_alloc(prompt, blocks(4, 2, 5), 0)
    prefill.worker.bind_connector_metadata(prefill.scheduler.build_connector_meta(scheduled((4, 2, 5), p=(0, 70))))

    def forward():
        try:
            raise RuntimeError("no memory")
        finally:
            prefill.worker.wait_for_save()

    with pytest.raises(RuntimeError):
        forward()
    assert prefill.worker._rooms.open_count == 0


def test_only_a_step_that_computes_nothing_pauses_while_rooms_are_open(engines, monkeypatch):
    prefill, _ = engines
    pauses, real = [], prefill.worker._rooms.poll
    monkeypatch.setattr(prefill.worker._rooms, "poll", lambda pause_s: (pauses.append(pause_s > 0), real(0.0))[1])
    prefill.prefill()
    prefill.step()
    assert pauses == [False, True]


def test_blocks_of_a_preempted_prompt_are_overwritten_only_after_their_release(engines):
    prefill, _ = engines
    prompt = request("p", {"do_remote_decode": True})
    prefill.scheduler.update_state_after_alloc(prompt, blocks(4, 2, 5), 0)
    prefill.step(scheduled((4, 2), p=(0, 64)))
    prefill.agent.expect(lambda: prefill.agent.of(Offer))
    (offer,) = prefill.agent.of(Offer)
    prefill.agent.say(event(RELEASED, room=offer.room, instance="prefill"))
    prefill.step(scheduled(preempted=["p"]))
    assert prefill.worker._rooms.open_count == 0
    prefill.agent.expect(lambda: [each.room for each in prefill.agent.of(Cancel)] == [offer.room])


def test_decode_is_told_where_prefill_listens_after_its_agent_came_back(engines):
    prefill, decode = engines
    moved = endpoint("prefill", "10.0.0.9:7100")
    prefill.agent.say(EndpointUpdate(moved))
    prefill.step_until(lambda _: prefill.worker._endpoint == moved)
    _, told = prefill.prefill()
    wanting = request("d", told)
    decode.scheduler.update_state_after_alloc(wanting, blocks(1, 3, 0), 70)
    decode.step()
    decode.agent.expect(lambda: decode.agent.of(Receive))
    assert decode.agent.of(Receive)[0].endpoint == moved


def test_a_load_that_fails_is_reported_once_and_counted(module, engines):
    _, decode = engines
    wanting = request("d", {"do_remote_prefill": True, "longshore": "junk"})
    assert decode.scheduler.get_num_new_matched_tokens(wanting, 0) == (70, True)
    decode.scheduler.update_state_after_alloc(wanting, blocks(1, 3, 0), 70)
    results = decode.step()
    assert (results.finished_recving, results.failed_recving) == ({"d"}, {"d"})
    assert decode.step().finished_recving == set()
    stats = decode.worker.get_kv_connector_stats()
    assert stats.data["failed_loads"] == 1
    assert decode.worker.get_kv_connector_stats() is None


def test_counts_of_all_ranks_reach_the_log_and_the_prometheus_page(module):
    ranks = [module.LongshoreConnector.build_kv_connector_stats() for _ in range(2)]
    rooms = importlib.import_module("longshore_engines.rooms")
    ranks[0].add(rooms.Transfer(Half.TARGET, 0.25, 4096, ""))
    ranks[1].add(rooms.Transfer(Half.TARGET, 0.75, 8192, ""))
    ranks[1].add(rooms.Transfer(Half.TARGET, 1.0, 0, "PEER_LOST"))
    ranks[1].add(rooms.Transfer(Half.SOURCE, 0.5, 0, ""))
    total = ranks[0].aggregate(ranks[1])
    assert total.reduce() == {
        "Loads": 2,
        "Avg load time (ms)": 500.0,
        "MB loaded": 0.012,
        "Hand-outs": 1,
        "Failed loads": 1,
        "Failed hand-outs": 0,
    }
    page = CollectorRegistry()
    kinds = {
        "counter": lambda **more: Counter(registry=page, **more),
        "histogram": lambda **more: Histogram(registry=page, **more),
    }
    metrics = module.LongshoreConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    metrics.observe(total.data)
    assert page.get_sample_value("vllm:longshore_load_bytes_sum", {"engine": "0"}) == 12288
    assert page.get_sample_value("vllm:longshore_load_time_seconds_count", {"engine": "0"}) == 2
    assert page.get_sample_value("vllm:longshore_failed_loads_total", {"engine": "0"}) == 1


def test_the_plug_in_registers_the_name_that_vllm_looks_up(module):
    register()
    (found,) = Factory.registered.items()
    assert found == ("LongshoreConnector", (module.__name__, module.LongshoreConnector.__name__))


def test_the_handshake_of_another_connector_is_refused_with_the_order_that_works(module, tmp_path):
    engine = Engine(module, tmp_path, "second")
    with pytest.raises(ArgumentError, match="name LongshoreConnector before the connectors"):
        engine.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    engine.stop()


@pytest.mark.shows("option.allow_untested_version")
def test_another_vllm_is_refused_when_it_makes_the_connector_unless_it_is_let_in():
    with installed("0.34.0"):
        made = importlib.import_module("longshore_engines.vllm").LongshoreConnector
        caches = cache_config()
        with pytest.raises(ArgumentError, match=r"^vLLM 0\.34\.0: this connector was tested with"):
            made(config("/nowhere", "p"), Role.SCHEDULER, caches)
        made(config("/nowhere", "p", allow_untested_version=True), Role.SCHEDULER, caches)


def test_a_request_that_comes_at_once_with_its_prompt_gets_blocks_when_prefill_has_begun_the_prompt(module, tmp_path):
    engine = Engine(module, tmp_path, "decode")
    earlier = msgspec.structs.replace(handover_of(engine.prefill("x")[1]), endpoint=endpoint("prefill"))
    asked = request("d", parameters_for_decode(earlier) | {ROOM: 2**63 + 5})
    assert engine.scheduler.get_num_new_matched_tokens(asked, 0) == (None, False)
    assert engine.scheduler.has_pending_push_work()
    engine.step_until(lambda found: engine.agent.of(Ask))
    assert engine.scheduler.get_num_new_matched_tokens(asked, 0) == (None, False)
    engine.agent.say(RoomEvent(Half.TARGET, "prefill", 2**63 + 5, RoomEventKind.OFFERED))
    engine.step_until(lambda found: engine.scheduler.get_num_new_matched_tokens(asked, 0) == (70, True))
    assert engine.agent.of(Receive) == []
    engine.scheduler.update_state_after_alloc(asked, blocks(4, 2, 5), 70)
    engine.step_until(lambda found: engine.agent.of(Receive))
    assert [(claim.room, claim.caches[0].end_token) for claim in engine.agent.of(Receive)] == [(2**63 + 5, 70)]
    engine.stop()


@pytest.mark.shows("option.transfer_limit_s")
def test_a_transfer_that_is_not_over_within_the_set_limit_is_given_up(module, tmp_path, monkeypatch):
    monkeypatch.setattr("longshore_engines.vllm_checks.LIMIT_MIN_S", 0.01)
    engine = Engine(module, tmp_path, "hasty", transfer_limit_s=0.05)
    engine.prefill()
    engine.step_until(lambda found: engine.agent.of(Cancel))
    (offer,) = engine.agent.of(Offer)
    assert [cancel.room for cancel in engine.agent.of(Cancel)] == [offer.room]
    engine.stop()


@pytest.mark.shows("argument.connect.timeout_s", "option.connect_limit_s")
def test_an_engine_waits_for_its_agent_as_long_as_is_set(module, tmp_path, monkeypatch):
    monkeypatch.setattr("longshore_engines.vllm_checks.LIMIT_MIN_S", 0.01)
    settings = (
        config(str(tmp_path / "nobody"), "alone", connect_limit_s=0.05),
        cache_config(),
    )
    worker = module.LongshoreConnector(settings[0], Role.WORKER, settings[1])
    with pytest.raises(ConnectError, match=r"nobody within 0\.05 s"):
        worker.register_kv_caches(
            {f"model.layers.{n}.attn": torch.zeros((6, HEADS, TOKENS, 2 * DIM)) for n in range(2)}
        )


def test_scales_beside_a_head_are_made_before_the_cache_is_shared_since_making_them_overwrites_those_that_came(
    tmp_path, monkeypatch
):
    made = []
    monkeypatch.setattr(Layer, "impl", SimpleNamespace(_ensure_scale_caches=made.append), raising=False)
    settings = config(str(tmp_path / "nobody"), "scaled", connect_limit_s=1)
    settings.cache_config.cache_dtype = "fp8_per_token_head"
    with installed("0.33.0"):
        kind = importlib.import_module("longshore_engines.vllm").LongshoreConnector
        worker = kind(settings, Role.WORKER, cache_config())
        caches = {f"model.layers.{n}.attn": torch.zeros((6, HEADS, TOKENS, 2 * DIM)) for n in range(2)}
        with pytest.raises(ConnectError):
            worker.register_kv_caches(caches)
    assert [id(each) for each in made] == [id(each) for each in caches.values()]


@pytest.mark.shows("option.pages")
def test_an_engine_shares_tokens_if_they_are_wanted_and_says_so_in_its_handover(module, tmp_path):
    engine = Engine(module, tmp_path, "prefill", pages="tokens")
    try:
        (hello,) = engine.agent.of(Hello)
        assert (hello.layout.order, hello.layout.blob_bytes) == (PageOrder.HND, 0)
        (registered,) = engine.agent.of(RegisterPool)
        assert [plane.element_stride for plane in registered.geometry.planes] == [TOKENS * 4] * 2 + [0] * 2
        _, told = engine.prefill()
        assert handover_of(told).content == "tokens of float32"
    finally:
        engine.stop()


# -- models with windows or states: prefill leaves a prompt's last token to decode -----------------------------------------


@pytest.fixture
def windowed(module):
    """The scheduler's connector of a model with windows."""
    groups = [cache_group(FullAttentionSpec(TOKENS, DIM), "l.0"), cache_group(SlidingWindowSpec(TOKENS, DIM), "l.1")]
    return module.LongshoreConnector(config("/nowhere", "p"), Role.SCHEDULER, CacheConfig(6, groups))


def new_request(tokens=70, parameters=None, **changes):
    found = request("p", {"do_remote_decode": True} if parameters is None else parameters, tokens)
    found._all_token_ids, found.max_tokens = list(found.prompt_token_ids), 16
    found.resumable, found.get_skip_reading_prefix_cache = False, lambda: False
    vars(found).update(changes)
    return found


def test_prefill_computes_a_prompt_of_such_a_model_without_its_last_token_and_answers_one(windowed):
    asked = new_request()
    given = asked.prompt_token_ids
    windowed.on_new_request(asked)
    assert asked.prompt_token_ids == asked._all_token_ids == list(range(69))
    assert (asked.num_prompt_tokens, asked.max_tokens) == (69, 1)
    # Other requests of the process may have the same list.
    assert len(given) == 70


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"prompt_token_ids": [7], "num_prompt_tokens": 1},
        {"resumable": True},
        {"get_skip_reading_prefix_cache": lambda: True},
    ],
    ids=["embeddings beside ids", "no ids", "one token", "session", "logprobs of the prompt"],
)
def test_a_prompt_that_cannot_be_shortened_is_computed_whole_and_not_handed_out(windowed, changes):
    asked = new_request(**changes)
    whole = list(asked._all_token_ids), asked.num_prompt_tokens, asked.max_tokens
    windowed.on_new_request(asked)
    assert (list(asked._all_token_ids), asked.num_prompt_tokens, asked.max_tokens) == whole
    windowed.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: ([4], [5])), 0)
    assert windowed.request_finished_all_groups(asked, ([4], [5])) == (False, None)


def test_decode_loads_all_but_the_last_token_and_vllm_clears_its_blocks_before(windowed):
    other = new_request(parameters={"do_remote_prefill": True})
    windowed.on_new_request(other)
    assert other.num_prompt_tokens == 70
    assert windowed.get_loaded_kv_cache_group_ids(other) == ()
