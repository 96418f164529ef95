"""Saving and loading the prefix cache while jobs go on: the core's side and the file's side.

The cores are production ones; the test plays compute and drives `CacheFiles` piece by piece.
"""

from pathlib import Path

import numpy as np
import pytest

from common.block_store import BlockStore
from common.digests import PrefixIdentity
from common.errors import ErrorCode
from common.kv_layout import KvLayout
from common.messages import CacheOrder, CacheReply
from common.prefix_commands import (
    CacheFileEnded,
    CacheHeadsRead,
    ReadCacheFile,
    RestoreBlocks,
    Store,
    WriteCacheFile,
)
from common.prefix_file import info
from common.prefix_index import PrefixIndex
from decode_node.cache_files import CacheFiles
from tests.prefix_devices import BLOCK, PrefixPair
from tests.unit.test_prefix_cache import PROMPT, SUFFIX, WHOLE_BLOCKS, run, warm
from tests.unit.test_prefix_index import ids


class OrderPair(PrefixPair):
    """A pair whose file commands wait in `files` for the test."""

    def _execute(self, effect: object) -> list[object]:
        if isinstance(effect, (WriteCacheFile, ReadCacheFile, RestoreBlocks)):
            self.files.append(effect)
            return []
        return super()._execute(effect)

    def order(self, action: str, name: str = "chat") -> None:
        self.client.say(CacheOrder(action, name))

    def answer(self, event: object) -> None:
        self.step_decode(event)
        self.deliver()

    @property
    def replies(self) -> list[CacheReply]:
        return [item for item in self.client.received if isinstance(item, CacheReply)]


def test_a_save_locks_what_it_writes_until_its_end() -> None:
    pair = OrderPair()
    warm(pair)
    pair.order("save")
    command = pair.files.popleft()

    assert [block.head.tokens for block in command.blocks] == [
        ids(*PROMPT[start : start + BLOCK]) for start in range(0, WHOLE_BLOCKS * BLOCK, BLOCK)
    ]
    assert pair.index.status()["pinned"] == WHOLE_BLOCKS
    assert not pair.core.idle
    pair.answer(CacheFileEnded("/there/chat", 77))
    assert pair.replies == [CacheReply(WHOLE_BLOCKS, 77, "/there/chat")]
    pair.check_unlocked()


def test_a_full_cache_evicts_nothing_that_is_being_saved() -> None:
    pair = OrderPair(places=WHOLE_BLOCKS)
    warm(pair)
    row = [block.entry_id for block in pair.index.known_blocks()]
    pair.order("save")
    run(pair, "job", SUFFIX * 3)

    assert [block.entry_id for block in pair.index.known_blocks()] == row
    pair.answer(CacheFileEnded("/there/chat", 77))
    pair.check_unlocked()
    run(pair, "next", SUFFIX * 3)
    assert pair.index.status()["evictions"] > 0


def test_a_block_that_turns_out_damaged_is_forgotten_and_the_rest_is_saved() -> None:
    pair = OrderPair()
    warm(pair)
    pair.order("save")
    blocks = pair.files.popleft().blocks
    pair.answer(CacheFileEnded("/there/chat", corrupt_place=blocks[2].place))

    assert pair.replies == []
    assert pair.files.popleft().blocks == blocks[:2]
    pair.answer(CacheFileEnded("/there/chat", 50))
    assert pair.replies == [CacheReply(2, 50, "/there/chat")]
    pair.check_unlocked()


def test_a_loaded_block_matches_once_the_whole_file_is_in_place() -> None:
    source, pair = OrderPair(), OrderPair()
    warm(source)
    heads = tuple(block.head for block in source.index.known_blocks())
    pair.order("load")
    assert pair.files.popleft() == ReadCacheFile("chat")
    pair.answer(CacheHeadsRead(heads))
    command = pair.files.popleft()
    for position, store in command.stores:
        pair.device.blocks.kept[store.place] = PROMPT[: (position + 1) * BLOCK]
    assert run(pair, "meanwhile", PROMPT).usage.cached_tokens_decode == 0

    pair.answer(CacheFileEnded("/there/chat", 77))
    assert pair.replies == [CacheReply(WHOLE_BLOCKS, 77, "/there/chat")]
    assert run(pair, "job", PROMPT + SUFFIX).usage.cached_tokens_decode == WHOLE_BLOCKS * BLOCK
    pair.check_unlocked()


@pytest.mark.parametrize("heads_read", [False, True])
def test_of_a_load_that_fails_nothing_is_left(heads_read: bool) -> None:
    source, pair = OrderPair(), OrderPair()
    warm(source)
    pair.order("load")
    if heads_read:
        pair.answer(CacheHeadsRead(tuple(block.head for block in source.index.known_blocks())))
    pair.answer(CacheFileEnded("/there/chat", problem="it is damaged"))

    assert pair.replies == [CacheReply(0, 0, "/there/chat", ErrorCode.INVALID_REQUEST, "it is damaged")]
    assert pair.index.status()["blocks"] == 0
    pair.check_unlocked()


def test_a_smaller_cache_takes_as_much_as_it_has_room_for() -> None:
    source, pair = OrderPair(), OrderPair(places=2)
    warm(source)
    pair.order("load")
    pair.answer(CacheHeadsRead(tuple(block.head for block in source.index.known_blocks())))
    pair.answer(CacheFileEnded("/there/chat", 77))

    assert [position for position, _ in pair.files[-1].stores] == [0, 1]
    assert pair.replies[0].blocks == 2
    pair.check_unlocked()


def test_one_file_at_a_time() -> None:
    pair = OrderPair()
    pair.order("save")
    pair.order("save", "other")
    pair.order("load")

    assert [reply.code for reply in pair.replies] == [ErrorCode.BUSY] * 2
    assert len(pair.files) == 1
    pair.answer(CacheFileEnded("/there/chat", 77))
    pair.order("save", "other")
    assert len(pair.files) == 2


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc/passwd", ".hidden", "a b", "ä", "a\n"])
def test_a_name_that_is_not_plain_is_refused(name: str) -> None:
    pair = OrderPair()
    pair.order("save", name)
    [reply] = pair.replies
    assert (reply.code, list(pair.files)) == (ErrorCode.INVALID_REQUEST, [])
    assert "plain name" in reply.detail


def test_an_unknown_action_is_refused() -> None:
    pair = OrderPair()
    pair.order("delete")
    assert pair.replies[0].code is ErrorCode.INVALID_REQUEST
    assert not pair.files


def test_without_a_cache_there_is_nothing_to_save() -> None:
    pair = OrderPair(places=0)
    pair.order("save")
    assert "--prefix-cache-mb" in pair.replies[0].detail


def test_without_a_directory_the_refusal_names_the_flag() -> None:
    pair = OrderPair()
    pair.core.cache_orders._has_directory = False
    pair.order("load")
    assert "--prefix-cache-dir" in pair.replies[0].detail


def test_a_client_that_is_gone_gets_no_answer_and_leaves_no_lock() -> None:
    pair = OrderPair()
    warm(pair)
    pair.order("save")
    pair.client.leave()
    pair.answer(CacheFileEnded("/there/chat", 77))
    assert pair.replies == []
    pair.check_unlocked()


def test_a_node_that_drains_finishes_the_file_first_and_begins_no_other() -> None:
    pair = OrderPair()
    warm(pair)
    pair.order("save")
    pair.stop_decode()
    pair.order("load")
    assert pair.exit is None
    assert pair.replies[0].code is ErrorCode.SHUTTING_DOWN
    pair.answer(CacheFileEnded("/there/chat", 77))
    assert pair.exit.status == 0


LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="uint8", max_tokens=8)
IDENTITY = PrefixIdentity("m", "w", "uint8", "half", 1, 1, LAYOUT.row_bytes, 2)
TOKENS = ids(*range(12))


class Files:
    """`CacheFiles` over a store of its own, and what it has said."""

    def __init__(self, directory: Path, identity: PrefixIdentity = IDENTITY, blocks: int = 6) -> None:
        self.store = BlockStore(LAYOUT, 2, 8 * IDENTITY.block_bytes)
        self.index = PrefixIndex(8, 2)
        for store in self.index.plan_insert(b"root" * 4, TOKENS, 2 * blocks):
            self.store.write(store.place, np.full(self.store.block_shape, store.start_tokens, np.uint8))
            self.index.stored(store.entry_id)
        self.said: list[object] = []
        self.files = CacheFiles(self.store, identity, str(directory), self.said.append)

    def write(self, name: str = "chat") -> None:
        self.files.start(WriteCacheFile(name, tuple(self.index.known_blocks())))

    def run(self) -> int:
        """Until nothing is left to do; how many pieces that took."""
        pieces = 0
        while self.files.busy:
            self.files.work()
            pieces += 1
        return pieces


def test_a_file_is_written_and_read_in_as_many_pieces_as_it_has_blocks(tmp_path: Path) -> None:
    saved, loaded = Files(tmp_path), Files(tmp_path, blocks=0)
    saved.write()
    assert saved.run() >= 6
    assert saved.said == [CacheFileEnded(str(tmp_path / "chat"), info(tmp_path / "chat").size_bytes)]

    loaded.files.start(ReadCacheFile("chat"))
    assert loaded.run() >= 6
    [read] = loaded.said
    stores = tuple(enumerate(loaded.index.plan_restore(read.heads)))
    loaded.files.start(RestoreBlocks(stores))
    assert loaded.run() >= 6
    for position, store in stores:
        assert (loaded.store.read(store.place) == 2 * position).all()
    assert loaded.said[1].size_bytes == saved.said[0].size_bytes


def test_a_thread_that_ends_leaves_no_unfinished_file(tmp_path: Path) -> None:
    saved = Files(tmp_path)
    saved.write()
    saved.files.work()
    assert len(list(tmp_path.iterdir())) == 1
    saved.files.close()
    assert list(tmp_path.iterdir()) == []
    assert not saved.files.busy


def test_a_damaged_block_ends_the_save_and_keeps_the_old_file(tmp_path: Path) -> None:
    saved = Files(tmp_path)
    saved.write()
    saved.run()
    old = (tmp_path / "chat").read_bytes()
    saved.store._memory.flags.writeable = True
    saved.store._memory[3] ^= 1
    saved.write()
    saved.run()
    assert saved.said[1].corrupt_place == 3
    assert (tmp_path / "chat").read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 1


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _make_foreign(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(200))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-17] ^= 1  # of the last block, before the digest of it all
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "says"), [(_cut, "cut off"), (_make_foreign, "no saved prefix cache"), (_flip, "damaged")]
)
def test_a_spoiled_file_is_refused_before_anything_is_placed(tmp_path: Path, spoil, says: str) -> None:
    files = Files(tmp_path)
    files.write()
    files.run()
    spoil(tmp_path / "chat")
    files.files.start(ReadCacheFile("chat"))
    files.run()
    assert says in files.said[1].problem
    assert not any(isinstance(item, CacheHeadsRead) for item in files.said)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    saved = Files(tmp_path)
    saved.write()
    saved.run()
    other = Files(tmp_path, PrefixIdentity("m", "other", "uint8", "half", 1, 1, LAYOUT.row_bytes, 2))
    other.files.start(ReadCacheFile("chat"))
    other.run()
    assert "weights_digest" in other.said[0].problem


def test_a_file_that_changes_after_it_was_verified_is_not_used(tmp_path: Path) -> None:
    saved, loaded = Files(tmp_path), Files(tmp_path, blocks=0)
    saved.write()
    saved.run()
    loaded.files.start(ReadCacheFile("chat"))
    loaded.run()
    _flip(tmp_path / "chat")
    loaded.files.start(RestoreBlocks(tuple((number, Store(number, number, 0)) for number in range(6))))
    loaded.run()
    assert "changed" in loaded.said[1].problem


def test_a_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    files = Files(tmp_path / "gone")
    files.write()
    files.run()
    assert "cannot be written" in files.said[0].problem
