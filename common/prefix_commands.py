"""What a core and its compute thread say to each other about the prefix cache, on either node.

Decides nothing: frozen values. The index in the core says what is copied where; the store on the compute
thread has the bytes, which never appear here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Store:
    """Copy KV of the block from `start_tokens` on to `place`; answered once, as stored or abandoned."""

    entry_id: int
    place: int
    start_tokens: int


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """Compute: copy blocks out of a slot or lane, before it is written anew; answered by BlocksStored.

    Of a lane each block is answered by itself, as soon as it may be found.
    """

    holder: int
    stores: tuple[Store, ...]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These blocks are in the prefix cache, by entry, and those could not be copied."""

    stored: tuple[int, ...]
    abandoned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A block outside of an index. parent: where in the same list the block before it stands; -1: none."""

    root: bytes
    parent: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class KnownBlock:
    """A block of an index that may be saved."""

    head: BlockHead
    entry_id: int
    place: int


@dataclass(frozen=True, slots=True)
class WriteCacheFile:
    """Compute: save blocks, whose places nobody writes meanwhile; answered by CacheFileEnded."""

    name: str
    blocks: tuple[KnownBlock, ...]


@dataclass(frozen=True, slots=True)
class ReadCacheFile:
    """Compute: verify a saved cache; answered by CacheHeadsRead, or by CacheFileEnded with a problem."""

    name: str


@dataclass(frozen=True, slots=True)
class RestoreBlocks:
    """Compute: copy blocks of the file that was just read to places, by their position there.

    Answered by CacheFileEnded.
    """

    stores: tuple[tuple[int, Store], ...]


@dataclass(frozen=True, slots=True)
class CacheHeadsRead:
    """A saved cache is whole; these are its blocks."""

    heads: tuple[BlockHead, ...]


@dataclass(frozen=True, slots=True)
class CacheFileEnded:
    """A save or a load is over; nothing of a file with a problem was used.

    path, size_bytes: of the file. corrupt_place: a place that does not hold what was put there; nothing was
    saved.
    """

    path: str
    size_bytes: int = 0
    problem: str | None = None
    corrupt_place: int | None = None
