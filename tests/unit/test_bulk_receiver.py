"""The decode node's end of a bulk socket: nothing is landed but the next piece of a wanted production."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from common import limits
from common.errors import ErrorCode
from common.kv_layout import chunk_bounds
from common.messages import Credit, KvPiece
from tests.unit.test_bulk import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    SESSION,
    Bulk,
    end_of,
    messages,
    piece_frame,
)
from transport.bulk import ChunksLanded, ExpectChunks, ForgetChunks, PiecesMoved


@pytest.fixture
def bulk() -> Bulk:
    """Both ends, introduced to each other."""
    made = Bulk()
    made.deliver_up()
    return made


def test_pieces_of_two_slots_may_come_interleaved_and_each_is_complete_by_itself(bulk: Bulk) -> None:
    for slot, epoch in ((0, 1), (1, 9)):
        bulk.to_receiver(ExpectChunks(slot, epoch, 0, 8))
    for start in (0, 4):
        for slot, epoch in ((0, 1), (1, 9)):
            bulk.offer(slot, epoch, start, start + 4)
    bulk.deliver_down()
    bulk.deliver_down()
    bulk.deliver_down()
    assert [item for item in bulk.news if isinstance(item, ChunksLanded)] == [ChunksLanded(SESSION, 0, 1)]
    bulk.deliver_down()
    assert ChunksLanded(SESSION, 1, 9) in bulk.news


def unwanted(bulk: Bulk) -> Iterator[tuple[str, KvPiece]]:
    """Pieces that are fenced, each in a receiver that wants none of it."""
    piece = KvPiece(0, 1, 0, 4, 0, 3)
    yield "nothing is expected", piece
    bulk.to_receiver(ExpectChunks(0, 2, 0, 8))
    yield "an older epoch", piece
    yield "an epoch that never was", replace(piece, epoch=7)
    yield "another slot", replace(piece, slot=1, epoch=2)
    bulk.to_receiver(ForgetChunks(0, 2))
    yield "a production that was let go of", replace(piece, epoch=2)


def test_a_piece_that_is_not_wanted_is_fenced_and_its_credit_goes_back(bulk: Bulk) -> None:
    bulk.up.clear()
    for number, (what, piece) in enumerate(unwanted(bulk), 1):
        bulk.to_receiver(piece_frame(number, piece))
        assert messages([bulk.up.popleft()]) == [Credit(CHUNK_BYTES)], what
        assert bulk.receiver.fenced_pieces == number
    assert (bulk.landed, bulk.news) == ([], [])


def test_forgetting_an_older_epoch_does_not_touch_the_newer_one(bulk: Bulk) -> None:
    bulk.to_receiver(ExpectChunks(0, 2, 0, 4))
    bulk.to_receiver(ForgetChunks(0, 1))
    bulk.to_receiver(ForgetChunks(1, 2))
    bulk.to_receiver(piece_frame(1, KvPiece(0, 2, 0, 4, 0, 3)))
    assert bulk.news == [ChunksLanded(SESSION, 0, 2)]


def test_what_comes_behind_the_last_piece_is_fenced(bulk: Bulk) -> None:
    bulk.to_receiver(ExpectChunks(0, 1, 0, 4))
    for sequence in (1, 2):
        bulk.to_receiver(piece_frame(sequence, KvPiece(0, 1, 0, 4, 0, 3)))
    assert len(bulk.landed) == bulk.receiver.fenced_pieces == 1
    assert bulk.news == [ChunksLanded(SESSION, 0, 1)]


GOOD = KvPiece(0, 1, 0, 4, 0, 1)
OUT_OF_PLACE = {
    "another layer": replace(GOOD, layer=1),
    "no layer": replace(GOOD, layer_count=0),
    "more layers than there are": replace(GOOD, layer_count=4),
    "far more layers": replace(GOOD, layer_count=2**40),
    "the next chunk": replace(GOOD, start=4, end=8),
    "two chunks": replace(GOOD, end=8),
    "beyond the prompt": replace(GOOD, end=64),
    "no token": replace(GOOD, end=0),
    "a hole": replace(GOOD, start=1),
    "a part of a chunk in two layers": replace(GOOD, end=2, layer_count=2),
}


@pytest.mark.parametrize("piece", OUT_OF_PLACE.values(), ids=OUT_OF_PLACE)
def test_a_piece_out_of_its_place_ends_the_session_and_lands_nowhere(bulk: Bulk, piece: KvPiece) -> None:
    bulk.to_receiver(ExpectChunks(0, 1, 0, 8))
    assert "out of its place" in end_of(bulk.to_receiver(piece_frame(1, piece)))
    assert bulk.landed == []


@pytest.mark.parametrize("sequence", [0, 2])
def test_a_receiver_wants_every_piece_in_order(bulk: Bulk, sequence: int) -> None:
    bulk.to_receiver(ExpectChunks(0, 1, 0, 4))
    assert ErrorCode.SEQUENCE_ERROR in end_of(bulk.to_receiver(piece_frame(sequence, GOOD)))


@pytest.mark.parametrize("frame", [piece_frame(1, Credit(4)), piece_frame(1, GOOD, session="other")])
def test_nothing_but_pieces_of_its_session_comes_over_a_bulk_socket(bulk: Bulk, frame: Any) -> None:
    assert ErrorCode.PROTOCOL_ERROR in end_of(bulk.to_receiver(frame))


def test_a_production_may_begin_behind_a_prefix_in_the_middle_of_a_chunk(bulk: Bulk) -> None:
    bulk.to_receiver(ExpectChunks(0, 1, 6, 9))
    for bounds in chunk_bounds(6, 9, CHUNK_TOKENS):
        bulk.offer(0, 1, *bounds)
    bulk.run()
    assert [(piece.start, piece.end) for piece in bulk.landed] == [(6, 8), (8, 9)]
    assert ChunksLanded(SESSION, 0, 1) in bulk.news


def test_pieces_that_land_are_told_of_now_and_then(bulk: Bulk) -> None:
    bulk.to_receiver(ExpectChunks(0, 1, 0, 40))
    for number, start in enumerate(range(0, 40, CHUNK_TOKENS), 1):
        bulk.now_ms += limits.KV_MOVED_MS // 2
        bulk.to_receiver(piece_frame(number, KvPiece(0, 1, start, start + CHUNK_TOKENS, 0, 3)))
    assert bulk.news.count(PiecesMoved(SESSION, 0, 1)) == 5
    assert bulk.news.count(ChunksLanded(SESSION, 0, 1)) == 1
