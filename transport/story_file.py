"""Where the story of a broken node goes.

Decides the directory, the name and the protection of the file, and how many are kept. Called by
`transport.daemon` once, on its way out. It must never follow a link, overwrite a file, or fill a disk when a
supervisor starts a node again and again that breaks at once.
"""

import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from common.errors import ConfigError
from transport.launch.run_directory import runtime_directory

KEPT_STORIES: Final = 8
_PREFIX: Final = "story-"


def story_directory(asked: str | None) -> Path:
    """The directory asked for, else the one in which pairs run, else the system's for temporary files."""
    if asked is not None:
        return Path(asked)
    try:
        return runtime_directory()
    except ConfigError:
        return Path(tempfile.gettempdir())


def write_story(directory: Path, role: str, incarnation: str, lines: Iterable[str]) -> Path:
    """Write a file for this user alone; the newest `KEPT_STORIES` of the role stay. Raises OSError."""
    path = directory / f"{_PREFIX}{role}-{incarnation}.jsonl"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(lines)
    # The story is there; that older ones stay is no failure of it.
    with suppress(OSError):
        _remove_oldest(directory, role)
    return path


def _remove_oldest(directory: Path, role: str) -> None:
    own: list[tuple[int, Path]] = []
    for path in directory.glob(f"{_PREFIX}{role}-*.jsonl"):
        # Another node of the role may be tidying up as well.
        with suppress(FileNotFoundError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
                own.append((found.st_mtime_ns, path))
    for _, path in sorted(own, reverse=True)[KEPT_STORIES:]:
        path.unlink(missing_ok=True)
