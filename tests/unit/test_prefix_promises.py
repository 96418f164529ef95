"""Blocks that are counted on before they are copied: what that allows, and what a broken promise leaves."""

from tests.unit.test_prefix_index import ROOT, found, ids, index_of, put


def test_a_promised_block_matches_and_can_be_locked_before_its_copy_has_ended() -> None:
    index = index_of(8)
    first, second = index.plan_insert(ROOT, ids(1, 2, 3, 4), 4, promised=True)
    match = index.match(ROOT, ids(1, 2, 3, 4, 5))
    assert (match.tokens, match.places) == (4, (first.place, second.place))
    lock = index.lock(match)
    index.stored(first.entry_id)
    index.check()
    index.stored(second.entry_id)
    index.unlock(lock)
    index.check()


def test_a_broken_promise_matches_no_more_and_keeps_its_place_for_who_counts_on_it() -> None:
    index = index_of(2)
    (promised,) = index.plan_insert(ROOT, ids(1, 2), 2, promised=True)
    lock = index.lock(index.match(ROOT, ids(1, 2, 3)))
    index.abandon(promised.entry_id)
    assert found(index, 1, 2) == 0
    assert promised.place not in {store.place for store in put(index, 7, 8, 9, 10)}
    index.unlock(lock)
    index.check()
    assert index.status()["pinned"] == 0
