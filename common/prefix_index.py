"""Which blocks of which prompts are known, where their KV lies, and which goes next.

Decides the use of the places of a prefix cache: what a prompt finds there, what is locked, what is written,
what makes room. Lives inside the core of either node and is changed by it alone; the bytes are
`common.block_store`'s, on the compute thread. It must never let a block match whose KV is neither confirmed
nor promised, give away a place that somebody still reads or writes, or look at a clock.

A block that is being written is promised where the copy to it is ordered before every copy from it: whoever
looks it up may count on it, and finds out when copying should the promise be broken. Blocks of a file are
not promised, as the whole file has yet to be verified.

A block is looked up by the chained digest of its tokens, and believed only after its own tokens and the
identity of the entry before it were compared; identities are numbers that are never used again. So blocks
whose keys collide cost hits and never a wrong answer, and [a][b] is not found in [c][b].

A pin keeps an entry: each lock, a write that is not over, and each pinned child is one, so what is before a
pinned entry is pinned as well. Unpinned entries stand in order of use, each behind its children: the first
of the row has none and was used longest ago. An entry that must not match any more, but is pinned, is
doomed: it keeps its place until the last pin goes.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.digests import block_keys
from common.errors import check
from common.prefix_commands import BlockHead, KnownBlock, Store

TOKEN_BYTES = 4
KeysOf = Callable[[bytes, bytes, int], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt finds: identities and places of its first blocks, in order. Good within one step only."""

    entries: tuple[int, ...]
    places: tuple[int, ...]
    tokens: int
    prompt_tokens: int

    @property
    def usable_tokens(self) -> int:
        """How many tokens need not be computed: never the last one, whose logits are wanted."""
        return max(0, min(self.tokens, self.prompt_tokens - 1))


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """A locked match. tokens: how many tokens of the prompt it spares."""

    lock: int
    match: Match

    @property
    def tokens(self) -> int:
        return self.match.usable_tokens

    @property
    def places(self) -> tuple[int, ...]:
        return self.match.places


@dataclass(slots=True)
class _Entry:
    """One block. parent: identity of the entry before it, or the root of its chain.

    promised: it may be used while it is being written.
    """

    entry_id: int
    parent: int | bytes
    key: str
    tokens: bytes
    place: int
    promised: bool = False
    writing: bool = True
    doomed: bool = False
    pins: int = 0

    @property
    def usable(self) -> bool:
        return not self.doomed and (self.promised or not self.writing)


class PrefixIndex:
    """The entries of one prefix cache; see the module. Every size is bounded by `places` and by the locks."""

    def __init__(self, places: int, block_tokens: int, keys_of: KeysOf = block_keys) -> None:
        """places: how many blocks there is room for; 0 is off. keys_of: see `common.digests.block_keys`."""
        check(places >= 0 and block_tokens >= 1, "a prefix index of impossible size")
        self.places = places
        self.block_tokens = block_tokens
        self._keys_of = keys_of
        self._entries: dict[int, _Entry] = {}
        self._by_key: dict[str, _Entry] = {}
        self._row: OrderedDict[int, _Entry] = OrderedDict()
        self._returned: list[int] = []
        self._untouched = 0  # places from this one on were never given out
        self._locks: dict[int, int] = {}
        self._last_entry = 0
        self._last_lock = 0
        self._writing = 0
        self._counters = {"hit_tokens": 0, "missed_tokens": 0, "evictions": 0, "lost_blocks": 0}

    def match(self, root: bytes, prompt: bytes) -> Match:
        """The longest chain of usable blocks that `prompt` (int32 little-endian ids) begins with."""
        found: list[_Entry] = []
        if self._by_key:
            for entry in self._chain(root, prompt, self._keys_of(root, prompt, self.block_tokens)):
                if not entry.usable:
                    break
                found.append(entry)
        return Match(
            tuple([entry.entry_id for entry in found]),
            tuple([entry.place for entry in found]),
            len(found) * self.block_tokens,
            len(prompt) // TOKEN_BYTES,
        )

    def lock(self, match: Match) -> int:
        """Keep all blocks of a match of this step, which is now counted and used; a number for `unlock`.

        An empty match is locked like any other. A match with blocks that are gone is our mistake.
        """
        last = self._entries.get(match.entries[-1]) if match.entries else None
        if match.entries:
            check(last is not None and last.usable, "a lock on blocks that are gone")
            self._pin(last)
        self._last_lock += 1
        self._locks[self._last_lock] = last.entry_id if last is not None else 0
        self._counters["hit_tokens"] += match.usable_tokens
        self._counters["missed_tokens"] += match.prompt_tokens - match.usable_tokens
        return self._last_lock

    def lock_entry(self, entry_id: int) -> int:
        """Keep a block that may match, and all before it, without using it; a number for `unlock`."""
        self._pin(self._entries[entry_id])
        self._last_lock += 1
        self._locks[self._last_lock] = entry_id
        return self._last_lock

    def unlock(self, lock: int) -> None:
        """Let go, once, of what `lock` kept, when no copy out of its places is going on any more."""
        check(lock in self._locks, "a prefix was unlocked twice, or never locked")
        entry_id = self._locks.pop(lock)
        if entry_id:
            self._unpin(self._entries[entry_id])

    def plan_insert(
        self, root: bytes, tokens: bytes, valid_tokens: int, *, promised: bool = False
    ) -> list[Store]:
        """Places for the blocks of `tokens` that are not known yet, in order; KV of `valid_tokens` is there.

        promised: they may match from now on, see the module.
        Makes room by evicting what was used longest ago. Where none can be made, or where a key collides, it
        stops: what is stored is always a beginning, without a hole.
        """
        check(0 <= valid_tokens * TOKEN_BYTES <= len(tokens), "more valid KV than tokens")
        whole = tokens[: valid_tokens * TOKEN_BYTES]
        if not self.places or valid_tokens < self.block_tokens:
            return []
        keys = self._keys_of(root, whole, self.block_tokens)
        chain = self._chain(root, whole, keys)
        known = parent = chain[-1] if chain else None
        if known is not None:
            self._pin(known)
        stores = []
        size = self.block_tokens * TOKEN_BYTES
        for number in range(len(chain), len(keys)):
            place = None if keys[number] in self._by_key else self._take_place(may_evict=True)
            if place is None:
                break
            block = whole[number * size : (number + 1) * size]
            parent = self._add(parent, root, keys[number], block, place, promised=promised)
            stores.append(Store(parent.entry_id, place, number * self.block_tokens))
        if known is not None:
            self._unpin(known)
        return stores

    def stored(self, entry_id: int) -> None:
        """The block's KV is complete and verified: it may match, unless it was lost meanwhile."""
        entry = self._written(entry_id)
        self._unpin(entry)

    def abandon(self, entry_id: int) -> None:
        """The block was not, or not wholly, written. It and what follows it never match."""
        entry = self._written(entry_id)
        self._doom(entry)
        self._unpin(entry)

    def forget(self, entry_id: int) -> None:
        """The block's bytes are not what was stored. It and what follows it match no more from now on.

        An entry that is not there any more is no mistake: another reader may have found the same.
        """
        entry = self._entries.get(entry_id)
        if entry is not None:
            self._doom(entry)

    def known_blocks(self) -> list[KnownBlock]:
        """All blocks that may match, each behind the one before it, else the most recently used first."""
        pinned = sorted((entry for entry in self._entries.values() if entry.pins), key=lambda it: it.entry_id)
        found: list[KnownBlock] = []
        positions: dict[int, int] = {}
        for entry in [*pinned, *reversed(self._row.values())]:
            first = isinstance(entry.parent, bytes)
            if entry.writing or entry.doomed or not (first or entry.parent in positions):
                continue
            parent = -1 if first else positions[entry.parent]
            root = entry.parent if first else found[parent].head.root
            positions[entry.entry_id] = len(found)
            found.append(KnownBlock(BlockHead(root, parent, entry.tokens), entry.entry_id, entry.place))
        return found

    def plan_restore(self, heads: Sequence[BlockHead]) -> list[Store | None]:
        """Places for saved blocks, in the order of `known_blocks`; None for what is known or has no room.

        Nothing is evicted: what is here is newer. When all of them are written, confirm them from the last
        to the first, so that the most recently used are so again.
        """
        stores: list[Store | None] = []
        restored: list[_Entry | None] = []
        starts_tokens: list[int] = []
        for head in heads:
            follows = head.parent >= 0
            parent = restored[head.parent] if follows else None
            starts_tokens.append(starts_tokens[head.parent] + self.block_tokens if follows else 0)
            entry, is_new = (None, False) if follows and parent is None else self._restore(head, parent)
            stores.append(Store(entry.entry_id, entry.place, starts_tokens[-1]) if is_new else None)
            restored.append(entry)
        return stores

    def _restore(self, head: BlockHead, parent: _Entry | None) -> tuple[_Entry | None, bool]:
        """The entry of a saved block, if it is or can be there, and whether it is new."""
        before = head.root if parent is None else bytes.fromhex(parent.key)
        (key,) = self._keys_of(before, head.tokens, self.block_tokens)
        entry = self._by_key.get(key)
        if entry is not None:
            same = entry.parent == (head.root if parent is None else parent.entry_id)
            return (entry if same and entry.tokens == head.tokens else None), False
        place = self._take_place(may_evict=False)
        if place is None:
            return None, False
        return self._add(parent, head.root, key, head.tokens, place), True

    def status(self) -> dict[str, int]:
        """Plain numbers; tokens are counted when a match is locked."""
        return {
            "places": self.places,
            "blocks": len(self._entries),
            "writing": self._writing,
            "pinned": len(self._entries) - len(self._row),
            "locks": len(self._locks),
            **self._counters,
        }

    def check(self) -> None:
        """Raise `InvariantViolation` unless all is well. Takes about two microseconds for each entry."""
        entries = self._entries.values()
        taken = {entry.place for entry in entries} | set(self._returned)
        check(len(entries) + len(self._returned) == self._untouched, "INV-1: a place is lost")
        check(taken == set(range(self._untouched)), "INV-2: a place has two owners")
        check(self._untouched <= self.places, "INV-6: more places than there are")
        check(self._writing == sum(entry.writing for entry in entries), "INV-1: a write is miscounted")
        live = {entry.key: entry for entry in entries if not entry.doomed}
        check(live == self._by_key, "INV-2: what is looked up is not what is there")
        pins = Counter(entry_id for entry_id in self._locks.values() if entry_id)
        pins.update(entry.entry_id for entry in entries if entry.writing)
        pins.update(entry.parent for entry in entries if entry.pins and isinstance(entry.parent, int))
        check(pins.keys() <= self._entries.keys(), "INV-4: a pin on an entry that is gone")
        for entry in entries:
            self._check_entry(entry, pins[entry.entry_id])
        self._check_row()

    def _check_entry(self, entry: _Entry, pins: int) -> None:
        check(entry.pins == pins, "INV-4: an entry's pins are not those of its holders")
        check((entry.pins == 0) == (entry.entry_id in self._row), "INV-4: evictable, and yet pinned")
        check(entry.pins > 0 or not entry.doomed, "INV-1: a doomed entry keeps a place for nobody")
        if isinstance(entry.parent, int):
            parent = self._entries.get(entry.parent)
            check(parent is not None, "INV-2: an entry without the one before it")
            check(entry.doomed or not parent.doomed, "INV-3: an entry outlives the one before it")

    def _check_row(self) -> None:
        passed: set[int | bytes] = set()
        for entry in self._row.values():
            check(entry.parent not in passed, "INV-4: an entry would be evicted before its child")
            passed.add(entry.entry_id)

    def _chain(self, root: bytes, tokens: bytes, keys: Sequence[str]) -> list[_Entry]:
        """The entries of the first blocks of `tokens`, unconfirmed ones included, as far as they go."""
        chain: list[_Entry] = []
        parent: int | bytes = root
        size = self.block_tokens * TOKEN_BYTES
        start = 0
        for key in keys:
            entry = self._by_key.get(key)
            if entry is None or entry.parent != parent or entry.tokens != tokens[start : start + size]:
                break
            chain.append(entry)
            parent = entry.entry_id
            start += size
        return chain

    def _take_place(self, *, may_evict: bool) -> int | None:
        if not self._returned and self._untouched < self.places:
            self._untouched += 1
            return self._untouched - 1
        if not self._returned and may_evict and self._row:
            self._remove(next(iter(self._row.values())))
            self._counters["evictions"] += 1
        return self._returned.pop() if self._returned else None

    def _add(
        self, parent: _Entry | None, root: bytes, key: str, tokens: bytes, place: int, promised: bool = False
    ) -> _Entry:
        """A new entry that is being written, and so pinned with all before it."""
        self._last_entry += 1
        before = root if parent is None else parent.entry_id
        entry = _Entry(self._last_entry, before, key, tokens, place, promised)
        self._entries[entry.entry_id] = self._by_key[key] = entry
        self._writing += 1
        self._pin(entry)
        return entry

    def _written(self, entry_id: int) -> _Entry:
        entry = self._entries.get(entry_id)
        check(entry is not None and entry.writing, "a block's copy ended twice, or never began")
        entry.writing = False
        self._writing -= 1
        return entry

    def _pin(self, entry: _Entry | None) -> None:
        while entry is not None:
            entry.pins += 1
            if entry.pins > 1:
                return
            self._row.pop(entry.entry_id, None)
            entry = self._parent_of(entry)

    def _unpin(self, entry: _Entry | None) -> None:
        while entry is not None:
            entry.pins -= 1
            if entry.pins > 0:
                return
            # From the last block to the first: so each comes to stand behind its children.
            parent = self._parent_of(entry)
            self._row[entry.entry_id] = entry
            if entry.doomed:
                self._remove(entry)
            entry = parent

    def _parent_of(self, entry: _Entry) -> _Entry | None:
        return self._entries[entry.parent] if isinstance(entry.parent, int) else None

    def _doom(self, entry: _Entry) -> None:
        """Neither the entry nor what follows it matches any more; unpinned ones go at once."""
        if entry.doomed:
            return
        lost = {entry.entry_id: entry}
        # Numbers grow along a chain and entries stand in their order, so one pass finds all that follows.
        # Children are not kept at each entry: losses are rare, and the state is written down and copied.
        for each in self._entries.values():
            if each.parent in lost:
                lost[each.entry_id] = each
        for each in lost.values():
            if each.doomed:
                continue
            each.doomed = True
            self._counters["lost_blocks"] += 1
            del self._by_key[each.key]
            if not each.pins:
                self._remove(each)

    def _remove(self, entry: _Entry) -> None:
        """An unpinned entry leaves, and its place returns."""
        check(not entry.pins, "INV-4: an entry goes that somebody needs")
        del self._entries[entry.entry_id], self._row[entry.entry_id]
        if not entry.doomed:
            del self._by_key[entry.key]
        self._returned.append(entry.place)
