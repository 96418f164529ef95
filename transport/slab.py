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
_NAME = re.compile(_PREFIX + "[0-9a-f]{24}")
_DIRECTORY = Path("/dev/shm")
_FENCE_LOCK = threading.Lock()


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


class _Mapping:
    """The mapped object, cut into epoch words and slots; base of both sides."""

    def __init__(self, descriptor: int, slot_count: int, slot_bytes: int, protection: int) -> None:
        self.slot_count = slot_count
        self.slot_bytes = slot_bytes
        header_bytes = _padded(slot_count * _HEADER_BYTES)
        self.size_bytes = header_bytes + slot_count * _padded(slot_bytes)
        self._map = mmap.mmap(descriptor, self.size_bytes, mmap.MAP_SHARED, protection)
        words = np.frombuffer(self._map, dtype=np.uint64, count=slot_count * _HEADER_BYTES // 8)
        self._epochs = words[:: _HEADER_BYTES // 8]
        view = memoryview(self._map)
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
    """The prefill node's side: creates the object, owns its name, writes."""

    def __init__(self, slot_count: int, slot_bytes: int) -> None:
        """Reserve and touch the whole slab. Raises `ConfigError` when the host has no room for it."""
        self.name, self._descriptor = _create()
        try:
            size_bytes = _padded(slot_count * _HEADER_BYTES) + slot_count * _padded(slot_bytes)
            _reserve(self._descriptor, size_bytes, slot_count)
            super().__init__(self._descriptor, slot_count, slot_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
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
        try:
            _posixshmem.shm_unlink(self.name)
        except FileNotFoundError:
            return


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
            if os.fstat(descriptor).st_size < _padded(slot_count * _HEADER_BYTES) + slot_count * _padded(
                slot_bytes
            ):
                raise ConfigError(f"the shared memory {name} is smaller than the prefill node said")
            super().__init__(descriptor, slot_count, slot_bytes, mmap.PROT_READ)
        finally:
            os.close(descriptor)


def _create() -> tuple[str, int]:
    """A new object and a descriptor that holds its lock, which tells `remove_stale_slabs` that it is in use.

    Between the two a cleaner may take it for stale; what it took is given up and another one made.
    """
    while True:
        name = _PREFIX + secrets.token_hex(12)
        try:
            descriptor = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        except OSError as error:
            raise ConfigError(f"no shared memory can be made in /dev/shm: {error.strerror}") from error
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
    for path in sorted(_DIRECTORY.glob(_PREFIX[1:] + "[0-9a-f]" * 24)):
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
