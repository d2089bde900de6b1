"""One prompt from vLLM to SGLang, and from SGLang to vLLM, through the example router: tokens equal one engine's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import engines as vllm_engines
import httpx
import msgspec
import pytest
import scene as vllm_scene
from controlplane.ports import free_port
from controlplane.processes import Process
from controlplane.waiting import until
from families import TOKENS_EQUAL
from sglang_engines import REQUEST_LIMIT_S, ROOT, Nursery, Prompt
from sglang_engines import body as sglang_body
from sglang_prompts import LOGPROB_ERROR_MAX, NEW_TOKENS, PROMPTS, Oracle, random_prompt
from sglang_scene import END_LIMIT_S, WINDOWED, Scene, Side, tokens_in_use
from tiny_model import TinyModel

from longshore_cli.local_agents import make_keys
from longshore_engines.handover import KEY, Handover, handover_of, packed_handover
from longshore_wire.bindings import Binding

VLLM_VENV_VARIABLE = "E2E_VLLM_VENV"
TO_SGLANG, TO_VLLM = "vllm-to-sglang", "sglang-to-vllm"
# vLLM computes the last token of a prompt itself.
TELLING_TOKENS_MIN = 32
VLLM_BLOCK_TOKENS = 32

pytestmark = pytest.mark.timeout(900)


@dataclass
class Pair:
    """A vLLM and an SGLang engine of unequal TP, and the router between them."""

    direction: str
    vllm: vllm_scene.Scene
    sglang: Scene
    url: str

    @property
    def zero(self) -> Path:
        """The file of decode's scene that lets received KV be zeroed."""
        return self.sglang.zero if self.direction == TO_SGLANG else self.vllm.zero

    def ask(self, prompt: Prompt | str, **more: Any) -> Any:
        """Return the choice in the router's answer."""
        answer = httpx.post(f"{self.url}/v1/completions", json=body(prompt, **more), timeout=REQUEST_LIMIT_S)
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer.json()["choices"][0]

    def at_once(self, prompts: list[Prompt], **more: Any) -> list[Any]:
        """Ask for all prompts concurrently."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.ask(prompt, **more), prompts))


def body(prompt: Prompt | str, **more: Any) -> dict[str, Any]:
    fixed = {"model": "tiny", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **fixed, **more}


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text of the tiny model, whose words are w0, w1 and so on."""
    return [int(word.removeprefix("w")) for word in text.split()]


@pytest.fixture(scope="module")
def vllm_nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_engines.Nursery]:
    """The process from which vLLM engines are forked."""
    assert os.environ.get(VLLM_VENV_VARIABLE), f"{VLLM_VENV_VARIABLE} is not set: run `make e2e-sglang`"
    folder = tmp_path_factory.mktemp("vllm-engines")
    with vllm_engines.Nursery(Path(os.environ[VLLM_VENV_VARIABLE]), folder) as running:
        running.wait_ready()
        yield running


@contextmanager
def paired(
    direction: str,
    nursery: Nursery,
    vllm_nursery: vllm_engines.Nursery,
    model: TinyModel,
    keys: Path,
    vllm_options: Sequence[str] = (),
) -> Iterator[Pair]:
    """Run two engines of a model, the one of TP2 and the other of TP1."""
    make_keys(keys)
    with ExitStack() as stack:
        is_to_sglang = direction == TO_SGLANG
        vllm_side = vllm_scene.Side(
            "vllm", 2 if is_to_sglang else 1, block_tokens=VLLM_BLOCK_TOKENS, pages="tokens", extra=vllm_options
        )
        vllm = stack.enter_context(vllm_scene.Scene(vllm_nursery, model, [vllm_side], keys=keys))
        sides = (None, Side(1)) if is_to_sglang else (Side(2), None)
        sglang = stack.enter_context(Scene(nursery, model, *sides, keys=keys))
        url, port = vllm.engines["vllm"].url, free_port()
        if is_to_sglang:
            engines = ["--prefill", url, "--sglang-decode", sglang.decode.url]
        else:
            engines = ["--sglang-prefill", sglang.prefill.url, str(sglang.prefill.bootstrap_port), "--decode", url]
        command = [sys.executable, ROOT / "examples" / "vllm" / "proxy.py", *engines, "--port", str(port)]
        router = Process("router", command, nursery.directory)
        stack.callback(router.stop)
        address = f"http://127.0.0.1:{port}"
        until(lambda: router.check() and answers(address), "the router listens", END_LIMIT_S)
        yield Pair(direction, vllm, sglang, address)


@pytest.fixture(scope="module", params=[TO_SGLANG, TO_VLLM])
def pair(
    request: pytest.FixtureRequest,
    nursery: Nursery,
    vllm_nursery: vllm_engines.Nursery,
    model: TinyModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    with paired(request.param, nursery, vllm_nursery, model, keys) as running:
        yield running


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code > 0
    except httpx.TransportError:
        return False


def check_nothing_is_lent(pair: Pair) -> None:
    until(lambda: pair.sglang.open_rooms() == 0, "no room is open at SGLang's agent", END_LIMIT_S)
    vllm_scene.check_nothing_is_lent(pair.vllm, END_LIMIT_S)
    for name, engine in pair.sglang.engines.items():
        until(partial(lambda engine: tokens_in_use(engine) == 0, engine), f"{name} has all its pages", END_LIMIT_S)


def check_tokens(pair: Pair, alone: Oracle) -> None:
    """Check that tokens of prompts that are moved at once equal those of one engine."""
    found = [tokens_of(choice["text"]) for choice in pair.at_once(list(PROMPTS))]
    assert found == [alone(prompt) for prompt in PROMPTS]
    moved = [scene.agents[name].metrics() for scene in (pair.vllm, pair.sglang) for name in scene.agents]
    assert all(page.total("longshore_rooms_total", outcome="done") >= len(PROMPTS) for page in moved)
    check_nothing_is_lent(pair)


def check_zeroed(pair: Pair, alone: Oracle) -> None:
    """Check that with what moved zeroed the tokens of every telling prompt differ."""
    telling = [prompt for prompt in PROMPTS if len(prompt) > TELLING_TOKENS_MIN]
    # Otherwise vLLM would use the pages of the test before.
    pair.vllm.engines["vllm"].forget_prefixes()
    pair.zero.touch()
    try:
        answers = pair.at_once(telling)
    finally:
        pair.zero.unlink()
    same = [len(p) for p, choice in zip(telling, answers, strict=True) if tokens_of(choice["text"]) == alone(p)]
    assert same == []
    pair.vllm.engines["vllm"].forget_prefixes()


def test_tokens_of_prompts_that_are_moved_at_once_equal_those_of_one_engine_alone(pair: Pair, alone: Oracle) -> None:
    check_tokens(pair, alone)


def test_with_the_moved_kv_zeroed_the_tokens_of_every_telling_prompt_differ(pair: Pair, alone: Oracle) -> None:
    check_zeroed(pair, alone)


@pytest.mark.family(
    "Laguna (sliding windows), with vLLM",
    "K and V, of windowed layers the end of the prompt",
    TOKENS_EQUAL,
    "vLLM TP2 → SGLang TP1",
)
def test_windows_of_vllm_move_to_sglang(nursery: Nursery, vllm_nursery: vllm_engines.Nursery, tmp_path: Path) -> None:
    check_windows(TO_SGLANG, nursery, vllm_nursery, tmp_path)


@pytest.mark.family(
    "Laguna (sliding windows), with vLLM",
    "K and V, of windowed layers the end of the prompt",
    TOKENS_EQUAL,
    "SGLang TP2 → vLLM TP1",
)
def test_windows_of_sglang_move_to_vllm(nursery: Nursery, vllm_nursery: vllm_engines.Nursery, tmp_path: Path) -> None:
    check_windows(TO_VLLM, nursery, vllm_nursery, tmp_path)


def check_windows(direction: str, nursery: Nursery, vllm_nursery: vllm_engines.Nursery, directory: Path) -> None:
    model = WINDOWED.make(directory / "model")
    alone = WINDOWED.alone(nursery, model, directory / "plugins", PROMPTS)
    with paired(direction, nursery, vllm_nursery, model, directory / "keys") as running:
        check_tokens(running, alone)
        check_zeroed(running, alone)


def test_a_text_has_the_tokens_and_first_logprob_of_its_ids(pair: Pair, alone: Oracle) -> None:
    prompt = PROMPTS[-2]
    choice = pair.ask(" ".join(f"w{token}" for token in prompt), logprobs=0)
    assert tokens_of(choice["text"]) == alone(prompt)
    assert abs(choice["logprobs"]["token_logprobs"][0] - alone.first_logprob(prompt)) < LOGPROB_ERROR_MAX


def test_a_client_that_streams_gets_the_same_tokens(pair: Pair, alone: Oracle) -> None:
    prompt, parts = PROMPTS[-1], []
    content, last = body(prompt, stream=True), ""
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=content, timeout=REQUEST_LIMIT_S) as answer:
        assert answer.status_code == httpx.codes.OK
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                parts += [choice["text"] for choice in httpx.Response(200, text=line[6:]).json()["choices"]]
            last = line or last
    # A busy engine sends several tokens in one event.
    assert (answer.headers["content-type"].partition(";")[0], last) == ("text/event-stream", "data: [DONE]")
    assert tokens_of("".join(parts)) == alone(prompt)


def test_a_client_that_leaves_and_a_room_that_decode_cannot_use_leave_nothing_lent(pair: Pair) -> None:
    long = PROMPTS[-1]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{pair.url}/v1/completions", json=body(long, max_tokens=1000), timeout=0.5)
    check_nothing_is_lent(pair)


def test_a_prompt_of_vllm_that_sglang_would_let_prefill_compute_again_ends_with_a_reason(pair: Pair) -> None:
    if pair.direction == TO_VLLM:
        pytest.skip("vLLM has no such pause")
    content, decode = body(PROMPTS[-1], max_tokens=1000, stream=True), pair.sglang.decode
    with httpx.stream("POST", f"{pair.url}/v1/completions", json=content, timeout=REQUEST_LIMIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        decode.http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        decode.http.post("/continue_generation", json={}).raise_for_status()
        # After the first token the reason cannot reach the client: the stream breaks off.
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    text = "could not resolve the prefill /generate URL"
    until(lambda: text in decode.log_path.read_text(encoding="utf-8", errors="replace"), "decode's log has the reason")
    check_nothing_is_lent(pair)


def test_a_forged_handover_costs_its_sender_his_request_and_the_room_goes_to_its_own(pair: Pair, alone: Oracle) -> None:
    if pair.direction == TO_VLLM:
        pytest.skip("vLLM's own tests forge handovers to it")
    prompt, decode = PROMPTS[-1], pair.sglang.decode
    told = vllm_scene.prefill(pair.vllm.engines["vllm"], prompt)
    right = handover_of(told)
    forged = msgspec.structs.replace(right, binding=Binding(right.binding.prompt, bytes(16)))
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9, "bootstrap_room": 4711}

    def ask(handover: Handover, room: int, wanted: Prompt) -> Any:
        parameters = {KEY: packed_handover(handover), "first_token": alone(prompt)[0]}
        content = sglang_body(wanted, NEW_TOKENS, **place | {"bootstrap_room": room})
        content["sampling_params"]["custom_params"] = parameters
        return decode.post(content)

    with pytest.raises(httpx.HTTPStatusError, match="does not show the capability"):
        ask(forged, 4711, prompt)
    with pytest.raises(httpx.HTTPStatusError, match="the handover is of another prompt"):
        ask(right, 4712, random_prompt(900, len(prompt)))
    assert ask(right, 4713, prompt)["output_ids"] == alone(prompt)
    check_nothing_is_lent(pair)


def test_an_agent_that_dies_gives_an_error_with_its_reason_and_the_next_request_is_answered(
    pair: Pair, alone: Oracle
) -> None:
    agent = (pair.sglang if pair.direction == TO_VLLM else pair.vllm).agents
    [source] = agent.values()
    source.kill()
    prompt = PROMPTS[-2]
    answer = httpx.post(f"{pair.url}/v1/completions", json=body(prompt), timeout=REQUEST_LIMIT_S)
    assert answer.status_code >= httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["message"]
    source.start()
    source.wait_ready()

    def is_served() -> bool:
        found = httpx.post(f"{pair.url}/v1/completions", json=body(prompt), timeout=REQUEST_LIMIT_S)
        return found.status_code == httpx.codes.OK and tokens_of(found.json()["choices"][0]["text"]) == alone(prompt)

    until(is_served, "a prompt is moved again", END_LIMIT_S)
    check_nothing_is_lent(pair)
