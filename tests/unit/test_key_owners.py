"""Key files that are not what they should be, and the names by which scripts are given keys."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from transport import key_files
from transport.key_files import make_key_pair, read_key_pair, read_public_key, read_public_keys
from transport.launch.key_flags import add_key_flags, keys_of

STRANGER = 54_321


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Makes a path another user's; only root could do it in earnest."""
    owners: dict[Path, int] = {}
    true_status = key_files._stat

    def status_of(path: Path) -> os.stat_result:
        found = list(true_status(path))
        found[4] = owners.get(path, os.getuid())
        return os.stat_result(found)

    monkeypatch.setattr(key_files, "_stat", status_of)
    return owners.__setitem__


def test_a_secret_of_another_user_is_refused(tmp_path: Path, give_away: Callable[[Path, int], None]) -> None:
    secret, _ = make_key_pair("alice", tmp_path / "keys")
    read_key_pair(secret)
    give_away(secret, STRANGER)
    with pytest.raises(
        ConfigError, match=f"{secret} is a secret key and belongs to another user .*{STRANGER}"
    ):
        read_key_pair(secret)
    give_away(secret, 0)
    read_key_pair(secret)


@pytest.mark.parametrize(
    ("asked", "foreign"), [(".", "."), (".", "a.pub"), ("a.pub", "a.pub"), ("a.pub", ".")]
)
def test_a_list_that_another_user_owns_is_refused(
    tmp_path: Path, give_away: Callable[[Path, int], None], asked: str, foreign: str
) -> None:
    make_key_pair("a", tmp_path / "keys")
    path, owned = tmp_path / "keys" / asked, tmp_path / "keys" / foreign
    assert list(read_public_keys(path).values()) == ["a"]
    give_away(owned, STRANGER)
    with pytest.raises(ConfigError, match=f"{owned} says who may connect and belongs to another user"):
        read_public_keys(path)
    give_away(owned, 0)
    assert list(read_public_keys(path).values()) == ["a"]


def test_a_list_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    _, public = make_key_pair("a", tmp_path / "keys")
    public.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=f"chmod go-w {public.parent}"):
        read_public_keys(public)
    public.parent.chmod(0o1777)
    assert list(read_public_keys(public).values()) == ["a"]
    with pytest.raises(ConfigError, match=f"chmod go-w {public.parent}"):
        read_public_keys(public.parent)


@pytest.mark.parametrize("read", [read_key_pair, read_public_key, read_public_keys])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    pipe = tmp_path / "pipe.pub"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(ConfigError, match=f"{pipe} is no regular file"):
        read(pipe)


@pytest.mark.parametrize("read", [read_key_pair, read_public_key])
def test_a_directory_is_no_key_file_and_its_mode_is_left_alone(
    tmp_path: Path, read: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is no regular file") as caught:
        read(Path(""))
    assert "chmod" not in str(caught.value)


def client_keys(*argv: str) -> object:
    parser = argparse.ArgumentParser()
    add_key_flags(parser)
    return keys_of(parser.parse_args(argv))


def test_a_nodes_key_is_never_a_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, public = make_key_pair("alice", tmp_path / "keys")
    monkeypatch.setenv("TANDEM_CLIENT_KEY_FILE", str(secret))
    monkeypatch.setenv("TANDEM_CLIENT_SERVER_KEY", str(public))
    assert client_keys().own == read_key_pair(secret)
    monkeypatch.delenv("TANDEM_CLIENT_KEY_FILE")
    monkeypatch.delenv("TANDEM_CLIENT_SERVER_KEY")
    monkeypatch.setenv("TANDEM_KEY_FILE", str(secret))
    monkeypatch.setenv("TANDEM_SERVER_KEY", str(public))
    assert client_keys() is None


@pytest.mark.parametrize("flag", ["key-file", "server-key"])
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_key_of_a_client_is_refused_by_name(
    flag: str, empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"--{flag} is empty; leave it out"):
        client_keys(f"--{flag}", empty)
    variable = "TANDEM_CLIENT_" + flag.replace("-", "_").upper()
    monkeypatch.setenv(variable, empty)
    with pytest.raises(ConfigError, match=f"{variable} is empty; unset it or give it a value"):
        client_keys()
