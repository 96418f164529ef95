"""What a decode node can say to a prefill node that it should not, and clients to either node.

Messages made by hand, late, repeated, reordered, truncated and foreign: each has its documented answer, slots
come back, a job that runs is undisturbed, and the next prompt is computed as ever.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common import messages as ms
from common.client_messages import CacheOrder, CacheReply
from common.compatibility import MUST_BE_EQUAL
from common.digests import prompt_digest
from common.errors import ErrorCode
from common.limits import EPOCH_STEP
from common.messages import (
    Bye,
    Cancel,
    ClientError,
    HelloRefused,
    NodeProfile,
    Ping,
    Pong,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Release,
    SessionGone,
)
from tests.process.harness import Daemon
from tests.process.raw_peer import RawPeer
from tests.process.world import Pair, World, expected, prompt_of
from tests.protocol_samples import SAMPLE_IDS, SAMPLES
from transport.codec import encode

A = prompt_of(200, 70)
JOB = "cd" * 16


@pytest.fixture(scope="module")
def prefill(shared_world: World) -> Iterator[Daemon]:
    """A prefill node that no decode node of ours uses; afterwards its slot is in the pool."""
    daemon = shared_world.prefill("--lease-ms", "20000")
    yield daemon
    status = shared_world.wait_status(
        daemon, lambda status: status["slots"][0]["state"] == "pool", "the slot is in the pool"
    )
    assert not status["decode_sessions"]
    assert not status["queued"]
    shared_world.stop(daemon)


@pytest.fixture(scope="module")
def profile(prefill: Daemon) -> NodeProfile:
    with RawPeer(prefill.endpoint) as peer:
        profile = peer.hello().profile
        peer.send(Bye("enough"))
    return profile


def request_of(epoch: int, prompt_ids: list[int] = A, **changes: Any) -> Prefill:
    prompt = np.asarray(prompt_ids, dtype="<i4").tobytes()
    return replace(Prefill(JOB, 0, epoch, prompt, prompt_digest(prompt_ids), 0, 60_000), **changes)


def check_good_prefill(prefill: Daemon, profile: NodeProfile) -> None:
    """A decode node that does everything right is served at once."""
    with RawPeer(prefill.endpoint, profile) as peer:
        grants = peer.hello().grants
        assert [grant.slot for grant in grants] == [0]
        epoch = grants[0].last_epoch + 1
        peer.send(request_of(epoch))
        check_record(peer.receive(), epoch)
        peer.send(Release(0, epoch))
        peer.send(Bye("done"))


def check_record(record: Any, epoch: int) -> None:
    assert isinstance(record, PrefillDone), record
    assert (record.job_id, record.slot, record.epoch, record.token_count) == (JOB, 0, epoch, len(A))
    assert int(np.frombuffer(record.logits, dtype="<f4").argmax()) == expected(A, 1, ignore_eos=True)[0]


def stale_messages(daemon: Daemon) -> int:
    """How many messages of no present session the node has counted."""
    with RawPeer(daemon.endpoint) as peer:
        peer.hello()
        peer.send(ms.StatusRequest())
        return peer.receive_until(ms.StatusReply).body["stale_messages"]


Messages = Callable[[int], list[Any]]
NOT_IDLE, NOT_HELD, NOT_OWN = "which is not idle", "not held", "not granted, or not idle"
MISUSES: dict[str, tuple[Messages, str]] = {
    "PREFILL twice": (lambda last: [request_of(last + 1), request_of(last + 2)], NOT_IDLE),
    "PREFILL repeated": (lambda last: [request_of(last + 1)] * 2, NOT_IDLE),
    "PREFILL of a slot that was not granted": (lambda last: [request_of(last + 1, slot=7)], NOT_IDLE),
    "an epoch that was used": (lambda last: [request_of(last)], "with epoch"),
    "an epoch too far ahead": (lambda last: [request_of(last + EPOCH_STEP + 1)], "with epoch"),
    "CANCEL of a future epoch": (lambda last: [Cancel(0, last + 1)], "never used"),
    "CANCEL of an epoch after the one that is computed": (
        lambda last: [request_of(last + 1), Cancel(0, last + 2)],
        "never used",
    ),
    "CANCEL of a slot that was not granted": (lambda last: [Cancel(7, 1)], "not granted"),
    "RELEASE of an idle slot": (lambda last: [Release(0, last)], NOT_HELD),
    "RELEASE of a slot that was not granted": (lambda last: [Release(7, 1)], NOT_HELD),
    "RELEASE of a slot that is being filled": (
        lambda last: [request_of(last + 1), Release(0, last + 1)],
        NOT_HELD,
    ),
    "RELEASE after a failure": (
        lambda last: [request_of(last + 1, prompt=b""), Release(0, last + 1)],
        NOT_HELD,
    ),
    "RETURN_SLOTS of a slot that was not granted": (lambda last: [ms.ReturnSlots((7,))], NOT_OWN),
    "RETURN_SLOTS of a slot that is being filled": (
        lambda last: [request_of(last + 1), ms.ReturnSlots((0,))],
        NOT_OWN,
    ),
    "HURRY for a slot that was not granted": (lambda last: [ms.Hurry(7, 1)], "not used"),
    "HURRY for a future epoch": (lambda last: [ms.Hurry(0, last + 1)], "not used"),
}
_OF_A_DECODE_NODE = (Prefill, Cancel, Release, ms.ReturnSlots, ms.Hurry, Ping, Bye, SessionGone, ms.Hello)
for _sample in SAMPLES:
    if not isinstance(_sample, _OF_A_DECODE_NODE):
        MISUSES[f"a {type(_sample).__name__}"] = (
            lambda last, sample=_sample: [sample],
            "sequence number" if isinstance(_sample, ms.UNNUMBERED) else "is not for a prefill node",
        )


@pytest.mark.parametrize("case", MISUSES)
def test_what_a_decode_node_must_not_say_ends_its_session(
    prefill: Daemon, profile: NodeProfile, case: str
) -> None:
    messages, reason = MISUSES[case]
    with RawPeer(prefill.endpoint, profile) as peer:
        last_epoch = peer.hello().grants[0].last_epoch
        prefill.hold("prefill.chunk")
        for message in messages(last_epoch):
            peer.send(message)
        bye = peer.receive_until(Bye)
        assert ErrorCode.PROTOCOL_ERROR in bye.reason
        assert reason in bye.reason
        prefill.release("prefill.chunk")
        peer.send(request_of(last_epoch + 9))
        assert peer.receive() == SessionGone(peer.session), "a record came after the end of its session"
    wait_pool(prefill, profile)
    check_good_prefill(prefill, profile)


def wait_pool(prefill: Daemon, profile: NodeProfile) -> None:
    """Wait until compute has let go of what an ended session had asked for."""
    with RawPeer(prefill.endpoint, profile) as peer:
        if not peer.hello().grants:
            assert peer.receive_until(ms.Grant).grants[0].slot == 0
        peer.send(Bye("done"))


@pytest.mark.parametrize("again", ["the same release", "the release of an earlier epoch"])
def test_a_slot_is_released_once(prefill: Daemon, profile: NodeProfile, again: str) -> None:
    with RawPeer(prefill.endpoint, profile) as peer:
        epoch = peer.hello().grants[0].last_epoch + 1
        peer.send(request_of(epoch))
        check_record(peer.receive(), epoch)
        if again == "the same release":
            peer.send(Release(0, epoch))
        peer.send(Release(0, epoch if again == "the same release" else epoch - 1))
        assert NOT_HELD in peer.receive_until(Bye).reason
    check_good_prefill(prefill, profile)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": b""}, "EMPTY_PROMPT"),
    "a prompt cut inside an id": ({"prompt": b"\x61\x00\x00"}, "EMPTY_PROMPT"),
    "a prompt too long": ({"prompt": b"\x61\x00\x00\x00" * 1025}, "CONTEXT_LENGTH_EXCEEDED"),
    "nothing to send": ({"send_from": 1_000}, "INVALID_REQUEST"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_prompt_that_cannot_be_computed_is_answered_once_and_the_session_goes_on(
    prefill: Daemon, profile: NodeProfile, case: str
) -> None:
    changes, code = REFUSED[case]
    with RawPeer(prefill.endpoint, profile) as peer:
        epoch = peer.hello().grants[0].last_epoch + 1
        peer.send(request_of(epoch, **changes))
        failure = peer.receive()
        assert (type(failure), str(failure.code), failure.epoch) == (PrefillFailed, code, epoch)
        assert peer.silent()
        peer.send(request_of(epoch + 1))
        check_record(peer.receive(), epoch + 1)
        peer.send(Release(0, epoch + 1))
        peer.send(Bye("done"))


def test_cancels_too_many_and_too_late_get_one_completion(prefill: Daemon, profile: NodeProfile) -> None:
    with RawPeer(prefill.endpoint, profile) as peer:
        epoch = peer.hello().grants[0].last_epoch + 1
        prefill.hold("prefill.chunk")
        peer.send(request_of(epoch))
        for _ in range(3):
            peer.send(Cancel(0, epoch))
        prefill.release("prefill.chunk")
        failure = peer.receive()
        assert (failure.epoch, str(failure.code)) == (epoch, "CANCELLED")
        # The same job again is no error, a cancel of what was answered no event.
        peer.send(request_of(epoch + 1))
        peer.send(Cancel(0, epoch))
        check_record(peer.receive(), epoch + 1)
        peer.send(Cancel(0, epoch + 1))
        peer.send(Release(0, epoch + 1))
        peer.send(Cancel(0, epoch + 1))
        assert peer.silent()
        peer.send(Ping())
        assert isinstance(peer.receive(), Pong), "the session goes on"
        peer.send(Bye("done"))


@pytest.mark.parametrize("order", ["repeat", "gap", "overtaken"])
def test_a_row_of_messages_that_is_broken_ends_the_session(
    prefill: Daemon, profile: NodeProfile, order: str
) -> None:
    with RawPeer(prefill.endpoint, profile) as peer:
        epoch = peer.hello().grants[0].last_epoch + 1
        peer.send(Ping())
        assert isinstance(peer.receive(), Pong)
        if order == "overtaken":
            peer.send(Release(0, epoch), sequence=3)
            peer.send(request_of(epoch), sequence=2)
        else:
            peer.send(request_of(epoch), sequence=1 if order == "repeat" else 3)
        assert ErrorCode.SEQUENCE_ERROR in peer.receive_until(Bye).reason
    check_good_prefill(prefill, profile)


def test_a_truncated_message_of_a_decode_node_ends_its_session(prefill: Daemon, profile: NodeProfile) -> None:
    with RawPeer(prefill.endpoint, profile) as peer:
        epoch = peer.hello().grants[0].last_epoch + 1
        tag, head, body = encode(peer.next_header(), request_of(epoch))
        peer.send_frames(tag, head, body[:-5])
        assert ErrorCode.PROTOCOL_ERROR in peer.receive_until(Bye).reason
    check_good_prefill(prefill, profile)


def test_a_newer_attempt_ends_the_earlier_session_and_an_older_one_is_ignored(
    prefill: Daemon, profile: NodeProfile
) -> None:
    with (
        RawPeer(prefill.endpoint, profile) as earlier,
        RawPeer(prefill.endpoint, profile, earlier.incarnation) as later,
        RawPeer(prefill.endpoint, profile, earlier.incarnation) as outrun,
    ):
        first = earlier.hello(attempt=5)
        epoch = first.grants[0].last_epoch + 1
        earlier.send(request_of(epoch))
        check_record(earlier.receive(), epoch)
        second = later.hello(attempt=6)
        assert second.session != first.session
        assert second.grants == (ms.SlotGrant(0, epoch),), "epochs of a slot never restart"
        outrun.send_hello(attempt=5)
        assert outrun.silent()
        # Messages of the ended session, from its own socket and from the new one.
        messages = (Release(0, epoch), Cancel(0, epoch), request_of(epoch + 1), Ping())
        stale_before = stale_messages(prefill)
        for message in messages:
            earlier.send(message)
            assert earlier.receive() == SessionGone(first.session)
            later.send(message, session=first.session, sequence=9)
            assert later.receive() == SessionGone(first.session)
        assert stale_messages(prefill) == stale_before + 2 * len(messages)
        later.send(request_of(epoch + 1))
        check_record(later.receive(), epoch + 1)
        later.send(Release(0, epoch + 1))
        later.send(Bye("done"))
    check_good_prefill(prefill, profile)


def test_a_rival_waits_and_disturbs_nothing(prefill: Daemon, profile: NodeProfile) -> None:
    with (
        RawPeer(prefill.endpoint, profile) as owner,
        RawPeer(prefill.endpoint, profile) as rival,
    ):
        epoch = owner.hello().grants[0].last_epoch + 1
        rival.send_hello()
        refusal = rival.receive()
        assert (type(refusal), refusal.temporary) == (HelloRefused, True)
        for message in (Release(0, epoch), request_of(epoch), Ping()):
            rival.send(message, session=owner.session, sequence=1)
            assert rival.receive() == SessionGone(owner.session), "a session belongs to its socket"
        owner.send(request_of(epoch))
        check_record(owner.receive(), epoch)
        owner.send(Release(0, epoch))
        owner.send(Bye("done"))
    check_good_prefill(prefill, profile)


@pytest.mark.parametrize("name", [*MUST_BE_EQUAL, "dtype"])
def test_a_decode_node_of_another_model_is_refused_by_the_name_of_what_differs(
    prefill: Daemon, profile: NodeProfile, name: str
) -> None:
    known = getattr(profile, name)
    other = replace(profile, **{name: known + 1 if isinstance(known, int) else f"{known}x"})
    with RawPeer(prefill.endpoint, other) as peer:
        peer.send_hello()
        refusal = peer.receive()
        assert (type(refusal), refusal.temporary, refusal.fields) == (HelloRefused, False, (name,))
    check_good_prefill(prefill, profile)


# What a client may say, to one node or to both. A HELLO opens a session of its own.
UNANSWERED = (ms.Bye, ms.SessionGone)
ANSWERED: dict[str, dict[type, type | None]] = {
    "prefill": {Ping: Pong, ms.StatusRequest: ms.StatusReply},
    "decode": {
        Ping: Pong,
        ms.StatusRequest: ms.StatusReply,
        ms.Submit: ms.Rejected,
        ms.CancelJob: None,
        CacheOrder: CacheReply,
        ms.Tokenize: ms.Rejected,
    },
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_message_from_a_client_has_its_answer_while_a_job_runs(shared_pair: Pair, role: str) -> None:
    world = shared_pair.world
    running = shared_pair.client.submit(f"for {role}", A, max_tokens=800, ignore_eos=True)
    world.wait(lambda: running.token_ids, "a job decodes")
    for sample, name in zip(SAMPLES, SAMPLE_IDS, strict=True):
        if isinstance(sample, ms.Hello):
            continue
        with RawPeer(getattr(shared_pair, role).endpoint) as peer:
            session = peer.hello(attempt=2).session
            if isinstance(sample, UNANSWERED):
                peer.send(sample, sequence=0 if isinstance(sample, SessionGone) else 1)
                assert peer.silent(), name
                continue
            peer.send(sample)
            if isinstance(sample, ms.UNNUMBERED):
                assert "sequence number" in peer.receive_until(Bye).reason, name
                continue
            wanted = ANSWERED[role].get(type(sample), ClientError)
            assert peer.silent() if wanted is None else type(peer.receive()) is wanted, name
            # The same once more, cut short: its place in the row is known, so the session bears it.
            tag, head, body = encode(peer.next_header(), sample)
            peer.send_frames(tag, head, body[:-1] + b"\xc1")
            answer = peer.receive()
            assert (type(answer), str(answer.code)) == (ClientError, "BAD_MESSAGE"), name
            peer.send(sample, sequence=2)
            assert ErrorCode.SEQUENCE_ERROR in peer.receive().reason, name
            peer.send(Ping())
            assert peer.receive() == SessionGone(session), name
        world.wait(lambda: True, "the client of the job is turned")
    shared_pair.client.cancel(f"for {role}")
    world.end_of(running)
    assert running.code in (None, "CANCELLED")
    count = len(running.token_ids)
    assert running.token_ids == expected(A, 800, ignore_eos=True)[:count]
    shared_pair.check_job("probe", A)
    shared_pair.wait_clean()
