"""What the benchmarks of real engines on GPUs share: a server as a group of processes, the model, MPS, and summaries."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from everything_gpu import commit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
from mps_daemon import mps_daemon, mps_logs

ROOT = Path(__file__).parents[1]
READY_LIMIT_S, REQUEST_LIMIT_S, END_LIMIT_S = 240.0, 120.0, 20.0
# Servers close a connection that was idle for 5 s, perhaps while a request comes: "Server disconnected without a response".
IDLE_S = 2.0
LOG_CHARACTERS, LOG_CHARACTERS_MAX = 6000, 1_000_000
VOCABULARY = 32_000
DENSE = "dense"
# Of K and V of the dense model.
DENSE_TOKEN_BYTES = 131_072
# Of each kind of model the classes of transformers, and what its config has beside `COMMON`. Sizes of what moves are those of
# the named model; there are fewer layers, and the rest is small.
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    DENSE: (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
    # Qwen3.5-397B: a state of 4.27 MB in each of 15 layers, and 2,048 bytes of K and V a token in each of 5.
    "gdn": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    # DeepSeek-V3: a latent of 1,152 bytes a token and layer, on each rank. No layer has experts.
    "mla": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 512,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 32,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            # vLLM reads a matrix of its own for this model.
            "tie_word_embeddings": False,
        },
    ),
}
MAKE_MODEL = f"""
import json, sys, torch, transformers
torch.manual_seed(0)
config, model, fields = json.loads(sys.argv[2])
with torch.device(sys.argv[3]):
    model = getattr(transformers, model)(getattr(transformers, config)(**fields)).to(torch.bfloat16)
model.save_pretrained(sys.argv[1])
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({{f"w{{n}}": n for n in range({VOCABULARY})}}, unk_token="w3"))
PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w3"
    ).save_pretrained(sys.argv[1])
"""


def python_path(first: str | None, tree: Path = ROOT) -> str:
    """Return the folders that an engine's Python searches, `first` before the connectors of a checkout."""
    folders = [tree / "engines", tree / "client", tree / "wire", Path(__file__).parent]
    return os.pathsep.join([*filter(None, [first]), *map(str, folders)])


@dataclass
class ServedEngine(ABC):
    """One server; `start` returns at once.

    Attributes:
        devices: the GPUs that its processes see.
        environment: variables in addition to those of its kind.
        arguments: further arguments of its program.
        request_limit_s: the longest time without any answer to a request.
    """

    name: str
    model: Path
    devices: tuple[int, ...]
    port: int
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    request_limit_s: float = REQUEST_LIMIT_S

    @abstractmethod
    def command(self) -> list[str]:
        """Return the program and its arguments."""

    @abstractmethod
    def variables(self) -> dict[str, str]:
        """Return the environment in addition to ours."""

    def start(self) -> None:
        """Start its processes, in a group of their own."""
        visible = ",".join(map(str, self.devices))
        environment = os.environ | self.variables() | {"HF_HUB_OFFLINE": "1"} | dict(self.environment)
        self.log_path = self.directory / f"{self.name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                env=environment | {"CUDA_VISIBLE_DEVICES": visible},
            )
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=self.request_limit_s, limits=limits)

    def wait_ready(self) -> None:
        """Return when it serves. Raises SystemExit with its log if it does not."""
        end_s = time.monotonic() + READY_LIMIT_S
        while True:
            try:
                if self.http.get("/health", timeout=5.0).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{self.name} does not serve:\n{self.log()}")
            time.sleep(0.1)

    def log(self) -> str:
        """Return the end of its log."""
        return self.log_path.read_text(errors="replace")[-LOG_CHARACTERS:]

    def end(self) -> None:
        """End its processes."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, signal_number)
                self.process.wait(END_LIMIT_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()
        self.http.close()


def tokens_of(seed: int, length: int, count: int) -> list[list[int]]:
    """Return the tokens of prompts of one length, the same for the same seed."""
    draw = random.Random(f"{seed} {length}")
    return [[draw.randrange(10, VOCABULARY) for _ in range(length)] for _ in range(count)]


def spread(values: list[float]) -> dict[str, float]:
    """Return median and 99th percentile in milliseconds."""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
    return {"p50_ms": round(1e3 * statistics.median(ordered), 2), "p99_ms": round(1e3 * high, 2)}


def program(name: str) -> str:
    """Return the path of a program of the driver. Raises SystemExit if it is not installed."""
    found = shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is not in PATH: install the driver's programs")
    return found


@contextmanager
def mps(directory: Path, logs: Path, *, wanted: bool) -> Iterator[Mapping[str, str]]:
    """Run the daemon of CUDA's Multi-Process Service if it is wanted; yield the variables of its clients."""
    if not wanted:
        yield {}
        return
    try:
        with mps_daemon(directory) as variables:
            yield variables
    finally:
        (logs / "mps.log").write_text(mps_logs(directory, LOG_CHARACTERS_MAX), encoding="utf-8")


def make_model(directory: Path, python: str, path: str, kind: str = DENSE, device: str = "cuda") -> Path:
    """Make a model of `MODELS` with random weights, by an interpreter that also searches these folders; return its folder."""
    config, model, fields = MODELS[kind]
    wanted = json.dumps([config, model, {**COMMON, **fields}])
    command = [python, "-c", MAKE_MODEL, str(directory / "model"), wanted, device]
    subprocess.run(command, check=True, timeout=240, env=os.environ | {"PYTHONPATH": path})
    return directory / "model"


def about(arguments: list[str]) -> dict[str, Any]:
    """Return where and of what this ran."""
    query = [program("nvidia-smi"), "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, check=False, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return {
        "gpus": gpus,
        "processors": os.cpu_count(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "engine_arguments": arguments,
    }
