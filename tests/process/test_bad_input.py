"""What a client can send that it should not: each has its answer, and the next job is served as ever."""

import random
from typing import Any

import msgpack
import pytest

from common.limits import BAD_MESSAGES_PER_CLIENT
from common.messages import (
    Bye,
    CancelJob,
    ClientError,
    Finished,
    Grant,
    Ping,
    Pong,
    Rejected,
    Release,
    SessionGone,
    StatusReply,
    StatusRequest,
    Submit,
)
from tests.process.harness import resident_bytes
from tests.process.raw_peer import RawPeer
from tests.process.world import Pair, World, expected, prompt_of
from transport.codec import PROTOCOL_TAG

A = prompt_of(40, 30)
ROLES = ["prefill", "decode"]


def probe(pair: Pair) -> None:
    """The pair is as good as before."""
    pair.check_job("probe", A, max_tokens=3)
    pair.wait_clean()


REJECTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an empty prompt": ({"prompt": ""}, "EMPTY_PROMPT", "at least one"),
    "no ids": ({"prompt_ids": []}, "EMPTY_PROMPT", "at least one"),
    "no prompt at all": ({}, "INVALID_REQUEST", "exactly one"),
    "two prompts": ({"prompt": "a", "prompt_ids": [97]}, "INVALID_REQUEST", "exactly one"),
    "an id out of range": ({"prompt_ids": [97, 259]}, "TOKEN_OUT_OF_RANGE", "0 to 258"),
    "a negative id": ({"prompt_ids": [-1]}, "TOKEN_OUT_OF_RANGE", "0 to 258"),
    "too long": ({"prompt_ids": [97] * 1020}, "CONTEXT_LENGTH_EXCEEDED", "1020 tokens and max_tokens is 16"),
    "nothing to generate": ({"prompt": "a", "sampling": {"max_tokens": 0}}, "INVALID_SAMPLING", "max_tokens"),
    "max_tokens as text": (
        {"prompt": "a", "sampling": {"max_tokens": "5"}},
        "INVALID_SAMPLING",
        "max_tokens",
    ),
    "max_tokens of a billion": (
        {"prompt": "a", "sampling": {"max_tokens": 10**9}},
        "CONTEXT_LENGTH_EXCEEDED",
        "1024",
    ),
    "a field that does not exist": (
        {"prompt": "a", "sampling": {"frequency": 1}},
        "INVALID_SAMPLING",
        "frequency",
    ),
    "a temperature out of range": (
        {"prompt": "a", "sampling": {"temperature": -0.5}},
        "INVALID_SAMPLING",
        "temperature",
    ),
    "a temperature that is no number": (
        {"prompt": "a", "sampling": {"temperature": float("nan")}},
        "INVALID_SAMPLING",
        "temperature",
    ),
    "a conversation without a message": ({"messages": []}, "INVALID_REQUEST", "at least one"),
    "a role of one's own": (
        {"messages": [{"role": "root", "content": "a"}]},
        "INVALID_REQUEST",
        "role must be one of",
    ),
}


@pytest.mark.parametrize("case", REJECTIONS)
def test_a_job_that_cannot_be_is_rejected_with_the_reason(shared_pair: Pair, case: str) -> None:
    body, code, hint = REJECTIONS[case]
    before = shared_pair.world.status(shared_pair.decode)
    answer = shared_pair.client.submit_body("bad", **body)
    shared_pair.world.end_of(answer)
    assert isinstance(answer.end, Rejected)
    assert (answer.code, answer.accepted, answer.token_ids) == (code, None, [])
    assert hint in answer.end.detail
    after = shared_pair.world.status(shared_pair.decode)
    assert after["counters"]["jobs_rejected"] == before["counters"]["jobs_rejected"] + 1
    assert after["counters"]["jobs_accepted"] == before["counters"]["jobs_accepted"]
    probe(shared_pair)


def test_a_prompt_that_breaks_the_tokenizer_is_refused_alone(shared_pair: Pair) -> None:
    shared_pair.decode.spoil("text.prepare", "fail")
    answer = shared_pair.world.end_of(shared_pair.client.submit("bad", A))
    assert (type(answer.end), answer.code) == (Rejected, "INVALID_REQUEST")
    probe(shared_pair)


def test_the_longest_job_that_fits_is_served(shared_pair: Pair) -> None:
    shared_pair.check_job("job", prompt_of(1021, 31), max_tokens=3)


def test_a_label_names_one_live_job_of_its_client(shared_pair: Pair) -> None:
    world = shared_pair.world
    shared_pair.prefill.hold("prefill.chunk")
    with RawPeer(shared_pair.decode.endpoint) as peer:
        peer.hello()
        peer.send(Submit("same", prompt_ids=tuple(A), sampling={"max_tokens": 2}))
        peer.receive()
        mine = shared_pair.client.submit("same", A, max_tokens=4)
        world.wait(lambda: mine.accepted, "another client's label does not matter")
        peer.send(Submit("same", prompt_ids=(97,)))
        rejected = peer.receive()
        assert (type(rejected), str(rejected.code)) == (Rejected, "DUPLICATE_ID")
        peer.send(CancelJob("same"))
        assert str(peer.receive().code) == "CANCELLED"
        shared_pair.prefill.release("prefill.chunk")
        assert world.end_of(mine).token_ids == expected(A, 4)
    probe(shared_pair)


def garbage() -> list[tuple[bytes, ...]]:
    """Frames that are no message, from nearly right to noise."""
    chance = random.Random(11)
    head = msgpack.packb({"type": 40, "session": "s", "sequence": 1})
    huge = b"\xdd\xff\xff\xff\xff"
    return [
        (b"",),
        (b"TANDEM/2", head, b"\x80"),
        (PROTOCOL_TAG,),
        (PROTOCOL_TAG, head),
        (PROTOCOL_TAG, head, b"\x80", b""),
        (PROTOCOL_TAG, head, b"\x80"),
        (PROTOCOL_TAG, b"\xc1", b"\xc1"),
        (PROTOCOL_TAG, huge, huge),
        (PROTOCOL_TAG, head, b"\x91" * 100_000),
        (PROTOCOL_TAG, msgpack.packb({"type": 999, "session": None, "sequence": 0}), b"\x80"),
        (PROTOCOL_TAG, msgpack.packb({"type": [1], "session": {}, "sequence": -1}), b"\x80"),
        *[(PROTOCOL_TAG, chance.randbytes(20), chance.randbytes(40)) for _ in range(40)],
        *[tuple(chance.randbytes(chance.randint(0, 60)) for _ in range(3)) for _ in range(40)],
    ]


@pytest.mark.parametrize("role", ROLES)
def test_noise_on_the_socket_is_counted_and_nothing_else(shared_pair: Pair, role: str) -> None:
    daemon = getattr(shared_pair, role)
    with RawPeer(daemon.endpoint) as peer:
        for frames in garbage():
            peer.send_frames(*frames)
        # Behind what was said to the wrong versions, it still gets a session.
        peer.hello()
        peer.send(StatusRequest())
        assert isinstance(peer.receive(), StatusReply)
        peer.send(Bye("done"))
    probe(shared_pair)


@pytest.mark.parametrize("role", ROLES)
def test_a_message_of_an_unknown_session_is_answered_session_gone(shared_pair: Pair, role: str) -> None:
    with RawPeer(getattr(shared_pair, role).endpoint) as peer:
        for message in (Submit("early", prompt_ids=(97,)), Ping(), StatusRequest(), Release(0, 1)):
            peer.send(message, session="nobody", sequence=7)
            assert peer.receive() == SessionGone("nobody")
        for message in (Bye("enough"), SessionGone("nobody")):
            peer.send(message, session="nobody", sequence=0 if isinstance(message, SessionGone) else 7)
        assert peer.silent(), "an end is not answered"
    probe(shared_pair)


def test_a_session_cannot_be_used_from_another_socket(shared_pair: Pair) -> None:
    with RawPeer(shared_pair.decode.endpoint) as owner, RawPeer(shared_pair.decode.endpoint) as thief:
        owner.hello()
        thief.send(Submit("stolen", prompt_ids=(97,)), session=owner.session, sequence=1)
        assert thief.receive() == SessionGone(owner.session)
        owner.send(Submit("own", prompt_ids=tuple(A), sampling={"max_tokens": 2}))
        assert type(owner.receive()).__name__ == "Accepted"
        owner.send(Bye("done"))
    probe(shared_pair)


@pytest.mark.parametrize("role", ROLES)
def test_a_client_is_dropped_after_too_many_messages_that_make_no_sense(shared_pair: Pair, role: str) -> None:
    with RawPeer(getattr(shared_pair, role).endpoint) as peer:
        peer.hello()
        for number in range(BAD_MESSAGES_PER_CLIENT):
            if number % 2:
                peer.send(Grant(()))
            else:
                header = peer.next_header()
                head = {"type": 40, "session": header.session, "sequence": header.sequence}
                peer.send_frames(PROTOCOL_TAG, msgpack.packb(head), msgpack.packb({"label": 5}))
            answer = peer.receive()
            assert (type(answer), str(answer.code)) == (ClientError, "BAD_MESSAGE")
        peer.send(StatusRequest())
        assert isinstance(peer.receive(), StatusReply), "the session goes on so far"
        peer.send(Grant(()))
        assert isinstance(peer.receive(), Bye)
        peer.send(StatusRequest())
        assert isinstance(peer.receive(), SessionGone)
    probe(shared_pair)


@pytest.mark.parametrize("sequence", [1, 3])
def test_a_repeat_or_a_gap_ends_that_session_alone(shared_pair: Pair, sequence: int) -> None:
    with RawPeer(shared_pair.decode.endpoint) as peer:
        peer.hello()
        peer.send(Ping())
        assert isinstance(peer.receive(), Pong)
        peer.send(Ping(), sequence=sequence)
        ending = peer.receive()
        assert isinstance(ending, Bye)
        assert "SEQUENCE_ERROR" in ending.reason
    probe(shared_pair)


def test_a_repeated_hello_gets_the_same_answer_and_an_older_one_none(shared_pair: Pair) -> None:
    with RawPeer(shared_pair.decode.endpoint) as peer:
        first = peer.hello(attempt=2)
        assert peer.hello(attempt=2) == first
        peer.send_hello(attempt=1)
        assert peer.silent()
        peer.send(Ping())
        assert isinstance(peer.receive(), Pong), "the session is still the same"
        peer.send(Bye("done"))
    probe(shared_pair)


def test_a_full_queue_is_busy_with_a_hint(world: World) -> None:
    pair = world.pair(decode=("--pd-remote-only", "--pd-prefetch-next", "--max-queue", "3"))
    pair.prefill.hold("prefill.chunk")
    running = pair.client.submit("running", A, max_tokens=5)
    world.wait_held(pair.prefill, "prefill.chunk")
    answers = [pair.client.submit(f"{number}", A, max_tokens=5) for number in range(5)]
    for answer in answers[3:]:
        assert world.end_of(answer).code == "BUSY"
        assert answer.end.retry_ms > 0
    pair.prefill.release("prefill.chunk")
    for answer in [running, *answers[:3]]:
        assert world.end_of(answer).token_ids == expected(A, 5)
    pair.audit(imports=4)


def test_a_thousand_jobs_leave_no_memory_behind(world: World) -> None:
    instant = ("--emulated-prefill-tokens-per-s", "1e9")
    pair = world.pair(instant, ("--pd-remote-only", "--pd-prefetch-next", "--emulated-decode-ms", "0.001"))
    prompts = [prompt_of(10 + 13 * number, number) for number in range(10)]
    answers_wanted = [expected(prompt_ids, 4) for prompt_ids in prompts]
    bytes_after = {}
    for turn in range(13):
        answers = [
            pair.client.submit(f"{number}", prompts[number % 10], max_tokens=4) for number in range(100)
        ]
        for number, answer in enumerate(answers):
            assert world.end_of(answer).token_ids == answers_wanted[number % 10]
            assert isinstance(answer.end, Finished)
        bytes_after[turn] = [resident_bytes(daemon) for daemon in (pair.prefill, pair.decode)]
    # By then each node's story of its last steps is full.
    for early, late in zip(bytes_after[9], bytes_after[12], strict=True):
        assert late - early < 1_200_000, bytes_after
    pair.audit()
