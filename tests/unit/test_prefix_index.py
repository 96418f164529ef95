"""The index of a prefix cache: what matches, what is kept, what makes room."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest

from common.digests import PrefixIdentity, block_keys, prefix_root
from common.errors import InvariantViolation
from common.prefix_commands import Store
from common.prefix_index import PrefixIndex

ROOT = prefix_root("model")
BLOCK = 2
IDENTITY = PrefixIdentity("model", "weights", "float32", "half", 2, 1, 8, BLOCK)


def ids(*token_ids: int) -> bytes:
    return np.array(token_ids, dtype="<i4").tobytes()


def constant_keys(before: bytes, tokens: bytes, block_tokens: int) -> tuple[str, ...]:
    return block_keys(before, tokens, block_tokens, lambda data: b"\0" * 16)


def two_bit_keys(before: bytes, tokens: bytes, block_tokens: int) -> tuple[str, ...]:
    return block_keys(before, tokens, block_tokens, lambda data: bytes([sum(data) % 4]))


def keys_without_past(before: bytes, tokens: bytes, block_tokens: int) -> tuple[str, ...]:
    return block_keys(before, tokens, block_tokens, lambda data: data[-4 * block_tokens :])


def keys_of_depth(before: bytes, tokens: bytes, block_tokens: int) -> tuple[str, ...]:
    return block_keys(before, tokens, block_tokens, lambda data: bytes([(data[0] + 1) % 256]))


KEYS = {
    "real": block_keys,
    "constant": constant_keys,
    "two_bits": two_bit_keys,
    "without_past": keys_without_past,
    "depth": keys_of_depth,
}


def index_of(places: int, keys: str = "real") -> PrefixIndex:
    return PrefixIndex(places, BLOCK, KEYS[keys])


def put(index: PrefixIndex, *token_ids: int, root: bytes = ROOT) -> list[Store]:
    """Insert a chain and confirm it."""
    stores = index.plan_insert(root, ids(*token_ids), len(token_ids))
    for store in stores:
        index.stored(store.entry_id)
    index.check()
    return stores


def found(index: PrefixIndex, *token_ids: int, root: bytes = ROOT) -> int:
    index.check()
    return index.match(root, ids(*token_ids)).tokens


def test_a_prompt_finds_the_whole_blocks_that_it_shares_from_its_beginning() -> None:
    index = index_of(8)
    stores = put(index, 1, 2, 3, 4, 5)
    assert [store.start_tokens for store in stores] == [0, 2]
    match = index.match(ROOT, ids(1, 2, 3, 4, 5))
    assert match.places == tuple(store.place for store in stores)
    assert match.entries == tuple(store.entry_id for store in stores)
    assert found(index, 1, 2, 3, 9) == 2
    assert found(index, 1, 2, 3) == 2
    assert found(index, 1) == 0
    assert found(index, 3, 4) == 0
    assert found(index) == 0


@pytest.mark.parametrize(
    ("prompt_tokens", "usable"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 4), (9, 4)]
)
def test_the_last_token_of_a_prompt_is_never_usable(prompt_tokens: int, usable: int) -> None:
    index = index_of(8)
    put(index, 1, 2, 3, 4)
    match = index.match(ROOT, ids(*range(1, prompt_tokens + 1)))
    assert match.usable_tokens == usable
    assert match.prompt_tokens == prompt_tokens


@pytest.mark.parametrize("keys", KEYS)
def test_a_block_is_not_found_behind_another_past(keys: str) -> None:
    index = index_of(8, keys)
    put(index, 1, 1, 2, 2)
    put(index, 3, 3)
    assert found(index, 3, 3, 2, 2) <= 2
    assert found(index, 2, 2) == 0
    put(index, 3, 3, 2, 2)
    ours, theirs = (set(index.match(ROOT, ids(first, first, 2, 2)).places) for first in (1, 3))
    assert not ours & theirs


def test_the_same_keys_for_everything_cost_hits_and_nothing_else() -> None:
    index = index_of(8, "constant")
    put(index, 1, 1, 2, 2)
    assert found(index, 1, 1, 2, 2) == 2
    assert put(index, 3, 3) == []
    assert found(index, 3, 3) == 0
    assert found(index, 1, 1, root=prefix_root("another model")) == 0
    index.forget(index.match(ROOT, ids(1, 1)).entries[0])
    put(index, 3, 3)
    assert found(index, 3, 3) == 2


def test_a_salt_shares_with_itself_and_with_nobody_else() -> None:
    index = index_of(8)
    put(index, 1, 2, root=IDENTITY.root("one client"))
    assert found(index, 1, 2, root=IDENTITY.root("one client")) == 2
    assert found(index, 1, 2, root=IDENTITY.root("another client")) == 0
    assert found(index, 1, 2, root=IDENTITY.root()) == 0


@pytest.mark.parametrize("name", IDENTITY.__dataclass_fields__)
def test_each_part_of_the_identity_changes_the_root(name: str) -> None:
    value = getattr(IDENTITY, name)
    other = replace(IDENTITY, **{name: value + 1 if isinstance(value, int) else value + "'"})
    assert other.root() != IDENTITY.root()
    assert len(IDENTITY.root()) == 16


def test_parts_of_an_identity_do_not_run_into_each_other() -> None:
    roots = {prefix_root("ab", "c"), prefix_root("a", "bc"), prefix_root("a", salt="bc"), prefix_root("abc")}
    assert len(roots) == 4


def test_nothing_matches_before_its_kv_is_confirmed_nor_behind_what_is_not() -> None:
    index = index_of(8)
    first, second = index.plan_insert(ROOT, ids(1, 2, 3, 4), 4)
    assert found(index, 1, 2, 3, 4) == 0
    index.stored(second.entry_id)
    assert found(index, 1, 2, 3, 4) == 0
    index.stored(first.entry_id)
    assert found(index, 1, 2, 3, 4) == 4


def test_only_tokens_with_valid_kv_are_inserted() -> None:
    index = index_of(8)
    assert [store.start_tokens for store in index.plan_insert(ROOT, ids(1, 2, 3, 4), 3)] == [0]
    assert index.plan_insert(ROOT, ids(1, 2, 3, 4), 1) == []
    with pytest.raises(InvariantViolation):
        index.plan_insert(ROOT, ids(1, 2), 3)


def test_what_is_known_or_being_written_is_not_planned_again() -> None:
    index = index_of(8)
    put(index, 1, 2)
    (writing,) = index.plan_insert(ROOT, ids(1, 2, 3, 4), 4)
    assert [store.start_tokens for store in index.plan_insert(ROOT, ids(1, 2, 3, 4, 5, 6), 6)] == [4]
    assert index.plan_insert(ROOT, ids(1, 2, 3, 4), 4) == []
    assert writing.start_tokens == 2


def test_an_abandoned_block_never_matches_and_neither_does_what_follows_it() -> None:
    index = index_of(3)
    first, second, third = index.plan_insert(ROOT, ids(1, 2, 3, 4, 5, 6), 6)
    index.stored(first.entry_id)
    index.stored(third.entry_id)
    index.abandon(second.entry_id)
    assert found(index, 1, 2, 3, 4, 5, 6) == 2
    assert index.status()["blocks"] == 1
    again = index.plan_insert(ROOT, ids(1, 2, 3, 4, 5, 6), 6)
    assert {store.place for store in again} == {second.place, third.place}
    assert not {store.entry_id for store in again} & {second.entry_id, third.entry_id}


def test_a_place_whose_copy_still_runs_is_not_given_away_when_its_chain_is_lost() -> None:
    index = index_of(2)
    first, second = index.plan_insert(ROOT, ids(1, 2, 3, 4), 4)
    index.abandon(first.entry_id)
    assert index.plan_insert(ROOT, ids(5, 6, 7, 8), 4) == [], "the lost parent's place waits for its child"
    index.stored(second.entry_id)
    assert found(index, 1, 2, 3, 4) == 0
    assert len(index.plan_insert(ROOT, ids(5, 6, 7, 8), 4)) == 2


def test_a_place_that_came_back_is_used_before_memory_that_was_never_touched() -> None:
    index = index_of(9)
    (store,) = index.plan_insert(ROOT, ids(1, 2), 2)
    index.abandon(store.entry_id)
    assert [again.place for again in index.plan_insert(ROOT, ids(3, 4), 2)] == [store.place]


@pytest.mark.parametrize("end", ["stored", "abandon"])
def test_a_copy_ends_once(end: str) -> None:
    index = index_of(2)
    (store,) = index.plan_insert(ROOT, ids(1, 2), 2)
    getattr(index, end)(store.entry_id)
    for again in (index.stored, index.abandon):
        with pytest.raises(InvariantViolation):
            again(store.entry_id)


def test_the_least_recently_used_leaf_goes_first_and_a_parent_after_its_children() -> None:
    index = index_of(4)
    put(index, 1, 1, 2, 2)
    put(index, 1, 1, 3, 3)
    put(index, 4, 4)
    index.unlock(index.lock(index.match(ROOT, ids(1, 1, 2, 2))))
    put(index, 5, 5)
    assert found(index, 1, 1, 3, 3) == 2, "used longest ago"
    put(index, 6, 6)
    assert found(index, 4, 4) == 0
    put(index, 7, 7)
    assert [found(index, 1, 1, 2, 2), found(index, 5, 5)] == [2, 2]
    assert index.status()["evictions"] == 3


def test_a_beginning_that_was_used_alone_outlives_its_stale_continuation_and_others() -> None:
    index = index_of(3)
    put(index, 1, 1, 2, 2)
    put(index, 3, 3)
    index.unlock(index.lock(index.match(ROOT, ids(1, 1))))
    put(index, 4, 4)
    put(index, 5, 5)
    assert [found(index, 1, 1, 2, 2), found(index, 3, 3), found(index, 4, 4)] == [2, 0, 2]


def test_to_insert_a_known_chain_again_is_a_use_of_it() -> None:
    index = index_of(2)
    put(index, 1, 1)
    put(index, 2, 2)
    put(index, 1, 1)
    put(index, 3, 3)
    assert [found(index, 1, 1), found(index, 2, 2), found(index, 3, 3)] == [2, 0, 2]


def test_a_chain_is_not_evicted_to_make_room_for_its_own_continuation() -> None:
    index = index_of(2)
    put(index, 1, 1, 2, 2)
    assert index.plan_insert(ROOT, ids(1, 1, 2, 2, 3, 3), 6) == []
    assert found(index, 1, 1, 2, 2, 3, 3) == 4


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    index = index_of(3)
    put(index, 9, 9)
    assert [store.start_tokens for store in put(index, *range(10))] == [0, 2, 4]
    assert found(index, *range(10)) == 6


def test_locked_blocks_stay_under_pressure_and_inserts_store_less() -> None:
    index = index_of(3)
    kept = put(index, 1, 1, 2, 2)
    lock = index.lock(index.match(ROOT, ids(1, 1, 2, 2)))
    for first in range(10, 20):
        stores = put(index, first, first, 3, 3)
        assert [store.start_tokens for store in stores] == [0]
        assert not {store.place for store in stores} & {store.place for store in kept}
    assert found(index, 1, 1, 2, 2) == 4
    index.unlock(lock)
    assert len(put(index, 5, 5, 6, 6, 7, 7)) == 3


def test_nothing_is_stored_while_everything_is_locked_and_no_error_comes_of_it() -> None:
    index = index_of(1)
    put(index, 1, 1)
    lock = index.lock(index.match(ROOT, ids(1, 1)))
    assert index.plan_insert(ROOT, ids(2, 2), 2) == []
    index.unlock(lock)
    assert len(index.plan_insert(ROOT, ids(2, 2), 2)) == 1


def test_locks_count_and_each_ends_once() -> None:
    index = index_of(1)
    put(index, 1, 1)
    match = index.match(ROOT, ids(1, 1, 7))
    first, second = index.lock(match), index.lock(match)
    index.unlock(first)
    assert index.plan_insert(ROOT, ids(2, 2), 2) == []
    with pytest.raises(InvariantViolation):
        index.unlock(first)
    index.unlock(second)
    assert index.status()["locks"] == 0
    assert len(index.plan_insert(ROOT, ids(2, 2), 2)) == 1


def test_an_empty_match_is_locked_like_any_other() -> None:
    index = index_of(1)
    lock = index.lock(index.match(ROOT, ids(1, 1)))
    index.check()
    index.unlock(lock)
    with pytest.raises(InvariantViolation):
        index.unlock(lock)


def test_a_match_that_is_gone_cannot_be_locked() -> None:
    index = index_of(1)
    put(index, 1, 1)
    match = index.match(ROOT, ids(1, 1))
    put(index, 2, 2)
    with pytest.raises(InvariantViolation):
        index.lock(match)


def test_a_forgotten_block_and_what_follows_it_stop_matching_but_keep_their_places_while_locked() -> None:
    index = index_of(3)
    first, second, third = put(index, 1, 1, 2, 2, 3, 3)
    lock = index.lock(index.match(ROOT, ids(1, 1, 2, 2, 3, 3)))
    index.forget(second.entry_id)
    index.forget(second.entry_id)
    assert found(index, 1, 1, 2, 2, 3, 3) == 2
    assert index.plan_insert(ROOT, ids(1, 1, 2, 2), 4) == []
    index.unlock(lock)
    assert index.status()["blocks"] == 1
    again = put(index, 1, 1, 2, 2, 3, 3)
    assert {store.place for store in again} == {second.place, third.place}
    assert found(index, 1, 1, 2, 2, 3, 3) == 6
    index.forget(third.entry_id)
    assert found(index, 1, 1, 2, 2, 3, 3) == 6, "the number of an entry that is gone is nobody else's"
    index.forget(first.entry_id)
    assert index.status()["blocks"] == 0
    assert index.status()["lost_blocks"] == 5


def test_off_it_misses_stores_nothing_and_does_not_hash() -> None:
    def no_keys(before: bytes, tokens: bytes, block_tokens: int) -> tuple[str, ...]:
        pytest.fail("it hashed")

    index = PrefixIndex(0, BLOCK, no_keys)
    assert index.plan_insert(ROOT, ids(1, 2), 2) == []
    match = index.match(ROOT, ids(1, 2))
    assert (match.entries, match.usable_tokens) == ((), 0)
    index.unlock(index.lock(match))
    index.check()


def test_status_counts_tokens_when_a_match_is_locked_and_shows_no_token() -> None:
    index = index_of(4)
    put(index, 77_777, 88_888, 3, 4)
    for _ in range(5):
        index.match(ROOT, ids(77_777, 88_888, 9))
    index.lock(index.match(ROOT, ids(77_777, 88_888, 9)))
    assert index.status() == {
        "places": 4,
        "blocks": 2,
        "writing": 0,
        "pinned": 1,
        "locks": 1,
        "hit_tokens": 2,
        "missed_tokens": 1,
        "evictions": 0,
        "lost_blocks": 0,
    }


def test_a_copy_of_an_index_lives_its_own_life() -> None:
    index = index_of(2)
    put(index, 1, 1)
    twin = copy.deepcopy(index)
    put(index, 2, 2)
    put(index, 3, 3)
    assert (found(twin, 1, 1), found(twin, 2, 2)) == (2, 0)
    assert found(index, 1, 1) == 0


def test_who_is_told_the_keys_goes_the_same_way_without_the_tokens() -> None:
    """A recorded node is played again with blank prompts and the answers it had from functions outside."""
    answers: list[tuple[str, ...]] = []

    def recorded(before: bytes, tokens: bytes, block_tokens: int) -> tuple[str, ...]:
        answers.append(block_keys(before, tokens, block_tokens))
        return answers[-1]

    def played(before: bytes, tokens: bytes, block_tokens: int) -> tuple[str, ...]:
        return answers.pop(0)

    def deed(index: PrefixIndex, blank: bool) -> list[tuple[int, ...]]:
        draw, places = random.Random(7), []
        for _ in range(60):
            tokens = ids(*draw.choices(range(3), k=draw.randint(0, 9)))
            root = ROOT
            if blank:
                tokens, root = bytes(len(tokens)), bytes(len(root))
            stores = index.plan_insert(root, tokens, len(tokens) // 4)
            for store in stores:
                index.stored(store.entry_id)
            places.append(index.match(root, tokens).places)
        return places

    assert deed(PrefixIndex(4, BLOCK, recorded), blank=False) == deed(
        PrefixIndex(4, BLOCK, played), blank=True
    )
    assert answers == []
