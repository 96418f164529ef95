"""The control port's outboxes: order kept, bounded, given up, and decoding of what arrives."""

import threading

import pytest

from common import limits
from common.errors import ErrorCode
from common.messages import Bye, Ping, Tokens
from tests.contract.wires import wait_until
from transport.codec import PROTOCOL_TAG, Header, decode, encode
from transport.link import DealerLink, Frames, RouterLink, Sent
from transport.memory_link import MemoryDealer, MemoryRouter
from transport.peers import BadFrame, FrameReceived, RouteLost, SendFrame
from transport.port import ControlPort
from transport.zmq_sockets import new_context

SESSION = "0123456789abcdef"
GIVE_UP_MS = 1_000


class ScriptedLink:
    """Answers each send as told, per route, and keeps what it took."""

    def __init__(self) -> None:
        self.answers: dict[bytes, Sent] = {}
        self.room: dict[bytes, int] = {}
        self.taken: list[tuple[bytes, int]] = []
        self.arrived: list[tuple[bytes, Frames]] = []
        self.gone: list[bytes] = []
        self.closed = False

    def send(self, route: bytes, frames: Frames) -> Sent:
        answer = self.answers.get(route, Sent.YES)
        if answer is Sent.YES and self.room.get(route, 1) == 0:
            answer = Sent.FULL
        if answer is Sent.YES:
            self.room[route] = self.room.get(route, limits.OUTBOX_MESSAGES * 2) - 1
            self.taken.append((route, decode(frames)[0].sequence))
        return answer

    def receive(
        self, limit: int, limit_bytes: int = limits.RECEIVE_BATCH_BYTES
    ) -> list[tuple[bytes, Frames]]:
        batch: list[tuple[bytes, Frames]] = []
        while self.arrived and len(batch) < limit and limit_bytes > 0:
            batch.append(self.arrived.pop(0))
            limit_bytes -= sum(map(len, batch[-1][1]))
        return batch

    def lost(self) -> list[bytes]:
        return self.gone

    def refusal(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def link() -> ScriptedLink:
    return ScriptedLink()


@pytest.fixture
def port(link: ScriptedLink) -> ControlPort:
    return ControlPort(link, GIVE_UP_MS)


def frame(number: int, route: bytes = b"a") -> SendFrame:
    return SendFrame(route, SESSION, number, Tokens("job", (number,), ""))


def test_what_the_link_takes_goes_straight_through(port: ControlPort, link: ScriptedLink) -> None:
    assert [port.send(frame(number), 0) for number in (1, 2, 3)] == [None] * 3
    assert link.taken == [(b"a", 1), (b"a", 2), (b"a", 3)]
    assert port.deadline_ms(50) is None
    assert port.flush(50) == []


def test_what_is_refused_waits_in_order_and_nothing_overtakes_it(
    port: ControlPort, link: ScriptedLink
) -> None:
    link.answers[b"a"] = Sent.FULL
    port.send(frame(1), 0)
    link.answers[b"a"] = Sent.YES
    # There is room again, but message 1 is still waiting.
    for number in (2, 3):
        assert port.send(frame(number), 1) is None
    assert link.taken == []
    assert port.deadline_ms(1) == 1 + limits.OUTBOX_RETRY_MS
    assert port.flush(2) == []
    port.send(frame(4), 3)
    assert [number for _, number in link.taken] == [1, 2, 3, 4]
    assert port.deadline_ms(3) is None


def test_a_flush_stops_at_the_first_refusal_and_goes_on_there(port: ControlPort, link: ScriptedLink) -> None:
    link.answers[b"a"] = Sent.FULL
    for number in range(1, 8):
        port.send(frame(number), 0)
    link.answers[b"a"] = Sent.YES
    for room, expected in ((2, [1, 2]), (0, [1, 2]), (3, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5, 6, 7])):
        link.room[b"a"] = room
        assert port.flush(10) == []
        assert [number for _, number in link.taken] == expected
    assert port.deadline_ms(10) is None


def test_a_stuck_peer_does_not_hold_up_another(port: ControlPort, link: ScriptedLink) -> None:
    link.answers[b"a"] = Sent.FULL
    for number in (1, 2):
        port.send(frame(number, b"a"), 0)
        port.send(frame(number, b"b"), 0)
    assert link.taken == [(b"b", 1), (b"b", 2)]
    assert port.flush(1) == []


def test_a_full_outbox_loses_the_route_once_and_forgets_what_waited(
    port: ControlPort, link: ScriptedLink
) -> None:
    link.answers[b"a"] = Sent.FULL
    outcomes = [port.send(frame(number), 0) for number in range(1, limits.OUTBOX_MESSAGES + 2)]
    assert outcomes == [None] * limits.OUTBOX_MESSAGES + [RouteLost(b"a")]
    assert port.deadline_ms(0) is None
    link.answers[b"a"] = Sent.YES
    assert port.flush(1) == []
    assert link.taken == []


def test_a_peer_that_takes_nothing_is_given_up_in_time_and_once(
    port: ControlPort, link: ScriptedLink
) -> None:
    link.answers[b"a"] = Sent.FULL
    port.send(frame(1), 100)
    port.send(frame(2), 900)
    assert port.flush(100 + GIVE_UP_MS - 1) == []
    assert port.flush(100 + GIVE_UP_MS) == [RouteLost(b"a")]
    assert port.flush(100 + 2 * GIVE_UP_MS) == []
    assert port.deadline_ms(5_000) is None
    assert link.taken == []


def test_a_peer_that_takes_a_little_is_not_given_up(port: ControlPort, link: ScriptedLink) -> None:
    link.answers[b"a"] = Sent.FULL
    for number in range(1, 6):
        port.send(frame(number), 0)
    link.answers[b"a"] = Sent.YES
    for turn in range(1, 5):
        link.room[b"a"] = 1
        assert port.flush(turn * (GIVE_UP_MS - 1)) == []
    link.room[b"a"] = 0
    assert port.flush(4 * (GIVE_UP_MS - 1) + GIVE_UP_MS) == [RouteLost(b"a")]
    assert [number for _, number in link.taken] == [1, 2, 3, 4]


def test_a_route_that_is_gone_is_reported_by_send_and_by_flush(port: ControlPort, link: ScriptedLink) -> None:
    link.answers = {b"a": Sent.GONE, b"b": Sent.FULL, b"c": Sent.FULL}
    assert port.send(frame(1, b"a"), 0) == RouteLost(b"a")
    assert port.send(frame(1, b"b"), 0) is None
    assert port.send(frame(1, b"c"), 0) is None
    link.answers = {b"b": Sent.GONE, b"c": Sent.YES}
    assert port.flush(1) == [RouteLost(b"b")]
    assert link.taken == [(b"c", 1)]
    assert port.deadline_ms(1) is None
    assert port.flush(2) == []


def test_what_arrives_is_decoded_and_what_cannot_be_is_reported_with_its_place(
    port: ControlPort, link: ScriptedLink
) -> None:
    good = encode(Header(SESSION, 5), Bye("done"))
    link.arrived = [
        (b"a", good),
        (b"b", [b"TANDEM/9", b"", b""]),
        (b"c", [*good[:2], b"\xc1"]),
        (b"d", []),
        (b"e", encode(Header(SESSION, 6), Ping())),
    ]
    events = list(port.receive())
    assert events[0] == FrameReceived(b"a", SESSION, 5, Bye("done"))
    assert [(event.route, event.session, event.sequence, event.code) for event in events[1:4]] == [
        (b"b", None, 0, ErrorCode.VERSION_MISMATCH),
        (b"c", SESSION, 5, ErrorCode.BAD_MESSAGE),
        (b"d", None, 0, ErrorCode.VERSION_MISMATCH),
    ]
    assert all(type(event) is BadFrame for event in events[1:4])
    assert events[4] == FrameReceived(b"e", SESSION, 6, Ping())


def test_one_turn_takes_at_most_one_batch(port: ControlPort, link: ScriptedLink) -> None:
    link.arrived = [(b"a", [PROTOCOL_TAG])] * (limits.RECEIVE_BATCH_MESSAGES + 3)
    assert len(list(port.receive())) == limits.RECEIVE_BATCH_MESSAGES
    assert len(list(port.receive())) == 3


def test_large_messages_make_a_batch_smaller(port: ControlPort, link: ScriptedLink) -> None:
    part = bytes(limits.RECEIVE_BATCH_BYTES // 4)
    link.arrived = [(b"a", [part])] * 10
    assert [len(list(port.receive())) for _ in range(4)] == [4, 4, 2, 0]
    link.arrived = [(b"a", [bytes(limits.RECEIVE_BATCH_BYTES + 1)])] * 2
    assert [len(list(port.receive())) for _ in range(3)] == [1, 1, 0]


@pytest.mark.parametrize(
    "message", [[PROTOCOL_TAG], [bytes(limits.RECEIVE_BATCH_BYTES // 4)]], ids=["many", "large"]
)
@pytest.mark.parametrize("more", [0, 1, 3, 9])
def test_a_lost_route_is_named_once_all_batches_of_what_arrived_from_it_are_taken(
    port: ControlPort, link: ScriptedLink, message: Frames, more: int
) -> None:
    whole = limits.RECEIVE_BATCH_MESSAGES if message == [PROTOCOL_TAG] else 4
    link.arrived = [(b"a", message)] * (whole + more)
    link.gone = [b"a"]
    items: list[object] = []
    while RouteLost(b"a") not in items:
        turn = list(port.receive())
        assert turn, "there is something left to be told"
        items += turn
    assert len(items) == whole + more + 1
    assert items[-1] == RouteLost(b"a")


def test_last_words_wait_for_a_peer_that_takes_them_soon(port: ControlPort, link: ScriptedLink) -> None:
    link.room[b"a"] = 1
    for number in (1, 2, 3):
        port.send(frame(number), 0)
    assert link.taken == [(b"a", 1)]
    peer = threading.Timer(0.02, link.room.update, [{b"a": 2}])
    peer.start()
    port.finish()
    peer.join()
    assert link.taken == [(b"a", 1), (b"a", 2), (b"a", 3)]


def test_last_words_that_nobody_takes_are_dropped_in_time(
    port: ControlPort, link: ScriptedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LAST_WORDS_MS", 20)
    link.answers[b"a"] = Sent.FULL
    port.send(frame(1), 0)
    port.finish()
    assert link.taken == []


def test_closing_the_port_closes_the_link(port: ControlPort, link: ScriptedLink) -> None:
    port.close()
    assert link.closed


def test_messages_through_a_pipe_of_one_arrive_complete_and_in_order() -> None:
    router = MemoryRouter(capacity=1)
    dealer = MemoryDealer(router, b"attempt-1")
    sender, receiver = ControlPort(dealer, GIVE_UP_MS), ControlPort(router, GIVE_UP_MS)
    sequences = []
    for number in range(1, 101):
        assert sender.send(frame(number, b"attempt-1"), number) is None
    for turn in range(101, 301):
        assert sender.flush(turn) == []
        sequences += [event.sequence for event in receiver.receive()]
    assert sequences == list(range(1, 101))


def test_a_real_peer_that_stops_reading_costs_its_route_and_no_message_before_that() -> None:
    context = new_context()
    router = RouterLink(context, "tcp://127.0.0.1:0")
    port = ControlPort(router, GIVE_UP_MS)
    reader = DealerLink(context, router.endpoint, b"attempt-1")
    reader.send(b"", [b"hello"])
    [(route, _)] = wait_until(lambda: router.receive(1))
    lost = None
    number = 0
    while lost is None:
        number += 1
        assert number < 50 * limits.OUTBOX_MESSAGES, "the port takes messages without end"
        lost = port.send(SendFrame(route, SESSION, number, Tokens("job", (number,), "x" * 2_000)), 0)
    assert lost == RouteLost(route)
    arrived: list[int] = []

    def all_there() -> bool:
        arrived.extend(decode(frames)[0].sequence for _, frames in reader.receive(1_000))
        return len(arrived) >= number - 1 - limits.OUTBOX_MESSAGES

    wait_until(all_there)
    assert arrived == list(range(1, number - limits.OUTBOX_MESSAGES))
    reader.close()
    port.close()
    context.term()


def test_a_route_that_the_link_knows_to_be_gone_is_named_after_what_arrived_from_it(
    link: ScriptedLink, port: ControlPort
) -> None:
    link.arrived = [(b"a", encode(Header(SESSION, 1), Tokens("job", (1,), "")))]
    link.gone = [b"a"]

    received = list(port.receive())

    assert [type(item) for item in received] == [FrameReceived, RouteLost]
    assert received[-1] == RouteLost(b"a")
