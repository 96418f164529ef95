"""The files of the prefix cache, on the compute thread: written and read one block at a time.

Decides only where a file lies and how far the work goes in one piece, so that decode steps fit between; the
form is `common.prefix_file`'s. Used by the compute thread alone. It must never write a place of the store
before the whole file was verified, and leaves no unfinished file behind.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.block_store import BlockCorrupt, BlockStore
from common.digests import PrefixIdentity
from common.prefix_commands import (
    CacheFileEnded,
    CacheHeadsRead,
    ReadCacheFile,
    RestoreBlocks,
    WriteCacheFile,
)
from common.prefix_file import PrefixFile, PrefixFileError, writing_prefix_file

FILE_COMMANDS = (WriteCacheFile, ReadCacheFile, RestoreBlocks)


class CacheFiles:
    """One file at a time. answer: takes the events that `common.prefix_commands` promises."""

    def __init__(
        self,
        store: BlockStore,
        identity: PrefixIdentity,
        directory: str | None,
        answer: Callable[[Any], None],
    ) -> None:
        self._store = store
        self._identity = identity
        self._directory = Path(directory or ".")
        self._answer = answer
        self._path = self._directory
        self._file: PrefixFile | None = None
        self._work: Iterator[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is a piece to do."""
        return self._work is not None

    def start(self, command: WriteCacheFile | ReadCacheFile | RestoreBlocks) -> None:
        """Take a command; `work` carries it out."""
        match command:
            case WriteCacheFile():
                self._work = self._write(command)
            case ReadCacheFile():
                self._work = self._read(command)
            case RestoreBlocks():
                self._work = self._restore(command)

    def work(self) -> None:
        """Do one piece."""
        try:
            next(self._work)
            return
        except StopIteration:
            self._work = None
        except BlockCorrupt as error:
            self._end(CacheFileEnded(str(self._path), corrupt_place=error.place))
        except (PrefixFileError, OSError) as error:
            self._end(CacheFileEnded(str(self._path), problem=str(error)))

    def close(self) -> None:
        """The thread ends: whatever is unfinished is dropped."""
        if self._work is not None:
            self._work.close()
            self._work = None
        self._close_file()

    def _end(self, event: CacheFileEnded) -> None:
        self._work = None
        self._close_file()
        self._answer(event)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.__exit__()
            self._file = None

    def _write(self, command: WriteCacheFile) -> Iterator[None]:
        self._path = self._directory / command.name
        yield from writing_prefix_file(self._path, self._identity, command.blocks, self._store.read)
        self._ended_well()

    def _read(self, command: ReadCacheFile) -> Iterator[None]:
        self._path = self._directory / command.name
        self._file = PrefixFile(self._path, self._identity, in_pieces=True)
        yield from self._file.verify()
        self._answer(CacheHeadsRead(tuple(self._file.heads)))

    def _restore(self, command: RestoreBlocks) -> Iterator[None]:
        planned = dict(command.stores)
        for position, kv in self._file.blocks(planned):
            self._store.write(planned[position].place, kv.reshape(self._store.block_shape))
            yield
        self._ended_well()

    def _ended_well(self) -> None:
        self._close_file()
        self._answer(CacheFileEnded(str(self._path), self._path.stat().st_size))
