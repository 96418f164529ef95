"""The index of a prefix cache on random walks, held against a naive model; and damaged, held against itself.

The seed of a failing test replays its walk.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from common.errors import InvariantViolation
from common.prefix_index import PrefixIndex
from tests.unit.test_prefix_index import BLOCK, IDENTITY, KEYS, ROOT, ids, index_of, put


def break_places(index: PrefixIndex) -> None:
    index._returned.append(0)


def break_pins(index: PrefixIndex) -> None:
    index._entries[1].pins -= 1


def break_parent(index: PrefixIndex) -> None:
    index._entries[2].parent = 99


def break_order(index: PrefixIndex) -> None:
    index._row.move_to_end(3)


def break_lookup(index: PrefixIndex) -> None:
    del index._by_key[index._entries[3].key]


def break_writing(index: PrefixIndex) -> None:
    index._writing += 1


def break_lock(index: PrefixIndex) -> None:
    index._locks[99] = 3


def break_loss(index: PrefixIndex) -> None:
    """The first of two locked blocks is lost, and the second would still match."""
    index.lock(index.match(ROOT, ids(2, 2, 3, 3)))
    entry = index._entries[2]
    entry.doomed = True
    del index._by_key[entry.key]


def break_bound(index: PrefixIndex) -> None:
    index.places = 2


@pytest.mark.parametrize(
    "damage",
    [
        break_places,
        break_pins,
        break_parent,
        break_order,
        break_lookup,
        break_writing,
        break_lock,
        break_bound,
        break_loss,
    ],
)
def test_check_finds_what_is_broken(damage: Callable[[PrefixIndex], None]) -> None:
    index = index_of(8)
    put(index, 1, 1)
    put(index, 2, 2, 3, 3)
    index.lock(index.match(ROOT, ids(1, 1)))
    index.check()
    damage(index)
    with pytest.raises(InvariantViolation):
        index.check()


@dataclass
class Known:
    """What the naive model knows of one entry. tokens: all from the root on."""

    root: bytes
    tokens: bytes
    place: int
    parent: int | None
    writing: bool = True
    live: bool = True
    used: int = 0
    was_pinned: bool = True


class Model:
    """Blocks as whole token strings; everything is found by looking at everything."""

    def __init__(self) -> None:
        self.entries: dict[int, Known] = {}
        self.locks: dict[int, tuple[int, ...]] = {}
        self.time = 0

    def pinned(self, entry_id: int) -> bool:
        held = self.entries[entry_id].writing or any(entry_id in lock for lock in self.locks.values())
        return held or any(self.pinned(it) for it, known in self.entries.items() if known.parent == entry_id)

    def match(self, root: bytes, tokens: bytes, writing_too: bool = False) -> list[int]:
        live = {
            (known.root, known.tokens): entry_id for entry_id, known in self.entries.items() if known.live
        }
        chain = []
        for end in range(4 * BLOCK, len(tokens) + 1, 4 * BLOCK):
            entry_id = live.get((root, tokens[:end]))
            if entry_id is None or (self.entries[entry_id].writing and not writing_too):
                break
            chain.append(entry_id)
        return chain

    def lose(self, entry_id: int) -> None:
        self.entries[entry_id].live = False
        for it, known in self.entries.items():
            if known.parent == entry_id and known.live:
                self.lose(it)

    def settle(self) -> None:
        """What lost its last pin was used now; what is lost and unpinned goes."""
        self.time += 1
        pinned = {entry_id: self.pinned(entry_id) for entry_id in self.entries}
        for entry_id, known in list(self.entries.items()):
            if known.was_pinned and not pinned[entry_id]:
                known.used = self.time
            known.was_pinned = pinned[entry_id]
            if not known.live and not pinned[entry_id]:
                del self.entries[entry_id]

    def make_room(self, kept: list[int]) -> bool:
        """Evict the leaf used longest ago; False when there is none."""
        parents = {known.parent for known in self.entries.values()}
        leaves = [it for it in self.entries if it not in parents and it not in kept and not self.pinned(it)]
        if leaves:
            del self.entries[min(leaves, key=lambda it: self.entries[it].used)]
        return bool(leaves)


class PrefixWalk:
    """Random deeds on an index and its model. exact: no keys collide, so hits and evictions must be equal."""

    def __init__(self, seed: int, keys: str) -> None:
        self.random = random.Random(seed)
        self.index = index_of(self.random.randint(3, 8), keys)
        self.model = Model()
        self.exact = keys == "real"
        self.most_blocks = 0
        self.hits = 0

    def draw_tokens(self) -> tuple[bytes, bytes]:
        root = self.random.choice([ROOT, IDENTITY.root()])
        return root, ids(*self.random.choices(range(2), k=self.random.randint(0, 11)))

    def deed(self) -> None:
        usual = [self.insert, self.insert, self.finish, self.finish, self.finish, self.lock, self.unlock]
        self.random.choice([*usual, self.forget, self.look])()
        self.model.settle()
        self.index.check()
        self.look()
        status = self.index.status()
        assert status["blocks"] == len(self.model.entries) <= self.index.places
        assert status["pinned"] == sum(map(self.model.pinned, self.model.entries))
        self.most_blocks = max(self.most_blocks, status["blocks"])

    def insert(self) -> None:
        root, tokens = self.draw_tokens()
        valid_tokens = self.random.randint(0, len(tokens) // 4)
        tokens_there = tokens[: 4 * valid_tokens]
        model = self.model
        evictions = self.index.status()["evictions"]
        chain = model.match(root, tokens_there, writing_too=True) if self.exact else []
        stores = self.index.plan_insert(root, tokens, valid_tokens)
        if self.exact:
            self.expect(chain, len(tokens_there) // (4 * BLOCK), len(stores))
        else:
            self.forget_evicted()
        free = set(range(self.index.places)) - {known.place for known in model.entries.values()}
        assert {store.place for store in stores} <= free, "a place that somebody uses"
        assert len({store.place for store in stores}) == len(stores)
        for store in stores:
            end = 4 * (store.start_tokens + BLOCK)
            before = {(it.root, it.tokens): number for number, it in model.entries.items() if it.live}
            parent = before.get((root, tokens[: 4 * store.start_tokens]))
            assert (parent is None) == (store.start_tokens == 0), "a hole"
            model.entries[store.entry_id] = Known(root, tokens[:end], store.place, parent)
        assert self.index.status()["evictions"] >= evictions

    def expect(self, chain: list[int], block_count: int, stored_count: int) -> None:
        """Make room in the model as the index should have, and compare how much it stored."""
        for entry_id in chain:
            self.model.entries[entry_id].used = self.model.time + 1
        room = 0
        for _ in range(block_count - len(chain)):
            full = len(self.model.entries) + room == self.index.places
            if full and not self.model.make_room(chain):
                break
            room += 1
        assert stored_count == room

    def forget_evicted(self) -> None:
        """With colliding keys the model follows: what the index let go of must have been in nobody's use."""
        there = set(self.index._entries)
        for entry_id in sorted(set(self.model.entries) - there, reverse=True):
            assert not self.model.pinned(entry_id)
            del self.model.entries[entry_id]

    def finish(self) -> None:
        writing = [entry_id for entry_id, known in self.model.entries.items() if known.writing]
        if not writing:
            return
        entry_id = self.random.choice(writing)
        self.model.entries[entry_id].writing = False
        if self.random.random() < 0.8:
            self.index.stored(entry_id)
        else:
            self.model.lose(entry_id)
            self.index.abandon(entry_id)

    def lock(self) -> None:
        match = self.index.match(*self.draw_tokens())
        if len(self.model.locks) < 3:
            self.model.locks[self.index.lock(match)] = match.entries

    def unlock(self) -> None:
        if self.model.locks:
            lock = self.random.choice(list(self.model.locks))
            del self.model.locks[lock]
            self.index.unlock(lock)

    def forget(self) -> None:
        if self.model.entries and self.random.random() < 0.3:
            entry_id = self.random.choice(list(self.model.entries))
            self.index.forget(entry_id)
            self.model.lose(entry_id)

    def look(self) -> None:
        root, tokens = self.draw_tokens()
        match = self.index.match(root, tokens)
        for number, (entry_id, place) in enumerate(zip(match.entries, match.places, strict=True), start=1):
            known = self.model.entries[entry_id]
            assert (known.root, known.tokens) == (root, tokens[: 4 * BLOCK * number]), "a wrong answer"
            assert known.place == place
            assert known.live
            assert not known.writing
        if self.exact:
            assert list(match.entries) == self.model.match(root, tokens)
        self.hits += len(match.entries)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk_agrees_with_a_naive_model(seed: int, keys: str) -> None:
    walk = PrefixWalk(seed, keys)
    for _ in range(150):
        walk.deed()
    for lock in list(walk.model.locks):
        walk.index.unlock(lock)
    for entry_id in [it for it, known in walk.model.entries.items() if known.writing]:
        walk.index.abandon(entry_id)
    walk.index.check()
    assert walk.index.status()["pinned"] == 0
    assert walk.hits > 0
    if walk.exact:
        assert walk.most_blocks == walk.index.places
        assert walk.index.status()["evictions"] > 0
