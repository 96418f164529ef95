"""What every link promises, with and without sockets."""

from common.clock import now_ms
from tests.contract.wires import Wire, nothing_arrives, send_all, wait_until
from transport.link import Frames, Link, Sent

BURST = 10_000
FILL_BYTES = 10_000
FILL_MESSAGES_MAX = 20_000
NOT_BLOCKED_MS = 5_000


def introduce(wire: Wire, dealer: Link, name: bytes = b"hello") -> bytes:
    """Let a dealer speak; the route under which the router knows it."""
    assert dealer.send(dealer.route, [name]) is Sent.YES
    [(route, frames)] = wait_until(lambda: wire.router.receive(1))
    assert frames == [name]
    return route


def received(link: Link, count: int) -> list[tuple[bytes, Frames]]:
    """Exactly `count` messages; more of them are noticed too."""
    arrived: list[tuple[bytes, Frames]] = []

    def enough() -> bool:
        arrived.extend(link.receive(1_000))
        return len(arrived) >= count

    wait_until(enough)
    assert nothing_arrives(link, during_ms=20)
    assert len(arrived) == count
    return arrived


def assorted(count: int) -> list[Frames]:
    """Messages that differ in number and size of frames; every eleventh holds an empty frame."""
    return [
        [b"%d" % number, *[bytes([part]) * (number * 7 % 300) for part in range(number % 4)], b""]
        if number % 11 == 0
        else [b"%d" % number, b"x" * (number % 5), *[b"y"] * (number % 3)]
        for number in range(count)
    ]


def test_messages_arrive_whole_in_order_and_once_in_both_directions(wire: Wire) -> None:
    dealer = wire.dealer()
    route = introduce(wire, dealer)
    batches = assorted(900)
    for frames in batches:
        assert dealer.send(dealer.route, frames) is Sent.YES
        assert wire.router.send(route, frames) is Sent.YES
    assert received(wire.router, 900) == [(route, frames) for frames in batches]
    assert received(dealer, 900) == [(dealer.route, frames) for frames in batches]


def test_a_burst_loses_nothing_while_the_reader_keeps_up(wire: Wire) -> None:
    dealer = wire.dealer()
    route = introduce(wire, dealer)
    assert_burst_arrives(dealer, dealer.route, wire.router)
    assert_burst_arrives(wire.router, route, dealer)


def assert_burst_arrives(sender: Link, route: bytes, receiver: Link) -> None:
    batches = [[b"%d" % number] for number in range(BURST)]
    arrived: list[Frames] = []

    def read() -> None:
        arrived.extend(frames for _, frames in receiver.receive(256))

    send_all(sender, route, batches, read)
    arrived += [frames for _, frames in received(receiver, BURST - len(arrived))]
    assert arrived == batches


def test_bursts_of_several_peers_are_each_whole_and_in_order(wire: Wire) -> None:
    dealers = [wire.dealer(b"peer-%d" % number) for number in range(4)]
    routes = [introduce(wire, dealer) for dealer in dealers]
    assert len(set(routes)) == 4
    arrived: list[tuple[bytes, Frames]] = []
    for number in range(0, 1_000, 100):
        for dealer in dealers:
            batches = [[dealer.route, b"%d" % part] for part in range(number, number + 100)]
            send_all(dealer, dealer.route, batches, lambda: arrived.extend(wire.router.receive(256)))
    arrived += received(wire.router, 4_000 - len(arrived))
    for dealer, route in zip(dealers, routes, strict=True):
        own = [frames for source, frames in arrived if source == route]
        assert own == [[dealer.route, b"%d" % part] for part in range(1_000)]


def test_an_answer_reaches_the_peer_it_is_for_and_no_other(wire: Wire) -> None:
    dealers = [wire.dealer(b"peer-%d" % number) for number in range(3)]
    routes = [introduce(wire, dealer) for dealer in dealers]
    assert wire.router.send(routes[1], [b"for you"]) is Sent.YES
    assert received(dealers[1], 1) == [(b"peer-1", [b"for you"])]
    assert nothing_arrives(dealers[0], dealers[2], during_ms=30)


def test_receiving_never_waits_and_takes_at_most_what_was_asked_for(wire: Wire) -> None:
    dealer = wire.dealer()
    assert dealer.receive(10) == []
    assert wire.router.receive(10) == []
    route = introduce(wire, dealer)
    for number in range(25):
        dealer.send(dealer.route, [b"%d" % number])
    batches: list[list[tuple[bytes, Frames]]] = []

    def all_there() -> bool:
        batches.append(wire.router.receive(10))
        return sum(map(len, batches)) == 25

    wait_until(all_there)
    assert max(map(len, batches)) <= 10
    arrived = [item for batch in batches for item in batch]
    assert arrived == [(route, [b"%d" % number]) for number in range(25)]


def test_a_batch_ends_with_the_message_that_reaches_its_bytes(wire: Wire) -> None:
    dealer = wire.dealer()
    route = introduce(wire, dealer)
    for link, sender, target in ((wire.router, dealer, dealer.route), (dealer, wire.router, route)):
        for number in range(8):
            assert sender.send(target, [b"%d" % number, bytes(1_000)]) is Sent.YES
        numbers: list[int] = []
        for bound_bytes, most in ((1, 1), (2_500, 3), (10**6, 8)):
            batch = wait_until(lambda link=link, bound=bound_bytes: link.receive(100, bound))
            assert len(batch) <= most
            numbers += [int(frames[0]) for _, frames in batch]
        while len(numbers) < 8:
            batch = wait_until(lambda link=link: link.receive(100))
            numbers += [int(frames[0]) for _, frames in batch]
        assert numbers == list(range(8))


def test_a_peer_that_does_not_read_fills_up_without_blocking_the_sender(wire: Wire) -> None:
    idle, busy = wire.dealer(b"idle"), wire.dealer(b"busy")
    idle_route, busy_route = introduce(wire, idle), introduce(wire, busy)
    started_ms = now_ms()
    taken = fill(wire.router, idle_route)
    assert now_ms() - started_ms < NOT_BLOCKED_MS
    assert wire.router.send(busy_route, [b"still served"]) is Sent.YES
    assert received(busy, 1) == [(b"busy", [b"still served"])]
    # What was taken arrives, what was refused does not, and then there is room again.
    arrived = received(idle, taken)
    assert [int(frames[0]) for _, frames in arrived] == list(range(taken))
    wait_until(lambda: wire.router.send(idle_route, [b"room"]) is Sent.YES)
    assert received(idle, 1) == [(b"idle", [b"room"])]


def test_a_router_that_does_not_read_fills_up_without_blocking_the_peer(wire: Wire) -> None:
    dealer = wire.dealer()
    route = introduce(wire, dealer)
    started_ms = now_ms()
    taken = fill(dealer, dealer.route)
    assert now_ms() - started_ms < NOT_BLOCKED_MS
    arrived = received(wire.router, taken)
    assert [(source, int(frames[0])) for source, frames in arrived] == [
        (route, number) for number in range(taken)
    ]


def fill(sender: Link, route: bytes) -> int:
    """Send until nothing more is taken for a while; how many were."""
    taken = 0
    refused_since_ms = None
    while refused_since_ms is None or now_ms() - refused_since_ms < 50:
        sent = sender.send(route, [b"%d" % taken, b"x" * FILL_BYTES])
        if sent is Sent.YES:
            taken += 1
            refused_since_ms = None
            assert taken < FILL_MESSAGES_MAX, "the link takes messages without end"
        else:
            assert sent is Sent.FULL
            refused_since_ms = refused_since_ms or now_ms()
    return taken


def test_a_vanished_peer_is_gone_for_good_and_the_others_are_not(wire: Wire) -> None:
    leaving, staying = wire.dealer(b"leaving"), wire.dealer(b"staying")
    gone, there = introduce(wire, leaving), introduce(wire, staying)
    leaving.close()
    wait_until(lambda: wire.router.send(gone, [b"anybody?"]) is Sent.GONE)
    assert [wire.router.send(gone, [b"anybody?"]) for _ in range(3)] == [Sent.GONE] * 3
    assert wire.router.send(there, [b"hello"]) is Sent.YES
    assert received(staying, 1) == [(b"staying", [b"hello"])]
    returning = wire.dealer(b"leaving")
    assert introduce(wire, returning) != gone
    assert wire.router.send(gone, [b"anybody?"]) is Sent.GONE


def test_a_route_that_never_was_is_gone(wire: Wire) -> None:
    assert wire.router.send(b"nobody", [b"x"]) is Sent.GONE


def test_what_a_peer_sent_last_arrives_although_it_closed_at_once(wire: Wire) -> None:
    dealer = wire.dealer()
    route = introduce(wire, dealer)
    for number in range(20):
        assert dealer.send(dealer.route, [b"%d" % number]) is Sent.YES
    dealer.close()
    assert received(wire.router, 20) == [(route, [b"%d" % number]) for number in range(20)]


def test_a_message_sent_before_the_connection_stands_survives_the_close(wire: Wire) -> None:
    for number in range(20):
        dealer = wire.dealer()
        assert dealer.send(dealer.route, [b"bye %d" % number]) is Sent.YES
        dealer.close()
        [(_, frames)] = wait_until(lambda: wire.router.receive(10))
        assert frames == [b"bye %d" % number]


def test_without_a_router_the_peer_is_refused_and_not_blocked(wire: Wire) -> None:
    dealer = wire.dealer()
    introduce(wire, dealer)
    wire.router.close()
    wait_until(lambda: dealer.send(dealer.route, [b"x"]) is Sent.FULL)
    assert dealer.receive(10) == []
