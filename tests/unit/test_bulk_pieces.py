"""How a chunk is cut into pieces, and that these land once and completely, whatever the sizes."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import limits
from common.kv_layout import KvLayout, chunk_bounds
from common.messages import KvPiece
from tests.unit.test_bulk import LAYER_BYTES, LAYOUT, SESSION, Bulk, piece_frame
from transport.bulk import ChunksLanded, ChunksLetGo, ExpectChunks, piece_bytes, pieces_of
from transport.peers import EndSession


def test_a_chunk_that_fits_one_message_is_one_piece() -> None:
    assert list(pieces_of(2, 7, 4, 8, LAYOUT)) == [KvPiece(2, 7, 4, 8, 0, 3)]


def test_a_larger_chunk_is_cut_between_layers_and_a_larger_layer_between_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "KV_PIECE_BYTES", 2 * LAYER_BYTES)
    assert list(pieces_of(0, 1, 0, 4, LAYOUT)) == [KvPiece(0, 1, 0, 4, 0, 2), KvPiece(0, 1, 0, 4, 2, 1)]
    monkeypatch.setattr(limits, "KV_PIECE_BYTES", LAYER_BYTES - 1)
    cut = [KvPiece(0, 1, *tokens, layer, 1) for layer in range(3) for tokens in ((0, 3), (3, 4))]
    assert list(pieces_of(0, 1, 0, 4, LAYOUT)) == cut


def test_a_token_of_a_layer_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KV_PIECE_BYTES", 1)
    pieces = list(pieces_of(0, 1, 4, 6, LAYOUT))
    assert pieces == [KvPiece(0, 1, at, at + 1, layer, 1) for layer in range(3) for at in (4, 5)]


@st.composite
def transfers(draw: st.DrawFn) -> tuple[KvLayout, int, int, int, int, int]:
    """A layout, where a prompt begins and ends, the chunk, and the limits of a piece and of credit."""
    end = draw(st.integers(1, 24))
    layout = KvLayout(
        draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 9)), "float16", end
    )
    start = draw(st.integers(0, end - 1))
    return (
        layout,
        start,
        end,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 700)),
        draw(st.integers(0, 900)),
    )


def carry(transfer: tuple[KvLayout, int, int, int, int, int]) -> Bulk:
    """One production over a bulk socket with these limits."""
    layout, start, end, chunk_tokens, most_bytes, credit_bytes = transfer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "KV_PIECE_BYTES", most_bytes)
        patch.setattr(limits, "KV_CREDIT_BYTES", credit_bytes)
        bulk = Bulk(layout, chunk_tokens)
        bulk.to_receiver(ExpectChunks(3, 5, start, end))
        for bounds in chunk_bounds(start, end, chunk_tokens):
            bulk.offer(3, 5, *bounds)
        bulk.run()
    return bulk


@settings(max_examples=120, deadline=None)
@given(transfers())
def test_whatever_the_layout_and_the_chunks_every_token_of_every_layer_lands_once(transfer: Any) -> None:
    layout, start, end, chunk_tokens, most_bytes, _ = transfer
    bulk = carry(transfer)
    places = Counter(
        (layer, token)
        for piece in bulk.landed
        for layer in range(piece.layer, piece.layer + piece.layer_count)
        for token in range(piece.start, piece.end)
    )
    assert places == Counter((layer, token) for layer in range(layout.layers) for token in range(start, end))
    for piece in bulk.landed:
        assert piece_bytes(piece, layout) <= max(most_bytes, 2 * layout.row_bytes)
    chunks = len(chunk_bounds(start, end, chunk_tokens))
    assert bulk.news.count(ChunksLanded(SESSION, 3, 5)) == 1
    assert [item for item in bulk.news if isinstance(item, ChunksLetGo)][-1].chunks == chunks
    assert not [item for item in bulk.news if isinstance(item, EndSession)]
    assert bulk.sender.deadline_ms() is None, "all credit is back and nothing waits"


@settings(max_examples=60, deadline=None)
@given(transfers(), st.randoms(use_true_random=False))
def test_no_piece_can_be_left_out_repeated_or_swapped(transfer: Any, random: Any) -> None:
    layout, start, end, chunk_tokens, _, _ = transfer
    pieces = carry(transfer).landed
    wrong = list(pieces)
    place = random.randrange(len(pieces))
    match random.choice(["left out", "repeated", "swapped"]):
        case "left out":
            del wrong[place]
        case "repeated":
            wrong.insert(place, wrong[place])
        case "swapped":
            other = random.randrange(len(pieces))
            wrong[place], wrong[other] = wrong[other], wrong[place]
    bulk = Bulk(layout, chunk_tokens)
    bulk.to_receiver(ExpectChunks(3, 5, start, end))
    for sequence, piece in enumerate(wrong, 1):
        bulk.to_receiver(piece_frame(sequence, piece))
        if isinstance(bulk.news[-1] if bulk.news else None, EndSession):
            break
    if wrong == pieces:
        assert bulk.news == [ChunksLanded(SESSION, 3, 5)]
    else:
        # Behind the last piece nothing is wanted; a repeated last one is fenced.
        assert bulk.landed == pieces[: len(bulk.landed)]
        complete = ChunksLanded(SESSION, 3, 5) in bulk.news
        assert complete == (bulk.landed == pieces)
