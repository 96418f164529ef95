"""Bulk sockets over real TCP: KV arrives as it lay, memory is let go of, and nothing wrong is taken.

The rules behind the sockets are those of `transport.bulk`; here they are played by hand, or for whole
productions by the real objects.
"""

import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from common import limits
from common.errors import ConfigError
from common.kv_layout import KvLayout, chunk_bounds
from common.messages import BulkOpen, Credit, KvPiece
from tests.contract.test_curve_link import Keys
from tests.contract.wires import raw_connection, wait_until
from transport.bulk import (
    BULK_ROUTE,
    BulkReceiver,
    BulkSender,
    ChunkOffered,
    ChunksLanded,
    ChunksLetGo,
    ExpectChunks,
    Land,
    PieceLetGo,
)
from transport.bulk_link import BulkSink, BulkSource
from transport.codec import Header, encode
from transport.key_files import ClientKeys, ServerKeys
from transport.landing import Landing, parts_of
from transport.link import RouterLink
from transport.peers import BadFrame, FrameReceived, RouteLost, SendFrame
from transport.zmq_sockets import new_context

SESSION = "session"
# Runs of a chunk are larger than what ZeroMQ copies anyway, so that they are sent from where they lie.
LAYOUT = KvLayout(3, 2, 600, "uint8", 200)
CHUNK_TOKENS = 64
QUIET_MS = 150


@cache
def slot_memory(salt: int = 0) -> memoryview:
    """A slot in which every byte tells its place."""
    places = np.arange(LAYOUT.slot_bytes, dtype=np.uint64)
    return memoryview(((places * 2_654_435_761 >> 7) + salt).astype(np.uint8).tobytes())


def drain(end: BulkSource | BulkSink) -> list[Any]:
    """What has arrived; fails when nothing does."""
    return wait_until(lambda: list(end.receive()))


class Ends:
    """A source and a sink in contexts of their own, as in two processes."""

    def __init__(self, server_keys: ServerKeys | None = None, client_keys: ClientKeys | None = None) -> None:
        self.contexts = [new_context(), new_context()]
        self.source = BulkSource(self.contexts[0], "127.0.0.1", 0, server_keys)
        self.endpoint = f"tcp://127.0.0.1:{self.source.port}"
        self.sink = BulkSink(self.contexts[1], self.endpoint, LAYOUT, client_keys)
        self.route = b""

    def open(self, credit_bytes: int = limits.KV_CREDIT_BYTES) -> None:
        assert self.sink.send(SendFrame(BULK_ROUTE, SESSION, 1, BulkOpen(credit_bytes)))
        [opened] = drain(self.source)
        assert opened == FrameReceived(opened.route, SESSION, 1, BulkOpen(credit_bytes))
        self.route = opened.route

    def send(self, sequence: int, piece: KvPiece, slot: memoryview) -> list[Any]:
        frame = SendFrame(self.route, SESSION, sequence, piece)
        return self.source.send(frame, parts_of(slot, piece, LAYOUT))

    def send_raw(self, *frames: bytes) -> None:
        self.source.socket.send_multipart([self.route, *frames])

    def close(self) -> None:
        for end in (self.source, self.sink):
            if not end.socket.closed:
                end.close()
        for context in self.contexts:
            context.destroy(linger=0)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def wait_quiet(source: BulkSource) -> list[PieceLetGo]:
    """What is let go of until nothing is read any more."""
    gone: list[Any] = []

    def quiet() -> bool:
        gone.extend(source.flush())
        return source.quiet

    wait_until(quiet)
    return gone


PIECES = [
    KvPiece(0, 1, 0, 64, 0, 3),
    KvPiece(0, 1, 64, 128, 1, 2),
    KvPiece(0, 1, 128, 200, 2, 1),
    KvPiece(0, 1, 17, 18, 1, 1),
    KvPiece(0, 1, 199, 200, 0, 3),
    KvPiece(0, 1, 0, 200, 0, 3),
]


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: f"{piece.start}-{piece.end}-{piece.layer}")
def test_the_bytes_of_a_piece_land_where_they_lay_and_nowhere_else(ends: Ends, piece: KvPiece) -> None:
    slot, landing = slot_memory(), Landing(LAYOUT)
    landing.begin(0, 1)
    ends.open()
    assert ends.send(1, piece, slot) == []

    def landed() -> bool:
        for item in ends.sink.receive():
            assert item == FrameReceived(BULK_ROUTE, SESSION, 1, piece)
            landing.land(piece, ends.sink.parts)
            return True
        return False

    wait_until(landed)
    expected = np.zeros((LAYOUT.layers, 2, LAYOUT.max_tokens, LAYOUT.row_bytes), dtype=np.uint8)
    layers, tokens = slice(piece.layer, piece.layer + piece.layer_count), slice(piece.start, piece.end)
    whole = np.frombuffer(slot, dtype=np.uint8).reshape(expected.shape)
    expected[layers, :, tokens] = whole[layers, :, tokens]
    assert np.array_equal(np.frombuffer(landing.slot(0), dtype=np.uint8).reshape(expected.shape), expected)
    assert wait_quiet(ends.source) == [PieceLetGo(0, 1)]


def test_a_large_piece_is_sent_from_where_it_lies() -> None:
    piece = KvPiece(0, 1, 0, 200, 0, 1)
    slot = bytearray(slot_memory())
    parts = parts_of(memoryview(slot), piece, LAYOUT)
    assert [part.nbytes for part in parts] == [200 * LAYOUT.row_bytes] * 2
    slot[0] ^= 255
    assert parts[0][0] == slot[0]


def test_memory_is_not_let_go_of_while_nobody_takes_it_and_is_when_the_socket_closes(ends: Ends) -> None:
    slot, piece = slot_memory(), KvPiece(4, 2, 0, 200, 0, 3)
    idler = ends.contexts[1].socket(zmq.DEALER)
    idler.setsockopt(zmq.RCVHWM, 1)
    idler.connect(ends.endpoint)
    idler.send_multipart(encode(Header(SESSION, 1), BulkOpen(1)))
    ends.route = drain(ends.source)[0].route
    sent = 0
    # More than the kernel holds for both sides.
    while sent * LAYOUT.slot_bytes < 40 * 2**20:
        sent += 1
        assert ends.send(sent, piece, slot) == []
    gone: list[Any] = []
    pause = threading.Event()
    for _ in range(QUIET_MS // 10):
        gone += ends.source.flush()
        pause.wait(0.01)
    assert not ends.source.quiet
    assert len(gone) < sent
    assert ends.source.deadline_ms(7) == 7 + limits.LET_GO_RETRY_MS
    tracker, _ = ends.source._reading[-1]
    assert len([each for each in tracker.peers if not each.done]) == 2 * piece.layer_count, "of every frame"
    ends.source.close()
    gone += wait_quiet(ends.source)
    assert set(gone) == {PieceLetGo(4, 2)}
    assert len(gone) <= sent
    idler.close(linger=0)


def test_a_whole_production_of_a_hundred_pieces_passes_through_a_credit_of_three(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_bytes = LAYOUT.row_bytes
    monkeypatch.setattr(limits, "KV_PIECE_BYTES", 2 * 6 * row_bytes)
    monkeypatch.setattr(limits, "KV_CREDIT_BYTES", 3 * 2 * 6 * row_bytes)
    slot, landing = slot_memory(9), Landing(LAYOUT)
    sender = BulkSender(SESSION, LAYOUT, 10_000)
    receiver = BulkReceiver(SESSION, LAYOUT, CHUNK_TOKENS)
    landing.begin(2, 5)
    news: list[Any] = []

    def at_source(event: Any) -> None:
        for effect in sender.step(event, 0):
            if isinstance(effect, SendFrame):
                piece = effect.message
                ends.source.send(effect, parts_of(slot, piece, LAYOUT))
            else:
                news.append(effect)

    def at_sink(event: Any) -> None:
        for effect in receiver.step(event, 0):
            match effect:
                case SendFrame():
                    assert ends.sink.send(effect)
                case Land(piece=piece):
                    landing.land(piece, ends.sink.parts)
                case _:
                    news.append(effect)

    def turn() -> bool:
        for item in ends.source.receive():
            at_source(item)
        for item in ends.source.flush():
            at_source(item)
        for item in ends.sink.receive():
            at_sink(item)
        return ChunksLanded(SESSION, 2, 5) in news and ChunksLetGo(SESSION, 2, 5, len(bounds)) in news

    assert ends.sink.send(receiver.open())
    at_sink(ExpectChunks(2, 5, 0, 200))
    bounds = chunk_bounds(0, 200, CHUNK_TOKENS)
    for start, end in bounds:
        at_source(ChunkOffered(SESSION, 2, 5, start, end))
    wait_until(turn)
    wait_until(lambda: turn() and sender.deadline_ms() is None)
    assert receiver._received > 100
    assert bytes(landing.slot(2)) == bytes(slot)


def head(piece: KvPiece, sequence: int = 1) -> list[bytes]:
    return encode(Header(SESSION, sequence), piece)


SMALL = KvPiece(0, 1, 0, 2, 0, 1)
SMALL_PART = bytes(2 * LAYOUT.row_bytes)
WRONG = {
    "a frame too few": [*head(SMALL), SMALL_PART],
    "a frame too many": [*head(SMALL), SMALL_PART, SMALL_PART, SMALL_PART],
    "far too many frames": [*head(SMALL), *[SMALL_PART] * 50],
    "no frame": head(SMALL),
    "a short frame": [*head(SMALL), SMALL_PART, SMALL_PART[:-1]],
    "an empty frame": [*head(SMALL), SMALL_PART, b""],
    "no token": [*head(KvPiece(0, 1, 2, 2, 0, 1)), b"", b""],
    "an end before its start": [*head(KvPiece(0, 1, 3, 1, 0, 1)), SMALL_PART, SMALL_PART],
    "more layers than anything holds": [*head(KvPiece(0, 1, 0, 2, 0, 2**60)), SMALL_PART],
    "noise": [b"noise"],
    "a head that is cut": [head(SMALL)[0], head(SMALL)[1][:-1], head(SMALL)[2], SMALL_PART, SMALL_PART],
}


@pytest.mark.parametrize("frames", WRONG.values(), ids=WRONG)
def test_frames_that_are_not_what_the_piece_says_are_a_bad_frame(ends: Ends, frames: list[bytes]) -> None:
    ends.open()
    ends.send_raw(*frames)
    [bad] = drain(ends.sink)
    assert isinstance(bad, BadFrame)
    ends.send(2, SMALL, slot_memory())
    assert drain(ends.sink) == [FrameReceived(BULK_ROUTE, SESSION, 2, SMALL)], "the next one is read as ever"


def test_a_session_may_end_at_any_message_of_a_batch(ends: Ends) -> None:
    ends.open()
    for sequence in (1, 2, 3):
        ends.send(sequence, SMALL, slot_memory())
        ends.sink.send(SendFrame(BULK_ROUTE, SESSION, 1 + sequence, Credit(1)))

    def stops(end: BulkSource | BulkSink) -> bool:
        for item in end.receive():
            if not end.socket.closed:
                end.close()  # as the node does when a message ends the session
                seen.append(item.message)
        return end.socket.closed

    seen: list[Any] = []
    wait_until(lambda: stops(ends.source))
    wait_until(lambda: stops(ends.sink))
    assert seen == [Credit(1), SMALL]


def test_a_stranger_cannot_fill_the_memory_of_the_source_with_frames(ends: Ends) -> None:
    ends.open()
    stranger = ends.contexts[1].socket(zmq.DEALER)
    stranger.connect(ends.endpoint)
    stranger.send_multipart([b"x"] * 1_000)
    [bad] = drain(ends.source)
    assert isinstance(bad, BadFrame)
    assert bad.route != ends.route
    stranger.close(linger=0)


def test_the_sink_notices_that_its_source_is_gone_after_the_last_piece(ends: Ends) -> None:
    ends.open()
    ends.send(1, SMALL, slot_memory())
    wait_quiet(ends.source)
    ends.source.socket.close(linger=1_000)
    items: list[Any] = []
    wait_until(lambda: items.extend(ends.sink.receive()) or RouteLost(BULK_ROUTE) in items)
    assert items[0] == FrameReceived(BULK_ROUTE, SESSION, 1, SMALL), "what was sent before its end arrives"


def test_a_source_that_was_never_there_is_noticed(ends: Ends) -> None:
    ends.source.close()
    late = BulkSink(ends.contexts[1], ends.endpoint, LAYOUT, None)
    assert RouteLost(BULK_ROUTE) in drain(late)
    late.close()


def test_a_piece_for_a_decode_node_that_is_gone_says_so(ends: Ends) -> None:
    ends.open()
    ends.sink.close()
    frame = SendFrame(ends.route, SESSION, 1, SMALL)
    parts = parts_of(slot_memory(), SMALL, LAYOUT)
    assert wait_until(lambda: RouteLost(ends.route) in ends.source.send(frame, parts))


def test_a_plain_connection_that_sends_noise_is_not_heard(ends: Ends) -> None:
    with raw_connection(ends.endpoint) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        ends.open()
        assert list(ends.source.receive()) == []


def test_ports_begin_where_they_are_told_to_and_the_next_session_takes_the_next() -> None:
    contexts = new_context()
    first = BulkSource(contexts, "127.0.0.1", 0, None)
    second = BulkSource(contexts, "127.0.0.1", first.port, None)
    assert first.port < second.port < first.port + limits.DECODE_SESSIONS
    first.close()
    third = wait_until(lambda: _bound_at(contexts, first.port))
    for source in (second, third):
        source.close()
    contexts.destroy(linger=0)


def _bound_at(context: zmq.Context, port: int) -> BulkSource | None:
    source = BulkSource(context, "127.0.0.1", port, None)
    if source.port == port:
        return source
    source.close()
    return None


def test_no_free_port_says_where_it_looked() -> None:
    context = new_context()
    with pytest.raises(ConfigError, match=r"no port for KV can be bound on 192\.0\.2\.1, from 0 on"):
        BulkSource(context, "192.0.2.1", 0, None)
    context.destroy(linger=0)


@pytest.fixture
def keys(short_directory: Path) -> Keys:
    return Keys(short_directory / "keys")


@pytest.mark.parametrize("client", [None, "mallory", "alice"])
def test_with_keys_only_a_listed_one_gets_through(keys: Keys, client: str | None) -> None:
    ends = Ends(keys.node, None if client is None else keys.of(client))
    gate = RouterLink(ends.contexts[0], "tcp://127.0.0.1:0", keys.node)
    gate.attend()
    try:
        if client == "alice":
            ends.sink.send(SendFrame(BULK_ROUTE, SESSION, 1, BulkOpen(1)))
            [opened] = wait_until(lambda: gate.receive(1) or list(ends.source.receive()))
            ends.route = opened.route
            ends.send(1, SMALL, slot_memory())
            assert drain(ends.sink) == [FrameReceived(BULK_ROUTE, SESSION, 1, SMALL)]
            return
        ends.sink.send(SendFrame(BULK_ROUTE, SESSION, 1, BulkOpen(1)))
        wait_until(lambda: gate.receive(1) or RouteLost(BULK_ROUTE) in list(ends.sink.receive()))
        assert list(ends.source.receive()) == []
    finally:
        gate.close()
        ends.close()
