"""The bytes of a prefix cache: what is read is what was written, or an error."""

import resource
import sys

import numpy as np
import pytest

from common.block_store import BlockCorrupt, BlockStore
from common.digests import bytes_digest
from common.errors import ConfigError, InvariantViolation
from common.kv_layout import KvLayout

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=4, dtype="float32", max_tokens=10)
BLOCK = 4
BLOCK_BYTES = BLOCK * LAYOUT.token_bytes


def slot_of(dtype: str = "f4", seed: int = 0) -> np.ndarray:
    """A full slot of random bytes as an array of that item type."""
    layout = LAYOUT
    row = layout.head_dim * layout.item_bytes
    shape = (layout.layers, 2, layout.max_tokens, layout.kv_heads, row)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f2", "u2", "u1"])
@pytest.mark.parametrize("start", [0, 3, 6])
def test_a_block_cut_from_a_slot_comes_back_bit_by_bit(dtype: str, start: int) -> None:
    store = BlockStore(LAYOUT, BLOCK, 3 * BLOCK_BYTES)
    piece = slot_of(dtype)[:, :, start : start + BLOCK]
    store.write(1, piece)
    assert store.read(1).tobytes() == piece.tobytes()
    assert store.read(1).view(dtype).shape == piece.shape
    assert store.digest(1) == bytes_digest(np.ascontiguousarray(piece))


def test_a_piece_may_be_changed_once_it_was_written() -> None:
    store = BlockStore(LAYOUT, BLOCK, BLOCK_BYTES)
    slot = slot_of()
    expected = slot[:, :, :BLOCK].tobytes()
    store.write(0, slot[:, :, :BLOCK])
    slot[:] = 0
    assert store.read(0).tobytes() == expected


def test_places_do_not_touch_each_other_and_hold_what_was_written_last() -> None:
    store = BlockStore(LAYOUT, BLOCK, 3 * BLOCK_BYTES)
    pieces = [slot_of(seed=seed)[:, :, :BLOCK] for seed in range(4)]
    for place in (2, 0, 1):
        store.write(place, pieces[place])
    store.write(1, pieces[3])
    assert [store.read(place).tobytes() for place in range(3)] == [pieces[it].tobytes() for it in (0, 3, 2)]


@pytest.mark.parametrize("where", [0, 1, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_one_changed_bit_is_found_before_anything_is_read(where: int) -> None:
    store = BlockStore(LAYOUT, BLOCK, 2 * BLOCK_BYTES)
    for place in (0, 1):
        store.write(place, slot_of(seed=place)[:, :, :BLOCK])
    store._memory[1].reshape(-1)[where] ^= 0x10
    with pytest.raises(BlockCorrupt) as caught:
        store.read(1)
    assert caught.value.place == 1
    assert store.read(0).tobytes() == slot_of(seed=0)[:, :, :BLOCK].tobytes()
    store.write(1, slot_of(seed=2)[:, :, :BLOCK])
    assert store.read(1).tobytes() == slot_of(seed=2)[:, :, :BLOCK].tobytes()


def test_what_is_read_cannot_be_written_through() -> None:
    store = BlockStore(LAYOUT, BLOCK, BLOCK_BYTES)
    store.write(0, slot_of()[:, :, :BLOCK])
    with pytest.raises(ValueError, match="read-only"):
        store.read(0)[0] = 0


def test_a_place_that_was_never_written_does_not_read() -> None:
    store = BlockStore(LAYOUT, BLOCK, BLOCK_BYTES)
    with pytest.raises(BlockCorrupt):
        store.read(0)
    with pytest.raises(InvariantViolation):
        store.digest(0)


def test_an_emptied_place_does_not_read_as_what_was_there_before() -> None:
    store = BlockStore(LAYOUT, BLOCK, BLOCK_BYTES)
    store.write(0, np.zeros(store.block_shape, dtype=np.uint8))
    store.read(0)
    store.empty(0)
    with pytest.raises(BlockCorrupt):
        store.read(0)


def test_after_a_write_that_failed_the_place_has_nothing_to_read() -> None:
    store = BlockStore(LAYOUT, BLOCK, BLOCK_BYTES)
    store.write(0, slot_of()[:, :, :BLOCK])
    with pytest.raises(InvariantViolation):
        store.write(0, slot_of()[:, :, : BLOCK - 1])
    with pytest.raises(BlockCorrupt):
        store.read(0)


@pytest.mark.parametrize(
    ("budget_bytes", "places"),
    [(0, 0), (BLOCK_BYTES, 1), (2 * BLOCK_BYTES - 1, 1), (7 * BLOCK_BYTES + 3, 7)],
)
def test_the_memory_is_never_more_than_the_budget(budget_bytes: int, places: int) -> None:
    store = BlockStore(LAYOUT, BLOCK, budget_bytes)
    assert store.places == places
    assert store._memory.nbytes == places * BLOCK_BYTES <= budget_bytes


def test_a_budget_below_one_block_is_refused_with_the_size_of_one() -> None:
    with pytest.raises(ConfigError, match=str(BLOCK_BYTES)):
        BlockStore(LAYOUT, BLOCK, BLOCK_BYTES - 1)


def test_a_budget_beyond_the_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="this host has no"):
        BlockStore(LAYOUT, BLOCK, 2**60)


def test_memory_is_taken_as_it_is_written_and_not_at_the_start() -> None:
    layout = KvLayout(layers=8, kv_heads=4, head_dim=64, dtype="float32", max_tokens=64)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    store = BlockStore(layout, 64, 512 * 2**20)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    assert store.places * store.block_bytes == 512 * 2**20
    assert after - before < 64 * 2**20
