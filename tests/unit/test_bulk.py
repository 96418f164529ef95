"""Both ends of a bulk socket as pure objects: which piece leaves, and which one is obeyed.

Nothing here has a socket; a `Bulk` carries messages between a sender and a receiver when a test says so.
"""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from common import limits
from common.errors import ErrorCode
from common.kv_layout import KvLayout
from common.messages import BulkOpen, Credit, KvPiece, Release
from transport.bulk import (
    BULK_ROUTE,
    BulkReceiver,
    BulkSender,
    ChunkOffered,
    ChunksLetGo,
    ExpectChunks,
    Land,
    PieceLetGo,
    PiecesMoved,
    SendsDropped,
)
from transport.peers import BadFrame, EndSession, FrameReceived, RouteLost, SendFrame, Tick

SESSION = "session"
ROUTE = b"decode node"
GIVE_UP_MS = 1_000
CHUNK_TOKENS = 4
# A chunk of four tokens has 3 layers x 2 x 4 tokens x 8 bytes = 192 bytes.
LAYOUT = KvLayout(3, 2, 4, "uint8", 64)
LAYER_BYTES = 2 * CHUNK_TOKENS * LAYOUT.row_bytes
CHUNK_BYTES = LAYOUT.layers * LAYER_BYTES


def end_of(effects: list[Any]) -> str:
    """The reason for which a session ends, and nothing else happens."""
    [ending] = effects
    assert isinstance(ending, EndSession)
    assert ending.session == SESSION
    return ending.reason


def messages(effects: list[Any]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, SendFrame)]


class Bulk:
    """A sender and a receiver, and what is on its way between them."""

    def __init__(self, layout: KvLayout = LAYOUT, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.now_ms = 0
        self.sender = BulkSender(SESSION, layout, GIVE_UP_MS)
        self.receiver = BulkReceiver(SESSION, layout, chunk_tokens)
        self.down: deque[SendFrame] = deque()
        self.up: deque[SendFrame] = deque([self.receiver.open()])
        self.landed: list[KvPiece] = []
        self.news: list[Any] = []

    def to_sender(self, event: Any) -> list[Any]:
        effects = self.sender.step(event, self.now_ms)
        self.down += [effect for effect in effects if isinstance(effect, SendFrame)]
        self.news += [effect for effect in effects if not isinstance(effect, SendFrame)]
        return effects

    def to_receiver(self, event: Any) -> list[Any]:
        effects = self.receiver.step(event, self.now_ms)
        self.up += [effect for effect in effects if isinstance(effect, SendFrame)]
        self.landed += [effect.piece for effect in effects if isinstance(effect, Land)]
        self.news += [effect for effect in effects if not isinstance(effect, SendFrame | Land)]
        return effects

    def offer(self, slot: int, epoch: int, start: int, end: int) -> list[Any]:
        return self.to_sender(ChunkOffered(SESSION, slot, epoch, start, end))

    def deliver_up(self) -> None:
        """The first message, or credit, arrives at the sender."""
        frame = self.up.popleft()
        assert frame.route == BULK_ROUTE
        self.to_sender(FrameReceived(ROUTE, frame.session, frame.sequence, frame.message))

    def deliver_down(self) -> KvPiece:
        """A piece arrives, and its memory is let go of."""
        frame = self.down.popleft()
        assert frame.route == ROUTE
        self.to_receiver(FrameReceived(BULK_ROUTE, frame.session, frame.sequence, frame.message))
        self.to_sender(PieceLetGo(frame.message.slot, frame.message.epoch))
        return frame.message

    def run(self) -> None:
        while self.up or self.down:
            if self.up:
                self.deliver_up()
            if self.down:
                self.deliver_down()


@pytest.fixture
def bulk() -> Bulk:
    """Both ends, introduced to each other."""
    made = Bulk()
    made.deliver_up()
    return made


@pytest.fixture
def layer_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a layer of a chunk each."""
    monkeypatch.setattr(limits, "KV_PIECE_BYTES", LAYER_BYTES)


@pytest.fixture
def small_credit(monkeypatch: pytest.MonkeyPatch, layer_pieces: None) -> Bulk:
    """Both ends, with credit for two pieces of a layer each."""
    monkeypatch.setattr(limits, "KV_CREDIT_BYTES", 2 * LAYER_BYTES)
    made = Bulk()
    made.deliver_up()
    return made


def credit_frame(sequence: int, byte_count: int) -> FrameReceived:
    return FrameReceived(ROUTE, SESSION, sequence, Credit(byte_count))


def piece_frame(sequence: int, piece: Any, session: str = SESSION) -> FrameReceived:
    return FrameReceived(BULK_ROUTE, session, sequence, piece)


def test_nothing_leaves_before_the_decode_node_has_opened_the_socket(layer_pieces: None) -> None:
    bulk = Bulk()
    assert bulk.offer(0, 1, 0, 4) == []
    bulk.deliver_up()
    assert [frame.message.layer for frame in bulk.down] == [0, 1, 2]
    assert [frame.sequence for frame in bulk.down] == [1, 2, 3]
    assert {(frame.route, frame.session) for frame in bulk.down} == {(ROUTE, SESSION)}


def test_pieces_of_two_productions_leave_in_the_order_of_their_chunks(bulk: Bulk, layer_pieces: None) -> None:
    for slot, epoch, start in ((0, 1, 0), (1, 4, 0), (0, 1, 4)):
        bulk.offer(slot, epoch, start, start + 4)
    sent = [frame.message for frame in bulk.down]
    places = [(piece.slot, piece.epoch, piece.start, piece.layer) for piece in sent]
    expected = [(0, 1, 0), (1, 4, 0), (0, 1, 4)]
    assert places == [(*chunk, layer) for chunk in expected for layer in range(3)]


def test_no_more_leaves_than_credit_allows_and_each_credit_lets_as_much_follow(small_credit: Bulk) -> None:
    bulk = small_credit
    bulk.offer(0, 1, 0, 4)
    assert len(bulk.down) == 2
    bulk.deliver_down()
    assert len(bulk.down) == 1, "what has arrived is not credit until the decode node says so"
    bulk.deliver_up()
    assert len(bulk.down) == 2
    bulk.deliver_down()
    bulk.deliver_down()
    assert messages(list(bulk.up)) == [Credit(LAYER_BYTES)] * 2


def test_credit_that_is_too_small_for_any_piece_lets_one_go_at_a_time(
    monkeypatch: pytest.MonkeyPatch, layer_pieces: None
) -> None:
    monkeypatch.setattr(limits, "KV_CREDIT_BYTES", LAYER_BYTES - 1)
    bulk = Bulk()
    bulk.to_receiver(ExpectChunks(0, 1, 0, 4))
    bulk.offer(0, 1, 0, 4)
    for _ in range(3):
        bulk.deliver_up()
        assert len(bulk.down) == 1
        bulk.deliver_down()
    assert len(bulk.landed) == 3


def test_a_chunk_is_let_go_of_when_its_last_piece_is_and_never_before(bulk: Bulk, layer_pieces: None) -> None:
    bulk.offer(0, 1, 0, 4)
    assert bulk.to_sender(PieceLetGo(0, 1)) == []
    assert bulk.to_sender(PieceLetGo(0, 1)) == []
    assert bulk.to_sender(PieceLetGo(0, 1)) == [ChunksLetGo(SESSION, 0, 1, 1)]


def test_what_waits_for_credit_is_not_let_go_of_though_everything_sent_is(small_credit: Bulk) -> None:
    bulk = small_credit
    bulk.offer(0, 1, 0, 4)
    bulk.offer(0, 1, 4, 8)
    assert bulk.to_sender(PieceLetGo(0, 1)) + bulk.to_sender(PieceLetGo(0, 1)) == []
    bulk.down.clear()
    sequence = 2
    while len(bulk.news) == 0:
        bulk.to_sender(credit_frame(sequence, LAYER_BYTES))
        bulk.to_sender(PieceLetGo(0, 1))
        sequence += 1
    assert bulk.news == [ChunksLetGo(SESSION, 0, 1, 2)]
    assert sequence == 6, "two chunks of three pieces, two of them before"


def test_the_count_says_which_chunks_are_meant_when_another_is_offered_meanwhile(bulk: Bulk) -> None:
    bulk.offer(0, 1, 0, 4)
    assert bulk.to_sender(PieceLetGo(0, 1)) == [ChunksLetGo(SESSION, 0, 1, 1)]
    bulk.offer(0, 1, 4, 8)
    bulk.offer(0, 1, 8, 12)
    assert bulk.to_sender(PieceLetGo(0, 1)) == []
    assert bulk.to_sender(PieceLetGo(0, 1)) == [ChunksLetGo(SESSION, 0, 1, 3)]


def test_dropped_sends_are_let_go_of_when_those_on_their_way_are(small_credit: Bulk) -> None:
    bulk = small_credit
    bulk.offer(0, 1, 0, 4)
    assert bulk.to_sender(SendsDropped(SESSION, 0, 1)) == []
    assert bulk.to_sender(PieceLetGo(0, 1)) == []
    assert bulk.to_sender(PieceLetGo(0, 1)) == [ChunksLetGo(SESSION, 0, 1, 1)]
    assert bulk.to_sender(credit_frame(2, LAYER_BYTES)) == [], "nothing of it is sent any more"


def test_dropped_sends_of_which_nothing_has_left_are_let_go_of_at_once() -> None:
    bulk = Bulk()
    bulk.offer(0, 1, 0, 4)
    bulk.offer(1, 6, 0, 4)
    assert bulk.to_sender(SendsDropped(SESSION, 0, 1)) == [ChunksLetGo(SESSION, 0, 1, 1)]
    bulk.deliver_up()
    assert {frame.message.slot for frame in bulk.down} == {1}, "the other production goes on"


def test_a_drop_of_what_was_never_offered_says_nothing(bulk: Bulk) -> None:
    assert bulk.to_sender(SendsDropped(SESSION, 0, 1)) == []


def test_earlier_productions_of_a_slot_are_forgotten(bulk: Bulk) -> None:
    for epoch in range(1, 50):
        bulk.offer(0, epoch, 0, 4)
        assert bulk.to_sender(PieceLetGo(0, epoch)) == [ChunksLetGo(SESSION, 0, epoch, 1)]
    assert len(bulk.sender._productions) <= 1


def test_a_decode_node_that_takes_nothing_though_pieces_wait_loses_its_session(small_credit: Bulk) -> None:
    bulk = small_credit
    assert bulk.sender.deadline_ms() is None
    bulk.now_ms = 300
    bulk.offer(0, 1, 0, 4)
    assert bulk.sender.deadline_ms() == 300 + GIVE_UP_MS
    bulk.now_ms = 800
    bulk.to_sender(credit_frame(2, LAYER_BYTES))
    bulk.now_ms = 800 + GIVE_UP_MS - 1
    assert bulk.to_sender(Tick()) == []
    bulk.now_ms += 1
    assert "took no KV for 1000 ms" in end_of(bulk.to_sender(Tick()))


def test_a_decode_node_that_never_opens_its_socket_loses_its_session() -> None:
    bulk = Bulk()
    bulk.offer(0, 1, 0, 4)
    bulk.now_ms = GIVE_UP_MS
    assert "took no KV" in end_of(bulk.to_sender(Tick()))


def test_a_decode_node_whose_credit_does_not_come_back_loses_its_session_though_nothing_waits(
    bulk: Bulk,
) -> None:
    bulk.offer(0, 1, 0, 4)
    assert len(bulk.down) == 1
    assert bulk.sender.deadline_ms() == GIVE_UP_MS
    bulk.now_ms = GIVE_UP_MS
    assert "took no KV" in end_of(bulk.to_sender(Tick()))


def test_an_idle_sender_waits_for_ever(bulk: Bulk) -> None:
    bulk.to_receiver(ExpectChunks(0, 1, 0, 4))
    bulk.offer(0, 1, 0, 4)
    bulk.run()
    assert bulk.sender.deadline_ms() is None
    bulk.now_ms = 100 * GIVE_UP_MS
    assert bulk.to_sender(Tick()) == []


def test_a_pause_between_two_prompts_is_no_time_in_which_nothing_was_taken(bulk: Bulk) -> None:
    bulk.to_receiver(ExpectChunks(0, 1, 0, 4))
    bulk.offer(0, 1, 0, 4)
    bulk.run()
    bulk.now_ms = 100 * GIVE_UP_MS
    bulk.offer(0, 2, 0, 4)
    assert bulk.to_sender(Tick()) == []


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_a_sender_wants_every_message_of_its_decode_node_in_order(bulk: Bulk, sequence: int) -> None:
    bulk.offer(0, 1, 0, 4)
    reason = end_of(bulk.to_sender(credit_frame(sequence, CHUNK_BYTES)))
    assert reason.startswith(ErrorCode.SEQUENCE_ERROR)


def test_the_first_message_opens_and_no_other_does(bulk: Bulk) -> None:
    assert ErrorCode.SEQUENCE_ERROR in end_of(Bulk().to_sender(credit_frame(1, 1)))
    again = FrameReceived(ROUTE, SESSION, 2, BulkOpen(10))
    assert ErrorCode.SEQUENCE_ERROR in end_of(bulk.to_sender(again))


def test_more_credit_than_was_used_ends_the_session(bulk: Bulk) -> None:
    bulk.offer(0, 1, 0, 4)
    assert bulk.to_sender(credit_frame(2, CHUNK_BYTES)) == []
    assert "more credit" in end_of(bulk.to_sender(credit_frame(3, 1)))


STRANGERS = {
    "another session": FrameReceived(ROUTE, "other", 1, BulkOpen(10**6)),
    "no session": FrameReceived(ROUTE, None, 1, BulkOpen(10**6)),
    "another message": FrameReceived(ROUTE, SESSION, 1, Release(0, 1)),
    "no message": BadFrame(ROUTE, SESSION, 1, ErrorCode.BAD_MESSAGE, "noise"),
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_before_the_first_message_is_counted_and_gets_nothing(stranger: Any) -> None:
    bulk = Bulk()
    bulk.offer(0, 1, 0, 4)
    assert bulk.to_sender(stranger) == []
    assert bulk.sender.stale_messages == 1
    bulk.deliver_up()
    assert len(bulk.down) == 1, "the decode node itself is served as ever"


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_on_another_route_changes_nothing(bulk: Bulk, stranger: Any) -> None:
    for route in (b"other", b""):
        assert bulk.to_sender(replace(stranger, route=route)) == []
    own_words = FrameReceived(b"other", SESSION, 2, Credit(1))
    assert bulk.to_sender(own_words) == [], "not even one who knows the session"
    assert bulk.to_sender(RouteLost(b"other")) == []
    assert bulk.sender.stale_messages == 3
    bulk.offer(0, 1, 0, 4)
    assert [frame.route for frame in bulk.down] == [ROUTE]


def test_the_end_of_the_bulk_socket_ends_the_session_on_either_side(bulk: Bulk) -> None:
    assert "gone" in end_of(bulk.to_sender(RouteLost(ROUTE)))
    assert "gone" in end_of(bulk.to_receiver(RouteLost(BULK_ROUTE)))
    noise = BadFrame(ROUTE, None, 0, ErrorCode.BAD_MESSAGE, "noise")
    assert end_of(bulk.to_sender(noise)) == f"{ErrorCode.PROTOCOL_ERROR} on the bulk socket: noise"
    assert end_of(bulk.to_receiver(noise)) == f"{ErrorCode.PROTOCOL_ERROR} on the bulk socket: noise"


def test_pieces_that_leave_are_told_of_now_and_then(bulk: Bulk, layer_pieces: None) -> None:
    bulk.offer(0, 1, 0, 16)
    told = []
    for _ in range(11):
        bulk.now_ms += limits.KV_MOVED_MS // 2
        told.append(bulk.to_sender(PieceLetGo(0, 1)))
    assert [effects == [PiecesMoved(SESSION, 0, 1)] for effects in told] == [False, True] * 5 + [False]
