"""What a prefill node can say that it should not: the decode node's answer to each, and a lane that goes on.

One decode node serves all tests. Its prefill node is made by hand: while one job decodes and another one is
prefetched, it says late, repeated, reordered, truncated, corrupted and foreign things. Afterwards it says the
right ones, and a job through it gets right tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common import messages as ms
from common.digests import bytes_digest
from common.errors import ErrorCode
from common.messages import (
    Cancel,
    Grant,
    HelloOk,
    Pong,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Release,
    SessionGone,
    SlotGrant,
)
from tests.process.handmade_prefill import HandmadePrefill
from tests.process.handmade_stage import ASKED, ASKED_TOKENS, Stage, set_up, whole
from tests.process.world import Answer, World, expected, prompt_of
from tests.protocol_samples import SAMPLES
from transport.codec import encode

RUNNING, RUNNING_TOKENS = prompt_of(30, 60), 20
OTHER_JOB = "ab" * 16


class Control(Stage):
    """With a job that decodes while things are said."""

    def status(self) -> dict[str, Any]:
        return self.world.status(self.decode)

    def cancel_asked(self) -> None:
        self.client.cancel(f"asked{self.asked_count}")

    def begin_running(self) -> Answer:
        """A job decodes, and stands still between two steps."""
        running = self.client.submit("running", RUNNING, max_tokens=RUNNING_TOKENS, ignore_eos=True)
        before = len(self.prefill.said(Prefill))
        self.world.wait(lambda: len(self.prefill.said(Prefill)) > before, "PREFILL arrives")
        request = self.prefill.said(Prefill)[-1]
        held = len(self.decode.logged("hook.held", point="decode.step"))
        self.decode.hold("decode.step")
        self.prefill.send(self.prefill.produce(request))
        self.world.wait_held(self.decode, "decode.step", held + 1)
        self.wait_released(request)
        return running

    def check_running(self, running: Answer) -> None:
        """It goes on as if nothing had been."""
        self.decode.release("decode.step")
        assert self.world.end_of(running).token_ids == expected(RUNNING, RUNNING_TOKENS, ignore_eos=True)

    def check_good_job(self) -> None:
        """A job whose KV is right gets right tokens."""
        answer, request = self.ask()
        self.prefill.send(self.prefill.produce(request))
        assert self.world.end_of(answer).token_ids == whole(), answer.end
        assert answer.end.path == "remote"
        self.wait_released(request)


@pytest.fixture(scope="module")
def stage(shared_world: World) -> Iterator[Control]:
    with set_up(shared_world, Control, HandmadePrefill) as stage:
        yield stage


Say = Callable[[HandmadePrefill, Prefill], None]


def _says(make: Callable[[HandmadePrefill, Prefill], Any]) -> Say:
    return lambda prefill, request: prefill.send(make(prefill, request))


def _failed(request: Prefill, **changes: Any) -> PrefillFailed:
    failure = PrefillFailed(request.job_id, request.slot, request.epoch, ErrorCode.PREFILL_ERROR, "no")
    return replace(failure, **changes)


def _with_sequence(offset: int) -> Say:
    """A good record in the wrong place of the row."""
    return lambda prefill, request: prefill.send(
        prefill.produce(request), sequence=prefill.last_sequence + offset
    )


def _truncated(prefill: HandmadePrefill, request: Prefill) -> None:
    tag, head, body = encode(prefill.next_header(), prefill.produce(request))
    prefill.send_frames([tag, head, body[:-3]])


def _swapped(prefill: HandmadePrefill, request: Prefill) -> None:
    """Two messages that have overtaken each other."""
    first, second = prefill.next_header(), prefill.next_header()
    prefill.send_frames(encode(second, prefill.produce(request)))
    prefill.send_frames(encode(first, Pong(0, 0)))


OWES_NONE, OTHER, UNEXPECTED = "that owes none", "names another job", "is not expected here"
ENDS_THE_SESSION: dict[str, tuple[Say, str]] = {
    "a record of a later epoch": (
        _says(lambda prefill, request: prefill.produce(request, epoch=request.epoch + 1)),
        OWES_NONE,
    ),
    "a record of an earlier epoch": (
        _says(lambda prefill, request: prefill.produce(request, epoch=request.epoch - 1)),
        OWES_NONE,
    ),
    "a record of a slot that was never granted": (
        _says(lambda prefill, request: prefill.produce(request, slot=9)),
        OWES_NONE,
    ),
    "a record of another job": (
        _says(lambda prefill, request: prefill.produce(request, job_id=OTHER_JOB)),
        OTHER,
    ),
    "a failure of another job": (_says(lambda _, request: _failed(request, job_id=OTHER_JOB)), OTHER),
    "a failure of a later epoch": (
        _says(lambda _, request: _failed(request, epoch=request.epoch + 1)),
        OWES_NONE,
    ),
    "a grant of a slot that is granted": (
        _says(lambda _, request: Grant((SlotGrant(0, request.epoch),))),
        UNEXPECTED,
    ),
    "a sequence gap": (_with_sequence(2), "SEQUENCE_ERROR"),
    "a repeated sequence number": (_with_sequence(0), "SEQUENCE_ERROR"),
    "messages that overtook each other": (_swapped, "SEQUENCE_ERROR"),
    "a truncated message": (_truncated, "PROTOCOL_ERROR"),
    "session gone": (
        lambda prefill, request: prefill.send(SessionGone(prefill.session), sequence=0),
        "no longer knows",
    ),
}
_OF_A_PREFILL_NODE = (HelloOk, ms.HelloRefused, SessionGone, Pong, ms.Bye, Grant, ms.GrantLimit, ms.Draining)
_COMPLETIONS = (PrefillDone, PrefillFailed)
for _sample in SAMPLES:
    if not isinstance(_sample, (*_OF_A_PREFILL_NODE, *_COMPLETIONS, ms.Hello)):
        ENDS_THE_SESSION[f"a {type(_sample).__name__}"] = (
            lambda prefill, request, sample=_sample: prefill.send(sample),
            UNEXPECTED,
        )


@pytest.mark.parametrize("case", ENDS_THE_SESSION)
def test_what_a_prefill_node_must_not_say_ends_its_session_and_fails_its_job_alone(
    stage: Control, case: str
) -> None:
    say, reason = ENDS_THE_SESSION[case]
    running = stage.begin_running()
    answer, request = stage.ask()
    session = stage.prefill.session
    say(stage.prefill, request)
    stage.world.end_of(answer)
    assert (answer.code, answer.end.definite, answer.token_ids) == ("PEER_LOST", False, [])
    assert reason in stage.wait_farewell(session)
    said = stage.prefill.farewells.get(session)
    assert said is None if case == "session gone" else reason in said
    stage.check_running(running)
    stage.check_good_job()


@pytest.mark.parametrize("again", ["record", "failure"])
def test_a_second_completion_ends_the_session_but_not_the_job(stage: Control, again: str) -> None:
    running = stage.begin_running()
    answer, request = stage.ask()
    session = stage.prefill.session
    record = stage.prefill.produce(request)
    stage.prefill.send(record)
    stage.prefill.send(record if again == "record" else _failed(request))
    assert OWES_NONE in stage.wait_farewell(session)
    stage.check_running(running)
    assert stage.world.end_of(answer).token_ids == whole(), answer.end
    stage.check_good_job()


CORRUPT: dict[str, Callable[[PrefillDone], dict[str, Any]]] = {
    "a missing digest": lambda record: {"chunk_digests": record.chunk_digests[:-1]},
    "no digests": lambda record: {"chunk_digests": ()},
    "a digest too many": lambda record: {"chunk_digests": (*record.chunk_digests, bytes(16))},
    "a digest cut short": lambda record: {"chunk_digests": (b"\x01", *record.chunk_digests[1:])},
    "a foreign digest": lambda record: {"chunk_digests": (bytes(16), *record.chunk_digests[1:])},
    "digests in another order": lambda record: {"chunk_digests": record.chunk_digests[::-1]},
    "a prompt of somebody else": lambda record: {"prompt_digest": "ee" * 16},
    "a token short": lambda record: {"token_count": record.token_count - 1},
    "a byte short": lambda record: {"byte_count": record.byte_count - 1},
    "no chunk size": lambda record: {"chunk_tokens": 0},
    "another chunk size": lambda record: {"chunk_tokens": record.chunk_tokens * 2},
    "logits cut short": lambda record: {"logits": record.logits[:-4]},
    "a flipped bit in the logits": lambda record: {"logits": b"\x01" + record.logits[1:]},
    "logits without a digest": lambda record: {"logits_digest": b""},
    "logits that are no numbers": lambda record: _logits(np.full(len(record.logits) // 4, np.nan)),
}


def _logits(row: np.ndarray) -> dict[str, bytes]:
    logits = row.astype("<f4").tobytes()
    return {"logits": logits, "logits_digest": bytes_digest(logits)}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_record_that_does_not_fit_yields_no_token_and_the_session_goes_on(
    stage: Control, case: str
) -> None:
    before = stage.status()["counters"]["kv_refused"]
    answer, request = stage.ask()
    session = stage.prefill.session
    good = stage.prefill.produce(request)
    stage.prefill.send(replace(good, **CORRUPT[case](good)))
    stage.world.end_of(answer)
    assert (answer.code, answer.end.definite) == ("KV_CORRUPT", False)
    # Where the logits are good the first token may be out; the KV is looked at when it is copied.
    assert answer.token_ids == whole()[: len(answer.token_ids)]
    assert len(answer.token_ids) <= ("digest" in case and "logits" not in case)
    stage.wait_released(request)
    assert stage.status()["counters"]["kv_refused"] == before + 1
    stage.check_good_job()
    assert stage.prefill.session == session


def test_a_slot_that_was_handed_on_before_its_record_is_stale(stage: Control) -> None:
    answer, request = stage.ask()
    record = stage.prefill.produce(request)
    stage.prefill.hand_slot_on(request.epoch + 1)
    stage.prefill.send(record)
    assert stage.world.end_of(answer).code == "KV_STALE"
    assert answer.token_ids in ([], whole()[:1])
    stage.wait_released(request)
    stage.check_good_job()


IGNORED: dict[str, Say] = {
    "a PONG of an earlier session": lambda prefill, _: prefill.send(
        Pong(1, 1), session=prefill.earlier_session, sequence=77
    ),
    "a record of an earlier session": lambda prefill, request: prefill.send(
        _failed(request), session=prefill.earlier_session, sequence=77
    ),
    "SESSION_GONE of an earlier session": lambda prefill, _: prefill.send(
        SessionGone(prefill.earlier_session), sequence=0
    ),
    "HELLO_REFUSED after all": lambda prefill, _: prefill.send(
        ms.HelloRefused(False, "changed my mind", ("dtype",)), sequence=0
    ),
    "a HELLO": lambda prefill, _: prefill.send(
        ms.Hello("fedcba9876543210", 1, ms.Role.DECODE), session="nobody", sequence=0
    ),
}
# As a repeated answer to the HELLO of this very socket would be.
NOT_COUNTED = ("HELLO_REFUSED after all",)


@pytest.mark.parametrize("case", IGNORED)
def test_what_belongs_to_no_present_session_changes_nothing(stage: Control, case: str) -> None:
    if not stage.prefill.earlier_session:
        session = stage.prefill.session
        stage.prefill.send(Grant((SlotGrant(0, 1),)))
        stage.wait_farewell(session)
    running = stage.begin_running()
    answer, request = stage.ask()
    session = stage.prefill.session
    stale_before = stage.status()["stale_messages"]
    IGNORED[case](stage.prefill, request)
    stage.prefill.send(stage.prefill.produce(request))
    stage.check_running(running)
    assert stage.world.end_of(answer).token_ids == whole()
    stage.wait_released(request)
    assert stage.prefill.session == session
    counted = case not in NOT_COUNTED
    assert stage.status()["stale_messages"] == stale_before + counted


@pytest.mark.parametrize("late", ["record", "failure"])
def test_a_late_completion_of_an_orphan_does_nothing_but_free_its_slot(stage: Control, late: str) -> None:
    before = stage.status()["workers"][0]["counters"]["late_completions"]
    answer, request = stage.ask()
    session = stage.prefill.session
    stage.cancel_asked()
    assert stage.world.end_of(answer).code == "CANCELLED"
    stage.world.wait(
        lambda: Cancel(request.slot, request.epoch) in stage.prefill.said(Cancel), "CANCEL arrives"
    )
    waiting = stage.client.submit("waiting", ASKED, max_tokens=ASKED_TOKENS, ignore_eos=True)
    stage.world.wait(lambda: waiting.accepted, "the next job is accepted")
    assert stage.prefill.said(Prefill)[-1] == request, "the slot was used again before it came back"
    if late == "record":
        stage.prefill.send(stage.prefill.produce(request))
        stage.wait_released(request)
    else:
        stage.prefill.send(_failed(request, code=ErrorCode.CANCELLED))
    stage.world.wait(lambda: stage.prefill.said(Prefill)[-1] != request, "the next PREFILL follows")
    following = stage.prefill.said(Prefill)[-1]
    assert following.epoch > request.epoch
    assert (Release(request.slot, request.epoch) in stage.prefill.said(Release)) == (late == "record")
    stage.prefill.send(stage.prefill.produce(following))
    assert stage.world.end_of(waiting).token_ids == whole()
    stage.wait_released(following)
    assert answer.token_ids == []
    assert stage.status()["workers"][0]["counters"]["late_completions"] == before + 1
    assert stage.prefill.session == session
