"""The runtime directory: whose it is, who is alive in it, and what becomes of the dead."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from common.errors import ConfigError
from transport.launch.run_directory import (
    KEPT_LOGS,
    RunDirectory,
    RunningPair,
    running_pairs,
    runtime_directory,
)

PAIR = RunningPair("ipc:///d", "ipc:///p", "model")


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory) / "tandem"


def abandon(directory: RunDirectory) -> None:
    """What the kernel does when a launcher is killed."""
    directory._lock.close()


def leave_socket(path: Path) -> None:
    """A socket file as a killed daemon leaves it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_the_directory_is_the_users_alone(base: Path) -> None:
    assert runtime_directory() == base
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_use_is_refused(base: Path) -> None:
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="only you can use"):
        runtime_directory()


def test_a_link_is_refused(base: Path, tmp_path: Path) -> None:
    base.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="only you can use"):
        runtime_directory()


def test_a_missing_place_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
        runtime_directory()


def test_a_pair_is_found_between_its_announcement_and_its_end() -> None:
    directory = RunDirectory()
    assert running_pairs() == []
    directory.announce(PAIR)
    assert running_pairs() == [PAIR]
    directory.close()
    assert running_pairs() == []


def test_a_pair_whose_launcher_was_killed_is_not_running() -> None:
    directory = RunDirectory()
    directory.announce(PAIR)
    abandon(directory)
    assert running_pairs() == []


def test_a_start_removes_the_socket_of_a_killed_pair_and_keeps_its_log() -> None:
    dead = RunDirectory()
    leave_socket(dead.path / "decode.sock")
    for name in ("decode.sock.lock", "decode_node.log"):
        (dead.path / name).touch()
    abandon(dead)
    RunDirectory().close()
    assert sorted(path.name for path in dead.path.iterdir()) == ["decode_node.log", "lock"]


def test_a_start_leaves_running_pairs_alone() -> None:
    running = RunDirectory()
    path = running.path / "decode.sock"
    leave_socket(path)
    RunDirectory().close()
    assert path.exists()
    running.close()
    assert not path.exists()


def test_only_the_newest_logs_are_kept(base: Path) -> None:
    for age in range(KEPT_LOGS + 3):
        directory = RunDirectory()
        os.utime(directory.path, (age, age))
        directory.close()
        os.utime(directory.path, (age, age))
    kept = sorted(int(path.stat().st_mtime) for path in base.glob("pair-*"))
    assert kept == list(range(2, KEPT_LOGS + 3))
