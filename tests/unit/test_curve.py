"""Key files and the answer at the door, without sockets."""

import os
import random
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from common import limits
from common.decode_config import DecodeConfig
from common.errors import ConfigError
from common.messages import Bye, StatusReply
from common.prefill_config import PrefillConfig
from transport import key_files
from transport.curve import Denial, decide, refusal_of, with_denials
from transport.key_files import (
    AllowedKeys,
    allow_key,
    check_private,
    connecting_keys,
    listening_keys,
    make_key_pair,
    read_key_pair,
    read_public_key,
    read_public_keys,
)
from transport.peers import SendFrame

KEY = bytes(range(32))
NAMES = {KEY: "alice"}
REQUEST = [b"1.0", b"1", b"tandem", b"192.0.2.7", b"", b"CURVE", KEY]
MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


def changed(position: int, value: bytes) -> list[bytes]:
    return [*REQUEST[:position], value, *REQUEST[position + 1 :]]


def test_a_listed_key_is_let_in_by_its_name() -> None:
    assert decide(REQUEST, NAMES) == ([b"1.0", b"1", b"200", b"OK", b"alice", b""], None)


def test_a_key_that_is_not_listed_is_denied_and_shown_so_that_it_can_be() -> None:
    reply, denial = decide(changed(6, bytes(32)), NAMES)
    assert reply[:3] == [b"1.0", b"1", b"400"]
    assert denial == Denial("192.0.2.7", z85.encode(bytes(32)).decode(), "its key is not listed")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        REQUEST[:6],
        [*REQUEST, b""],
        changed(0, b"2.0"),
        changed(2, b""),
        changed(2, b"other"),
        changed(1, b"x" * 256),
        changed(3, b"x" * 256),
        changed(4, b"x" * 100_000),
        changed(5, b"NULL"),
        changed(5, b"PLAIN"),
        changed(6, KEY[:-1]),
        changed(6, KEY + b"\0"),
        changed(6, b""),
    ],
)
def test_a_request_that_is_not_exactly_right_lets_nobody_in(frames: list[bytes]) -> None:
    reply, denial = decide(frames, NAMES)
    assert len(reply) == 6
    assert reply[2] in (b"400", b"500")
    assert max(map(len, reply)) <= 255
    assert denial is not None


@pytest.mark.parametrize("seed", range(3))
def test_only_the_listed_key_opens_whatever_is_asked(seed: int) -> None:
    source = random.Random(seed)
    opened = 0
    for _ in range(3_000):
        frames = list(REQUEST)
        for _ in range(source.randrange(3)):
            frames[source.randrange(7)] = source.choice([source.randbytes(source.randrange(40)), *REQUEST])
        reply, denial = decide(frames, NAMES)
        right = all(frames[index] == REQUEST[index] for index in (0, 2, 5, 6))
        assert (reply[2] == b"200") == (denial is None) == right
        opened += right
    assert 0 < opened < 3_000


def test_an_empty_list_lets_nobody_in() -> None:
    assert decide(REQUEST, {})[0][2] == b"400"


@pytest.mark.parametrize(
    ("event", "value", "keyed", "temporary", "words"),
    [
        (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, True, False, "does not list this key"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, MISMATCH, False, False, "give --key-file and --server-key"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, MISMATCH, True, False, "has no keys"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32, True, True, "is --server-key its public key"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 104, False, True, "give --key-file and --server-key"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 1, False, True, "give --key-file and --server-key"),
    ],
)
def test_a_refused_handshake_says_what_to_do(
    event: int, value: int, keyed: bool, temporary: bool, words: str
) -> None:
    refusal = refusal_of(event, value, keyed)
    assert refusal is not None
    assert refusal.temporary == temporary
    assert words in refusal.detail


def test_a_connection_that_just_breaks_says_nothing_about_keys() -> None:
    for event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
        assert refusal_of(event, 0, True) is refusal_of(event, 0, False) is None


def test_a_pair_is_made_privately_and_reads_back(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "keys"
    secret, public = make_key_pair("alice", directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert secret.stat().st_mode & 0o777 == 0o600
    pair = read_key_pair(secret)
    assert pair.public == read_public_key(public)
    assert zmq.curve_public(pair.secret) == pair.public
    assert pair.secret.decode() not in f"{pair} {pair!r} {public.read_text()}"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    secret, public = make_key_pair("alice", directory)
    before = secret.read_text()
    for kept, gone in ((secret, public), (public, secret)):
        with pytest.raises(ConfigError, match="exists and is left alone"):
            make_key_pair("alice", directory)
        assert kept.exists()
        gone.unlink()
        with pytest.raises(ConfigError, match="exists and is left alone"):
            make_key_pair("alice", directory)
        gone.write_text(before)
    assert secret.read_text() == before


@pytest.mark.parametrize("name", ["", "../alice", "a/b", ".hidden", "a b", "x" * 65, "ä"])
def test_a_name_is_a_plain_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a key"):
        make_key_pair(name, tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


def test_keys_are_not_made_where_others_can_look(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=f"chmod 700 {tmp_path}"):
        make_key_pair("alice", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601])
def test_a_secret_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    secret, _ = make_key_pair("alice", tmp_path / "keys")
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can read it .mode {mode:04o}.: chmod 600 {secret}"):
        read_key_pair(secret)


def test_secret_and_public_files_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    secret, public = make_key_pair("alice", tmp_path / "keys")
    public.chmod(0o600)
    with pytest.raises(ConfigError, match=r"a \.key file is needed here"):
        read_key_pair(public)
    for read in (read_public_key, read_public_keys):
        with pytest.raises(ConfigError, match=r"a \.pub file is needed here") as caught:
            read(secret)
        assert secret.read_text().split()[1] not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "tandem-public-key",
        "tandem-public-key short alice",
        "tandem-public-key " + "~" * 40,
        "tandem-public-key " + "#" * 40,  # more than 32 bits in five characters
        "tandem-public-key " + "ä" * 40,
        "0" * 40,
        "\udcff",
    ],
)
def test_a_file_that_holds_no_key_is_refused_without_being_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.pub"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read_public_key(path)
    assert str(path) in str(caught.value)
    assert "~~~" not in str(caught.value)
    assert "0000" not in str(caught.value)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*make NAME"):
        read_key_pair(tmp_path / "none.key")
    with (tmp_path / "huge.pub").open("wb") as file:
        file.truncate(limits.KEY_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match="too large"):
        read_public_key(tmp_path / "huge.pub")


def test_a_list_is_a_file_of_lines_or_a_directory_of_files(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    publics = [make_key_pair(name, directory)[1] for name in ("alice", "bob")]
    listed = tmp_path / "list"
    listed.write_text("\n\n".join(path.read_text() for path in publics))
    for path in (directory, listed):
        assert sorted(read_public_keys(path).values()) == ["alice", "bob"]
    assert set(read_public_keys(directory)) == {z85.decode(read_public_key(path)) for path in publics}


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_list_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "keys"
    _, public = make_key_pair("alice", directory)
    public.chmod(mode)
    for path in (public, directory):
        with pytest.raises(ConfigError, match=f"others can change it: chmod go-w {public}"):
            read_public_keys(path)
    public.chmod(0o644)
    directory.chmod(0o700 | mode & 0o022)
    with pytest.raises(ConfigError, match=f"chmod go-w {directory}"):
        read_public_keys(directory)


def test_a_list_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alice", "bob"):
        make_key_pair(name, tmp_path / "keys")
    monkeypatch.setattr(limits, "ALLOWED_KEYS", 1)
    with pytest.raises(ConfigError, match="lists 2 keys; at most 1"):
        read_public_keys(tmp_path / "keys")


def test_a_key_is_allowed_once_and_never_replaced(tmp_path: Path) -> None:
    _, alice = make_key_pair("alice", tmp_path / "a")
    _, other = make_key_pair("alice", tmp_path / "b")
    copy = allow_key(alice, tmp_path / "allowed")
    assert allow_key(alice, tmp_path / "allowed") == copy
    with pytest.raises(ConfigError, match="holds another key"):
        allow_key(other, tmp_path / "allowed")
    with pytest.raises(ConfigError, match=r"a \.pub file is needed"):
        allow_key(tmp_path / "a" / "alice.key", tmp_path / "allowed")
    assert read_public_keys(tmp_path / "allowed") == {z85.decode(read_public_key(alice)): "alice"}


def test_a_change_of_the_list_counts_while_the_node_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, own = make_key_pair("node", tmp_path / "own")
    _, alice = make_key_pair("alice", tmp_path / "a")
    allowed = tmp_path / "allowed"
    allowed.mkdir(mode=0o700)
    keys = listening_keys(str(secret), str(allowed))
    moment_ms = [key_files.now_ms()]
    monkeypatch.setattr(key_files, "now_ms", lambda: moment_ms[0])

    def names() -> set[str]:
        moment_ms[0] += 1_001
        return set(keys.allowed.names().values())

    itself = "this node itself"
    assert names() == {itself}
    copy = allow_key(alice, allowed)
    assert names() == {itself, "alice"}
    copy.unlink()
    assert names() == {itself}
    assert z85.decode(read_public_key(own)) in keys.allowed.names()
    (allowed / "bad.pub").write_text("nonsense")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"bad\.pub"):
            names()


def test_a_list_is_not_read_again_for_every_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, public = make_key_pair("node", tmp_path / "own")
    keys = AllowedKeys(public, read_key_pair(secret))
    moment_ms = key_files.now_ms()
    monkeypatch.setattr(key_files, "now_ms", lambda: moment_ms)
    public.unlink()
    for _ in range(100):
        assert len(keys.names()) == 1


def test_keys_are_all_or_nothing(tmp_path: Path) -> None:
    assert listening_keys(None, None) is None
    assert connecting_keys(None, None) is None
    secret, public = make_key_pair("node", tmp_path / "own")
    assert connecting_keys(str(secret), str(public)).server == read_public_key(public)


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (PrefillConfig, {"key_file": "k"}, "--key-file and --allowed-keys go together"),
        (PrefillConfig, {"allowed_keys": "k"}, "--key-file and --allowed-keys go together"),
        (DecodeConfig, {"server_key": "k"}, "--server-key needs --key-file"),
        (
            DecodeConfig,
            {"key_file": "k", "allowed_keys": "a", "pd_prefill_worker": "tcp://other:1"},
            "needs --server-key, the prefill node's public key",
        ),
        (PrefillConfig, {"bind": "tcp://*:5701"}, r"--bind: .*keys\.py make NAME.*--key-file and --allowed"),
        (DecodeConfig, {"bind": "tcp://192.168.0.7:5700"}, r"refused without keys.*keys\.py make NAME"),
    ],
)
def test_half_a_set_of_keys_is_a_configuration_error(config_class: type, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_class(**values)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:5701", "tcp://*:0", "tcp://eth0:1", "tcp://[::]:1"])
def test_with_keys_any_well_formed_address_may_be_bound(bind: str) -> None:
    keys = {"key_file": "k", "allowed_keys": "a"}
    if "[" in bind:
        with pytest.raises(ConfigError, match="not an endpoint"):
            PrefillConfig(bind=bind, **keys)
    else:
        assert PrefillConfig(bind=bind, **keys).bind == bind


def test_a_libzmq_without_encryption_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    for attempt in (
        lambda: make_key_pair("alice", tmp_path / "keys"),
        lambda: read_key_pair(tmp_path / "x.key"),
        lambda: read_public_key(tmp_path / "x.pub"),
        lambda: read_public_keys(tmp_path),
    ):
        with pytest.raises(ConfigError, match="built without it"):
            attempt()


def test_a_directory_of_somebody_else_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_private(tmp_path, "of a test")
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="must be a directory of yours"):
        check_private(tmp_path, "of a test")


def test_a_status_answer_says_how_many_were_denied_and_the_cores_own_copy_does_not() -> None:
    frame = SendFrame(b"route", "s", 1, StatusReply({"role": "decode"}))
    assert with_denials(frame, 3) == SendFrame(
        b"route", "s", 1, StatusReply({"role": "decode", "clients_denied": 3})
    )
    assert frame.message.body == {"role": "decode"}
    other = SendFrame(b"route", "s", 2, Bye("done"))
    assert with_denials(other, 3) is other
