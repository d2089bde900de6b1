"""Compares the reference engine with a plain forward pass and with itself under other layouts; tests its errors."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longshore_lab.engine import commands
from longshore_lab.engine.config import ModelConfig, RankOptions
from longshore_lab.engine.errors import EngineError, MissingKVError, PagesExhaustedError, RankLostError
from longshore_lab.engine.pages import PageAllocator, pages_for
from longshore_lab.engine.processes import STOP_TIMEOUT_S, EngineProcesses
from longshore_lab.engine.rank import EngineRank, Sampled
from longshore_lab.engine.starter import RankStarter
from longshore_lab.engine.weights import edge_weights, full_layer, rank_layer
from longshore_wire.errors import LayoutError
from longshore_wire.layout import PageOrder

# The largest difference seen between two computations of one logit, and the required ratio of every margin to it.
FURTHER = pytest.mark.rest("kernels")
LOGIT_NOISE = 5e-5
MARGIN_MIN = 20 * LOGIT_NOISE
SMALL = ModelConfig(layers=2, hidden=48, query_heads=12, kv_heads=6, head_dim=8, mlp=48, vocabulary=64)


def make_prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(ModelConfig().vocabulary) for _ in range(tokens)]


def tokens_of(steps: list[Sampled]) -> list[int]:
    assert min(step.margin for step in steps) > MARGIN_MIN
    return [step.token for step in steps]


def make_engine(page_size: int = 16, order: PageOrder = PageOrder.NHD) -> EngineRank:
    return EngineRank(RankOptions(page_size=page_size, order=order, page_count=1024 // page_size, shuffle_seed=7))


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineRank]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = make_engine()
    yield made
    made.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def starter() -> Iterator[RankStarter]:
    with RankStarter() as made:
        yield made


@pytest.fixture
def pages(engine: EngineRank) -> Iterator[list[int]]:
    taken = engine.allocator.allocate(40)
    yield taken
    engine.release(taken)


def plain_logits(config: ModelConfig, seed: int, tokens: list[int]) -> Tensor:
    """Return the logits after `tokens` by a forward pass without pages, chunks or a cache, head by head."""
    edge = edge_weights(config, seed)
    hidden = edge.embedding[tokens]
    steps = torch.arange(len(tokens), dtype=torch.float64)
    frequency = config.rope_base ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), steps[:, None] * frequency).to(torch.complex64)
    future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)

    def turned(rows: Tensor) -> Tensor:
        half = config.head_dim // 2
        pairs = torch.complex(rows[:, :half].contiguous(), rows[:, half:].contiguous()) * turns
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def normal(rows: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(rows, (config.hidden,), weight, 1e-6)

    for index in range(config.layers):
        layer = full_layer(config, seed, index)
        rows = normal(hidden, layer.attention_norm)
        query, key, value = (
            (rows @ w).view(len(tokens), -1, config.head_dim).unbind(1) for w in (layer.query, layer.key, layer.value)
        )
        mixed = []
        for head, one in enumerate(query):
            shared = head // config.query_group
            scores = turned(one) @ turned(key[shared]).T / config.head_dim**0.5
            mixed.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ value[shared])
        hidden = hidden + torch.cat(mixed, -1) @ layer.attention_out
        rows = normal(hidden, layer.mlp_norm)
        gate = rows @ layer.gate
        hidden = hidden + (gate * gate.sigmoid() * (rows @ layer.up)) @ layer.down
    return normal(hidden[-1], edge.final_norm) @ edge.head


@pytest.mark.parametrize("length", [16, *(pytest.param(length, marks=FURTHER) for length in (1, 33, 150))])
def test_tokens_equal_those_of_a_plain_forward_pass_over_the_whole_sequence(engine: EngineRank, length: int) -> None:
    prompt = make_prompt(length, length)
    expected: list[int] = []
    for _ in range(6):
        expected.append(int(plain_logits(ModelConfig(), 0, prompt + expected).argmax()))
    assert tokens_of(engine.generate(prompt, 6)) == expected


def test_the_next_token_depends_on_the_prompt_and_is_not_a_constant(engine: EngineRank) -> None:
    firsts = {engine.generate(make_prompt(seed, 40), 1)[0].token for seed in range(20)}
    assert len(firsts) > 10


@pytest.mark.parametrize("chunk_tokens", [37, *(pytest.param(tokens, marks=FURTHER) for tokens in (1, 300))])
def test_a_chunked_prefill_gives_the_tokens_of_an_unchunked_one(engine: EngineRank, chunk_tokens: int) -> None:
    prompt = make_prompt(2, 301 if chunk_tokens > 1 else 40)
    assert tokens_of(engine.generate(prompt, 8, chunk_tokens)) == tokens_of(engine.generate(prompt, 8, 10_000))


def test_both_page_orders_hold_the_same_bytes_and_give_the_same_tokens(engine: EngineRank, pages: list[int]) -> None:
    prompt = make_prompt(3, 203)
    other = make_engine(order=PageOrder.HND)
    first = engine.prefill(prompt, pages, 0, 203)
    assert other.prefill(prompt, pages, 0, 203) == first
    assert other.pool.digest_tokens(pages, 0, 203) == engine.pool.digest_tokens(pages, 0, 203)
    steps = engine.decode_many(pages, 203, first.token, 8)
    assert tokens_of(other.decode_many(pages, 203, first.token, 8)) == tokens_of(steps)
    other.close()


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=FURTHER) for seed in range(8, 36))])
def test_zeroed_kv_changes_the_tokens_of_a_prompt_above_31_tokens(
    engine: EngineRank, pages: list[int], seed: int
) -> None:
    length = [32, 33, 47, 64, 99, 160][seed % 6]
    prompt = make_prompt(100 + seed, length)
    first = engine.prefill(prompt, pages, 0, length)
    honest = tokens_of(engine.decode_many(pages, length, first.token, 4))
    engine.pool.zero(pages, 0, length)
    zeroed = [step.token for step in engine.decode_many(pages, length, first.token, 4)]
    assert zeroed != honest


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_kv_copied_to_a_pool_of_another_page_size_continues_with_the_same_tokens(
    engine: EngineRank, pages: list[int], page_size: int
) -> None:
    prompt, prefix = make_prompt(4, 221), 37
    first = engine.prefill(prompt, pages, 0, 221)
    target = make_engine(page_size, PageOrder.HND)
    there = target.allocator.allocate(pages_for(221 + 9, page_size))
    target.prefill(prompt, there, 0, prefix)
    copied = engine.pool.dump_tokens(pages, prefix, 221)
    layers = engine.options.model.layers
    for layer in range(layers):
        target.pool.write(layer, there, prefix, copied[layer], copied[layers + layer])
    assert target.pool.digest_tokens(there, prefix, 221) == engine.pool.digest_tokens(pages, prefix, 221)
    honest = tokens_of(engine.decode_many(pages, 221, first.token, 8))
    assert tokens_of(target.decode_many(there, 221, first.token, 8)) == honest
    target.close()


def test_one_missing_token_is_noticed_and_never_becomes_a_token(engine: EngineRank, pages: list[int]) -> None:
    prompt = make_prompt(5, 100)
    engine.prefill(prompt, pages, 0, 99)
    with pytest.raises(MissingKVError, match="KV of tokens"):
        engine.decode(pages, 100, 1)


def test_released_pages_hold_no_kv_any_more(engine: EngineRank) -> None:
    taken = engine.allocator.allocate(2)
    engine.prefill(make_prompt(6, 20), taken, 0, 20)
    engine.release(taken)
    assert engine.pool.dump_tokens(taken, 0, 20).isnan().all()


@pytest.mark.parametrize("order", [PageOrder.NHD, PageOrder.HND])
def test_another_mapping_of_the_region_finds_each_token_where_the_geometry_says(order: PageOrder) -> None:
    rank = EngineRank(RankOptions(model=SMALL, page_size=4, order=order, page_count=9, shuffle_seed=1))
    taken = rank.allocator.allocate(4)
    rank.prefill([token % 64 for token in make_prompt(7, 14)], taken, 0, 14)
    rows = rank.pool.dump_tokens(taken, 0, 14)
    geometry = rank.pool.geometry
    row_bytes = SMALL.head_dim * 4
    assert len(geometry.planes) == 2 * SMALL.layers
    with mmap.mmap(rank.pool.memory.descriptor, geometry.region_bytes[0], prot=mmap.PROT_READ) as region:
        for number, plane in enumerate(geometry.planes):
            for token in range(14):
                for head in range(SMALL.kv_heads):
                    at = plane.offset + taken[token // 4] * plane.page_stride
                    at += token % 4 * plane.token_stride + head * plane.head_stride
                    assert region[at : at + row_bytes] == rows[number, token, head].numpy().tobytes()
    rank.close()


def test_the_region_cannot_be_shrunk_under_another_process() -> None:
    rank = EngineRank(RankOptions(model=SMALL, page_count=2))
    with pytest.raises(PermissionError), open(rank.pool.memory.descriptor, "r+b", closefd=False) as region:
        region.truncate(0)
    rank.close()


@pytest.mark.parametrize("tp", [3, *(pytest.param(tp, marks=FURTHER) for tp in (2, 4))])
def test_the_ranks_shares_of_a_layer_put_together_are_the_full_layer(tp: int) -> None:
    config = ModelConfig()
    full = full_layer(config, 3, 1)
    shares = [rank_layer(config, 3, 1, tp, rank) for rank in range(tp)]
    for name in ("query", "key", "value", "gate", "up"):
        assert torch.equal(torch.cat([getattr(share, name) for share in shares], 1), getattr(full, name))
    for name in ("attention_out", "down"):
        assert torch.equal(torch.cat([getattr(share, name) for share in shares], 0), getattr(full, name))


def runs(pid: int) -> bool:
    """Whether a process runs and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("tp", "order", "page_size"), [pytest.param(3, PageOrder.NHD, 16, marks=FURTHER), (2, PageOrder.HND, 5)]
)
def test_ranks_in_processes_give_the_tokens_and_the_kv_of_one_rank(
    engine: EngineRank, starter: RankStarter, pages: list[int], tp: int, order: PageOrder, page_size: int
) -> None:
    options = RankOptions(tp=tp, order=order, page_size=page_size, page_count=1024 // page_size, shuffle_seed=3)
    prompts = [make_prompt(200 + seed, length) for seed, length in enumerate((31, 64, 333))]
    with EngineProcesses(options, starter=starter) as instance:
        for prompt in prompts:
            tokens = instance.generate(prompt, 12, chunk_tokens=101)
            assert min(tokens.margins) > MARGIN_MIN
            assert tokens.tokens == tokens_of(engine.generate(prompt, 12))
        taken = instance.allocator.allocate(pages_for(340, page_size))
        with pytest.raises(MissingKVError):
            instance.decode(taken, 333, 1)
        instance.prefill(prompts[2], taken, 0, 333)
        digests = instance.digest(taken, 0, 333)
        dumps = instance.dump(taken, 0, 333)
        assert [(entry.layer, entry.values, entry.head) for entry in digests] == [
            (layer, values, head) for layer in range(6) for values in (False, True) for head in range(12)
        ]
        engine.prefill(prompts[2], pages, 0, 333)
        shares = [torch.frombuffer(bytearray(d.content), dtype=torch.float32).view(d.shape) for d in dumps]
        own = engine.pool.dump_tokens(pages, 0, 333)
        torch.testing.assert_close(torch.cat(shares, 2), own, atol=1e-4, rtol=0.0)
        directory = Path(instance.options.init_method.removeprefix("file://")).parent
        pids = instance.pids
    assert not directory.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_killed_rank_is_reported_and_nothing_of_its_instance_is_left(starter: RankStarter) -> None:
    other = EngineProcesses(RankOptions(model=SMALL, page_count=8), starter=starter, wait=False)
    instance = EngineProcesses(RankOptions(model=SMALL, tp=2, page_count=8), starter=starter)
    instance.kill(1)
    with pytest.raises(RankLostError, match=r"rank 1 of 2 .* ended with status -9"):
        instance.generate([1, 2, 3], 2)
    with pytest.raises(EngineError, match="close the instance"):
        instance.generate([1, 2, 3], 2)
    instance.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in instance.pids)
    # An instance of the same starter does not notice.
    other.wait_ready()
    assert len(other.generate([1, 2, 3], 2).tokens) == 2
    other.close()


def test_a_rank_whose_driver_and_peers_have_ended_ends_without_a_traceback(
    starter: RankStarter, capfd: pytest.CaptureFixture[str]
) -> None:
    instance = EngineProcesses(RankOptions(model=SMALL, tp=2, page_count=8), starter=starter)
    os.kill(instance.pids[0], signal.SIGSTOP)
    instance.post(commands.Prefill([1, 2, 3], instance.allocator.allocate(1), 0, 3))
    for connection in instance._connections:
        connection.close()
    instance._connections.clear()
    instance.kill(0)
    ended = instance._processes[1].wait(STOP_TIMEOUT_S)
    instance.close()
    assert (ended, capfd.readouterr().err) == (0, "")


def test_ranks_end_with_the_process_that_starts_them_and_the_driver_says_so() -> None:
    with RankStarter() as starter:
        instance = EngineProcesses(RankOptions(model=SMALL, tp=2, page_count=8), starter=starter)
        assert {os.getpgid(pid) for pid in instance.pids} == set(instance.pids)
        os.kill(starter.pid, signal.SIGKILL)
        instance.close()
        with pytest.raises(EngineError, match="the process that starts ranks ended with status -9"):
            EngineProcesses(RankOptions(model=SMALL, page_count=8), starter=starter)
    assert not Path(f"/proc/{starter.pid}").exists()
    # An orphan's new parent reaps it at an unknown time.
    assert not any(runs(pid) for pid in instance.pids)


def test_an_instance_that_is_closed_before_torch_is_loaded_starts_nothing() -> None:
    with RankStarter() as starter:
        instance = EngineProcesses(RankOptions(model=SMALL, tp=2, page_count=8), starter=starter, wait=False)
        assert Path(f"/proc/{starter.pid}").exists()
        instance.close()
        assert instance.pids == [0, 0]
    assert not Path(f"/proc/{starter.pid}").exists()


@pytest.mark.rest("kernels")
def test_an_extension_runs_beside_the_engine_and_gets_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text(
        "class Beside:\n"
        "    def __init__(self, engine, options):\n"
        "        self.engine, self.options = engine, options\n"
        "    def handle(self, body):\n"
        "        return b'%d %s %s' % (self.engine.pool.page_count, self.options, body)\n"
        "    def close(self):\n"
        "        assert self.engine.pool.memory.descriptor >= 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    with EngineProcesses(RankOptions(model=SMALL, page_count=8, extension="beside:Beside"), [b"seven"]) as instance:
        assert instance.extra([b"ping"]) == [b"8 seven ping"]


def test_an_instance_whose_extension_cannot_be_loaded_says_so_and_leaves_nothing(starter: RankStarter) -> None:
    with pytest.raises(EngineError, match="no_such_module"):
        EngineProcesses(RankOptions(model=SMALL, page_count=8, extension="no_such_module:Beside"), starter=starter)


def test_shuffled_pages_of_one_sequence_are_not_contiguous_and_each_is_given_once() -> None:
    allocator = PageAllocator(64, shuffle_seed=1)
    taken = allocator.allocate(20)
    assert all(after - before != 1 for before, after in itertools.pairwise(taken))
    assert sorted(taken + allocator.allocate(44)) == list(range(64))
    with pytest.raises(PagesExhaustedError, match="0 are free"):
        allocator.allocate(1)
    allocator.free(taken)
    with pytest.raises(EngineError, match="not in use"):
        allocator.free(taken[:1])
    assert allocator.allocate(20) == taken


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RankOptions(tp=5, init_method="file:///x"), "kv_heads"),
        (RankOptions(tp=2), "init_method"),
        (RankOptions(model=ModelConfig(head_dim=7)), "head_dim"),
        (RankOptions(model=ModelConfig(query_heads=25)), "query_heads"),
        (RankOptions(page_size=0), "page_size"),
        (RankOptions(page_count=0), "page_count"),
        (RankOptions(order=PageOrder.OPAQUE), "OPAQUE"),
    ],
)
def test_options_that_cannot_work_are_refused_by_field(options: RankOptions, said: str) -> None:
    with pytest.raises((EngineError, LayoutError), match=said):
        EngineRank(options)


def test_requests_that_cannot_work_are_refused_before_anything_is_written(engine: EngineRank, pages: list[int]) -> None:
    with pytest.raises(EngineError, match="not within the prompt"):
        engine.prefill([1, 2], pages, 0, 3)
    with pytest.raises(EngineError, match="vocabulary"):
        engine.prefill([1, 512], pages, 0, 2)
    with pytest.raises(EngineError, match="do not hold"):
        engine.prefill(make_prompt(0, 17), pages[:1], 0, 17)
    with pytest.raises(EngineError, match="positions_max"):
        engine.decode(pages, 8192, 1)
    with pytest.raises(EngineError, match="not in the pool"):
        engine.decode([engine.pool.page_count], 0, 1)
    with pytest.raises(EngineError, match="at least 1"):
        engine.generate([], 1)
    assert engine.pool.dump_tokens(pages, 0, 16).isnan().all()


def test_the_driver_of_rank_processes_loads_no_torch() -> None:
    code = "import sys, longshore_lab.engine.processes; print('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
