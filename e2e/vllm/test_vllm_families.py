"""Families of models beyond K and V of equal layers, each with prefill TP2 and decode TP1, and the other way round."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tiny_model
from controlplane.waiting import until
from engines import DEVICES, Engine, Nursery, Prompt, body, tokens_of
from families import BYTES_EQUAL, TOKENS_AND_BYTES, TOKENS_EQUAL
from prompts import (
    AT_ONCE,
    NEW_TOKENS,
    PROMPTS,
    SHARED_TOKENS,
    SHARES_A_PREFIX,
    TELLING_TOKENS_MIN,
    Oracle,
    at_once,
    random_prompt,
)
from scene import TO_PREFILL, Scene, Side, check_nothing_is_lent, generate, prefill
from tiny_model import TinyModel

from longshore_engines.handover import handover_of

WIDE, SINGLE = "wide", "single"
# Between the logarithms of a token's probability in engines that round differently.
APART_MAX = 0.5
# Words of the connector under test; see `zeroing`.
DRAFT, STATE = "draft", "state"
DIRECTIONS = [pytest.param(WIDE, SINGLE, id="TP2-TP1"), pytest.param(SINGLE, WIDE, id="TP1-TP2")]
# Three times as many as an engine runs at once.
MANY = tuple(random_prompt(500 + number, 20 + 11 * number) for number in range(3 * AT_ONCE))

pytestmark = pytest.mark.timeout(600)
GPUS_ALONE = pytest.mark.skipif(not DEVICES, reason="vLLM has no kernels of this family for CPUs")


# -- sliding windows: groups of layers of which only the end of a prompt moves ---------------------------------------------


# By model, how many of its layers see all tokens, and from which one on the others read of a prompt for the next one.
WINDOWED: dict[Any, tuple[int, Callable[[int], int]]] = {
    tiny_model.make_windowed: (1, lambda tokens: tokens - tiny_model.WINDOW + 1),
    tiny_model.make_sinks: (2, lambda tokens: tokens - tiny_model.WINDOW + 1),
    tiny_model.make_chunked: (1, lambda tokens: tokens - tokens % tiny_model.WINDOW),
}
GPT_OSS = pytest.param(
    tiny_model.make_sinks,
    marks=pytest.mark.family(
        "gpt-oss (sliding windows, sinks, experts)", "K and V, of windowed layers the end of the prompt", TOKENS_EQUAL
    ),
    id="gpt-oss",
)

LLAMA_4 = pytest.param(
    tiny_model.make_chunked,
    marks=pytest.mark.family(
        "Llama 4 (chunked attention)", "K and V, of chunked layers the prompt's last chunk", TOKENS_EQUAL
    ),
    id="llama-4",
)


@pytest.fixture(scope="module", params=[pytest.param(tiny_model.make_windowed, id="gemma"), GPT_OSS, LLAMA_4])
def windowed(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, Oracle, tuple[int, Callable[[int], int]]]]:
    model = request.param(tmp_path_factory.mktemp("model"), 4)
    alone = Oracle(nursery, model, (*PROMPTS, SHARES_A_PREFIX, *MANY))
    with Scene(nursery, model, [Side(WIDE, 2), Side(SINGLE, 1)]) as running:
        yield running, alone, WINDOWED[request.param]


def load_bytes(engine: Engine) -> float:
    """Return the bytes that an engine has received."""
    return engine.metrics().total("vllm:longshore_load_bytes_sum")


@pytest.mark.family("Gemma 3 (sliding windows)", "K and V, of windowed layers the end of the prompt", TOKENS_EQUAL)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_tokens_of_a_model_with_windows_equal_those_of_one_engine_alone(
    windowed: tuple[Scene, Oracle, tuple[int, Callable[[int], int]]], source: str, target: str
) -> None:
    scene, alone, (full_layers, first_read) = windowed
    engines = scene.engines
    for prompts in (PROMPTS, MANY):
        for engine in engines.values():
            engine.forget_prefixes()
        answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), prompts)
        assert [len(prompt) for prompt, answer in zip(prompts, answers, strict=True) if answer != alone(prompt)] == []
    # Of windows vLLM's prefix cache has the end of each prompt that it has computed, which this one goes on from.
    for engine in engines.values():
        engine.complete(Prompt(SHARES_A_PREFIX[:SHARED_TOKENS]), NEW_TOKENS)
    loaded = load_bytes(engines[target])
    assert generate(engines[source], engines[target], SHARES_A_PREFIX, NEW_TOKENS) == alone(SHARES_A_PREFIX)
    until(lambda: load_bytes(engines[target]) > loaded, "the load is counted")
    block = engines[target].options.block_tokens
    blocks = full_layers * (-(-len(SHARES_A_PREFIX) // block) - SHARED_TOKENS // block)
    computed = len(SHARES_A_PREFIX) - 1
    blocks += (tiny_model.LAYERS - full_layers) * (-(-computed // block) - first_read(computed) // block)
    block_bytes = block * 2 * 4 * tiny_model.HEAD_DIM * tiny_model.ELEMENT_BYTES
    assert load_bytes(engines[target]) - loaded == blocks * block_bytes
    for engine in engines.values():
        engine.forget_prefixes()
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    scene.zero.touch()
    try:
        answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), telling)
    finally:
        scene.zero.unlink()
    assert [len(prompt) for prompt, answer in zip(telling, answers, strict=True) if answer == alone(prompt)] == []
    check_nothing_is_lent(scene, 60)


# -- speculative decoding: by n-grams, which have no layers, and by a draft model, whose layers are a cache of their own ------

# A model that drafts for itself is always right, if it has its own KV of the prompt.
DRAFTED = 3


def speculative(model: TinyModel, method: str) -> Sequence[str]:
    config: dict[str, object] = {"method": method, "num_speculative_tokens": DRAFTED}
    config |= {"model": str(model.path)} if method == "draft_model" else {"prompt_lookup_max": 3}
    return ("--speculative-config", json.dumps(config))


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def drafting(
    request: pytest.FixtureRequest, nursery: Nursery, model: TinyModel, alone: Oracle
) -> Iterator[tuple[str, Scene]]:
    extra = speculative(model, request.param)
    with Scene(nursery, model, [Side(WIDE, 2, extra=extra), Side(SINGLE, 1, extra=extra)], digest=True) as running:
        yield request.param, running


def accepted_share(engine: Engine, work: Callable[[], object]) -> float:
    """Return the share of drafted tokens that an engine accepts during the work."""
    counts = []
    for call in (lambda: None, work):
        call()
        page = engine.metrics()
        counts.append([page.total(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("accepted", "draft")])
    (accepted, drafted), (accepted_after, drafted_after) = counts
    assert drafted_after > drafted
    return (accepted_after - accepted) / (drafted_after - drafted)


@pytest.mark.family(
    "speculative decoding by n-grams or a draft model", "K and V, of the draft model, too", TOKENS_EQUAL
)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_tokens_of_engines_that_draft_equal_those_of_one_alone_and_the_drafts_kv_is_moved_too(
    drafting: tuple[str, Scene], alone: Oracle, source: str, target: str
) -> None:
    method, scene = drafting
    engines = scene.engines

    def move(prompts: Sequence[Prompt]) -> None:
        for engine in engines.values():
            engine.forget_prefixes()
        answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), prompts)
        # Whatever a draft proposes, the model decides.
        assert dict(zip(map(len, prompts), answers, strict=True)) == {len(prompt): alone(prompt) for prompt in prompts}

    def compute() -> None:
        (prompt,) = (prompt for prompt in PROMPTS if len(prompt) == 2 * engines[target].options.block_tokens + 1)
        engines[target].complete(prompt, NEW_TOKENS)

    moved = load_bytes(engines[target])
    share = accepted_share(engines[target], lambda: move(PROMPTS)) if method == "draft_model" else move(PROMPTS)
    block = engines[target].options.block_tokens
    layers = tiny_model.LAYERS * (2 if method == "draft_model" else 1)
    block_bytes = block * layers * 2 * 4 * tiny_model.HEAD_DIM * tiny_model.ELEMENT_BYTES
    expected = moved + sum(-(-len(prompt) // block) for prompt in PROMPTS) * block_bytes
    until(lambda: load_bytes(engines[target]) == expected, f"{expected} bytes came")
    if method == "draft_model":
        # vLLM's first draft is wrong wherever it computes only the last token of a prompt, also after a hit of its own cache.
        compute()
        assert share == accepted_share(engines[target], compute)
        telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
        scene.zero.write_text(DRAFT)
        try:
            assert accepted_share(engines[target], lambda: move(telling)) < share / 2
        finally:
            scene.zero.unlink()
    check_nothing_is_lent(scene, 60)


EAGLES = [
    pytest.param(
        1,
        id="eagle",
        marks=pytest.mark.family(
            "speculative decoding by EAGLE", "K and V, of the draft's layer, too", TOKENS_AND_BYTES
        ),
    ),
    pytest.param(
        3,
        id="eagle3",
        marks=pytest.mark.family(
            "speculative decoding by EAGLE-3", "K and V, of the draft's layer, too", TOKENS_AND_BYTES
        ),
    ),
]


@pytest.fixture(scope="module", params=EAGLES)
def reading_states(
    request: pytest.FixtureRequest, nursery: Nursery, model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    draft = tiny_model.make_eagle(tmp_path_factory.mktemp("draft"), 4, request.param)
    method = "eagle3" if request.param > 1 else "eagle"
    config = {"method": method, "model": str(draft.path), "num_speculative_tokens": DRAFTED}
    extra = ("--speculative-config", json.dumps(config))
    with Scene(nursery, model, [Side(WIDE, 2, extra=extra), Side(SINGLE, 1, extra=extra)], digest=True) as running:
        yield running


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_the_layer_of_an_eagle_moves_byte_for_byte_and_tokens_equal_those_of_one_engine_alone(
    reading_states: Scene, alone: Oracle, keep: list[Scene], source: str, target: str
) -> None:
    """Its weights are random, so that hardly a draft is accepted. So the bytes show that its K and V came."""
    scene = reading_states
    for engine in scene.engines.values():
        engine.forget_prefixes()
    answers = at_once(
        lambda prompt: generate(scene.engines[source], scene.engines[target], prompt, NEW_TOKENS), PROMPTS
    )
    assert dict(zip(map(len, PROMPTS), answers, strict=True)) == {len(prompt): alone(prompt) for prompt in PROMPTS}
    for engine in scene.engines.values():
        engine.forget_prefixes()
    scene.keep.mkdir()
    keep.append(scene)
    for room in move_and_keep(scene, source, target, PROMPTS):
        offered, received = kept_by_both(scene, room, source, target)
        assert len(offered[0]) == tiny_model.LAYERS + 1
        for part in offered[0]:
            assert have_equal_heads(offered, received, part)
    check_nothing_is_lent(scene, 60)


# -- LoRA adapters: K and V of one prompt differ by adapter ------------------------------------------------------------------

ADAPTER = {"model": "adapter"}


@pytest.fixture(scope="module")
def adapted(nursery: Nursery, model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    path = tiny_model.make_adapter(tmp_path_factory.mktemp("adapter"), 4)
    extra = ("--enable-lora", "--max-lora-rank", str(tiny_model.ADAPTER_RANK))
    extra += ("--lora-modules", f"{ADAPTER['model']}={path}")
    with Scene(nursery, model, [Side(WIDE, 2, extra=extra), Side(SINGLE, 1, extra=extra)], digest=True) as running:
        yield running


@pytest.mark.skipif(bool(DEVICES), reason="vLLM has no adapters in float32 on GPUs")
@pytest.mark.family("LoRA adapters", "K and V of the adapter that a request names", TOKENS_EQUAL)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_a_prompt_moves_with_its_adapter_and_to_no_request_of_another_one(
    adapted: Scene, alone: Oracle, source: str, target: str
) -> None:
    near, far = adapted.engines[source], adapted.engines[target]

    def answered(engine: Engine, prompt: Prompt, handed: Mapping[str, object] | None = None) -> list[int]:
        return tokens_of(engine.complete(prompt, NEW_TOKENS, handed, **ADAPTER))

    def moved(prompt: Prompt) -> list[int]:
        return answered(far, prompt, near.complete(prompt, 1, TO_PREFILL, **ADAPTER)["kv_transfer_params"])

    by_adapter = [answered(adapted.engines[SINGLE], prompt) for prompt in PROMPTS]
    assert [one for one, prompt in zip(by_adapter, PROMPTS, strict=True) if one == alone(prompt)] == []
    for engine in (near, far):
        engine.forget_prefixes()
    assert at_once(moved, PROMPTS) == by_adapter
    assert at_once(lambda prompt: generate(near, far, prompt, NEW_TOKENS), PROMPTS) == [alone(each) for each in PROMPTS]
    for engine in (near, far):
        engine.forget_prefixes()
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    adapted.zero.touch()
    try:
        assert [
            one for one, right in zip(at_once(moved, telling), by_adapter[-len(telling) :], strict=True) if one == right
        ] == []
    finally:
        adapted.zero.unlink()
    for engine in (near, far):
        engine.forget_prefixes()
    handed = near.complete(PROMPTS[-1], 1, TO_PREFILL, **ADAPTER)["kv_transfer_params"]
    with pytest.raises(httpx.HTTPStatusError):
        far.complete(PROMPTS[-1], NEW_TOKENS, handed)
    assert answered(far, PROMPTS[-1], handed) == by_adapter[-1]
    check_nothing_is_lent(adapted, 60)


# -- images: K and V of one text differ by what is seen in it ---------------------------------------------------------------


class Seen(NamedTuple):
    """A text with an image in its middle, as messages of a chat."""

    seed: int

    def messages(self) -> list[dict[str, object]]:
        """Return the messages; only the image depends on the seed."""
        words = [f"w{number} " for number in random_prompt(7, 90) if number >= 10]
        image = {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(self.png()).decode()}"},
        }
        texts = [{"type": "text", "text": "".join(part)} for part in (words[:40], words[40:])]
        return [{"role": "user", "content": [texts[0], image, texts[1]]}]

    def png(self) -> bytes:
        """Return a random image of 56 x 56 pixels."""
        lines = np.random.default_rng(self.seed).integers(0, 256, (56, 1 + 3 * 56), dtype=np.uint8)
        lines[:, 0] = 0  # no filter
        head = struct.pack(">IIBBBBB", 56, 56, 8, 2, 0, 0, 0)
        found = b"\x89PNG\r\n\x1a\n"
        for name, data in ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")):
            found += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        return found


def chat(engine: Engine, seen: Seen, max_tokens: int, transfer: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the response to a chat. Raises httpx.HTTPError unless it succeeds."""
    wanted = body(Prompt(), max_tokens, transfer, messages=seen.messages())
    del wanted["prompt"]
    found: dict[str, Any] = engine.http.post("/v1/chat/completions", json=wanted).raise_for_status().json()
    return found


@pytest.fixture(scope="module")
def seeing(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    path = tmp_path_factory.mktemp("model") / "llava"
    program = Path(__file__).with_name("image_model.py")
    subprocess.run([nursery.venv / "bin" / "python", program, path], check=True, timeout=120)
    with Scene(nursery, TinyModel(path, 4), [Side(WIDE, 2), Side(SINGLE, 1)], digest=True) as running:
        yield running


@pytest.mark.family("LLaVA (images in prompts)", "K and V of the text with its images", TOKENS_EQUAL)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_a_prompt_moves_with_its_images_and_to_no_request_with_other_ones(
    seeing: Scene, source: str, target: str
) -> None:
    near, far = seeing.engines[source], seeing.engines[target]
    seen = [Seen(seed) for seed in range(4)]

    def handed(each: Seen) -> Mapping[str, object]:
        found: Mapping[str, object] = chat(near, each, 1, TO_PREFILL)["kv_transfer_params"]
        return found

    def moved() -> list[list[int]]:
        for engine in (near, far):
            engine.forget_prefixes()
        return [tokens_of(chat(far, each, NEW_TOKENS, handed(each))) for each in seen]

    alone = [tokens_of(chat(seeing.engines[SINGLE], each, NEW_TOKENS)) for each in seen]
    assert len(set(map(tuple, alone))) == len(seen)
    assert moved() == alone
    seeing.zero.touch()
    try:
        assert [one for one, right in zip(moved(), alone, strict=True) if one == right] == []
    finally:
        seeing.zero.unlink()
    for engine in (near, far):
        engine.forget_prefixes()
    first = handed(seen[0])
    with pytest.raises(httpx.HTTPStatusError):
        chat(far, seen[1], NEW_TOKENS, first)
    assert tokens_of(chat(far, seen[0], NEW_TOKENS, first)) == alone[0]
    check_nothing_is_lent(seeing, 60)


# -- MLA: engines of unequal TP on CPUs answer one prompt differently, also alone, so that the bytes are compared ------------


# Index keys are followed by their scales in a block.
INDEX_BLOCK_TOKENS = 64
BY_MTP = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2}))
LATENTS = [
    pytest.param("dense", marks=pytest.mark.shortest),
    pytest.param(
        "drafting",
        marks=pytest.mark.family(
            "speculative decoding by MTP (DeepSeek V3)", "latents, of the draft's layer, too", BYTES_EQUAL
        ),
    ),
    pytest.param(
        "sparse",
        marks=[
            GPUS_ALONE,
            pytest.mark.family(
                "DeepSeek V3.2 (sparse MLA), MTP", "latents and index keys, of the draft's layer, too", BYTES_EQUAL
            ),
        ],
    ),
    pytest.param(
        "sparse-fp8",
        marks=[
            GPUS_ALONE,
            pytest.mark.family(
                "DeepSeek V3.2 (sparse MLA) with fp8 latents", "latents with their scales, and index keys", BYTES_EQUAL
            ),
        ],
    ),
]


@pytest.fixture(scope="module", params=LATENTS)
def latent(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    kind, directory = request.param, tmp_path_factory.mktemp("model")
    is_sparse = kind.startswith("sparse")
    model = (
        tiny_model.make_latent(directory, has_yarn=False)
        if kind == "dense"
        else tiny_model.make_latent_drafting(directory, is_sparse=is_sparse)
    )
    # vLLM has no other blocks for latents on CPUs, and no float32 for them on GPUs.
    backend = "FLASHMLA_SPARSE" if is_sparse else "TRITON_MLA"
    extra = ("--attention-backend", backend, "--dtype", "bfloat16") if DEVICES else ()
    extra += {"drafting": BY_MTP, "sparse": BY_MTP, "sparse-fp8": ("--kv-cache-dtype", "fp8")}.get(kind, ())
    if kind == "drafting" and not DEVICES:
        # vLLM does not chunk prompts of latents on CPUs, and with drafts it would wait for ever to compute a long one.
        extra += ("--max-num-batched-tokens", str(tiny_model.POSITIONS_MAX))
    block_tokens = INDEX_BLOCK_TOKENS if is_sparse else 16
    sides = [Side(name, tp, block_tokens=block_tokens, extra=extra) for name, tp in ((WIDE, 2), (SINGLE, 1))]
    with Scene(nursery, model, sides, digest=True) as running:
        yield running


def kept_by_both(scene: Scene, room: int, source: str, target: str) -> list[list[dict[str, np.ndarray]]]:
    """Return the blocks of a room at each rank of prefill, and at each of decode, by layer and part."""
    found = []
    for kind, side in (("offered", source), ("received", target)):
        ranks = range(scene.engines[side].options.tp)
        files = [scene.keep / f"{kind}-{room}-{rank}.npz" for rank in ranks]
        until(lambda files=files: all(file.exists() for file in files), f"room {room} is {kind} at {len(ranks)} ranks")
        found.append([dict(np.load(file)) for file in files])
    return found


def have_equal_heads(
    offered: Sequence[Mapping[str, np.ndarray]], received: Sequence[Mapping[str, np.ndarray]], part: str
) -> bool:
    """Whether the ranks of both sides together have equal blocks of K and V, and some of them are not zero."""
    # The dimension of heads, of which ranks of unequal TP have unequally many. Each backend has its own order.
    shapes = zip(offered[0][part].shape, received[0][part].shape, strict=True)
    heads = next(index for index, (near, far) in enumerate(shapes) if near != far)
    one, other = (np.concatenate([rank[part] for rank in side], axis=heads) for side in (offered, received))
    return bool(one.any()) and np.array_equal(one, other)


def move_and_keep(scene: Scene, source: str, target: str, prompts: Sequence[Prompt]) -> dict[int, int]:
    """Move prompts at once with the folder for their bytes; return the length of each by its room."""
    engines = scene.engines
    rooms: dict[int, int] = {}

    def move(prompt: Prompt) -> list[int]:
        handed = prefill(engines[source], prompt)
        rooms[handover_of(handed).room] = len(prompt)
        return tokens_of(engines[target].complete(prompt, NEW_TOKENS, handed))

    at_once(move, prompts)
    assert sorted(rooms.values()) == sorted(map(len, prompts))
    return rooms


def unchanged_by_zeroing(scene: Scene, source: str, target: str, what: str = "") -> list[int]:
    """Return the lengths of telling prompts whose answers are the same with what moved, or a part of it, zeroed."""
    engines = scene.engines
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    answers = []
    for is_zeroed in (False, True):
        for engine in engines.values():
            engine.forget_prefixes()
        if is_zeroed:
            scene.zero.write_text(what)
        # One after the other, since answers also depend on what is computed in the same step.
        answers.append([generate(engines[source], engines[target], prompt, NEW_TOKENS) for prompt in telling])
    scene.zero.unlink()
    return [len(prompt) for prompt, one, other in zip(telling, *answers, strict=True) if one == other]


def check_first_tokens(scene: Scene, source: str, target: str, what: str = "") -> None:
    """Check that most first tokens are those of decode alone, and as likely; with what moved, or a part of it, zeroed, none is."""
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]

    def first_tokens(*, are_moved: bool) -> list[tuple[str, float]]:
        found = []
        for prompt in telling:
            for engine in scene.engines.values():
                engine.forget_prefixes()
            handed = prefill(scene.engines[source], prompt) if are_moved else None
            (choice,) = scene.engines[target].complete(prompt, NEW_TOKENS, handed, logprobs=1)["choices"]
            found.append((choice["logprobs"]["tokens"][0], choice["logprobs"]["token_logprobs"][0]))
        return found

    alone, moved = first_tokens(are_moved=False), first_tokens(are_moved=True)
    apart = [abs(one[1] - other[1]) for one, other in zip(alone, moved, strict=True) if one[0] == other[0]]
    assert len(apart) > len(telling) / 2, (alone, moved)
    assert max(apart) < APART_MAX
    scene.zero.write_text(what)
    try:
        zeroed = first_tokens(are_moved=True)
    finally:
        scene.zero.unlink()
    assert not any(one[0] == other[0] for one, other in zip(alone, zeroed, strict=True))


@pytest.fixture
def keep() -> Iterator[list[Scene]]:
    """Scenes whose folders for bytes are removed after the test."""
    scenes: list[Scene] = []
    yield scenes
    for scene in scenes:
        shutil.rmtree(scene.keep)


def latents_of(blocks: np.ndarray, tokens: int) -> np.ndarray:
    """Return those of the first tokens in a layer's blocks, [token, element]."""
    found: np.ndarray = blocks.reshape(-1, blocks.shape[-1])[:tokens]
    return found


def held_of(name: str, blocks: np.ndarray, length: int) -> np.ndarray:
    """Return what a layer's blocks hold of a prompt: a latent for each token, or blocks of index keys and their scales."""
    if "indexer" in name:
        return blocks.reshape(len(blocks), -1)[: -(-length // INDEX_BLOCK_TOKENS)]
    return latents_of(blocks, length)


@pytest.mark.family("DeepSeek V2 (MLA)", "latents, once to each rank of decode", BYTES_EQUAL)
@pytest.mark.parametrize(
    ("source", "target"), [pytest.param(WIDE, SINGLE, id="TP2-TP1", marks=pytest.mark.shortest), DIRECTIONS[1]]
)
def test_latents_reach_each_rank_of_decode_byte_for_byte(
    latent: Scene, keep: list[Scene], source: str, target: str
) -> None:
    engines = latent.engines
    for engine in engines.values():
        engine.forget_prefixes()
    latent.keep.mkdir()
    keep.append(latent)
    rooms = move_and_keep(latent, source, target, (*PROMPTS, *MANY))
    for room, length in rooms.items():
        first, *others = (
            {name: held_of(name, part, length) for name, part in each.items()}
            for side in kept_by_both(latent, room, source, target)
            for each in side
        )
        # Decode computes the last token of a prompt itself, and has room for it.
        assert all(part.any(axis=1).all() for part in first.values())
        for other in others:
            assert all(np.array_equal(other[name], part) for name, part in first.items())
    check_nothing_is_lent(latent, 60)


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_with_the_moved_latents_zeroed_answers_change(latent: Scene, source: str, target: str) -> None:
    assert unchanged_by_zeroing(latent, source, target) == []
    # On CPUs engines of unequal TP agree on no token, also alone, and with latents of one byte on few.
    if DEVICES and "fp8" not in latent.engines[target].options.extra:
        check_first_tokens(latent, source, target)


# -- recurrent states: a page of each group of layers, which all tokens share -----------------------------------------------


WITHOUT_PREFIXES = ("--no-enable-prefix-caching",)
# A prefix cache keeps states at the ends of blocks. vLLM's kernels for CPUs need blocks that end where their chunks do.
STATE_BLOCK_TOKENS = 128


PREFIXES = pytest.param(
    "prefixes",
    marks=pytest.mark.family(
        "Falcon-H1 (Mamba2 and attention), prefix caches", "the rest of a prompt, and its states", TOKENS_EQUAL
    ),
)
MAMBA1 = pytest.param(
    "mamba1",
    marks=[
        GPUS_ALONE,
        pytest.mark.family("Jamba (Mamba1 and attention)", "K and V; conv and ssm states by channels", TOKENS_EQUAL),
    ],
)


@pytest.fixture(scope="module")
def mamba(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModel, Oracle]:
    """The model and the answers of one engine alone."""
    model = tiny_model.make_mamba(tmp_path_factory.mktemp("model"), 4)
    return model, Oracle(nursery, model, (*PROMPTS, SHARES_A_PREFIX, *MANY))


@pytest.fixture(scope="module", params=[pytest.param("opaque", marks=pytest.mark.shortest), "tokens", PREFIXES, MAMBA1])
def mamba_pair(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, Oracle, bool]]:
    kind = request.param
    if kind == "mamba1":
        model = tiny_model.make_mamba1(tmp_path_factory.mktemp("model"), 4)
        alone = Oracle(nursery, model, (*PROMPTS, *MANY))
    else:
        model, alone = request.getfixturevalue("mamba")
    pages = "tokens" if kind == "tokens" else "opaque"
    # vLLM takes 96 tokens instead of 32, so that a state fits into a block, and 160 instead of 150.
    block_tokens = {"tokens": (32, 150), "prefixes": (STATE_BLOCK_TOKENS,) * 2}.get(kind, (32, 32))
    sides = [
        Side(name, tp, extra=() if kind == "prefixes" else WITHOUT_PREFIXES, pages=pages, block_tokens=size)
        for name, tp, size in zip((WIDE, SINGLE), (2, 1), block_tokens, strict=True)
    ]
    with Scene(nursery, model, sides, digest=True) as running:
        yield running, alone, kind == "prefixes"


@pytest.mark.family("Falcon-H1 (Mamba2 and attention)", "K and V; conv states by x, B and C; ssm states", TOKENS_EQUAL)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_tokens_of_a_model_with_states_equal_those_of_one_engine_alone(
    mamba_pair: tuple[Scene, Oracle, bool], source: str, target: str
) -> None:
    scene, alone, has_prefixes = mamba_pair
    engines = scene.engines

    def forget() -> None:
        for engine in engines.values() if has_prefixes else ():
            engine.forget_prefixes()

    for prompts in (PROMPTS, MANY):
        forget()
        answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), prompts)
        assert [len(prompt) for prompt, answer in zip(prompts, answers, strict=True) if answer != alone(prompt)] == []
    if has_prefixes:
        check_prefixes_of_states(scene, alone, source, target)
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    for what in ("", STATE):
        forget()
        scene.zero.write_text(what)
        try:
            answers = at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), telling)
        finally:
            scene.zero.unlink()
        assert [len(prompt) for prompt, answer in zip(telling, answers, strict=True) if answer == alone(prompt)] == []
    check_nothing_is_lent(scene, 60)


def check_prefixes_of_states(scene: Scene, alone: Oracle, source: str, target: str) -> None:
    """Check that of a prompt whose beginning both engines have the rest moves, with its state."""
    near, far = scene.engines[source], scene.engines[target]
    loads = []
    for has_begun in (False, True):
        for engine in (near, far):
            engine.forget_prefixes()
            if has_begun:
                engine.complete(Prompt(SHARES_A_PREFIX[:SHARED_TOKENS]), NEW_TOKENS)
        before = load_bytes(far)
        assert generate(near, far, SHARES_A_PREFIX, NEW_TOKENS) == alone(SHARES_A_PREFIX)
        until(lambda before=before: load_bytes(far) > before, "the load is counted")
        loads.append(load_bytes(far) - before)
    tokens = SHARED_TOKENS // STATE_BLOCK_TOKENS * STATE_BLOCK_TOKENS
    token_bytes = tiny_model.LAYERS * 2 * 4 * tiny_model.HEAD_DIM * tiny_model.ELEMENT_BYTES
    assert loads[0] - loads[1] == tokens * token_bytes


# -- gated delta rules: engines of unequal TP round bfloat16 differently, so that the bytes are compared ---------------------


MTP = pytest.param(
    "MTP",
    marks=pytest.mark.family(
        "speculative decoding by MTP (Qwen3.5)", "as without, and K and V of the draft's layer", BYTES_EQUAL
    ),
)


MTP_PREFIXES = pytest.param(
    "MTP, prefixes",
    marks=[
        GPUS_ALONE,
        pytest.mark.family(
            "speculative decoding by MTP (Qwen3.5), prefix caches", "as without prefix caches", BYTES_EQUAL
        ),
    ],
)


KDA = pytest.param(
    "KDA",
    marks=[
        GPUS_ALONE,
        pytest.mark.family(
            "Kimi Linear (KDA and MLA)", "latents; conv states by q, k and v; recurrent states", BYTES_EQUAL
        ),
    ],
)


@pytest.fixture(scope="module", params=["SD", "DS", "prefixes", MTP, MTP_PREFIXES, KDA])
def gated(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Scene]]:
    directory = tmp_path_factory.mktemp("model")
    model = tiny_model.make_delta(directory) if request.param == "KDA" else tiny_model.make_gated(directory, 4)
    # vLLM has these kernels for bfloat16 alone on CPUs, and on GPUs others that compile a package at their first use.
    extra = ("--dtype", "bfloat16", *(("--gdn-prefill-backend", "triton") if DEVICES else ()))
    extra += ("--attention-backend", "TRITON_MLA") if request.param == "KDA" else ()
    extra += () if "prefixes" in request.param else WITHOUT_PREFIXES
    order = "DS" if request.param == "DS" else "SD"
    # The sum over ranks in one kernel, which Kimi Linear has by default, needs a package that compiles its kernels.
    environment = {"VLLM_SSM_CONV_STATE_LAYOUT": order, "VLLM_KIMI_K3_GEMM_AR": "0"}
    if "MTP" in request.param:
        extra += BY_MTP
    # A block has room for a rank's state, and every rank has a latent whole: so blocks differ with the number of ranks.
    pages = "tokens" if request.param == "KDA" else "opaque"
    sides = [Side(name, tp, extra=extra, environment=environment, pages=pages) for name, tp in ((WIDE, 2), (SINGLE, 1))]
    with Scene(nursery, model, sides, digest=True) as running:
        yield request.param, running


def whole_state(ranks: Sequence[np.ndarray], order: str, value_heads: int) -> np.ndarray:
    """Return the conv state of a layer, [channels, rows], from those of its ranks, each of which has a part of q, of k and of v."""
    parts = [rank[0] if order == "DS" else rank[0].T for rank in ranks]
    keys = (len(parts[0]) - value_heads * tiny_model.GATED_HEAD_DIM) // 2
    bounds = [(0, keys), (keys, 2 * keys), (2 * keys, None)]
    return np.concatenate([part[first:end] for first, end in bounds for part in parts])


@pytest.mark.family(
    "Qwen3.5 (gated delta nets and attention)", "K and V; conv states by q, k and v; recurrent states", BYTES_EQUAL
)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_states_and_keys_reach_decode_byte_for_byte(
    gated: tuple[str, Scene], keep: list[Scene], source: str, target: str
) -> None:
    kind, scene = gated
    order = "DS" if kind == "DS" else "SD"
    for engine in scene.engines.values():
        engine.forget_prefixes()
    scene.keep.mkdir()
    keep.append(scene)
    # vLLM's kernel for CPUs ends the engine with a prompt of one token, which is what prefill computes of two.
    rooms = move_and_keep(scene, source, target, [prompt for prompt in (*PROMPTS, *MANY) if len(prompt) > len("ab")])
    for room, length in rooms.items():
        offered, received = kept_by_both(scene, room, source, target)
        layers = {name.rpartition(".")[0] for name in offered[0]}
        drafts = {layer for layer in layers if layer.startswith("mtp.")}
        assert (len(layers - drafts), len(drafts)) == (tiny_model.LAYERS, int("MTP" in kind))
        for layer in layers:
            if f"{layer}.1" in offered[0]:
                conv, ssm = (
                    [[rank[f"{layer}.{part}"] for rank in side] for side in (offered, received)] for part in (0, 1)
                )
                one, other = (
                    whole_state(side, order, states[0].shape[1]) for side, states in zip(conv, ssm, strict=True)
                )
                assert np.array_equal(one, other)
                assert one.any(axis=1).all()
                one, other = (np.concatenate([rank[0] for rank in side]) for side in ssm)
                assert np.array_equal(one, other)
                assert one.any(axis=(1, 2)).all()
            elif kind == "KDA":
                first, *others = (latents_of(rank[f"{layer}.0"], length - 1) for rank in (*offered, *received))
                assert first.any(axis=1).all()
                assert all(np.array_equal(first, other) for other in others)
            else:
                # Blocks of the tokens before the last one.
                assert have_equal_heads(offered, received, f"{layer}.0")
    check_nothing_is_lent(scene, 60)


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_with_the_moved_states_zeroed_answers_change(gated: tuple[str, Scene], source: str, target: str) -> None:
    _, scene = gated
    assert unchanged_by_zeroing(scene, source, target, STATE) == []
    check_first_tokens(scene, source, target)


# -- K and V of one byte: rounding to it also makes engines of unequal TP differ ----------------------------------------------


SCALED = [
    GPUS_ALONE,
    pytest.mark.family(
        "Qwen3 with fp8, int8 or int4 K and V, a scale for each token and head",
        "each rank's heads and scales",
        BYTES_EQUAL,
    ),
]
CACHE_TYPES = [
    "fp8",
    *(pytest.param(f"{kind}_per_token_head", marks=SCALED) for kind in ("fp8", "int8", "int4")),
]


@pytest.fixture(scope="module", params=CACHE_TYPES)
def quantized(request: pytest.FixtureRequest, nursery: Nursery, model: TinyModel) -> Iterator[Scene]:
    extra = ("--kv-cache-dtype", request.param)
    with Scene(nursery, model, [Side(WIDE, 2, extra=extra), Side(SINGLE, 1, extra=extra)], digest=True) as running:
        yield running


@pytest.mark.family("Qwen3 with fp8 K and V", "each rank's heads; scales are of the model", BYTES_EQUAL)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_keys_and_values_of_one_byte_reach_decode_byte_for_byte(
    quantized: Scene, keep: list[Scene], source: str, target: str
) -> None:
    engines = quantized.engines
    for engine in engines.values():
        engine.forget_prefixes()
    quantized.keep.mkdir()
    keep.append(quantized)
    rooms = move_and_keep(quantized, source, target, (*PROMPTS, *MANY))
    for room in rooms:
        offered, received = kept_by_both(quantized, room, source, target)
        for part in offered[0]:
            assert have_equal_heads(offered, received, part)
    assert unchanged_by_zeroing(quantized, source, target) == []
    check_nothing_is_lent(quantized, 60)


# -- sleep mode: a cache stays where the agent has mapped it, while weights leave the GPU ----------------------------------------


@pytest.fixture(scope="module")
def sleeping(nursery: Nursery, model: TinyModel) -> Iterator[Scene]:
    extra = ("--enable-sleep-mode",)
    with Scene(nursery, model, [Side(WIDE, 2, extra=extra), Side(SINGLE, 1, extra=extra)], digest=True) as running:
        yield running


@GPUS_ALONE
@pytest.mark.family(
    "Qwen3 (K and V per head), sleep mode", "each rank's heads, also after the engines slept", TOKENS_EQUAL
)
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_prompts_move_after_both_engines_have_slept(sleeping: Scene, alone: Oracle, source: str, target: str) -> None:
    engines = sleeping.engines

    def answers(prompts: Sequence[Prompt]) -> list[list[int]]:
        for engine in engines.values():
            engine.forget_prefixes()
        return at_once(lambda prompt: generate(engines[source], engines[target], prompt, NEW_TOKENS), prompts)

    assert answers(PROMPTS) == [alone(prompt) for prompt in PROMPTS]
    for call in ("/sleep?level=1", "/wake_up"):
        for engine in engines.values():
            engine.http.post(call).raise_for_status()
            assert engine.http.get("/is_sleeping").json() == {"is_sleeping": "sleep?" in call}
    assert answers(PROMPTS) == [alone(prompt) for prompt in PROMPTS]
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    sleeping.zero.touch()
    try:
        zeroed = answers(telling)
    finally:
        sleeping.zero.unlink()
    assert [len(prompt) for prompt, answer in zip(telling, zeroed, strict=True) if answer == alone(prompt)] == []
    check_nothing_is_lent(sleeping, 60)


# -- errors of other connectors, planted -------------------------------------------------------------------------------------


def test_a_state_that_has_taken_in_the_last_token_is_told_by_its_answers(
    nursery: Nursery, mamba: tuple[TinyModel, Oracle]
) -> None:
    model, alone = mamba
    environment = {"E2E_VLLM_PLANT": "last token"}
    sides = [Side(f"late-{name}", 1, extra=WITHOUT_PREFIXES, environment=environment) for name in (WIDE, SINGLE)]
    telling = [prompt for prompt in PROMPTS if len(prompt) >= TELLING_TOKENS_MIN]
    with Scene(nursery, model, sides) as scene:
        source, target = scene.engines.values()
        answers = at_once(lambda prompt: generate(source, target, prompt, NEW_TOKENS), telling)
    assert [len(prompt) for prompt, answer in zip(telling, answers, strict=True) if answer == alone(prompt)] == []


def test_a_conv_state_that_is_split_without_its_sections_is_told_by_its_bytes(nursery: Nursery, tmp_path: Path) -> None:
    extra = (*WITHOUT_PREFIXES, "--dtype", "bfloat16")
    environment = {"E2E_VLLM_PLANT": "no sections"}
    sides = [Side(name, tp, extra=extra, environment=environment) for name, tp in (("cut-wide", 2), ("cut-single", 1))]
    (prompt,) = (prompt for prompt in PROMPTS if len(prompt) == max(map(len, PROMPTS)))
    with Scene(nursery, tiny_model.make_gated(tmp_path, 4), sides) as scene:
        scene.keep.mkdir()
        (room,) = move_and_keep(scene, "cut-wide", "cut-single", [prompt])
        offered, received = kept_by_both(scene, room, "cut-wide", "cut-single")
    parts = [name for name in received[0] if f"{name.rpartition('.')[0]}.1" in received[0] and name.endswith(".0")]
    assert len(parts) == tiny_model.LAYERS - 1
    for part in parts:
        one, other = (
            whole_state([rank[part] for rank in side], "SD", tiny_model.GATED_HEADS // len(side))
            for side in (offered, received)
        )
        assert not np.array_equal(one, other)
