"""What ZeroMQ does beyond the links' common promises: closing, threads, reconnects, strangers, sizes."""

import os
import threading
from pathlib import Path

import pytest
import zmq

from common import limits
from common.clock import now_ms
from common.errors import InvariantViolation
from tests.contract.test_link import introduce, received
from tests.contract.wires import ZmqWire, nothing_arrives, raw_connection, silent_listener, wait_until
from transport.link import DealerLink, RouterLink, Sent
from transport.zmq_sockets import new_context

CLOSE_BOUND_MS = 2_000
RECONNECT_WATCH_MS = 300  # three times ZeroMQ's own default interval
REFUSED_WITHIN_MS = 150
OPENED = 300
SETTLED_MS = 100
LARGE_BYTES = 500_000
ON_THE_WAY = 20  # in the kernel and in ZeroMQ's own batches, if messages are so large
ZMTP_GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_closing_with_unsent_messages_to_a_silent_peer_is_quick(kind: str, short_directory: Path) -> None:
    listener, endpoint = silent_listener(kind, short_directory)
    context = new_context()
    link = DealerLink(context, endpoint, b"attempt-1")
    assert all(link.send(link.route, [b"x" * 1_000]) is Sent.YES for _ in range(500))
    started_ms = now_ms()
    link.close()
    context.term()
    assert now_ms() - started_ms < CLOSE_BOUND_MS
    listener.close()


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_closing_a_router_with_unsent_messages_to_a_stuck_peer_is_quick(
    kind: str, short_directory: Path
) -> None:
    wire = ZmqWire(kind, short_directory)
    other = new_context()
    dealer = DealerLink(other, wire.endpoint, b"attempt-1")
    route = introduce(wire, dealer)
    while wire.router.send(route, [b"x" * 10_000]) is Sent.YES:
        continue
    started_ms = now_ms()
    wire.close()
    assert now_ms() - started_ms < CLOSE_BOUND_MS
    dealer.close()
    other.term()


def test_a_link_belongs_to_the_thread_that_made_it(zmq_wire: ZmqWire) -> None:
    dealer = zmq_wire.dealer()
    route = introduce(zmq_wire, dealer)
    caught: list[str] = []

    def trespass() -> None:
        for use in (
            lambda: dealer.send(dealer.route, [b"x"]),
            lambda: dealer.receive(1),
            lambda: zmq_wire.router.send(route, [b"x"]),
            lambda: zmq_wire.router.receive(1),
        ):
            try:
                use()
            except InvariantViolation as error:
                caught.append(str(error))

    thread = threading.Thread(target=trespass)
    thread.start()
    thread.join()
    assert caught == ["a socket was used by a thread that does not own it"] * 4
    assert nothing_arrives(dealer, zmq_wire.router, during_ms=20)


def test_a_dealer_never_reconnects_to_a_restarted_router(zmq_wire: ZmqWire) -> None:
    old = zmq_wire.dealer(b"old")
    introduce(zmq_wire, old)
    zmq_wire.restart_router()
    new = zmq_wire.dealer(b"new")
    route = introduce(zmq_wire, new)
    deadline_ms = now_ms() + RECONNECT_WATCH_MS
    while now_ms() < deadline_ms:
        old.send(b"old", [b"I am back"])
        assert nothing_arrives(zmq_wire.router, old, during_ms=10)
    assert zmq_wire.router.send(route, [b"hello"]) is Sent.YES
    assert received(new, 1) == [(b"new", [b"hello"])]


def test_attempts_at_an_absent_router_do_not_reach_it_when_it_comes(zmq_wire: ZmqWire) -> None:
    # Fifty timed-out attempts must not become fifty messages for the router that comes back.
    zmq_wire.router.close()
    attempts = [zmq_wire.dealer(b"attempt-%d" % number) for number in range(50)]
    for attempt in attempts:
        attempt.send(attempt.route, [b"stale hello"])
    for attempt in attempts[:25]:
        attempt.close()
    # Time for the connections to be refused: until then a dealer would be right to reach a new router.
    assert nothing_arrives(*attempts[25:], during_ms=REFUSED_WITHIN_MS)
    zmq_wire.restart_router()
    assert nothing_arrives(zmq_wire.router, during_ms=RECONNECT_WATCH_MS)
    introduce(zmq_wire, zmq_wire.dealer())


def test_a_message_over_the_limit_costs_its_sender_the_connection_and_nobody_else(zmq_wire: ZmqWire) -> None:
    small, big = zmq_wire.dealer(b"small"), zmq_wire.dealer(b"big")
    small_route, big_route = introduce(zmq_wire, small), introduce(zmq_wire, big)
    assert big.send(b"big", [b"fits", bytes(limits.CONTROL_MESSAGE_BYTES)]) is Sent.YES
    [(_, frames)] = received(zmq_wire.router, 1)
    assert len(frames[1]) == limits.CONTROL_MESSAGE_BYTES
    assert big.send(b"big", [b"too much", bytes(limits.CONTROL_MESSAGE_BYTES + 1)]) is Sent.YES
    wait_until(lambda: zmq_wire.router.send(big_route, [b"x"]) is Sent.GONE)
    assert zmq_wire.router.receive(10) == []
    assert small.send(b"small", [b"still here"]) is Sent.YES
    assert received(zmq_wire.router, 1) == [(small_route, [b"still here"])]


def test_a_node_holds_few_messages_of_a_peer_unread(
    zmq_wire: ZmqWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HIGH_WATER_MARK_MESSAGES", 10)  # of the peer
    dealer = zmq_wire.dealer()
    introduce(zmq_wire, dealer)
    taken = 0
    refused_since_ms = None
    bound = limits.UNREAD_MESSAGES + 10 + ON_THE_WAY
    while taken <= bound and (refused_since_ms is None or now_ms() - refused_since_ms < SETTLED_MS):
        if dealer.send(dealer.route, [bytes(LARGE_BYTES)]) is Sent.YES:
            taken, refused_since_ms = taken + 1, None
        else:
            refused_since_ms = refused_since_ms or now_ms()
    assert limits.UNREAD_MESSAGES <= taken <= bound


def test_a_message_of_too_many_frames_is_cut_short_and_the_next_one_is_whole(zmq_wire: ZmqWire) -> None:
    dealer = zmq_wire.dealer()
    route = introduce(zmq_wire, dealer)
    frames = [b"%d" % number for number in range(5_000)]
    for batch in (frames, frames[:3], frames, frames[:3]):
        assert dealer.send(dealer.route, batch) is Sent.YES
        assert zmq_wire.router.send(route, batch) is Sent.YES
    for link in (zmq_wire.router, dealer):
        counts = [len(arrived) for _, arrived in received(link, 4)]
        # Still more than the codec takes for a message.
        assert 3 < counts[0] <= limits.MESSAGE_FRAMES + 1
        assert counts == [counts[0], 3, counts[0], 3]


def test_a_stranger_cannot_take_over_the_routing_id_of_a_peer(zmq_wire: ZmqWire) -> None:
    owner, thief = (zmq_wire.context.socket(zmq.DEALER) for _ in range(2))
    for plain in (owner, thief):
        plain.setsockopt(zmq.ROUTING_ID, b"decode-node")
        plain.setsockopt(zmq.LINGER, 0)
    try:
        owner.connect(zmq_wire.endpoint)
        owner.send(b"mine")
        assert received(zmq_wire.router, 1) == [(b"decode-node", [b"mine"])]
        thief.connect(zmq_wire.endpoint)
        thief.send(b"also mine")
        assert nothing_arrives(zmq_wire.router, during_ms=100)
        assert zmq_wire.router.send(b"decode-node", [b"for the owner"]) is Sent.YES
        assert owner.poll(2_000)
        assert owner.recv() == b"for the owner"
        assert not thief.poll(50)
    finally:
        owner.close()
        thief.close()


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00" * 4_096,
        b"\xff" * 4_096,
        b"\xff"
        + b"\x00" * 8
        + b"\x7f\x03\x00"
        + b"NULL".ljust(20, b"\0")
        + b"\0" * 32
        + b"\x06"
        + b"\x7f" * 8,
    ],
    ids=["http", "zeros", "ones", "huge frame"],
)
def test_bytes_that_are_not_zeromq_disturb_nobody(zmq_wire: ZmqWire, bytes_sent: bytes) -> None:
    dealer = zmq_wire.dealer()
    route = introduce(zmq_wire, dealer)
    strangers = [raw_connection(zmq_wire.endpoint) for _ in range(5)]
    for stranger in strangers:
        stranger.sendall(bytes_sent)
    assert dealer.send(dealer.route, [b"undisturbed"]) is Sent.YES
    assert received(zmq_wire.router, 1) == [(route, [b"undisturbed"])]
    for stranger in strangers:
        stranger.close()
    assert zmq_wire.router.send(route, [b"and back"]) is Sent.YES
    assert received(dealer, 1) == [(dealer.route, [b"and back"])]


def test_opening_and_closing_dealers_leaks_no_descriptor(zmq_wire: ZmqWire) -> None:
    for _ in range(3):
        dealer = zmq_wire.dealer()
        introduce(zmq_wire, dealer)
        dealer.close()
    before = wait_until(settled)
    for number in range(OPENED):
        dealer = zmq_wire.dealer(b"attempt-%d" % number)
        introduce(zmq_wire, dealer)
        dealer.close()
    wait_until(lambda: descriptors() <= before)


def settled() -> int:
    """How many descriptors are open, once that has stopped changing."""
    count = descriptors()
    threading.Event().wait(0.3)
    return count if descriptors() == count else 0


def test_closing_twice_closes_nothing_else(zmq_wire: ZmqWire) -> None:
    zmq_wire.router.close()
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    zmq_wire.router.close()
    for other in others:
        assert os.read(other, 1) == b""
        os.close(other)


def test_opening_and_closing_routers_leaks_no_descriptor(short_directory: Path) -> None:
    context = new_context()
    endpoint = f"ipc://{short_directory}/s"
    RouterLink(context, endpoint).close()
    before = wait_until(settled)
    for _ in range(50):
        RouterLink(context, endpoint).close()
    wait_until(lambda: descriptors() <= before)
    context.term()
    assert list(short_directory.iterdir()) == []


def test_a_refused_connection_and_a_broken_one_are_known_at_once() -> None:
    context = new_context()
    router = RouterLink(context, "tcp://127.0.0.1:0")
    dealer = DealerLink(context, router.endpoint, b"first")
    assert dealer.send(b"first", [b"hello"]) is Sent.YES
    assert router.socket.poll(CLOSE_BOUND_MS)
    assert dealer.lost() == []

    endpoint = router.endpoint
    router.close()
    assert dealer.sockets[1].poll(CLOSE_BOUND_MS)
    assert dealer.lost() == [b"first"]

    late = DealerLink(context, endpoint, b"second")
    assert late.sockets[1].poll(CLOSE_BOUND_MS)
    assert late.lost() == [b"second"]
    late.close()
    dealer.close()
    context.term()
