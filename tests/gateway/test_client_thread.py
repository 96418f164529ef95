"""The client thread against a node of the test's own making."""

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common import messages as ms
from tests.process.harness import wait_until
from tests.unit.test_client import Node, serve
from transport.client_thread import ClientThread
from transport.loop import ThreadDied
from transport.peers import AttemptRefused, Delivered, SessionEnded, SessionOpened

ITEMS = 1_000
Start = Callable[..., tuple[ClientThread, "queue.Queue[Any]"]]


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(f"ipc://{tmp_path_factory.mktemp('t')}/n", serve)
    yield node
    node.end()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts threads, each with a queue of what it hands out."""
    started: list[ClientThread] = []

    def begin(endpoint: str) -> tuple[ClientThread, queue.Queue[Any]]:
        items: queue.Queue[Any] = queue.Queue(ITEMS)
        thread = ClientThread(endpoint, lambda batch: [items.put(item) for item in batch])
        started.append(thread)
        thread.start()
        return thread, items

    yield begin
    for thread in started:
        thread.stop()


def opened(items: "queue.Queue[Any]") -> str:
    item = items.get(timeout=10)
    assert isinstance(item, SessionOpened)
    return item.hello_ok.session


def test_messages_of_a_session_are_handed_out_in_order(node: Node, start: Start) -> None:
    thread, items = start(node.endpoint)
    thread.post(opened(items), ms.Submit("a", "text"))
    messages = [items.get(timeout=10).message for _ in range(3)]
    assert [type(message) for message in messages] == [ms.Accepted, ms.Tokens, ms.Finished]
    assert {message.label for message in messages} == {"a"}


def test_what_was_meant_for_an_ended_session_is_sent_in_no_other(node: Node, start: Start) -> None:
    thread, items = start(node.endpoint)
    first = opened(items)
    node.farewell.set()
    ended = items.get(timeout=10)
    assert isinstance(ended, SessionEnded)
    assert ended.session == first
    node.farewell.clear()
    second = opened(items)
    thread.post(first, ms.Submit("late", "text"))
    thread.post(second, ms.Submit("now", "text"))
    assert items.get(timeout=10).message.label == "now"
    assert [message.label for message in node.received] == ["now"]


def test_it_waits_for_a_node_that_is_not_there_yet(tmp_path: Any, start: Start) -> None:
    endpoint = f"ipc://{tmp_path}/n"
    _, items = start(endpoint)
    node = Node(endpoint, serve)
    try:
        assert opened(items)
    finally:
        node.end()


def test_a_refusal_is_handed_out_with_the_nodes_words(tmp_path: Any, start: Start) -> None:
    refusal = ms.HelloRefused(False, "another version", ("version",))
    node = Node(f"ipc://{tmp_path}/n", serve, (refusal,))
    try:
        _, items = start(node.endpoint)
        refused = items.get(timeout=10)
        assert isinstance(refused, AttemptRefused)
        assert refused.refusal.detail == "another version"
        assert opened(items)
    finally:
        node.end()


def test_stopping_says_goodbye(node: Node) -> None:
    items: queue.Queue[Any] = queue.Queue(ITEMS)
    thread = ClientThread(node.endpoint, lambda batch: [items.put(item) for item in batch])
    thread.start()
    opened(items)
    thread.stop()
    assert wait_until(lambda: node.ended, "the node hears of it", []) == ["bye: the client is done"]


def test_an_exception_on_the_thread_is_handed_out(node: Node, start: Start) -> None:
    thread, items = start(node.endpoint)
    thread.post(opened(items), object())
    died = items.get(timeout=10)
    while isinstance(died, Delivered | SessionEnded):
        died = items.get(timeout=10)
    assert isinstance(died, ThreadDied)
