"""Tests digests of real agents on a GPU: pages that change while a room is copied fail that room alone, and by name.

Pages on decode's GPU are not changed: nothing runs there between the kernels that scatter and that compute digests. The
kernels' own tests change single bits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from gpu_world import EngineProcess, GPUAgent

pytestmark = pytest.mark.gpu

SHAPE = {"layers": 4, "kv_heads": 4, "tp": 1, "rank": 0}
PAGE_SIZE, PAGE_COUNT, TOKENS = 16, 32, 200
# Each room is found with a probability of about a half, if the bit changes fast enough.
ROOMS_MAX = 200


@dataclass
class Place:
    """Prefill on a GPU; decode on the same agent with pages in host memory, and on another agent on a GPU."""

    prefill: EngineProcess
    host: EngineProcess
    device: EngineProcess
    endpoint: str
    rooms: Iterator[int]

    def move(self, target: EngineProcess, *, first_page: int = 0) -> tuple[str, str]:
        """Move a room with digests; return its end at decode, and the text."""
        room, size = next(self.rooms), 1 if target is self.host else PAGE_SIZE
        pages = [first_page * PAGE_SIZE // size + page for page in range(-(-TOKENS // size))]
        near = list(range(-(-TOKENS // PAGE_SIZE)))
        target.ask("receive", room=room, endpoint=self.endpoint, pages=pages, tokens=TOKENS, digest=True)
        self.prefill.ask("send", room=room, pages=near, tokens=TOKENS, chunk=TOKENS)
        kind, text, _ = target.ask("wait", room=room, half="TARGET", instance="prefill")
        self.prefill.ask("wait", room=room, half="SOURCE", instance="prefill")
        return kind, text


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("nixl")
    with ExitStack() as stack:
        near, far = (stack.enter_context(GPUAgent(LONGSHORE_RING_BYTES="64Mi")) for _ in range(2))
        prefill, host, device = (stack.enter_context(EngineProcess()) for _ in range(3))
        pool = {"page_size": PAGE_SIZE, "page_count": PAGE_COUNT, **SHAPE}
        prefill.begin("allocate", device=0, **pool)
        device.begin("allocate", device=torch.cuda.device_count() - 1, **pool)
        host.ask("allocate_host", **pool | {"page_size": 1, "page_count": PAGE_COUNT * PAGE_SIZE})
        prefill.end()
        device.end()
        prefill.begin("register", socket=near.socket, instance="prefill", role="SOURCE")
        device.begin("register", socket=far.socket, instance="device", role="TARGET")
        host.ask("register_host", socket=near.socket, instance="host", device="cpu")
        prefill.end()
        device.end()
        prefill.ask("fill", seed=1, tokens=TOKENS, pages=list(range(-(-TOKENS // PAGE_SIZE))))
        yield Place(prefill, host, device, prefill.ask("endpoint"), itertools.count(2**63 + 1))


@pytest.mark.parametrize(("target", "damaged"), [("host", "host"), ("host", "prefill"), ("device", "prefill")])
def test_a_bit_that_changes_while_a_room_is_copied_fails_it_and_names_layer_head_and_slab(
    target: str, damaged: str, place: Place
) -> None:
    decode: EngineProcess = getattr(place, target)
    victim: EngineProcess = getattr(place, damaged)
    assert place.move(decode) == ("DONE", "")
    victim.ask("damage", page=0)
    failed: tuple[str, str] | None = None
    for _ in range(ROOMS_MAX):
        found = place.move(decode)
        if found[0] != "DONE":
            failed = found
            break
        # Rooms into other pages, from pages that nobody changes, are untouched.
        assert damaged == "prefill" or place.move(decode, first_page=16) == ("DONE", "")
    victim.ask("heal")
    assert failed is not None, f"no room of {ROOMS_MAX} was found"
    assert failed[0] == "FAILED"
    assert re.match(
        r"layer 0, K, head 0: tokens 0 to \d+ in decode rank 0's pages are not those of prefill rank 0", failed[1]
    )
    place.prefill.ask("fill", seed=1, tokens=TOKENS, pages=list(range(-(-TOKENS // PAGE_SIZE))))
    assert place.move(decode) == ("DONE", "")
    whole: list[Any] = [(1, TOKENS, list(range(-(-TOKENS // (1 if target == "host" else PAGE_SIZE)))))]
    if damaged != "prefill":
        size = 1 if target == "host" else PAGE_SIZE
        assert place.move(decode, first_page=16) == ("DONE", "")
        whole.append((1, TOKENS, [16 * PAGE_SIZE // size + page for page in range(-(-TOKENS // size))]))
        assert decode.ask("differences", sequences=whole) == 0
