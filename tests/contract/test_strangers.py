"""Crowds at the door of an idle node with keys: it hears of each of them, and still serves whom it lists."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common import limits
from tests.contract.wires import raw_connection
from transport.key_files import allow_key, connecting_keys, listening_keys, make_key_pair
from transport.link import DealerLink, RouterLink, Sent
from transport.zmq_sockets import new_context

# More than ZeroMQ keeps between its thread and one that does not read.
CROWD = 3_000
SILENCE_MS = 2_000
# ZMTP 3.1: signature, version, and the mechanism of those who have no keys.
NULL_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


class Door:
    """An idle node's link, watched as a loop watches it: nothing is read unless a socket ends the poll."""

    def __init__(self, directory: Path) -> None:
        self.files = {name: make_key_pair(name, directory) for name in ("node", "alice")}
        allow_key(self.files["alice"][1], directory / "allowed")
        self.context = new_context()
        keys = listening_keys(str(self.files["node"][0]), str(directory / "allowed"))
        self.router = RouterLink(self.context, "tcp://127.0.0.1:0", keys)
        self.router.attend()
        self._poller = zmq.Poller()
        for socket in self.router.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def turn(self) -> list[tuple[bytes, list[bytes]]]:
        assert self._poller.poll(SILENCE_MS), "nothing ended the poll"
        return self.router.receive(limits.RECEIVE_BATCH_MESSAGES)

    def close(self) -> None:
        self.router.close()
        self.context.term()


@pytest.fixture
def door(short_directory: Path) -> Iterator[Door]:
    opened = Door(short_directory / "keys")
    yield opened
    opened.close()


def knock(endpoint: str, count: int) -> None:
    """Strangers without keys, one after the other; each waits until it is turned away."""
    for _ in range(count):
        with raw_connection(endpoint) as plain:
            plain.settimeout(SILENCE_MS / 1_000)
            plain.sendall(NULL_GREETING)
            while True:
                try:
                    if not plain.recv(4_096):
                        break
                except ConnectionResetError:
                    break


def test_a_crowd_of_strangers_does_not_make_an_idle_node_deaf(door: Door) -> None:
    strangers = threading.Thread(target=knock, args=(door.router.endpoint, CROWD), daemon=True)
    strangers.start()
    while door.router.clients_denied < CROWD:
        assert door.turn() == []
    strangers.join()
    client_context = new_context()
    keys = connecting_keys(str(door.files["alice"][0]), str(door.files["node"][1]))
    client = DealerLink(client_context, door.router.endpoint, b"a", keys)
    assert client.send(client.route, [b"hello"]) is Sent.YES
    while not (arrived := door.turn()):
        pass
    assert arrived[0][1] == [b"hello"]
    client.close()
    client_context.term()


def test_one_turn_hears_of_one_batch_of_strangers(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECEIVE_BATCH_MESSAGES", 4)
    knock(door.router.endpoint, 10)
    counts = []
    while door.router.clients_denied < 10:
        door.turn()
        counts.append(door.router.clients_denied)
    assert counts == [4, 8, 10]


def test_a_node_that_leaves_does_not_wait_for_strangers_of_whom_it_has_not_heard(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RECEIVE_BATCH_MESSAGES", 4)
    knock(door.router.endpoint, 10)
    door.router.close()
    assert door.router.clients_denied == 10
