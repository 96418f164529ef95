"""Keys on real sockets: who gets in, who does not, and what each side is told."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from common.clock import now_ms
from common.errors import ConfigError, HandshakeRefused, NodeUnavailable, TandemError
from tests.contract.wires import Relay, nothing_arrives, wait_until
from transport import key_files
from transport.client import Client
from transport.curve import Denial, Refusal
from transport.key_files import (
    ClientKeys,
    ServerKeys,
    allow_key,
    connecting_keys,
    listening_keys,
    make_key_pair,
)
from transport.link import DealerLink, RouterLink, Sent
from transport.zmq_sockets import new_context

QUIET_MS = 150
HURRY_MS = 20
CLIENT_MS = 700


class Keys:
    """Pairs of a node, of a client that it lists, and of a stranger."""

    def __init__(self, directory: Path) -> None:
        self.files = {name: make_key_pair(name, directory) for name in ("node", "alice", "mallory")}
        self.allowed = directory / "allowed"
        allow_key(self.files["alice"][1], self.allowed)
        self.node = self.listening()

    def listening(self) -> ServerKeys:
        keys = listening_keys(str(self.files["node"][0]), str(self.allowed))
        assert keys is not None
        return keys

    def of(self, client: str, server: str = "node") -> ClientKeys:
        keys = connecting_keys(str(self.files[client][0]), str(self.files[server][1]))
        assert keys is not None
        return keys


class Door:
    """A router and what it said about those outside."""

    def __init__(self, context: zmq.Context, endpoint: str, keys: ServerKeys | None) -> None:
        self.denials: list[Denial] = []
        self.router = RouterLink(context, endpoint, keys, self.denials.append)


@pytest.fixture
def keys(short_directory: Path) -> Keys:
    return Keys(short_directory / "keys")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = new_context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["tcp", "ipc"])
def doors(
    request: pytest.FixtureRequest, context: zmq.Context, short_directory: Path
) -> Iterator[Callable[[ServerKeys | None], Door]]:
    """Makes one router, with keys or without."""
    opened: list[Door] = []

    def make(server_keys: ServerKeys | None) -> Door:
        endpoint = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{short_directory}/s"
        opened.append(Door(context, endpoint, server_keys))
        return opened[-1]

    yield make
    for door in opened:
        door.router.close()


@contextmanager
def dealer(door: Door, keys: ClientKeys | None) -> Iterator[DealerLink]:
    """A connecting side in a context of its own, as in another process."""
    context = new_context()
    link = DealerLink(context, door.router.endpoint, b"attempt-1", keys)
    try:
        yield link
    finally:
        link.close()
        context.term()


def refusal_of(door: Door, keys: ClientKeys | None) -> Refusal:
    """Knock, be refused, and hear why; nothing gets through meanwhile."""
    with dealer(door, keys) as link:
        assert link.send(link.route, [b"let me in"]) is Sent.YES

        def lost() -> bool:
            assert door.router.receive(1) == []
            return bool(link.lost())

        wait_until(lost)
        refusal = link.refusal()
        assert refusal is not None
        assert link.receive(1) == []
        assert nothing_arrives(door.router, during_ms=20)
        return refusal


def definite_refusal_of(door: Door, keys: ClientKeys | None) -> str:
    """Knock until the reason is certain: whichever side sees the difference first hangs up on the other."""
    door.router.receive(1)  # a node that has loaded: from here on, failed handshakes are counted
    refusal = refusal_of(door, keys)
    for _ in range(20):
        if not refusal.temporary:
            break
        assert "ended the handshake" in refusal.detail
        assert "--server-key" in refusal.detail
        refusal = refusal_of(door, keys)
    assert not refusal.temporary
    return refusal.detail


def exchange(door: Door, keys: ClientKeys | None) -> None:
    """A whole message each way."""
    with dealer(door, keys) as link:
        assert link.send(link.route, [b"hello", b"x" * 100_000]) is Sent.YES
        [(route, frames)] = wait_until(lambda: door.router.receive(1))
        assert frames == [b"hello", b"x" * 100_000]
        assert door.router.send(route, [b"welcome"]) is Sent.YES
        assert wait_until(lambda: link.receive(1)) == [(b"attempt-1", [b"welcome"])]


def test_a_listed_key_gets_in_and_others_do_not(doors: Callable[..., Door], keys: Keys) -> None:
    door = doors(keys.node)
    exchange(door, keys.of("alice"))
    assert door.router.clients_denied == 0
    refusal = refusal_of(door, keys.of("mallory"))
    assert not refusal.temporary
    assert "does not list this key" in refusal.detail
    assert door.router.clients_denied == 1
    [denial] = door.denials
    assert denial.key == keys.of("mallory").own.public.decode()
    assert denial.reason == "its key is not listed"
    assert denial.address
    exchange(door, keys.of("alice"))


def test_a_client_without_keys_gets_nothing_and_is_counted(doors: Callable[..., Door], keys: Keys) -> None:
    door = doors(keys.node)
    assert definite_refusal_of(door, None) == "that node uses keys: give --key-file and --server-key"
    wait_until(lambda: door.router.receive(1) or door.router.clients_denied)
    assert {denial.reason for denial in door.denials} <= {"it has no keys", "it left during the handshake"}
    exchange(door, keys.of("alice"))


def test_a_client_with_the_wrong_key_of_the_node_gets_nothing_and_is_counted(
    doors: Callable[..., Door], keys: Keys
) -> None:
    door = doors(keys.node)
    door.router.receive(1)
    refusal = refusal_of(door, keys.of("alice", server="mallory"))
    assert refusal.temporary, "a node that dies in a handshake looks the same"
    assert "--server-key" in refusal.detail
    wait_until(lambda: door.router.receive(1) or door.router.clients_denied)
    assert door.router.clients_denied == 1
    exchange(door, keys.of("alice"))


def test_a_client_with_keys_learns_that_the_node_has_none(doors: Callable[..., Door], keys: Keys) -> None:
    door = doors(None)
    assert "that node has no keys" in definite_refusal_of(door, keys.of("alice"))
    assert (door.router.clients_denied, door.denials) == (0, [])
    exchange(door, None)


def test_nothing_that_is_said_can_be_read_on_the_way(context: zmq.Context, keys: Keys) -> None:
    # A listener between the two sees what goes over the wire.
    marker = b"what-nobody-else-may-read"
    seen = {}
    for name, server, client in (("plain", None, None), ("curve", keys.node, keys.of("alice"))):
        door = Door(context, "tcp://127.0.0.1:0", server)
        with Relay(door.router.endpoint) as relay:
            other = new_context()
            link = DealerLink(other, relay.endpoint, b"a", client)
            link.send(link.route, [marker])
            wait_until(lambda door=door, relay=relay: relay.turn() or door.router.receive(1))
            seen[name] = marker in relay.carried
            link.close()
            other.term()
        door.router.close()
    assert seen == {"plain": True, "curve": False}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed list is noticed sooner than in a second."""
    monkeypatch.setattr(key_files, "_RECHECK_MS", HURRY_MS)


@pytest.mark.usefixtures("hurried")
def test_a_key_listed_later_gets_in_without_a_restart(context: zmq.Context, keys: Keys) -> None:
    door = Door(context, "tcp://127.0.0.1:0", keys.node)
    assert not admitted(door, keys.of("mallory"))
    copy = allow_key(keys.files["mallory"][1], keys.allowed)
    deadline_ms = now_ms() + 5_000
    while not admitted(door, keys.of("mallory")):
        assert now_ms() < deadline_ms
    copy.unlink()
    while admitted(door, keys.of("mallory")):
        assert now_ms() < deadline_ms
    exchange(door, keys.of("alice"))
    door.router.close()


def admitted(door: Door, keys: ClientKeys) -> bool:
    with dealer(door, keys) as link:
        link.send(link.route, [b"hello"])
        arrived = wait_until(lambda: door.router.receive(1) or link.lost())
        return isinstance(arrived[0], tuple)


@pytest.mark.usefixtures("hurried")
def test_an_unreadable_list_lets_nobody_in_and_says_why(context: zmq.Context, keys: Keys) -> None:
    door = Door(context, "tcp://127.0.0.1:0", keys.node)
    (keys.allowed / "bad.pub").write_text("nonsense")
    deadline_ms = now_ms() + 5_000
    while admitted(door, keys.of("alice")):
        assert now_ms() < deadline_ms
    assert "bad.pub" in door.denials[-1].reason
    (keys.allowed / "bad.pub").unlink()
    while not admitted(door, keys.of("alice")):
        assert now_ms() < deadline_ms
    door.router.close()


def test_without_anybody_at_the_gate_nobody_gets_in(context: zmq.Context, keys: Keys) -> None:
    door = Door(context, "tcp://127.0.0.1:0", keys.node)
    door.router._gate.requests.close()
    door.router._gate = None
    with dealer(door, keys.of("alice")) as link:
        link.send(link.route, [b"hello"])
        assert nothing_arrives(door.router, during_ms=QUIET_MS)
    door.router.close()


def test_a_crowd_of_strangers_is_denied_one_by_one_while_a_client_is_served(
    context: zmq.Context, keys: Keys
) -> None:
    door = Door(context, "tcp://127.0.0.1:0", keys.node)
    assert door.router.receive(1) == [], "from now on it is at the door"
    strangers = new_context()
    links = [
        DealerLink(
            strangers, door.router.endpoint, b"%d" % number, keys.of("mallory") if number % 2 else None
        )
        for number in range(100)
    ]
    for link in links:
        link.send(link.route, [b"let me in"])
    exchange(door, keys.of("alice"))
    wait_until(lambda: door.router.receive(1) or door.router.clients_denied == 100)
    assert len(door.denials) == 100
    for link in links:
        link.close()
    strangers.term()
    door.router.close()


def test_a_bind_that_fails_leaves_no_socket_open(keys: Keys) -> None:
    made = new_context()
    with pytest.raises(ConfigError, match="cannot bind"):
        RouterLink(made, "tcp://203.0.113.7:5555", keys.node)
    made.term()  # would wait for ever for an open socket


@pytest.mark.parametrize(
    ("server", "client", "error", "words"),
    [
        (True, None, TandemError, "uses keys.*give --key-file and --server-key"),
        (True, "mallory", HandshakeRefused, "does not list this key; allow it there"),
        (False, "alice", TandemError, "that node has no keys|does it use keys"),
        (True, "alice of another node", NodeUnavailable, "is --server-key its public key"),
    ],
    ids=["no keys", "not listed", "keys for nothing", "another node's key"],
)
def test_a_client_that_is_not_let_in_is_told_why(
    context: zmq.Context, keys: Keys, server: bool, client: str | None, error: type, words: str
) -> None:
    with serving(keys.node if server else None) as endpoint:
        own = None if client is None else client.split()[0]
        peer = "mallory" if client and " " in client else "node"
        client_keys = None if own is None else keys.of(own, server=peer)
        started_ms = now_ms()
        with pytest.raises(error, match=words):
            Client(endpoint, connect_timeout_ms=CLIENT_MS, keys=client_keys)
        assert now_ms() - started_ms < 2 * CLIENT_MS


def test_a_client_that_nobody_answers_is_told_of_keys(short_directory: Path) -> None:
    with pytest.raises(NodeUnavailable, match="If that node uses keys, give --key-file and --server-key"):
        Client(f"ipc://{short_directory}/nobody", connect_timeout_ms=100)


@contextmanager
def serving(keys: ServerKeys | None) -> Iterator[str]:
    """A router that is read by a thread of its own; nobody speaks behind it."""
    ready, over = threading.Event(), threading.Event()
    endpoints: list[str] = []

    def serve() -> None:
        made = new_context()
        router = RouterLink(made, "tcp://127.0.0.1:0", keys)
        endpoints.append(router.endpoint)
        ready.set()
        while not over.wait(0.002):
            router.receive(10)
        router.close()
        made.term()

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait()
    try:
        yield endpoints[0]
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_a_socket_file_without_keys_needs_a_directory_of_ones_own(
    context: zmq.Context, keys: Keys, short_directory: Path, mode: int
) -> None:
    open_to_others = short_directory / "d"
    open_to_others.mkdir()
    open_to_others.chmod(mode)
    endpoint = f"ipc://{open_to_others}/s"
    remedy = "mkdir -m 700" if mode & 0o022 else "chmod 700"
    with pytest.raises(ConfigError, match=f"without keys, whoever reaches {endpoint}.*: .*{remedy}"):
        RouterLink(context, endpoint)
    assert list(open_to_others.iterdir()) == []
    door = Door(context, endpoint, keys.node)
    exchange(door, keys.of("alice"))
    door.router.close()
    open_to_others.chmod(0o700)
    RouterLink(context, endpoint).close()


def test_a_socket_file_beside_the_working_directory_is_checked_too(
    context: zmq.Context, short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(short_directory)
    os.chmod(".", 0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        RouterLink(context, "ipc://s")
    os.chmod(".", 0o700)
    RouterLink(context, "ipc://s").close()
