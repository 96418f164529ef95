"""A daemon on a host that has less than this one, or does not share what it has.

`python -m tests.process.poor_host LACKS PROGRAM FLAGS` runs what `python -m PROGRAM FLAGS` would.

It decides what is taken away before the daemon's own `__main__` runs, in the daemon's process. Started by
`tests/process/test_tcp_elsewhere.py`. The product holds no trace of it. LACKS is a comma-separated list:

    shared-memory   there is nothing of the kind, as in some containers
    common-memory   /dev/shm is this process's own, as in a container of its own
    pinning         the system has no notion of CPUs that a process may use, as on macOS
"""

import _posixshmem
import ctypes
import errno
import os
import runpy
import sys
from typing import Any

CLONE_NEWNS = 0x00020000
MS_PRIVATE, MS_REC = 1 << 18, 1 << 14


def own_memory() -> None:
    """Give this process a /dev/shm of its own. Raises OSError where that is not permitted."""
    library = ctypes.CDLL(None, use_errno=True)
    for call in (
        lambda: library.unshare(CLONE_NEWNS),
        lambda: library.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: library.mount(b"own", b"/dev/shm", b"tmpfs", 0, None),
    ):
        if call() != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def may_own_memory() -> bool:
    """Whether this user may do so at all."""
    child = os.posix_spawn(sys.executable, [sys.executable, "-m", __name__, "probe"], dict(os.environ))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def take_away(lacks: str) -> None:
    """Change this process as LACKS says."""
    for lack in lacks.split(","):
        match lack:
            case "shared-memory":
                _posixshmem.shm_open = _nothing_of_the_kind
            case "common-memory":
                own_memory()
            case "pinning":
                del os.sched_setaffinity
                del os.sched_getaffinity
            case _:
                raise ValueError(f"{lack!r} cannot be taken away")


def _nothing_of_the_kind(*_: Any, **__: Any) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def main() -> None:
    """Take away, then be the daemon."""
    if sys.argv[1] == "probe":
        own_memory()
        return
    take_away(sys.argv[1])
    program = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
