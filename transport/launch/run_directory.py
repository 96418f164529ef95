"""Where a pair's sockets and logs are, and which pairs are running.

Decides the runtime directory of a user, the private directory of each pair in it, and what becomes of those
whose launcher has died. Used by `transport/launch/pair.py` and, to find a running pair, by the scripts.
A pair is alive while its launcher holds the lock of its directory, so no process id is ever trusted. It must
never remove a socket that a daemon still listens on.
"""

import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from transport.zmq_sockets import IpcLock

KEPT_LOGS = 5
_LOCK = "lock"
_ANNOUNCEMENT = "pair.json"


@dataclass(frozen=True, slots=True)
class RunningPair:
    """A pair that accepts jobs, as its launcher announced it."""

    decode_endpoint: str
    prefill_endpoint: str
    model: str


def runtime_directory() -> Path:
    """`tandem` in XDG_RUNTIME_DIR, else a directory of the user's own in /tmp; made if it is not there.

    Raises ConfigError when it cannot be made or is not this user's alone.
    """
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(base) / "tandem"
    else:
        path = Path("/tmp") / f"tandem-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot use {path}: {error.strerror}; set XDG_RUNTIME_DIR to a directory of yours"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} must be a directory that only you can use: remove it, or set XDG_RUNTIME_DIR to another"
        )
    return path


def running_pairs() -> list[RunningPair]:
    """Pairs of this user that have announced themselves and whose launcher is alive."""
    base = runtime_directory()
    with _one_process(base):
        alive = [path for path in sorted(base.glob("pair-*")) if _is_held(path)]
        announcements = [path / _ANNOUNCEMENT for path in alive if (path / _ANNOUNCEMENT).exists()]
        return [RunningPair(**json.loads(path.read_text(encoding="utf-8"))) for path in announcements]


def only_running_pair(choice: Callable[[RunningPair], str]) -> RunningPair | None:
    """The pair that runs, if any does. Raises ConfigError, with a line for each, when there are more."""
    pairs = running_pairs()
    if len(pairs) > 1:
        choices = "\n".join(f"  {choice(pair)}" for pair in pairs)
        raise ConfigError(f"{len(pairs)} pairs are running; say which one:\n{choices}")
    return pairs[0] if pairs else None


class RunDirectory:
    """The directory of one pair, held until `close`, which leaves the logs alone."""

    def __init__(self) -> None:
        """Make it, and tidy up after pairs that were killed. Raises ConfigError."""
        base = runtime_directory()
        with _one_process(base):
            _remove_leftovers(base)
            self.path = Path(tempfile.mkdtemp(prefix="pair-", dir=base))
            self._lock = (self.path / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def endpoint(self, node: str) -> str:
        """An address in this directory that nobody else has."""
        return f"ipc://{self.path / node}.sock"

    def announce(self, pair: RunningPair) -> None:
        """Let clients find the pair."""
        draft = self.path / "draft"
        text = {name: getattr(pair, name) for name in RunningPair.__slots__}
        draft.write_text(json.dumps(text), encoding="utf-8")
        draft.rename(self.path / _ANNOUNCEMENT)

    def close(self) -> None:
        """Remove all but the logs."""
        if not self._lock.closed:
            _remove_sockets(self.path)
            for name in (_ANNOUNCEMENT, _LOCK):
                (self.path / name).unlink(missing_ok=True)
            self._lock.close()


def remove_socket(endpoint: str) -> bool:
    """Remove the socket file of a killed daemon at an `ipc://` endpoint; False if one listens there."""
    if endpoint.startswith("ipc://"):
        try:
            IpcLock(endpoint.removeprefix("ipc://")).release()
        except ConfigError:
            return False
    return True


@contextmanager
def _one_process(base: Path) -> Iterator[None]:
    """Two launchers must not tidy up, or judge each other, at the same time."""
    with (base / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_held(directory: Path) -> bool:
    try:
        with (directory / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _remove_sockets(directory: Path) -> bool:
    """Remove socket files without a daemon; False if a daemon listens on one of them."""
    sockets = {directory / path.name.removesuffix(".lock") for path in directory.glob("*.sock*")}
    unused = [remove_socket(f"ipc://{path}") for path in sockets]
    return all(unused)


def _remove_leftovers(base: Path) -> None:
    """Tidy the directories of pairs whose launcher is gone; the newest keep their logs."""
    over = [path for path in base.glob("pair-*") if not _is_held(path)]
    over.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for age, path in enumerate(over):
        if not _remove_sockets(path):
            continue  # its launcher was killed, its daemons are still draining
        (path / _ANNOUNCEMENT).unlink(missing_ok=True)
        if age >= KEPT_LOGS:
            shutil.rmtree(path)
