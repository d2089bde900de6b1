"""Tests what ties both halves of a room to one request, the prompt's digest and the room's capability; and asks for a room."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from core_outputs import effects_of, messages_of

from longshore_wire.bindings import UNBOUND, Binding
from longshore_wire.claims import Wanted
from longshore_wire.effects import SECOND_NS, PeerId, RoomEnded, RoomOffered, SessionConfig, StartScatter, StartWrite
from longshore_wire.engine_messages import CachePages, Endpoint, Offer, RankAddress, Receive
from longshore_wire.errors import Reason, RoomError
from longshore_wire.layout import KVLayout, ModelShape, Parallel
from longshore_wire.links import Outcome
from longshore_wire.peer_messages import Abort, Ask, Claim, PairKey, RegionInfo, RoomKey, SlabReady
from longshore_wire.source import SourceSession
from longshore_wire.target import TargetSession
from longshore_wire.ways import Way

LAYOUT = KVLayout(ModelShape.kv(2, 4, 16, 2), Parallel(), 16)
ENDPOINT = Endpoint("P", LAYOUT, (RankAddress(0, "h:1", 7),))
PREFILL = PeerId("P", 0, 0)
KEY = RoomKey("P", 2**63 + 9)
PROMPT, CAPABILITY = bytes(range(16)), b"0123456789abcdef"
RIGHT = Binding(PROMPT, CAPABILITY)
WRONG = Binding(PROMPT, b"another one     ")


def decode(name: str, epoch: int) -> TargetSession:
    session = TargetSession(SessionConfig("d", name, epoch, LAYOUT, ring_bytes=1 << 20, force_way=Way.STAGED), now_ns=0)
    session.describe(b"", RegionInfo(0, 1 << 20), {})
    return session


@dataclass
class Scene:
    """A prefill rank, and the decode ranks of its request and of a thief. Writes and scatters are over at once."""

    source: SourceSession
    targets: dict[str, TargetSession] = field(
        default_factory=lambda: {"owner": decode("owner", 9), "thief": decode("thief", 10)}
    )
    now_ns: int = 0
    ended: dict[str, RoomEnded] = field(default_factory=dict)
    write_count: int = 0
    told: list[str] = field(default_factory=list)  # who was told that the room is offered
    is_deaf: bool = False  # prefill loses what it is sent

    @classmethod
    def of(cls) -> Scene:
        source = SourceSession(SessionConfig("d", "P", 7, LAYOUT), now_ns=0)
        source.describe(b"", None, {}, address="h:1")
        return cls(source)

    def offer(self, binding: Binding = RIGHT, tokens: tuple[int, int] = (0, 60)) -> None:
        self.source.offer(KEY.room, [(0, *tokens)], last=tokens[1] == 60, now_ns=self.now_ns, binding=binding)
        self.settle()

    def ask(self, who: str, binding: Binding) -> None:
        self.targets[who].ask(
            Wanted(KEY, ENDPOINT, (CachePages(0, 0, 1, 0, b""),), binding=Binding(b"", binding.capability)), self.now_ns
        )
        self.settle()

    def claim(self, who: str, binding: Binding) -> None:
        wanted = Wanted(KEY, ENDPOINT, (CachePages(0, 0, 60, 4, bytes(16)),), binding=binding)
        self.targets[who].claim(wanted, self.now_ns)
        self.settle()

    def wait(self, seconds: int) -> None:
        for _ in range(2 * seconds):
            self.now_ns += SECOND_NS // 2
            for core in (self.source, *self.targets.values()):
                core.renew(self.now_ns)
                core.tick(self.now_ns)
            self.settle()

    def settle(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        said = False
        for name, target in self.targets.items():
            for _, message in messages_of(target):
                said = True
                if not (self.is_deaf and isinstance(message, Ask)):
                    self.source.receive(PeerId(name, 0, 0), message, self.now_ns)
            for effect in effects_of(target):
                if isinstance(effect, StartScatter):
                    target.scatter_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, self.now_ns)
                elif isinstance(effect, RoomOffered):
                    self.told.append(name)
                elif isinstance(effect, RoomEnded):
                    self.ended[name] = effect
        for effect in effects_of(self.source):
            if isinstance(effect, StartWrite):
                self.write_count += 1
                self.source.write_done(effect.peer, effect.pair, effect.slab, effect.payload_bytes, self.now_ns)
                ready = SlabReady(
                    effect.pair, effect.slab, effect.generation, effect.payload_bytes, effect.total_tokens
                )
                self.targets[effect.peer.instance].receive(PREFILL, ready, self.now_ns)
            elif isinstance(effect, RoomEnded):
                self.ended["prefill"] = effect
        for peer, message in messages_of(self.source):
            said = True
            self.targets[peer.instance].receive(PREFILL, message, self.now_ns)
        return said

    def reasons(self) -> dict[str, Reason]:
        return {name: effect.reason for name, effect in self.ended.items()}


DONE = {"owner": Reason.NONE, "thief": Reason.AUTHENTICATION, "prefill": Reason.NONE}


@pytest.mark.parametrize("shown", [WRONG, UNBOUND, Binding(PROMPT)])
@pytest.mark.parametrize(
    "order", ["offer, thief, owner", "thief, offer, owner", "thief, owner, offer", "owner, thief, offer"]
)
def test_a_claim_without_the_capability_gets_no_byte_and_the_room_goes_to_its_own_request(
    order: str, shown: Binding
) -> None:
    scene = Scene.of()
    for step in order.split(", "):
        if step == "offer":
            scene.offer()
        else:
            scene.claim(step, RIGHT if step == "owner" else shown)
    scene.wait(20)
    # A claim before the offer is answered when the offer shows whose claim is right; by then the room may be over.
    late = order.startswith("owner")
    assert scene.reasons() == DONE | ({"thief": Reason.ROOM_REUSED} if late else {})
    assert late or "does not show the capability" in scene.ended["thief"].text
    assert {pair.peer.instance for pair in scene.ended["prefill"].pairs} == {"owner"}


def test_a_claim_without_the_capability_spoils_no_later_one_at_the_same_rank() -> None:
    scene = Scene.of()
    scene.offer()
    scene.claim("owner", WRONG)
    scene.wait(8)
    assert scene.reasons() == {"owner": Reason.AUTHENTICATION}
    with pytest.raises(RoomError, match="has failed already"):
        scene.claim("owner", WRONG)
    scene.claim("owner", RIGHT)
    scene.wait(8)
    assert scene.reasons() == {"owner": Reason.NONE, "prefill": Reason.NONE}


def test_until_the_end_of_a_claim_without_the_capability_is_confirmed_the_next_one_has_to_wait() -> None:
    scene = Scene.of()
    scene.offer()
    owner = scene.targets["owner"]
    owner.claim(Wanted(KEY, ENDPOINT, (CachePages(0, 0, 60, 4, bytes(16)),), binding=WRONG), 0)
    scene.settle()
    owner.peers[PREFILL].outcomes[KEY, 0] = Outcome(owner.ended[KEY], 0)
    with pytest.raises(RoomError, match="try again") as caught:
        scene.claim("owner", RIGHT)
    assert caught.value.reason is Reason.BUSY
    scene.wait(8)
    owner.peers[PREFILL].outcomes.pop((KEY, 0), None)
    scene.claim("owner", RIGHT)
    scene.wait(1)
    assert scene.reasons()["owner"] is Reason.NONE


def test_a_claim_that_an_earlier_life_of_prefill_refused_keeps_no_later_offer_away() -> None:
    scene = Scene.of()
    scene.ask("owner", RIGHT)
    key = PairKey(KEY, 0, 0, 7, 9, "owner")
    scene.source.receive(
        PeerId("owner", 0, 0), Abort(key, Reason.AUTHENTICATION, "of an earlier life", 1, WRONG), scene.now_ns
    )
    scene.offer()
    assert scene.told == ["owner"]


def test_a_late_word_of_a_claim_without_the_capability_ends_no_later_one_at_the_same_rank() -> None:
    scene = Scene.of()
    scene.offer(tokens=(0, 32))
    scene.claim("owner", WRONG)
    scene.wait(8)
    scene.claim("owner", RIGHT)
    key = PairKey(KEY, 0, 0, 7, 9, "owner")
    scene.source.receive(PeerId("owner", 0, 0), Abort(key, Reason.AUTHENTICATION, "late", 1, WRONG), scene.now_ns)
    scene.offer(tokens=(32, 60))
    scene.wait(8)
    assert scene.reasons() == {"owner": Reason.NONE, "prefill": Reason.NONE}


def test_a_thief_who_cancels_his_claim_ends_nobodys_room() -> None:
    scene = Scene.of()
    scene.offer()
    thief = scene.targets["thief"]
    thief.claim(Wanted(KEY, ENDPOINT, (CachePages(0, 0, 60, 4, bytes(16)),), binding=WRONG), 0)
    thief.cancel(KEY, Reason.CANCELLED, "enough", 0)
    scene.wait(8)
    assert "prefill" not in scene.ended
    scene.claim("owner", RIGHT)
    scene.wait(8)
    assert scene.reasons() == DONE | {"thief": Reason.CANCELLED}


@pytest.mark.parametrize("owner", ["", "ask", "claim"])
@pytest.mark.parametrize("call", ["ask", "claim"])
def test_a_thief_who_cancels_before_the_offer_ends_nobodys_room(call: str, owner: str) -> None:
    scene = Scene.of()
    if owner == "ask":
        scene.ask("owner", RIGHT)
    getattr(scene, call)("thief", WRONG)
    if owner == "claim":
        scene.claim("owner", RIGHT)
    scene.targets["thief"].cancel(KEY, Reason.CANCELLED, "enough", scene.now_ns)
    scene.wait(8)
    scene.offer()
    if owner != "claim":
        scene.claim("owner", RIGHT)
    scene.wait(8)
    assert scene.reasons() == DONE | {"thief": Reason.CANCELLED}


def test_what_prefills_own_engine_ends_before_its_offer_is_over_for_everybody() -> None:
    scene = Scene.of()
    scene.claim("thief", WRONG)
    scene.source.cancel(KEY, Reason.CANCELLED, "prefill gave it up", scene.now_ns)
    scene.settle()
    scene.claim("owner", RIGHT)
    assert scene.reasons()["owner"] is Reason.CANCELLED
    with pytest.raises(RoomError, match="prefill gave it up"):
        scene.offer()


def test_the_owner_who_cancels_before_his_claim_arrives_ends_his_room() -> None:
    scene = Scene.of()
    scene.offer()
    owner = scene.targets["owner"]
    owner.claim(Wanted(KEY, ENDPOINT, (CachePages(0, 0, 60, 4, bytes(16)),), binding=RIGHT), 0)
    owner.cancel(KEY, Reason.CANCELLED, "enough", 0)
    scene.wait(8)
    assert scene.reasons() == {"owner": Reason.CANCELLED, "prefill": Reason.CANCELLED}


@pytest.mark.parametrize("first", ["offer", "claim"])
@pytest.mark.parametrize("first_token", [0, 60])
def test_a_room_whose_halves_have_other_prompts_fails_on_both_sides_before_a_byte_moves(
    first: str, first_token: int
) -> None:
    scene = Scene.of()
    pages = bytes(16) if first_token == 0 else b""
    wanted = Wanted(
        KEY,
        ENDPOINT,
        (CachePages(0, first_token, 60, len(pages) // 4, pages),),
        binding=Binding(PROMPT[::-1], CAPABILITY),
    )
    if first == "offer":
        scene.offer()
    scene.targets["owner"].claim(wanted, 0)
    scene.settle()
    if first == "claim":
        scene.offer()
    scene.wait(8)
    # A claim of nothing needs nothing of prefill, and is no open room before the offer.
    is_noted = first_token > 0 and first == "claim"
    assert scene.ended["prefill"].reason is (Reason.NONE if is_noted else Reason.PROMPT_MISMATCH)
    assert scene.ended["owner"].reason is (Reason.PROMPT_MISMATCH if first_token == 0 else Reason.NONE)
    assert scene.write_count == 0


@pytest.mark.parametrize(("offered", "claimed"), [(b"", PROMPT), (PROMPT, b""), (b"", b"")])
def test_an_engine_that_states_no_prompt_is_served(offered: bytes, claimed: bytes) -> None:
    scene = Scene.of()
    scene.offer(Binding(offered, CAPABILITY))
    scene.claim("owner", Binding(claimed, CAPABILITY))
    scene.wait(4)
    assert scene.reasons() == {"owner": Reason.NONE, "prefill": Reason.NONE}


def test_all_chunks_of_a_room_have_one_binding() -> None:
    source = Scene.of().source
    source.offer(KEY.room, [(0, 0, 32)], last=False, now_ns=0, binding=RIGHT)
    for other in (WRONG, UNBOUND, Binding(b"", CAPABILITY)):
        with pytest.raises(RoomError, match="another prompt or capability"):
            source.offer(KEY.room, [(0, 32, 60)], last=True, now_ns=0, binding=other)
    source.offer(KEY.room, [(0, 32, 60)], last=True, now_ns=0, binding=RIGHT)


def test_messages_show_neither_prompt_nor_capability_nor_a_number_that_nobody_can_guess() -> None:
    pair = PairKey(KEY, 0, 0, 1, 2, "D")
    shown = [
        Claim(pair, 0, 60, Way.STAGED, binding=RIGHT),
        Abort(pair, Reason.CANCELLED, "enough", binding=RIGHT),
        Offer(1, 7, (CachePages(0, 0, 4, 0, b""),), True, binding=RIGHT),
        Receive(1, 7, ENDPOINT, (CachePages(0, 0, 4, 0, b"", 0),), binding=RIGHT),
    ]
    for message in shown:
        text = repr(message)
        assert str(KEY.room) not in text
        assert repr(PROMPT)[2:-1] not in text
        assert CAPABILITY.decode() not in text


def test_who_asks_opens_no_room_at_prefill_and_is_told_with_its_first_chunk_once() -> None:
    scene = Scene.of()
    scene.ask("owner", RIGHT)
    scene.wait(20)
    assert not scene.source.rooms and not scene.told
    scene.offer(tokens=(0, 32))
    assert scene.told == ["owner"]
    scene.wait(20)
    scene.claim("owner", RIGHT)
    scene.offer(tokens=(32, 60))
    scene.wait(8)
    assert (scene.told, scene.reasons()) == (["owner"], {"owner": Reason.NONE, "prefill": Reason.NONE})


def test_who_asks_for_an_offered_room_is_told_at_once_and_a_lost_ask_is_repeated() -> None:
    scene = Scene.of()
    scene.offer()
    scene.is_deaf = True
    scene.ask("owner", RIGHT)
    assert not scene.told
    scene.is_deaf = False
    scene.wait(8)
    assert scene.told == ["owner"]
    scene.claim("owner", RIGHT)
    scene.wait(1)
    assert scene.reasons() == {"owner": Reason.NONE, "prefill": Reason.NONE}


@pytest.mark.parametrize("order", ["offer, thief", "thief, offer"])
def test_who_asks_without_the_capability_is_turned_away_and_ends_nobodys_room(order: str) -> None:
    scene = Scene.of()
    for step in order.split(", "):
        if step == "offer":
            scene.offer()
        else:
            scene.ask("thief", WRONG)
    scene.wait(8)
    assert scene.reasons() == {"thief": Reason.AUTHENTICATION} and not scene.told
    scene.claim("owner", RIGHT)
    scene.wait(8)
    assert scene.reasons() == DONE


def test_who_asks_and_leaves_ends_the_room_at_prefill_before_and_after_its_offer() -> None:
    for is_offered in (True, False):
        scene = Scene.of()
        scene.ask("owner", RIGHT)
        if is_offered:
            scene.offer()
        scene.targets["owner"].cancel(KEY, Reason.CANCELLED, "the client has left", scene.now_ns)
        scene.settle()
        if is_offered:
            assert scene.reasons() == {"owner": Reason.CANCELLED, "prefill": Reason.CANCELLED}
        else:
            with pytest.raises(RoomError, match="the client has left"):
                scene.offer()
        with pytest.raises(RoomError, match="has failed already: the client has left"):
            scene.claim("owner", RIGHT)


def test_who_asks_for_a_room_that_has_ended_or_never_comes_hears_why() -> None:
    scene = Scene.of()
    scene.source.cancel(KEY, Reason.CANCELLED, "prefill gave it up", 0)
    scene.ask("owner", RIGHT)
    assert (scene.ended["owner"].reason, scene.ended["owner"].text) == (Reason.CANCELLED, "prefill gave it up")
    scene = Scene.of()
    scene.ask("owner", RIGHT)
    scene.wait(700)
    assert scene.ended["owner"].reason is Reason.TIMED_OUT
    assert "the prefill engine has not offered it" in scene.ended["owner"].text


def test_a_refused_claim_leaves_the_asked_room_as_it_is_and_a_second_ask_is_refused() -> None:
    scene = Scene.of()
    scene.ask("owner", RIGHT)
    owner = scene.targets["owner"]
    with pytest.raises(RoomError, match="not a range"):
        owner.claim(Wanted(KEY, ENDPOINT, (CachePages(0, 60, 0, 0, b""),), binding=RIGHT), 0)
    assert owner.is_asked(KEY)
    scene.offer()
    assert scene.told == ["owner"]
    scene.claim("owner", RIGHT)
    with pytest.raises(RoomError, match="was claimed before"):
        scene.ask("owner", RIGHT)
    scene.wait(1)
    assert scene.reasons() == {"owner": Reason.NONE, "prefill": Reason.NONE}


def test_the_asks_that_prefill_notes_are_bounded() -> None:
    config = SessionConfig("d", "P", 7, LAYOUT, ended_rooms_max=4)
    scene = Scene(SourceSession(config, now_ns=0))
    scene.source.describe(b"", None, {}, address="h:1")
    for room in range(8):
        key = RoomKey("P", room)
        scene.targets["owner"].ask(Wanted(key, ENDPOINT, (CachePages(0, 0, 1, 0, b""),)), 0)
    scene.settle()
    assert len(scene.source._asks) == 4
