"""A prefix cache as a file: saved, described, and restored.

Decides the form of the file and which files are refused. Used by both nodes and `scripts/cache.py`, where no
core steps meanwhile. A file is read to its end and believed before one block of it reaches a cache; it must
never be followed in a length that it states before that length was limited, nor keep a salt (only roots).
Its blocks tell what clients wrote: it is written for this user alone.

    magic (16 bytes), version, header length (uint32 little-endian each)
    header (one line of JSON: identity and block count), its digest with all before it
    per block: root (16), position of the block before it (int64, -1: none), token ids (int32 each),
               digest of the KV (16), KV in wire layout `[layer][2][token][kv_head][head_dim]`
    digest (16) of all before it

All digests are XXH3-128. A block stands behind the one that its chain continues.
"""

import json
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import numpy as np
import xxhash

from common.block_store import BlockCorrupt, BlockStore
from common.digests import PrefixIdentity
from common.errors import ConfigError, check
from common.prefix_index import BlockHead, KnownBlock, PrefixIndex

MAGIC: Final = b"tandem prefix\r\n\x1a"
VERSION: Final = 1
HEADER_BYTES_MAX: Final = 4_096
BLOCKS_MAX: Final = 2**24
_START: Final = struct.Struct("<16sII")
_DIGEST_BYTES: Final = 16
_PIECE_BYTES: Final = 2**20
_SYNC_BYTES: Final = 2**24


class PrefixFileError(ConfigError):
    """A file of a prefix cache cannot be used, or not be written; the text says why, and what would do."""


@dataclass(frozen=True, slots=True)
class PrefixFileInfo:
    """What the header of a file says. start_bytes: where its first block begins."""

    identity: PrefixIdentity
    block_count: int
    start_bytes: int

    @property
    def head_bytes(self) -> int:
        """Size of what stands before the KV of each block."""
        return _head(self.identity).size

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        block_bytes = self.head_bytes + self.identity.block_bytes
        return self.start_bytes + self.block_count * block_bytes + _DIGEST_BYTES


def info(path: Path) -> PrefixFileInfo:
    """Header facts, without a look at the blocks. Raises `PrefixFileError`."""
    with _open(path) as file:
        return _read_header(file, path)


class PrefixFile:
    """A file that was read to its end once and found whole; `heads` are its blocks without their KV.

    Holds the file open, the heads, and the KV of one block at a time.
    """

    def __init__(self, path: Path, identity: PrefixIdentity, *, in_pieces: bool = False) -> None:
        """Raises `PrefixFileError` for a file that is damaged, or of another identity.

        in_pieces: the caller drives `verify` to its end, before anything else.
        """
        self._path = path
        self._file = _open(path)
        self.heads: list[BlockHead] = []
        self._digests: list[bytes] = []
        try:
            self._info = _read_header(self._file, path)
            _compare(path, self._info.identity, identity)
            for _ in () if in_pieces else self.verify():
                continue
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def blocks(self, wanted: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
        """(position, KV as bytes) of the wanted blocks, each verified again; good until the next one.

        Raises `PrefixFileError` when the file has changed since it was opened.
        """
        kv = np.empty(self._info.identity.block_bytes, dtype=np.uint8)
        for position in sorted(wanted):
            stride = self._info.head_bytes + kv.nbytes
            self._file.seek(self._info.start_bytes + position * stride + self._info.head_bytes)
            if self._file.readinto(kv) != kv.nbytes or xxhash.xxh3_128_digest(kv) != self._digests[position]:
                raise PrefixFileError(f"{self._path}: changed while it was being read; load it again")
            yield position, kv

    def verify(self) -> Iterator[None]:
        """Read and compare everything, one block per `next`; takes `heads` and digests of all blocks."""
        self._file.seek(0)
        whole = xxhash.xxh3_128(self._file.read(self._info.start_bytes))
        form = _head(self._info.identity)
        for position in range(self._info.block_count):
            head = self._file.read(form.size)
            kv = xxhash.xxh3_128()
            whole.update(head)
            for piece in self._pieces(self._info.identity.block_bytes):
                whole.update(piece)
                kv.update(piece)
            if len(head) != form.size:
                raise _cut_off(self._path)
            root, parent, tokens, digest = form.unpack(head)
            well_placed = -1 <= parent < position and (parent < 0 or self.heads[parent].root == root)
            if kv.digest() != digest or not well_placed:
                raise _damaged(self._path, f"block {position} is not what was saved")
            self.heads.append(BlockHead(root, parent, tokens))
            self._digests.append(digest)
            yield
        if self._file.read(_DIGEST_BYTES + 1) != whole.digest():
            raise _damaged(self._path, "its digest does not match")

    def _pieces(self, size_bytes: int) -> Iterator[bytes]:
        while size_bytes:
            piece = self._file.read(min(size_bytes, _PIECE_BYTES))
            if not piece:
                raise _cut_off(self._path)
            size_bytes -= len(piece)
            yield piece


def writing_prefix_file(
    path: Path, identity: PrefixIdentity, blocks: Sequence[KnownBlock], read: Callable[[int], np.ndarray]
) -> Iterator[None]:
    """Write blocks, in the order of `PrefixIndex.known_blocks`, so that `path` is at once old or new.

    One block per `next`; closing the iterator leaves nothing behind. read: the verified KV of a place, as
    `BlockStore.read`. What it raises passes through, and `path` stays as it was. Raises `PrefixFileError`
    where the file cannot be written.
    """
    start = _start_of(identity, len(blocks))
    try:
        descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield from _write(file, start, identity, blocks, read)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from error
        raise
    _sync_directory(path.parent)


def write_prefix_file(
    path: Path, identity: PrefixIdentity, blocks: Sequence[KnownBlock], read: Callable[[int], np.ndarray]
) -> None:
    """`writing_prefix_file`, all at once."""
    for _ in writing_prefix_file(path, identity, blocks, read):
        continue


def save_prefix_cache(path: Path, identity: PrefixIdentity, index: PrefixIndex, store: BlockStore) -> int:
    """Save all blocks that may match; how many. Blocks that turn out corrupt are forgotten, not saved."""
    while True:
        blocks = index.known_blocks()
        try:
            write_prefix_file(path, identity, blocks, store.read)
            return len(blocks)
        except BlockCorrupt as error:
            index.forget(next(block.entry_id for block in blocks if block.place == error.place))


def load_prefix_cache(path: Path, identity: PrefixIdentity, index: PrefixIndex, store: BlockStore) -> int:
    """Load what there is room for, the most recently used first; how many blocks. All of it, or nothing."""
    check(store.block_bytes == identity.block_bytes, "a store for blocks of another size")
    with PrefixFile(path, identity) as file:
        planned = {
            position: order
            for position, order in enumerate(index.plan_restore(file.heads))
            if order is not None
        }
        entry_ids = [order.entry_id for order in planned.values()]
        try:
            for position, kv in file.blocks(planned):
                store.write(planned[position].place, kv.reshape(store.block_shape))
        except BaseException:
            for entry_id in entry_ids:
                index.abandon(entry_id)
            raise
    for entry_id in reversed(entry_ids):
        index.stored(entry_id)
    return len(entry_ids)


def _head(identity: PrefixIdentity) -> struct.Struct:
    return struct.Struct(f"<16sq{4 * identity.block_tokens}s{_DIGEST_BYTES}s")


def _start_of(identity: PrefixIdentity, block_count: int) -> bytes:
    """Everything before the first block."""
    header = json.dumps({"blocks": block_count, "identity": asdict(identity)}).encode() + b"\n"
    if len(header) > HEADER_BYTES_MAX or block_count > BLOCKS_MAX:
        raise PrefixFileError(
            f"{block_count} blocks, or so long names, do not fit one file of a prefix cache"
        )
    start = _START.pack(MAGIC, VERSION, len(header)) + header
    return start + xxhash.xxh3_128_digest(start)


def _write(
    file: BinaryIO,
    start: bytes,
    identity: PrefixIdentity,
    blocks: Sequence[KnownBlock],
    read: Callable[[int], np.ndarray],
) -> Iterator[None]:
    whole = xxhash.xxh3_128(start)
    file.write(start)
    form = _head(identity)
    blocks_to_sync = max(1, _SYNC_BYTES // identity.block_bytes)
    for number, block in enumerate(blocks, start=1):
        kv = read(block.place)
        head = form.pack(block.head.root, block.head.parent, block.head.tokens, xxhash.xxh3_128_digest(kv))
        for part in (head, kv):
            whole.update(part)
            file.write(part)
        if number % blocks_to_sync == 0:
            # So that the last one, which everything waits for, has little left to do.
            file.flush()
            os.fsync(file.fileno())
        yield
    file.write(whole.digest())


def _sync_directory(path: Path) -> None:
    """Make the new name last through a power cut, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open(path: Path) -> BinaryIO:
    """The file, if only this user can have written it. A named pipe is refused, not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise PrefixFileError(f"{path}: {error.strerror}; name a file that was saved before") from error
    found = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = "is no regular file; name one that was saved before"
    elif found.st_uid != os.getuid():
        problem = "belongs to another user; save one as this user"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "can be changed by others; chmod 600 it if it is yours"
    if problem is not None:
        os.close(descriptor)
        raise PrefixFileError(f"{path}: {problem}")
    return os.fdopen(descriptor, "rb")


def _read_header(file: BinaryIO, path: Path) -> PrefixFileInfo:
    """The header, held against its digest and the size of the file."""
    start = file.read(_START.size)
    foreign = PrefixFileError(
        f"{path}: is no saved prefix cache of Tandem; name a file that was saved before"
    )
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise foreign
    if len(start) < _START.size:
        raise _cut_off(path)
    _, version, header_bytes = _START.unpack(start)
    if version != VERSION:
        raise PrefixFileError(
            f"{path}: has form {version} and this Tandem reads form {VERSION}; load it with the version that"
            " saved it, or save a new one"
        )
    if header_bytes > HEADER_BYTES_MAX:
        raise _damaged(path, f"a header of {header_bytes} bytes; at most {HEADER_BYTES_MAX} are written")
    header, digest = file.read(header_bytes), file.read(_DIGEST_BYTES)
    if len(digest) < _DIGEST_BYTES:
        raise _cut_off(path)
    if digest != xxhash.xxh3_128_digest(start + header):
        raise _damaged(path, "the digest of its header does not match")
    found = _parse(header, file.tell())
    if found is None:
        raise foreign
    size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes < found.size_bytes:
        raise _cut_off(path, f"{size_bytes} of {found.size_bytes} bytes are there")
    if size_bytes > found.size_bytes:
        raise _damaged(path, f"{size_bytes - found.size_bytes} bytes follow its end")
    return found


def _parse(header: bytes, start_bytes: int) -> PrefixFileInfo | None:
    """A header's facts; None when it does not say exactly what headers say."""
    try:
        plain: Any = json.loads(header)
        identity = PrefixIdentity(**plain["identity"])
        count = plain["blocks"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    values = [(getattr(identity, field.name), field.type) for field in fields(identity)]
    numbers = [count, *(value for value, kind in values if kind is int)]
    texts = [value for value, kind in values if kind is str]
    if not all(type(number) is int for number in numbers) or not all(type(text) is str for text in texts):
        return None
    sizes = numbers[1:]
    if not 0 <= count <= BLOCKS_MAX or not all(1 <= size < 2**31 for size in sizes):
        return None
    return PrefixFileInfo(identity, count, start_bytes)


def _compare(path: Path, theirs: PrefixIdentity, ours: PrefixIdentity) -> None:
    differences = [
        f"{field.name}: {getattr(theirs, field.name)} in the file, {getattr(ours, field.name)} here"
        for field in fields(ours)
        if getattr(theirs, field.name) != getattr(ours, field.name)
    ]
    if differences:
        raise PrefixFileError(
            f"{path}: was saved by another kind of node ({'; '.join(differences)}); start this one with the"
            " same model, --dtype and block size, or save a new file"
        )


def _cut_off(path: Path, detail: str = "it ends too early") -> PrefixFileError:
    return PrefixFileError(f"{path}: was cut off: {detail}; copy it again, or save a new one")


def _damaged(path: Path, detail: str) -> PrefixFileError:
    return PrefixFileError(f"{path}: is damaged: {detail}; copy it again, or save a new one")


def _unwritable(path: Path, error: OSError) -> PrefixFileError:
    return PrefixFileError(
        f"{path}: cannot be written: {error.strerror}; name a place with room, of this user"
    )
