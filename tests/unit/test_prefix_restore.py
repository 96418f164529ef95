"""What an index gives to be saved, and what another one makes of it."""

from common.prefix_commands import Store
from common.prefix_index import BlockHead, PrefixIndex
from tests.unit.test_prefix_index import IDENTITY, ROOT, found, ids, index_of, put


def test_what_is_saved_stands_behind_its_past_and_newest_first() -> None:
    index = index_of(8)
    put(index, 1, 1, 2, 2)
    put(index, 1, 1, 3, 3)
    put(index, 4, 4)
    index.plan_insert(ROOT, ids(4, 4, 5, 5), 4)
    index.unlock(index.lock(index.match(ROOT, ids(1, 1, 2, 2))))
    heads = [block.head for block in index.known_blocks()]
    assert [(head.parent, head.tokens) for head in heads] == [
        (-1, ids(4, 4)),
        (-1, ids(1, 1)),
        (1, ids(2, 2)),
        (1, ids(3, 3)),
    ]
    assert {head.root for head in heads} == {ROOT}


def restore(index: PrefixIndex, heads: list[BlockHead]) -> list[Store | None]:
    stores = index.plan_restore(heads)
    for store in reversed(stores):
        if store is not None:
            index.stored(store.entry_id)
    index.check()
    return stores


def test_what_is_restored_matches_and_is_evicted_as_before() -> None:
    index, other = index_of(4), index_of(4)
    put(index, 1, 1, 2, 2)
    put(index, 3, 3)
    put(index, 4, 4, root=IDENTITY.root("salt"))
    index.unlock(index.lock(index.match(ROOT, ids(1, 1))))
    restore(other, [block.head for block in index.known_blocks()])
    for step in range(5):
        hits = [
            [
                found(one, *tokens, root=root)
                for tokens, root in [
                    ((1, 1, 2, 2), ROOT),
                    ((3, 3), ROOT),
                    ((4, 4), IDENTITY.root("salt")),
                    ((4, 4), ROOT),
                ]
            ]
            for one in (index, other)
        ]
        assert hits[0] == hits[1]
        for one in (index, other):
            put(one, 50 + step, 50)
    assert hits[0] == [0, 0, 0, 0]


def test_with_less_room_the_newest_is_restored_and_nothing_is_evicted_for_it() -> None:
    index, other = index_of(8), index_of(3)
    put(index, 1, 1, 2, 2)
    put(index, 3, 3, 4, 4)
    put(other, 9, 9)
    stores = restore(other, [block.head for block in index.known_blocks()])
    assert [store is not None for store in stores] == [True, True, False, False]
    assert [found(other, 3, 3, 4, 4), found(other, 1, 1), found(other, 9, 9)] == [4, 0, 2]


def test_what_is_known_already_is_not_restored_twice_but_continued() -> None:
    index, other = index_of(8), index_of(8)
    put(index, 1, 1, 2, 2)
    put(other, 1, 1)
    stores = restore(other, [block.head for block in index.known_blocks()])
    assert [store is not None for store in stores] == [False, True]
    assert found(other, 1, 1, 2, 2) == 4


def test_what_collides_with_another_chain_is_not_restored_and_neither_is_what_follows_it() -> None:
    index, other = index_of(8), index_of(8, "without_past")
    put(index, 1, 1, 2, 2, 4, 4)
    put(other, 5, 5, 2, 2)
    stores = restore(other, [block.head for block in index.known_blocks()])
    assert [store is not None for store in stores] == [True, False, False]
    assert [found(other, 1, 1, 2, 2, 4, 4), found(other, 5, 5, 2, 2, 4, 4)] == [2, 4]


def test_a_block_in_the_same_position_with_the_same_key_is_not_taken_for_the_saved_one() -> None:
    index, other = index_of(8), index_of(8, "depth")
    put(index, 1, 1, 2, 2)
    put(other, 3, 3)
    assert restore(other, [block.head for block in index.known_blocks()]) == [None, None]
    assert found(other, 3, 3, 2, 2) == 2
