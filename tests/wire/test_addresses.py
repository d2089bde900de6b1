"""Tests the addresses of endpoints: those of agents are accepted, and all others are refused by rank and reason."""

from __future__ import annotations

import msgspec
import pytest

from longshore_wire.addresses import is_numeric
from longshore_wire.engine_messages import Endpoint, RankAddress
from longshore_wire.errors import LongshoreError
from longshore_wire.layout import KVLayout, ModelShape, Parallel

GOOD = Endpoint(
    "prefill-0",
    KVLayout(ModelShape.kv(2, 4, 8, 2), Parallel(tp=2), 4),
    tuple(RankAddress(n, f"10.0.0.{n + 1}:1", 5) for n in range(2)),
)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:1",
        "127.0.0.1:65535",
        "223.255.255.255:7000",
        "10.0.0.1:7000#0a1b2c",
        "10.0.0.1:7000#0a,10.0.0.1:7001#b2",
    ],
)
def test_addresses_that_an_agent_gives_are_accepted(address: str) -> None:
    assert is_numeric(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "slow.attacker.example:443",
        "localhost:7000",
        "*:7000",
        "10.0.0.1",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.256:1",
        "0.0.0.0:7000",
        "169.254.169.254:80",
        "224.0.0.1:1",
        "255.255.255.255:1",
        "::1:7000",
        "[::1]:7000",
        "10.0.0.1:7000;10.0.0.2:7000",
        "10.0.0.1:7000,attacker.example:1",
        "10.0.0.1:7000#0a,",
        "10.0.0.1:7000#no key",
        " 10.0.0.1:7000",
        "010.0.0.1:7000",
        "10.0.0.1:07000",
        "10.0.0.1:7000\n",
        "\u0661\u0660.0.0.1:7000",
    ],
)
def test_no_other_address_is_accepted(address: str) -> None:
    assert not is_numeric(address)
    bad = msgspec.structs.replace(GOOD, ranks=(GOOD.ranks[0], RankAddress(1, address, 5)))
    with pytest.raises(LongshoreError, match="rank 1 is at"):
        bad.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instance": ""}, "instance is ''"),
        ({"instance": "prefill\x1b]0;owned\x07"}, "instance is 'prefill"),
        ({"instance": "p" * 20_000}, "instance is 'ppp"),
        ({"agent": "a" * 31_000}, "agent has 31000 characters"),
        ({"seals": (b"",) * 15_500}, "there are 15500 seals"),
        ({"seals": (b"x" * 10_000,)}, "there are 1 seals"),
        ({"ranks": (RankAddress(2, "10.0.0.1:1", 5),)}, "rank 2: give each of 0 to 1 once"),
        ({"ranks": (RankAddress(-1, "10.0.0.1:1", 5),)}, "rank -1"),
        ({"ranks": (GOOD.ranks[0], RankAddress(0, "10.0.0.3:1", 5))}, "rank 0: give each"),
        ({"ranks": (GOOD.ranks[0], RankAddress(1, "10.0.0.1:1#0a", 5))}, "two ranks are at 10.0.0.1:1"),
    ],
)
def test_an_endpoint_that_no_agent_gives_is_refused_with_the_field(change: dict[str, object], said: str) -> None:
    GOOD.check()
    with pytest.raises(LongshoreError, match=said) as caught:
        msgspec.structs.replace(GOOD, **change).check()
    assert len(str(caught.value)) < 300
