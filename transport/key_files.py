"""Key pairs as files: how they are made, read, and kept from others.

Decides the form of a key file (one line: kind, key, name), where keys lie, and which files are refused.
Called by the nodes before anything heavy is loaded, by clients, and by `scripts/keys.py`. A secret key must
never be printed, logged, or accepted from a file that somebody else owns or can read; a public key is no
secret, but a list of them that others can change is refused, because it says who may connect.
"""

import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from common import limits
from common.clock import now_ms
from common.errors import ConfigError

SECRET_SUFFIX = ".key"
PUBLIC_SUFFIX = ".pub"
_SECRET = "tandem-secret-key"
_PUBLIC = "tandem-public-key"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_CHARACTERS = 40
_RECHECK_MS = 1_000


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One node's or client's own keys, as 40 characters of Z85 each; `repr` leaves the secret out."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What the connecting side needs: its own pair, and the public key of the peer it means to reach."""

    own: KeyPair
    server: bytes


class AllowedKeys:
    """Names by public key (32 bytes) of those who may connect; a change of the files counts within a second.

    The node's own key is always among them: whoever has its secret is the node.
    """

    def __init__(self, path: Path, own: KeyPair) -> None:
        """path: a file with a key on each line, or a directory of `.pub` files. Raises `ConfigError`."""
        self._path = path
        self._own = z85.decode(own.public)
        self._state = _state_of(path)
        self._names = read_public_keys(path)
        self._checked_ms = now_ms()

    def names(self) -> dict[bytes, str]:
        """Raises `ConfigError` while the list cannot be read: nobody is let in by a list of yesterday."""
        if now_ms() - self._checked_ms >= _RECHECK_MS:
            state = _state_of(self._path)
            if state != self._state:
                self._names, self._state = read_public_keys(self._path), state
            self._checked_ms = now_ms()
        return {**self._names, self._own: "this node itself"}


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the binding side needs: its own pair, and who may connect."""

    own: KeyPair
    allowed: AllowedKeys


def listening_keys(key_file: str | None, allowed_keys: str | None) -> ServerKeys | None:
    """Keys of a binding side from the paths that a person gave, None without. Raises `ConfigError`."""
    if key_file is None or allowed_keys is None:
        return None
    own = read_key_pair(Path(key_file))
    return ServerKeys(own, AllowedKeys(Path(allowed_keys), own))


def connecting_keys(key_file: str | None, server_key: str | None) -> ClientKeys | None:
    """Keys of a connecting side from the paths that a person gave, None without. Raises `ConfigError`."""
    if key_file is None or server_key is None:
        return None
    return ClientKeys(read_key_pair(Path(key_file)), read_public_key(Path(server_key)))


def default_directory() -> Path:
    """Where keys are made and looked for when no directory is named."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "tandem" / "keys"


def make_key_pair(name: str, directory: Path) -> tuple[Path, Path]:
    """Make NAME.key (mode 0600) and NAME.pub in a directory of mode 0700. Raises `ConfigError`.

    Nothing that exists is overwritten.
    """
    check_curve()
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a key: use letters, digits, dots and dashes, at most 64")
    _make_private(directory)
    secret_path, public_path = directory / (name + SECRET_SUFFIX), directory / (name + PUBLIC_SUFFIX)
    for path in (secret_path, public_path):
        if path.exists():
            raise ConfigError(f"{path} exists and is left alone: choose another name, or move it away first")
    public, secret = zmq.curve_keypair()
    _write_new(secret_path, f"{_SECRET} {secret.decode()} {name}\n", 0o600)
    _write_new(public_path, f"{_PUBLIC} {public.decode()} {name}\n", 0o644)
    return secret_path, public_path


def allow_key(source: Path, directory: Path) -> Path:
    """Copy a public key file into a directory of allowed ones; the copy. Raises `ConfigError`."""
    key = read_public_key(source)
    _make_private(directory)
    copy = directory / source.with_suffix(PUBLIC_SUFFIX).name
    if copy.exists():
        if read_public_key(copy) == key:
            return copy
        raise ConfigError(f"{copy} holds another key: remove it first, or rename {source.name}")
    _write_new(copy, source.read_text(encoding="utf-8"), 0o644)
    return copy


def read_key_pair(path: Path) -> KeyPair:
    """The pair of a secret key file. Raises `ConfigError`, also when others own it or can read it."""
    check_curve()
    found = _file_status(path)
    _check_owner(path, found, "is a secret key")
    mode = found.st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"{path} is a secret key and others can read it (mode {mode:04o}): chmod 600 {path}; if they may"
            " have read it, make another one"
        )
    lines = _lines(path)
    if len(lines) != 1:
        raise ConfigError(f"{path} must hold one line, as NAME.key of scripts/keys.py make does")
    secret, _ = _key_of(lines[0], _SECRET, path)
    return KeyPair(zmq.curve_public(secret), secret)


def read_public_key(path: Path) -> bytes:
    """The one key, as 40 characters of Z85, of a public key file. Raises `ConfigError`."""
    check_curve()
    lines = _lines(path)
    if len(lines) != 1:
        raise ConfigError(f"{path} must hold one line, as NAME.pub of scripts/keys.py make does")
    return _key_of(lines[0], _PUBLIC, path)[0]


def read_public_keys(path: Path) -> dict[bytes, str]:
    """Names by key (32 bytes) of a file with a key on each line, or of a directory of `.pub` files.

    Raises `ConfigError`, also when others can change the list. An empty list is legal: nobody may connect.
    """
    check_curve()
    names: dict[bytes, str] = {}
    files, directory = (_public_files(path), path) if path.is_dir() else ([path], path.parent)
    for part in (*files, directory):
        found = _stat(part)
        _check_owner(part, found, "says who may connect")
        # Above a single file the sticky bit will do, as in /tmp: it keeps others from replacing the file.
        sticky = part != path and found.st_mode & stat.S_ISVTX
        if found.st_mode & 0o022 and not sticky:
            raise ConfigError(f"{part} says who may connect and others can change it: chmod go-w {part}")
    for part in files:
        for line in _lines(part):
            key, name = _key_of(line, _PUBLIC, part)
            names[z85.decode(key)] = name or part.stem
    if len(names) > limits.ALLOWED_KEYS:
        raise ConfigError(f"{path} lists {len(names)} keys; at most {limits.ALLOWED_KEYS} are read")
    return names


def check_curve() -> None:
    """Raise `ConfigError` when the installed libzmq cannot encrypt."""
    if not zmq.has("curve"):
        raise ConfigError(
            "keys need a libzmq with CURVE, and the installed one was built without it:"
            " install pyzmq from its wheel (pip install --force-reinstall --only-binary :all: pyzmq)"
        )


def _public_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*" + PUBLIC_SUFFIX))


def _state_of(path: Path) -> list[tuple[str, int, int]]:
    """What changes whenever the list does."""
    parts = [path, *_public_files(path)] if path.is_dir() else [path]
    found = [(part.name, _stat(part)) for part in parts]
    return [(name, status.st_mtime_ns, status.st_size) for name, status in found]


def _key_of(line: str, kind: str, path: Path) -> tuple[bytes, str]:
    """Key and name of a line. No error repeats the line: it may be a secret."""
    words = line.split(maxsplit=2)
    if len(words) >= 2 and words[0] in (_SECRET, _PUBLIC) and words[0] != kind:
        right, wrong = (PUBLIC_SUFFIX, SECRET_SUFFIX) if kind == _PUBLIC else (SECRET_SUFFIX, PUBLIC_SUFFIX)
        raise ConfigError(f"{path}: a {right} file is needed here, and this is a {wrong} file")
    if len(words) < 2 or words[0] != kind or not _is_key(words[1]):
        raise ConfigError(f"{path}: a line must read '{kind} KEY NAME', as scripts/keys.py writes it")
    return words[1].encode(), words[2].strip() if len(words) > 2 else ""


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_CHARACTERS and len(z85.decode(text.encode("ascii"))) == 32
    except (KeyError, ValueError, struct.error):
        return False


def _lines(path: Path) -> list[str]:
    if _file_status(path).st_size > limits.KEY_FILE_BYTES:
        raise ConfigError(f"{path} is too large for a key file")
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no key file of scripts/keys.py") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; scripts/keys.py make NAME makes keys"
        ) from None


def _file_status(path: Path) -> os.stat_result:
    """Status of a regular file. Opening a pipe would wait, and a directory's mode is no secret's."""
    found = _stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is no regular file, and a key file is needed here")
    return found


def _check_owner(path: Path, found: os.stat_result, why: str) -> None:
    """Whoever owns a file can change it and its mode; root can anyway."""
    if found.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"{path} {why} and belongs to another user (number {found.st_uid}):"
            " use one that is yours or root's"
        )


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {directory}: {error.strerror}") from None
    check_private(directory, "it holds keys")


def check_private(directory: Path, why: str) -> None:
    """Raise `ConfigError` unless the directory is this user's and nobody else can enter it."""
    found = _stat(directory)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        # Never of a directory that is shared, /tmp say: closing that to everybody else breaks the machine.
        shared = found.st_uid != os.getuid() or found.st_mode & 0o1022
        remedy = "make another one: mkdir -m 700 DIRECTORY" if shared else f"chmod 700 {directory}"
        raise ConfigError(
            f"{directory} must be a directory of yours that others cannot enter, because {why}: {remedy}"
        )


def _write_new(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
