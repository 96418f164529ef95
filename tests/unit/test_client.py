"""The client against a node of the test's own making: a listener on a thread, without jobs or engine."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common import client_messages as cm
from common import limits
from common import messages as ms
from common.clock import now_ms
from common.errors import ErrorCode, HandshakeRefused, NodeUnavailable
from tests.contract.wires import silent_listener, wait_until
from tests.protocol_samples import sample_of
from transport.client import Client
from transport.link import RouterLink
from transport.listener import Listener
from transport.peers import (
    Answer,
    Delivered,
    EndSession,
    HelloArrived,
    LivenessTimes,
    Post,
    SendFrame,
    SessionEnded,
)
from transport.port import ControlPort
from transport.zmq_sockets import new_context

TIMES = LivenessTimes(ping_ms=500, suspect_ms=1_500, dead_after_ms=3_000, lease_ms=5_000)
CONNECT_MS = 250
PROFILE = sample_of(ms.HelloOk).profile
Replies = Callable[[Any], list[Any]]


def nothing(message: Any) -> list[Any]:
    return []


class Node(threading.Thread):
    """Answers HELLO with `answers` in turn (the last for ever) and each message with `replies(message)`."""

    def __init__(self, endpoint: str, replies: Replies = nothing, answers: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.received: list[Any] = []
        self.ended: list[str] = []
        self.hellos = 0
        self.farewell = threading.Event()
        self._replies = replies
        self._answers = answers
        self._bound = threading.Event()
        self._stopping = threading.Event()
        self.start()
        assert self._bound.wait(5)

    def run(self) -> None:
        context = new_context()
        link = RouterLink(context, self.endpoint)
        self._port = ControlPort(link, TIMES.dead_after_ms)
        self._listener = Listener(TIMES, lambda: 0)
        self._bound.set()
        while not self._stopping.is_set():
            link.socket.poll(5)
            for event in self._port.receive():
                self._step(event)
            if self.farewell.is_set():
                for session in self._listener.sessions:
                    self._step(EndSession(session.identity, "farewell"))
        link.close()
        context.term()

    def _step(self, event: Any) -> None:
        for effect in self._listener.step(event, now_ms()):
            match effect:
                case SendFrame():
                    self._port.send(effect, now_ms())
                case HelloArrived(route=route):
                    self._step(Answer(route, self._answer()))
                case SessionEnded(cause=cause):
                    self.ended.append(cause)
                case Delivered(session=session, message=message):
                    self.received.append(message)
                    for reply in self._replies(message):
                        self._step(Post(session, reply))

    def _answer(self) -> Any:
        number, self.hellos = self.hellos, self.hellos + 1
        if number < len(self._answers):
            return self._answers[number]
        return ms.HelloOk(f"session-{number}", "node", TIMES.lease_ms, 20_000, PROFILE)

    def end(self) -> None:
        self._stopping.set()
        self.join()


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Starts nodes at one endpoint; ends them all."""
    endpoint = f"ipc://{tmp_path_factory.mktemp('n')}/s"
    started: list[Node] = []

    def start(*arguments: Any, **named: Any) -> Node:
        started.append(Node(endpoint, *arguments, **named))
        return started[-1]

    yield start
    for node in started:
        node.end()


def serve(message: Any) -> list[Any]:
    """Accept and finish every job at once."""
    if not isinstance(message, ms.Submit):
        return []
    label = message.label
    timings = cm.Timings(1, 1, {}, 0, 0, 0, 0, 0, None)
    return [
        ms.Accepted(label, "job", 1),
        ms.Tokens(label, (5,), "x"),
        ms.Finished(label, "stop", "local", cm.Usage(1, 1), timings),
    ]


def events(client: Client, count: int) -> list[Any]:
    """The next events; at least `count`."""
    arrived: list[Any] = []
    while len(arrived) < count:
        batch = list(client.events(5_000))
        assert batch, f"only {arrived}"
        arrived += batch
    return arrived


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
@pytest.mark.parametrize("silent", [False, True], ids=["absent", "silent"])
def test_a_node_that_does_not_answer_is_unavailable_in_time(tmp_path: Path, kind: str, silent: bool) -> None:
    listener, endpoint = silent_listener(kind, tmp_path)
    if not silent:
        listener.close()
    started_ms = now_ms()
    with pytest.raises(NodeUnavailable, match=f"nobody answers at {re.escape(endpoint)}"):
        Client(endpoint, connect_timeout_ms=CONNECT_MS)
    assert CONNECT_MS <= now_ms() - started_ms < CONNECT_MS + 2_000
    listener.close()


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_who_finds_nobody_listening_may_give_up_sooner_than_who_finds_a_silent_node(
    tmp_path: Path, kind: str
) -> None:
    listener, endpoint = silent_listener(kind, tmp_path)
    started_ms = now_ms()
    with pytest.raises(NodeUnavailable):
        Client(endpoint, connect_timeout_ms=2 * CONNECT_MS, refused_timeout_ms=1)
    assert now_ms() - started_ms >= 2 * CONNECT_MS
    listener.close()
    started_ms = now_ms()
    with pytest.raises(NodeUnavailable):
        Client(endpoint, connect_timeout_ms=60_000, refused_timeout_ms=CONNECT_MS)
    assert CONNECT_MS <= now_ms() - started_ms < 30_000


def test_waiting_for_a_node_that_is_not_there_costs_no_processor_time() -> None:
    started = os.times()
    with pytest.raises(NodeUnavailable):
        Client("ipc:///nowhere", connect_timeout_ms=600)
    used = os.times()
    assert used.user + used.system - started.user - started.system < 0.3


def test_a_mismatch_is_refused_with_the_nodes_own_words(nodes: Callable[..., Node]) -> None:
    node = nodes(answers=(ms.HelloRefused(False, "version: 1 here, 2 there", ("version",)),))
    with pytest.raises(HandshakeRefused, match="version: 1 here, 2 there"):
        Client(node.endpoint)
    assert node.hellos == 1


def test_a_temporary_refusal_is_tried_again(nodes: Callable[..., Node]) -> None:
    busy = ms.HelloRefused(True, "too many sessions")
    node = nodes(answers=(busy, busy))
    with Client(node.endpoint) as client:
        assert client.hello.session == "session-2"


def test_a_jobs_messages_come_out_in_order_and_end_its_life(nodes: Callable[..., Node]) -> None:
    node = nodes(serve)
    with Client(node.endpoint) as client:
        client.submit("a", prompt_ids=[1, 2], sampling={"max_tokens": 1})
        assert client.live == {"a"}
        assert [type(event) for event in events(client, 3)] == [ms.Accepted, ms.Tokens, ms.Finished]
        assert client.live == frozenset()
    assert node.received == [ms.Submit("a", None, None, (1, 2), {"max_tokens": 1})]


def test_a_label_is_refused_while_its_job_is_live_and_free_afterwards(nodes: Callable[..., Node]) -> None:
    node = nodes(lambda message: serve(ms.Submit("a")) if isinstance(message, ms.CancelJob) else [])
    with Client(node.endpoint) as client:
        client.submit("a", prompt="first")
        with pytest.raises(ValueError, match="'a' is live"):
            client.submit("a", prompt="second")
        assert client.live == {"a"}
        client.cancel("a")
        events(client, 3)
        client.submit("a", prompt="third")
        assert client.live == {"a"}
        wait_until(lambda: len(node.received) == 3)
    assert node.received == [ms.Submit("a", "first"), ms.CancelJob("a"), ms.Submit("a", "third")]


def test_leaving_says_goodbye(nodes: Callable[..., Node]) -> None:
    node = nodes()
    with Client(node.endpoint) as client:
        client.submit("a", prompt="text")
        client.cancel("a")
    assert wait_until(lambda: node.ended) == ["bye: the client is done"]
    assert node.received == [ms.Submit("a", "text"), ms.CancelJob("a")]


def test_jobs_of_a_lost_session_fail_once_each_and_the_next_job_opens_another(
    nodes: Callable[..., Node],
) -> None:
    node = nodes(lambda message: serve(message) if getattr(message, "label", "") == "served" else [])
    with Client(node.endpoint) as client:
        for label in ("b", "a"):
            client.submit(label, prompt="text")
        wait_until(lambda: len(node.received) == 2)
        node.farewell.set()
        failures = events(client, 2)
        assert [(failure.label, failure.code, failure.definite) for failure in failures] == [
            ("a", ErrorCode.PEER_LOST, False),
            ("b", ErrorCode.PEER_LOST, False),
        ]
        assert "farewell" in failures[0].detail
        assert client.live == frozenset()
        node.farewell.clear()
        client.submit("served", prompt="text")
        assert [type(event) for event in events(client, 3)] == [ms.Accepted, ms.Tokens, ms.Finished]
        assert client.hello.session != "session-0"


@pytest.mark.parametrize(
    ("job", "hint"),
    [
        ({"prompt": "half a pair: \ud83d"}, "surrogates not allowed"),
        ({"prompt_ids": [1], "sampling": {"seed": 2**64}}, "int cannot travel (integers: up to 64 bits)"),
        ({"prompt": "a", "sampling": {"stop": {"a"}}}, "set cannot travel"),
        ({"prompt": "x" * limits.CONTROL_MESSAGE_BYTES}, "too large"),
        ({"prompt": 5}, "Submit.prompt: expected a string"),
        ({"prompt_ids": ["1"]}, "Submit.prompt_ids: expected an integer"),
        ({"messages": ["hello"]}, "Submit.messages: expected a map"),
    ],
    ids=["surrogate", "number", "set", "size", "prompt", "ids", "messages"],
)
def test_a_job_that_cannot_travel_is_rejected_and_harms_no_other(
    nodes: Callable[..., Node], job: dict[str, Any], hint: str
) -> None:
    node = nodes(serve)
    with Client(node.endpoint) as client:
        client.submit("bad", **job)
        [rejected] = events(client, 1)
        assert (type(rejected), rejected.label, rejected.code) == (
            ms.Rejected,
            "bad",
            ErrorCode.INVALID_REQUEST,
        )
        assert hint in rejected.detail
        assert client.live == frozenset()
        client.submit("good", prompt="text")
        assert type(events(client, 3)[-1]) is ms.Finished
    assert [message.label for message in node.received] == ["good"]
    assert wait_until(lambda: node.ended) == ["bye: the client is done"]


def test_a_label_too_long_to_travel_is_rejected_under_its_label(nodes: Callable[..., Node]) -> None:
    node = nodes(serve)
    label = "x" * (limits.LABEL_CHARACTERS + 1)
    with Client(node.endpoint) as client:
        client.submit(label, prompt="text")
        [rejected] = events(client, 1)
        assert (type(rejected), rejected.label) == (ms.Rejected, label)


def test_status_is_answered_or_times_out(nodes: Callable[..., Node]) -> None:
    body = {"role": "decode", "lanes": 1}
    answering = [True]

    def replies(message: Any) -> list[Any]:
        return [ms.StatusReply(body)] if isinstance(message, ms.StatusRequest) and answering[0] else []

    node = nodes(replies)
    with Client(node.endpoint) as client:
        assert client.status() == body
        answering[0] = False
        with pytest.raises(NodeUnavailable, match="did not answer STATUS within 100 ms"):
            client.status(timeout_ms=100)


def test_waiting_for_events_ends_at_its_timeout(nodes: Callable[..., Node]) -> None:
    node = nodes()
    with Client(node.endpoint) as client:
        started_ms = now_ms()
        assert list(client.events(100)) == []
        assert 100 <= now_ms() - started_ms < 2_000


def test_a_caller_that_never_waits_still_hears_its_answers(nodes: Callable[..., Node]) -> None:
    with Client(nodes(serve).endpoint) as client:
        client.submit("a", prompt_ids=[1])
        deadline_ms = now_ms() + 5_000
        heard: list[Any] = []
        while not heard and now_ms() < deadline_ms:
            heard = list(client.events(0))

        assert heard
