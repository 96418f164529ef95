"""Where the bytes of a token lie, held against numpy's own arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv_layout import ITEM_BYTES, KvLayout, chunk_bounds

LAYOUT = KvLayout(layers=5, kv_heads=3, head_dim=8, dtype="float32", max_tokens=11)


@pytest.mark.parametrize(("name", "item"), [("float32", "f4"), ("float16", "f2"), ("uint8", "u1")])
def test_sizes_equal_those_of_an_array_of_that_shape(name: str, item: str) -> None:
    layout = KvLayout(5, 3, 8, name, 11)
    array = np.zeros(layout.shape, dtype=item)
    assert array.nbytes == layout.slot_bytes
    assert array.strides[2] == layout.row_bytes
    assert array[:, :, 0].nbytes == layout.token_bytes
    assert array.itemsize == layout.item_bytes


def test_bfloat16_has_two_bytes_and_an_unknown_dtype_has_no_size() -> None:
    assert KvLayout(1, 1, 1, "bfloat16", 1).slot_bytes == 4
    with pytest.raises(KeyError):
        _ = KvLayout(1, 1, 1, "float8", 1).slot_bytes
    assert set(ITEM_BYTES) == {"float32", "float16", "bfloat16", "uint8"}


def test_a_chunk_of_one_layer_is_one_contiguous_run() -> None:
    slot = np.arange(LAYOUT.slot_bytes // LAYOUT.item_bytes, dtype="<f4").reshape(LAYOUT.shape)
    whole = slot.tobytes()
    for layer in range(LAYOUT.layers):
        for part in (0, 1):
            start = ((layer * 2 + part) * LAYOUT.max_tokens + 4) * LAYOUT.row_bytes
            run = whole[start : start + 3 * LAYOUT.row_bytes]
            assert run == np.ascontiguousarray(slot[layer, part, 4:7]).tobytes()


@pytest.mark.parametrize(
    ("start", "end", "chunk_tokens", "expected"),
    [
        (0, 0, 4, []),
        (5, 5, 4, []),
        (6, 5, 4, []),
        (0, 1, 4, [(0, 1)]),
        (0, 4, 4, [(0, 4)]),
        (0, 9, 4, [(0, 4), (4, 8), (8, 9)]),
        (3, 9, 4, [(3, 4), (4, 8), (8, 9)]),
        (4, 8, 4, [(4, 8)]),
        (7, 8, 1, [(7, 8)]),
        (2, 5, 100, [(2, 5)]),
    ],
)
def test_chunks_are_cut_at_multiples_counted_from_zero(
    start: int, end: int, chunk_tokens: int, expected: list[tuple[int, int]]
) -> None:
    assert chunk_bounds(start, end, chunk_tokens) == expected


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, 300), length=st.integers(1, 300), chunk_tokens=st.integers(1, 80))
def test_chunks_cover_everything_once_whatever_prefix_was_there(
    start: int, length: int, chunk_tokens: int
) -> None:
    end = start + length
    bounds = chunk_bounds(start, end, chunk_tokens)
    assert [position for low, high in bounds for position in range(low, high)] == list(range(start, end))
    assert all(high % chunk_tokens == 0 for _, high in bounds[:-1])
    assert max(high - low for low, high in bounds) <= chunk_tokens
    # The same boundaries as without the prefix, so the same arithmetic in a real engine.
    whole = chunk_bounds(0, end, chunk_tokens)
    assert bounds[1:] == whole[len(whole) - len(bounds) + 1 :]
