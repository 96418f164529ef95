"""The file of API keys.

Decides its form (one key on each line, `#` begins a comment) and that nobody else may read it. Read at start,
before anything heavy is loaded; a change counts after a restart. A key must never be logged or shown.
"""

import hashlib
import os
import stat
from pathlib import Path

from common import limits
from common.errors import ConfigError


def read_api_keys(path: str) -> tuple[bytes, ...]:
    """Digests of the keys in a file, one on each line. Raises `ConfigError`."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limits.KEY_FILE_BYTES:
            raise ConfigError(f"--api-key-file: {path} is no file of keys, one on each line")
        if found.st_mode & 0o077:
            raise ConfigError(f"--api-key-file: {path} can be read by others: chmod 600 {path}")
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file: {path} is no text file") from None
    except OSError as error:
        raise ConfigError(f"--api-key-file: cannot read {path}: {error.strerror}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file: {path} has no keys; write one on each line")
    return tuple(digest_of(key.encode()) for key in keys)


def digest_of(key: bytes) -> bytes:
    """What keys are compared by: of one length, whatever theirs is."""
    return hashlib.sha256(key).digest()
