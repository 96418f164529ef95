"""The shared-memory data plane: one slab of source slots.

Decides how the slab is created, found, fenced and cleaned up. The prefill node creates it and writes; a
decode node of the same host maps it read-only and copies out. Must never be unlinked by a reader, and a
reader must never trust bytes whose epoch word it has not compared after its copy.

Layout: one 64-byte header per slot (the epoch as an aligned 64-bit word), padded to a page; then the slots,
each padded to a page. The object is opened with shm_open and mmap rather than
`multiprocessing.shared_memory`, whose attaching side unlinks it at exit on Python 3.11.
"""

import _posixshmem
import fcntl
import mmap
import os
import re
import secrets
import threading
from pathlib import Path

import numpy as np

from common.errors import ConfigError

_HEADER_BYTES = 64
_PREFIX = "/tandem-"
# With the prefix 30 characters: macOS takes no longer names.
_NAME_BYTES = 11
_NAME = re.compile(_PREFIX + "[0-9a-f]{22}")
_DIRECTORY = Path("/dev/shm")
_FENCE_LOCK = threading.Lock()


class NoSharedMemory(ConfigError):
    """The host, or the container, has no shared memory at all."""


def _fence() -> None:
    """Order every memory access before this call before every access after it.

    A seqlock needs a full fence and Python offers none. Two lock round trips give one: accesses may move into
    a critical section but not out of it, and the release of the first is ordered before the acquire of the
    second.
    """
    for _ in range(2):
        _FENCE_LOCK.acquire()
        _FENCE_LOCK.release()


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _slab_bytes(slot_count: int, slot_bytes: int) -> int:
    return _padded(slot_count * _HEADER_BYTES) + slot_count * _padded(slot_bytes)


class _Mapping:
    """The mapped object, cut into epoch words and slots; base of both sides."""

    def __init__(self, memory: mmap.mmap, slot_count: int, slot_bytes: int) -> None:
        self.slot_count = slot_count
        self.slot_bytes = slot_bytes
        self.size_bytes = len(memory)
        header_bytes = _padded(slot_count * _HEADER_BYTES)
        words = np.frombuffer(memory, dtype=np.uint64, count=slot_count * _HEADER_BYTES // 8)
        self._epochs = words[:: _HEADER_BYTES // 8]
        view = memoryview(memory)
        starts = [header_bytes + index * _padded(slot_bytes) for index in range(slot_count)]
        self._slots = [view[start : start + slot_bytes] for start in starts]

    def slot(self, index: int) -> memoryview:
        """The payload of one slot."""
        return self._slots[index]

    def epoch(self, index: int) -> int:
        """The epoch word, read after every earlier access of this thread."""
        _fence()
        return int(self._epochs[index])


class Slab(_Mapping):
    """The prefill node's side: creates the object, owns its name, writes. `name` is None when not shared."""

    def __init__(self, slot_count: int, slot_bytes: int, shared: bool = True) -> None:
        """Reserve and touch the whole slab. Raises `ConfigError` when the host has no room for it.

        shared: whether other processes can map it; memory of the process alone otherwise. Raises
        `NoSharedMemory` where there is nothing of the kind.
        """
        size_bytes = _slab_bytes(slot_count, slot_bytes)
        self.name: str | None = None
        if not shared:
            super().__init__(mmap.mmap(-1, size_bytes), slot_count, slot_bytes)
            return
        self.name, self._descriptor = _create()
        try:
            _reserve(self._descriptor, size_bytes, slot_count)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            memory = mmap.mmap(self._descriptor, size_bytes, mmap.MAP_SHARED, protection)
            super().__init__(memory, slot_count, slot_bytes)
        except BaseException:
            self.unlink()
            os.close(self._descriptor)
            raise

    def begin(self, index: int, epoch: int) -> None:
        """Give the slot to a new production, before its first byte is written."""
        self._epochs[index] = epoch
        _fence()

    def unlink(self) -> None:
        """Remove the name. Mappings of readers stay valid until they let go."""
        if self.name is not None:
            _unlink(self.name)


class SlabView(_Mapping):
    """A decode node's side: read-only, and kept for as long as one of its slots is being read."""

    def __init__(self, name: str, slot_count: int, slot_bytes: int) -> None:
        """Map an existing slab. Raises `ConfigError` with the usual causes when it cannot."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name[:64]!r} is not the name of a slab")
        try:
            descriptor = _posixshmem.shm_open(name, os.O_RDONLY, mode=0)
        except OSError as error:
            raise ConfigError(
                f"the prefill node's shared memory {name} cannot be opened ({error.strerror}): both"
                " nodes must run on one host as one user and share /dev/shm (containers: the same --ipc)"
            ) from error
        try:
            size_bytes = _slab_bytes(slot_count, slot_bytes)
            if os.fstat(descriptor).st_size < size_bytes:
                raise ConfigError(f"the shared memory {name} is smaller than the prefill node said")
            memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            super().__init__(memory, slot_count, slot_bytes)
        finally:
            os.close(descriptor)


class MemoryProbe:
    """A shared memory object that exists while a HELLO is on its way: who finds it shares our memory.

    Its name cannot be guessed, so that finding it is the proof; an address would not be one.
    """

    def __init__(self) -> None:
        self.name = _new_name()
        self._descriptor: int | None = None

    def show(self) -> None:
        """From now on it can be found, where there is shared memory."""
        if self._descriptor is None:
            try:
                _, self._descriptor = _create(self.name)
            except NoSharedMemory:
                return

    def hide(self) -> None:
        """The HELLO was answered, or will not be."""
        if self._descriptor is not None:
            _unlink(self.name)
            os.close(self._descriptor)
            self._descriptor = None


def memory_is_shared(probe: str) -> bool:
    """Whether the process that shows this probe shares memory with us."""
    if not _NAME.fullmatch(probe):
        return False
    try:
        os.close(_posixshmem.shm_open(probe, os.O_RDONLY, mode=0))
    except OSError:
        return False
    return True


def _new_name() -> str:
    return _PREFIX + secrets.token_hex(_NAME_BYTES)


def _unlink(name: str) -> None:
    try:
        _posixshmem.shm_unlink(name)
    except FileNotFoundError:
        return


def _create(name: str | None = None) -> tuple[str, int]:
    """A new object and a descriptor that holds its lock, which tells `remove_stale_slabs` that it is in use.

    Between the two a cleaner may take it for stale; what it took is given up and another one made.
    """
    given = name
    while True:
        name = given or _new_name()
        try:
            descriptor = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        except OSError as error:
            raise NoSharedMemory(
                f"no shared memory can be made in /dev/shm ({error.strerror}): let --kv-plane be tcp or auto"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)  # a cleaner holds it and is about to remove it
            continue
        if os.fstat(descriptor).st_nlink > 0:
            return name, descriptor
        os.close(descriptor)


def _reserve(descriptor: int, size_bytes: int, slot_count: int) -> None:
    """Take every page now: a page that is missing later would be a SIGBUS in the middle of a prefill."""
    try:
        os.ftruncate(descriptor, size_bytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        room_bytes = os.fstatvfs(descriptor).f_bavail * os.fstatvfs(descriptor).f_frsize
        raise ConfigError(
            f"the slab needs {size_bytes / 2**20:.0f} MiB of shared memory but {room_bytes / 2**20:.0f} MiB"
            f" are free in /dev/shm ({error.strerror}): lower --source-slots (now {slot_count}) or"
            " --max-tokens, or enlarge it (containers: --shm-size)"
        ) from error


def remove_stale_slabs() -> list[str]:
    """Unlink slabs whose creator has died, and name them. A live creator holds a lock on its slab."""
    removed = []
    for path in sorted(_DIRECTORY.glob(_PREFIX[1:] + "[0-9a-f]" * 2 * _NAME_BYTES)):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or just gone
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except OSError:
            continue  # its creator lives, or it is not ours to remove
        finally:
            os.close(descriptor)
    return removed
