"""A prefix cache that is saved and restored; and every file that must not be."""

import os
import re
import shutil
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from common.block_store import BlockCorrupt, BlockStore
from common.digests import PrefixIdentity
from common.errors import ConfigError
from common.kv_layout import KvLayout
from common.prefix_file import (
    HEADER_BYTES_MAX,
    PrefixFile,
    PrefixFileError,
    info,
    load_prefix_cache,
    save_prefix_cache,
    write_prefix_file,
)
from common.prefix_index import PrefixIndex
from tests.unit.test_prefix_index import ids

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="uint8", max_tokens=8)
BLOCK = 2
IDENTITY = PrefixIdentity("m", "w", "uint8", "half", 1, 1, LAYOUT.row_bytes, BLOCK)
ROOT = IDENTITY.root()
SALT = "a-salt-that-nobody-may-read"


class Cache:
    """An index and its store. The KV of a block is drawn from all tokens up to its end."""

    def __init__(self, places: int = 8, identity: PrefixIdentity = IDENTITY) -> None:
        layout = replace(LAYOUT, head_dim=identity.row_bytes)
        self.identity = identity
        self.store = BlockStore(layout, identity.block_tokens, places * identity.block_bytes)
        self.index = PrefixIndex(self.store.places, identity.block_tokens)

    def kv(self, root: bytes, tokens: bytes) -> np.ndarray:
        draw = np.random.default_rng(xxhash.xxh3_64_intdigest(root + tokens))
        return draw.integers(0, 256, self.store.block_shape, dtype=np.uint8)

    def insert(self, *token_ids: int, root: bytes = ROOT) -> None:
        tokens = ids(*token_ids)
        for store in self.index.plan_insert(root, tokens, len(token_ids)):
            end = 4 * (store.start_tokens + self.identity.block_tokens)
            self.store.write(store.place, self.kv(root, tokens[:end]))
            self.index.stored(store.entry_id)

    def holds(self, *token_ids: int, root: bytes = ROOT) -> int:
        """How many tokens match, with the KV that belongs to them."""
        tokens = ids(*token_ids)
        match = self.index.match(root, tokens)
        for number, place in enumerate(match.places, start=1):
            end = 4 * number * self.identity.block_tokens
            assert np.array_equal(self.store.read(place), self.kv(root, tokens[:end]))
        self.index.check()
        return match.tokens

    def save(self, path: Path) -> int:
        return save_prefix_cache(path, self.identity, self.index, self.store)

    def load(self, path: Path) -> int:
        return load_prefix_cache(path, self.identity, self.index, self.store)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def saved(path: Path) -> Path:
    """A small saved cache of three chains, one of them salted."""
    cache = Cache()
    cache.insert(1, 1, 2, 2)
    cache.insert(1, 1, 3, 3)
    cache.insert(1, 1, root=IDENTITY.root(SALT))
    assert cache.save(path) == 4
    return path


def test_what_was_saved_is_there_again_with_its_kv(saved: Path) -> None:
    cache = Cache()
    assert cache.load(saved) == 4
    assert cache.holds(1, 1, 2, 2) == 4
    assert cache.holds(1, 1, 3, 3) == 4
    assert cache.holds(1, 1, 3, 3, root=IDENTITY.root(SALT)) == 2
    assert cache.holds(1, 1, root=IDENTITY.root("another salt")) == 0


def test_the_header_tells_what_is_in_a_file(saved: Path) -> None:
    facts = info(saved)
    assert (facts.identity, facts.block_count) == (IDENTITY, 4)
    assert facts.size_bytes == saved.stat().st_size


def test_an_empty_cache_can_be_saved_and_loaded(path: Path) -> None:
    assert Cache().save(path) == 0
    assert info(path).block_count == 0
    assert Cache().load(path) == 0


def test_a_file_is_for_its_user_alone_and_tells_no_salt(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o600
    assert SALT.encode() not in saved.read_bytes()
    assert os.listdir(saved.parent) == [saved.name]


def test_saving_over_a_file_leaves_the_old_one_until_the_new_one_is_whole(saved: Path) -> None:
    old = saved.read_bytes()
    cache = Cache()
    cache.insert(1, 1, 2, 2)

    def read(place: int) -> np.ndarray:
        if place:
            raise BlockCorrupt(place)
        assert saved.read_bytes() == old
        return cache.store.read(place)

    with pytest.raises(BlockCorrupt):
        write_prefix_file(saved, IDENTITY, cache.index.known_blocks(), read)
    assert saved.read_bytes() == old
    assert os.listdir(saved.parent) == [saved.name]
    assert cache.save(saved) == 2
    assert info(saved).block_count == 2


@pytest.mark.parametrize("place", ["missing/cache", "", "file/cache"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrefixFileError, match=re.escape(str(tmp_path))):
        Cache().save(tmp_path / place)
    assert os.listdir(tmp_path) == ["file"]


def test_a_corrupt_block_is_forgotten_and_the_rest_saved(path: Path) -> None:
    cache = Cache()
    cache.insert(1, 1, 2, 2, 3, 3)
    cache.insert(4, 4)
    corrupt = cache.index.match(ROOT, ids(1, 1, 2, 2)).places[1]
    cache.store._memory[corrupt].reshape(-1)[3] ^= 1
    assert cache.save(path) == 2
    again = Cache()
    again.load(path)
    assert (again.holds(1, 1, 2, 2, 3, 3), again.holds(4, 4)) == (2, 2)


def test_a_file_cut_off_anywhere_is_refused_as_cut_off(saved: Path) -> None:
    whole = saved.read_bytes()
    cache = Cache()
    for length in range(len(whole)):
        saved.write_bytes(whole[:length])
        with pytest.raises(PrefixFileError, match="was cut off"):
            cache.load(saved)
        with pytest.raises(PrefixFileError, match="was cut off"):
            info(saved)
    assert cache.index.status()["blocks"] == 0
    assert cache.index._untouched == 0


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_a_changed_byte_anywhere_is_refused_and_nothing_of_the_file_kept(saved: Path, flip: int) -> None:
    whole = saved.read_bytes()
    cache = Cache()
    for where in range(len(whole)):
        saved.write_bytes(whole[:where] + bytes([whole[where] ^ flip]) + whole[where + 1 :])
        with pytest.raises(PrefixFileError, match=re.escape(str(saved))):
            cache.load(saved)
    assert cache.index.status()["blocks"] == 0
    assert cache.index._untouched == 0


def test_a_header_with_a_changed_byte_tells_nothing(saved: Path) -> None:
    whole = saved.read_bytes()
    for where in range(info(saved).start_bytes):
        saved.write_bytes(whole[:where] + bytes([whole[where] ^ 0x01]) + whole[where + 1 :])
        with pytest.raises(PrefixFileError):
            info(saved)


def test_bytes_behind_the_end_are_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    with pytest.raises(PrefixFileError, match="1 bytes follow its end"):
        Cache().load(saved)


@pytest.mark.parametrize("content", [b"{}", b"\x7fELF" + bytes(4_000), b"tandem prefix\n" + bytes(99)])
def test_a_foreign_file_is_called_no_cache(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for look in (info, Cache().load):
        with pytest.raises(PrefixFileError, match="is no saved prefix cache"):
            look(path)


def with_header(saved: Path, header: bytes, version: int = 1) -> None:
    """Exchange the header, digests and all, as a hostile writer would."""
    whole = saved.read_bytes()
    start = whole[:16] + struct.pack("<II", version, len(header)) + header
    body = start + xxhash.xxh3_128_digest(start) + whole[info(saved).start_bytes : -16]
    saved.write_bytes(body + xxhash.xxh3_128_digest(body))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"[" * 4_000,
        b"\xff\xfe",
        b'{"blocks": 4}',
        b'{"blocks": 4, "identity": []}',
        b'{"blocks": 4, "identity": {"model_id": "m"}}',
        b'{"blocks": ' + b"9" * 3_000 + b"}",
    ],
)
def test_a_header_that_says_something_else_is_called_foreign(saved: Path, header: bytes) -> None:
    with_header(saved, header)
    with pytest.raises(PrefixFileError, match="is no saved prefix cache"):
        info(saved)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"blocks": 4', b'"blocks": -1'),
        (b'"blocks": 4', b'"blocks": true'),
        (b'"blocks": 4', b'"blocks": 4.0'),
        (b'"blocks": 4', b'"blocks": 99999999999'),
        (b'"layers": 1', b'"layers": 0'),
        (b'"layers": 1', b'"layers": "1"'),
        (b'"row_bytes": 2', b'"row_bytes": 99999999999'),
        (b'"model_id": "m"', b'"model_id": 5'),
    ],
)
def test_a_number_beyond_its_limit_or_of_another_kind_is_refused(saved: Path, old: bytes, new: bytes) -> None:
    whole = saved.read_bytes()
    header = whole[24 : info(saved).start_bytes - 16]
    assert old in header
    with_header(saved, header.replace(old, new))
    with pytest.raises(PrefixFileError, match="is no saved prefix cache"):
        info(saved)


def test_more_blocks_than_the_file_has_bytes_for_are_refused_unread(saved: Path) -> None:
    header = saved.read_bytes()[24 : info(saved).start_bytes - 16]
    with_header(saved, header.replace(b'"blocks": 4', b'"blocks": 9999999'))
    with pytest.raises(PrefixFileError, match="was cut off"):
        Cache().load(saved)


def test_a_header_beyond_its_limit_is_refused_unread(saved: Path) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[:20] + struct.pack("<I", 2**32 - 1) + whole[24:])
    with pytest.raises(PrefixFileError, match=f"at most {HEADER_BYTES_MAX}"):
        info(saved)


def test_another_form_of_file_is_named_with_the_one_that_is_read(saved: Path) -> None:
    with_header(saved, b"{}\n", version=2)
    with pytest.raises(PrefixFileError, match="form 2 and this Tandem reads form 1"):
        info(saved)


@pytest.mark.parametrize("parent", [-2, 0, 1, 3, 2**62])
def test_a_block_that_continues_no_earlier_one_of_its_root_is_refused(saved: Path, parent: int) -> None:
    """As a hostile writer would do it: with all digests right. Block 0 is the salted one."""
    facts, whole = info(saved), bytearray(saved.read_bytes()[:-16])
    where = facts.start_bytes + facts.head_bytes + IDENTITY.block_bytes + 16
    whole[where : where + 8] = struct.pack("<q", parent)
    saved.write_bytes(bytes(whole) + xxhash.xxh3_128_digest(bytes(whole)))
    with pytest.raises(PrefixFileError, match="block 1 is not what was saved"):
        Cache().load(saved)


def test_kv_that_does_not_match_its_digest_is_refused_by_the_number_of_its_block(saved: Path) -> None:
    facts, whole = info(saved), bytearray(saved.read_bytes()[:-16])
    whole[-IDENTITY.block_bytes] ^= 1
    saved.write_bytes(bytes(whole) + xxhash.xxh3_128_digest(bytes(whole)))
    with pytest.raises(PrefixFileError, match=f"block {facts.block_count - 1} is not what was saved"):
        Cache().load(saved)


@pytest.mark.parametrize("name", ["model_id", "weights_digest", "dtype", "wire_form"])
def test_a_file_of_another_identity_is_refused_by_the_name_of_what_differs(saved: Path, name: str) -> None:
    cache = Cache(identity=replace(IDENTITY, **{name: "other"}))
    with pytest.raises(PrefixFileError, match=f"{name}: {getattr(IDENTITY, name)} in the file, other here"):
        cache.load(saved)


@pytest.mark.parametrize("name", ["layers", "row_bytes", "block_tokens"])
def test_a_file_of_another_geometry_is_refused_before_its_blocks_are_read(saved: Path, name: str) -> None:
    ours = replace(IDENTITY, **{name: 4})
    with pytest.raises(PrefixFileError, match=f"{name}: .* in the file, 4 here"):
        PrefixFile(saved, ours)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "no regular file"), ("", "no regular file"), ("gone", "No such file")):
        with pytest.raises(PrefixFileError, match=reason):
            info(tmp_path / name)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_change_is_refused(saved: Path, mode: int) -> None:
    saved.chmod(mode)
    with pytest.raises(PrefixFileError, match="chmod 600"):
        info(saved)


def test_all_refusals_are_the_operators_to_mend() -> None:
    assert issubclass(PrefixFileError, ConfigError)


def test_a_file_that_changes_while_it_is_loaded_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = replace(IDENTITY, row_bytes=2**18)  # more than the reader looks ahead
    root = identity.root()
    saved, cache = Cache(4, identity), Cache(4, identity)
    saved.insert(1, 1, 2, 2, root=root)
    saved.save(path)
    cache.insert(9, 9, root=root)
    write = cache.store.write

    def write_and_spoil(place: int, piece: np.ndarray) -> None:
        write(place, piece)
        path.write_bytes(bytes(path.stat().st_size))

    monkeypatch.setattr(cache.store, "write", write_and_spoil)
    with pytest.raises(PrefixFileError, match="changed while it was being read"):
        cache.load(path)
    assert (cache.holds(9, 9, root=root), cache.holds(1, 1, root=root)) == (2, 0)
    assert cache.index.status()["blocks"] == 1


def test_reading_holds_no_more_than_a_block_at_a_time(tmp_path: Path) -> None:
    identity = replace(IDENTITY, row_bytes=2**18)
    cache, again = Cache(16, identity), Cache(16, identity)
    cache.insert(*range(32), root=identity.root())
    cache.save(tmp_path / "large")
    size_bytes = (tmp_path / "large").stat().st_size
    assert size_bytes > 16 * 2**20
    tracemalloc.start()
    again.load(tmp_path / "large")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert again.holds(*range(32), root=identity.root()) == 32
    assert peak_bytes < 4 * 2**20
    shutil.rmtree(tmp_path)


def test_a_smaller_cache_takes_what_was_used_last(saved: Path) -> None:
    cache = Cache(places=3)
    assert cache.load(saved) == 3
    assert cache.holds(1, 1, root=IDENTITY.root(SALT)) == 2
    assert (cache.holds(1, 1, 3, 3), cache.holds(1, 1, 2, 2)) == (4, 2)


def test_what_was_used_last_before_is_evicted_last_after(saved: Path) -> None:
    cache = Cache(places=4)
    cache.load(saved)
    cache.insert(7, 7)
    assert (cache.holds(1, 1, 2, 2), cache.holds(1, 1, 3, 3)) == (2, 4)
    cache.insert(8, 8, 9, 9)
    assert cache.holds(1, 1, root=IDENTITY.root(SALT)) == 2
    assert cache.holds(1, 1, 3, 3) == 0
