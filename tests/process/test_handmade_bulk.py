"""What can come over a bulk socket that should not, on both nodes, by hand.

Pieces late, twice, truncated, of a foreign session or of the wrong layer; credit that was never used. Each
has its documented answer, the daemon lives, and the next job is served as ever.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq

from common.clock import now_ms
from common.limits import KV_CREDIT_BYTES
from common.messages import (
    BulkOpen,
    Bye,
    Credit,
    Hello,
    HelloOk,
    KvPiece,
    NodeProfile,
    Ping,
    Pong,
    Prefill,
    PrefillDone,
    Release,
    Role,
)
from tests.process.handmade_sender import HandmadeSender
from tests.process.handmade_stage import Stage, set_up, whole
from tests.process.raw_peer import RawPeer
from tests.process.test_handmade_prefill import check_record, request_of
from tests.process.world import World
from transport.codec import Header, encode

TCP = ("--kv-plane", "tcp")
PINGS = 100


class BulkStage(Stage):
    """With a bulk socket."""

    def wait_usable(self) -> None:
        super().wait_usable()
        self.world.wait(lambda: self.prefill.bulk_heard, "the bulk socket is open")
        assert self.prefill.bulk_heard[0] == BulkOpen(KV_CREDIT_BYTES)

    def check_good_job(self, record_first: bool = False) -> None:
        answer, request = self.ask()
        record = self.prefill.produce(request)
        if record_first:
            self.prefill.send(record)
            self.world.wait(lambda: answer.token_ids, "the first token is out")
        for piece in self.prefill.pieces(request):
            self.prefill.send_piece(piece)
        if not record_first:
            self.prefill.send(record)
        assert self.world.end_of(answer).token_ids == whole(), answer.end
        self.wait_released(request)


@pytest.fixture(scope="module")
def stage(shared_world: World) -> Iterator[BulkStage]:
    with set_up(shared_world, BulkStage, HandmadeSender, *TCP) as stage:
        yield stage


@pytest.mark.parametrize("record_first", [False, True], ids=["chunks first", "record first"])
def test_right_pieces_in_either_order_give_right_tokens_and_all_credit_back(
    stage: BulkStage, record_first: bool
) -> None:
    before = len(stage.prefill.bulk_heard)
    stage.check_good_job(record_first)
    sent = sum(2 * 4 * 16 * (piece.end - piece.start) for piece in _pieces(stage))
    stage.world.wait(
        lambda: sum(credit.byte_count for credit in stage.prefill.bulk_heard[before:]) == sent,
        "every byte of credit comes back",
    )


def _pieces(stage: BulkStage) -> list[KvPiece]:
    return stage.prefill.pieces(stage.prefill.said(Prefill)[-1])


def _twice(prefill: HandmadeSender, pieces: list[KvPiece]) -> None:
    prefill.send_piece(pieces[0])
    prefill.send_piece(pieces[0])


def _one(change: Callable[[KvPiece], Any], **options: Any) -> Callable[[HandmadeSender, list[KvPiece]], None]:
    def send(prefill: HandmadeSender, pieces: list[KvPiece]) -> None:
        parts = prefill.parts(pieces[0])
        prefill.send_piece(change(pieces[0]), parts, **options)

    return send


def _truncated(prefill: HandmadeSender, pieces: list[KvPiece]) -> None:
    parts = prefill.parts(pieces[0])
    prefill.send_piece(pieces[0], [*parts[:-1], parts[-1][:-1]])


def _followed(prefill: HandmadeSender, pieces: list[KvPiece]) -> None:
    """Two more wait behind the piece at which the session ends."""
    prefill.send_piece(pieces[1])
    prefill.send_piece(pieces[0])
    prefill.send_piece(pieces[1])


WRONG = {
    "twice": (_twice, "out of its place"),
    "in another order": (_followed, "out of its place"),
    "of the wrong layer": (_one(lambda piece: replace(piece, layer=1)), "PROTOCOL_ERROR"),
    "of more layers than it has": (_one(lambda piece: replace(piece, layer_count=2**60)), "PROTOCOL_ERROR"),
    "of a foreign session": (_one(lambda piece: piece, session="f" * 16), "PROTOCOL_ERROR"),
    "with a number left out": (_one(lambda piece: piece, sequence=7_000), "SEQUENCE_ERROR"),
    "truncated": (_truncated, "PROTOCOL_ERROR"),
    "no piece at all": (
        lambda prefill, pieces: prefill.send_bulk_frames([b"noise"]),
        "PROTOCOL_ERROR",
    ),
    "another message": (lambda prefill, pieces: prefill.send_piece(Credit(5), []), "PROTOCOL_ERROR"),
    "the end of the socket": (lambda prefill, pieces: prefill.close_bulk(), "socket is gone"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_piece_that_is_not_right_ends_the_session_and_the_decode_node_goes_on(
    stage: BulkStage, name: str
) -> None:
    say, cause = WRONG[name]
    answer, request = stage.ask()
    session = stage.prefill.session
    stage.prefill.produce(request)
    say(stage.prefill, stage.prefill.pieces(request))
    assert cause in stage.wait_farewell(session)
    assert (stage.world.end_of(answer).code, answer.token_ids) == ("PEER_LOST", [])
    stage.check_good_job()


def test_late_pieces_of_a_job_that_was_cancelled_are_fenced_and_the_next_one_is_right(
    stage: BulkStage,
) -> None:
    answer, request = stage.ask()
    session, pieces = stage.prefill.session, stage.prefill.pieces(request)
    record = stage.prefill.produce(request)
    stage.prefill.send_piece(pieces[0])
    stage.prefill.send(record)
    stage.world.wait(lambda: answer.token_ids, "the record is there")
    stage.client.cancel(f"asked{stage.asked_count}")
    assert stage.world.end_of(answer).code == "CANCELLED"
    for piece in pieces[1:]:
        stage.prefill.send_piece(piece)
    stage.check_good_job()
    assert stage.prefill.session == session


def test_a_client_is_answered_at_once_while_pieces_come_as_fast_as_they_can(stage: BulkStage) -> None:
    """What is sent is wanted by nobody; each piece is taken, thrown away and credited."""
    answer, request = stage.ask()
    stage.prefill.send(stage.prefill.produce(request))
    tokens = 8_192
    piece = KvPiece(0, 1, 0, tokens, 0, 4)
    parts = [bytes(16 * tokens)] * 8
    waits_ms: list[int] = []
    sent_bytes, began_ms = 0, now_ms()
    for known in stage.prefill.pieces(request):
        stage.prefill.send_piece(known)
    with RawPeer(stage.decode.endpoint) as peer:
        peer.hello()
        for _ in range(PINGS):
            for _ in range(2):
                stage.prefill.send_piece(piece, parts)
                sent_bytes += sum(map(len, parts))
            asked_ms = now_ms()
            peer.send(Ping())
            peer.receive_until(Pong)
            waits_ms.append(now_ms() - asked_ms)
            stage.prefill.turn()
        peer.send(Bye("done"))
    waits_ms.sort()
    rate = sent_bytes / 2**20 / max(1, now_ms() - began_ms) * 1_000
    assert waits_ms[int(0.99 * PINGS)] < 100, f"{waits_ms[-5:]} ms at {rate:.0f} MiB/s"
    stage.world.end_of(answer)
    stage.check_good_job()


class Taker(RawPeer):
    """A decode node by hand whose KV comes over TCP."""

    def __init__(self, endpoint: str, profile: NodeProfile) -> None:
        super().__init__(endpoint, profile)
        self._bulk = self._context.socket(zmq.DEALER)
        self._bulk.setsockopt(zmq.LINGER, 0)
        self._bulk_sequence = 0

    def __exit__(self, *arguments: object) -> None:
        self._bulk.close()
        super().__exit__(*arguments)

    def send_hello(self, attempt: int = 1) -> None:
        hello = Hello(self.incarnation, attempt, Role.DECODE, self._profile, ("tcp",))
        self.send_frames(*encode(Header(None, 0), hello))

    def open(self) -> HelloOk:
        """A session, and its bulk socket, connected and silent."""
        answer = self.hello()
        assert answer.plane is None
        self._bulk.connect(f"tcp://127.0.0.1:{answer.bulk.port}")
        return answer

    def say(self, message: Any, session: str | None = None, sequence: int | None = None) -> None:
        if sequence is None:
            self._bulk_sequence += 1
            sequence = self._bulk_sequence
        self._bulk.send_multipart(encode(Header(session or self.session, sequence), message))

    def say_noise(self) -> None:
        self._bulk.send_multipart([b"noise"])

    def take(self) -> None:
        """A message of the bulk socket."""
        assert self._bulk.poll(5_000), "no piece"
        self._bulk.recv_multipart()


@pytest.fixture(scope="module")
def source(shared_world: World) -> Iterator[tuple[str, NodeProfile]]:
    daemon = shared_world.prefill("--lease-ms", "20000", *TCP)
    with RawPeer(daemon.endpoint) as peer:
        profile = peer.hello().profile
        peer.send(Bye("enough"))
    yield daemon.endpoint, profile
    shared_world.wait_status(
        daemon, lambda status: status["slots"][0]["state"] == "pool", "the slot is in the pool"
    )
    shared_world.stop(daemon)


def check_served(source: tuple[str, NodeProfile]) -> None:
    """A decode node that does everything right gets its record and its pieces."""
    with Taker(*source) as taker:
        epoch = taker.open().grants[0].last_epoch + 1
        taker.say(BulkOpen(KV_CREDIT_BYTES))
        taker.send(request_of(epoch))
        taker.take()
        taker.take()
        record = taker.receive_until(PrefillDone)
        check_record(record, epoch)
        taker.send(Release(0, epoch))
        taker.send(Bye("done"))


MISUSES: dict[str, tuple[Callable[[Taker], None], str]] = {
    "more credit than was used": (lambda taker: taker.say(Credit(KV_CREDIT_BYTES)), "more credit"),
    "a number left out": (lambda taker: taker.say(Credit(1), sequence=9), "SEQUENCE_ERROR"),
    "opened twice": (lambda taker: taker.say(BulkOpen(1)), "SEQUENCE_ERROR"),
    "noise": (lambda taker: taker.say_noise(), "PROTOCOL_ERROR"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_a_decode_node_must_not_say_over_its_bulk_socket_ends_its_session(
    source: tuple[str, NodeProfile], name: str
) -> None:
    say, cause = MISUSES[name]
    with Taker(*source) as taker:
        taker.open()
        taker.say(BulkOpen(KV_CREDIT_BYTES))
        say(taker)
        say(taker)  # a second one waits behind the one that ends the session
        assert cause in taker.receive_until(Bye).reason
    check_served(source)


def test_strangers_at_the_bulk_port_are_not_heard_and_get_nothing(
    source: tuple[str, NodeProfile],
) -> None:
    with Taker(*source) as taker, Taker(*source) as stranger:
        opened = taker.open()
        stranger._bulk.connect(f"tcp://127.0.0.1:{opened.bulk.port}")
        stranger.say(BulkOpen(KV_CREDIT_BYTES), session="f" * 16)
        stranger.say_noise()
        taker.say(BulkOpen(KV_CREDIT_BYTES))
        epoch = opened.grants[0].last_epoch + 1
        taker.send(request_of(epoch))
        taker.take()
        stranger.say(Credit(5), session=taker.session)  # who has got to know it is still another peer
        taker.take()
        check_record(taker.receive_until(PrefillDone), epoch)
        assert not stranger._bulk.poll(0)
        taker.send(Bye("done"))
    check_served(source)
