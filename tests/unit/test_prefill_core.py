"""The prefill core: one completion for each PREFILL, cancels in each state, epochs, releases, budgets."""

import pytest

from common import limits
from common.errors import ErrorCode
from common.messages import Cancel, PrefillDone, Release
from prefill_node import events as ev
from tests.devices import CHUNK_TOKENS, MAX_TOKENS, TOKEN_BYTES
from tests.prefill_driver import BUDGET_MS, Node, completions, ended

LIVE_STATES = ["queued", "computing", "held"]


def test_a_prefill_is_computed_in_chunks_and_answered_once_with_its_record() -> None:
    node = Node()
    [first] = node.prefill(0, 1, tokens=6)
    assert (first.slot, first.epoch, first.start, first.end) == (0, 1, 0, 4)
    [second] = node.chunk(0, 1, later_ms=10)
    assert (second.start, second.end, second.digests) == (4, 6, (b"d" * 16,))
    [record] = completions(node.chunk(0, 1))
    assert record == PrefillDone(
        "job1",
        0,
        1,
        "digest",
        6,
        CHUNK_TOKENS,
        6 * TOKEN_BYTES,
        (b"d" * 16,) * 2,
        b"logits",
        b"digest",
        0,
        1400,
    )
    assert node.states() == ["held", "idle"]
    assert node.core.line.progress == 2


def test_compute_has_one_chunk_at_a_time_and_takes_prefills_in_order() -> None:
    node = Node()
    node.prefill(1, 1, tokens=4)
    assert node.prefill(0, 1, tokens=4) == []
    assert node.states() == ["queued", "computing"]
    effects = node.chunk(1, 1, later_ms=30)
    assert [(item.slot, item.epoch) for item in effects if isinstance(item, ev.RunChunk)] == [(0, 1)]
    [record] = completions(node.chunk(0, 1))
    assert record.queue_us == 30_000


def test_a_repeated_job_id_is_no_error() -> None:
    node = Node()
    node.prefill(0, 1, job_id="same", tokens=4)
    node.prefill(1, 1, job_id="same", tokens=4)
    answered = completions(node.chunk(0, 1)) + completions(node.chunk(1, 1))
    assert [(message.job_id, message.slot) for message in answered] == [("same", 0), ("same", 1)]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt": b""}, ErrorCode.EMPTY_PROMPT),
        ({"prompt": b"abc"}, ErrorCode.EMPTY_PROMPT),
        ({"prompt": bytes(4 * (MAX_TOKENS + 1))}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"send_from": MAX_TOKENS}, ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_prompt_that_cannot_be_computed_is_answered_at_once(changes: dict, code: ErrorCode) -> None:
    node = Node()
    [failure] = completions(node.prefill(0, 1, **changes))
    assert (failure.code, failure.slot, failure.epoch) == (code, 0, 1)
    assert node.states() == ["idle", "idle"]
    assert node.core.line.counters["prefills_failed"] == 1
    assert len(node.prefill(0, 2)) == 1, "its epoch is used up, the slot is not"


def test_a_prompt_of_exactly_the_limit_is_computed() -> None:
    node = Node()
    assert isinstance(node.prefill(0, 1, tokens=MAX_TOKENS)[0], ev.RunChunk)


def test_a_compute_error_is_the_completion_and_the_next_one_starts() -> None:
    node = Node()
    node.prefill(0, 1)
    node.prefill(1, 1)
    effects = node.step(ev.ComputeFailed(0, 1, "out of memory"))
    [failure] = completions(effects)
    assert (failure.code, failure.detail) == (ErrorCode.PREFILL_ERROR, "out of memory")
    assert effects[1].slot == 1
    assert node.states() == ["idle", "computing"]


@pytest.mark.parametrize("epoch", [0, 3, 4, 4 + limits.EPOCH_STEP + 1])
def test_an_epoch_must_be_greater_but_not_far_greater(epoch: int) -> None:
    node = Node()
    node.prefill(0, 4, prompt=b"")
    effects = node.prefill(0, epoch)
    assert ended(effects)
    assert completions(effects) == []
    assert node.states()[0] == "idle"


def test_an_epoch_at_the_edge_of_the_step_is_taken() -> None:
    node = Node()
    assert not ended(node.prefill(0, limits.EPOCH_STEP))


@pytest.mark.parametrize("state", LIVE_STATES)
def test_a_prefill_into_a_slot_that_is_not_idle_ends_the_session(state: str) -> None:
    node = Node()
    slot = node.bring(state)
    effects = node.prefill(slot, 2)
    assert ended(effects)
    assert node.states()[slot] == state


def test_a_prefill_into_a_slot_that_was_never_granted_ends_the_session() -> None:
    assert ended(Node(slots=1).prefill(1, 1))
    assert ended(Node(slots=1).prefill(limits.SOURCE_SLOTS - 1, 1))


def test_a_cancel_in_the_queue_is_answered_at_once() -> None:
    node = Node()
    slot = node.bring("queued")
    [failure] = completions(node.say(Cancel(slot, 1)))
    assert failure.code is ErrorCode.CANCELLED
    assert node.states() == ["computing", "idle"]


def test_a_cancel_while_computing_is_answered_at_the_next_chunk_and_stops_there() -> None:
    node = Node()
    node.prefill(0, 1, tokens=20)
    assert node.say(Cancel(0, 1)) == []
    assert node.say(Cancel(0, 1)) == []
    effects = node.chunk(0, 1)
    assert [failure.code for failure in completions(effects)] == [ErrorCode.CANCELLED]
    assert [item for item in effects if isinstance(item, ev.RunChunk)] == []
    assert node.states()[0] == "idle"


def test_a_cancel_during_the_last_chunk_is_still_a_cancel() -> None:
    node = Node()
    node.prefill(0, 1, tokens=4)
    node.say(Cancel(0, 1))
    assert [failure.code for failure in completions(node.chunk(0, 1))] == [ErrorCode.CANCELLED]
    assert node.states()[0] == "idle", "nobody has to release it"


def test_a_cancelled_chunk_that_fails_has_one_completion() -> None:
    node = Node()
    node.prefill(0, 1)
    node.say(Cancel(0, 1))
    assert len(completions(node.step(ev.ComputeFailed(0, 1, "boom")))) == 1


def test_a_cancel_for_an_epoch_already_answered_is_a_legal_no_op() -> None:
    node = Node()
    node.bring("held")
    assert node.say(Cancel(0, 1)) == []
    assert node.states()[0] == "held", "the record went out, its RELEASE will come"
    node.say(Release(0, 1))
    assert node.say(Cancel(0, 1)) == []
    node.prefill(0, 2)
    assert node.say(Cancel(0, 1)) == [], "an older epoch does not cancel the newer"
    assert isinstance(node.chunk(0, 2)[0], ev.RunChunk)


def test_a_cancel_of_the_future_or_of_nothing_ends_the_session() -> None:
    assert ended(Node().say(Cancel(0, 1)))
    assert ended(Node(slots=1).say(Cancel(1, 0)))


def test_release_makes_a_held_slot_idle() -> None:
    node = Node()
    node.bring("held")
    assert node.say(Release(0, 1)) == []
    assert node.states()[0] == "idle"


@pytest.mark.parametrize("state", ["idle", "queued", "computing"])
def test_a_release_of_a_slot_that_is_not_held_ends_the_session(state: str) -> None:
    node = Node()
    slot = node.bring(state)
    assert ended(node.say(Release(slot, 1)))
    assert node.states()[slot] == state


def test_a_release_under_another_epoch_or_twice_ends_the_session() -> None:
    for epoch, before in ((0, 0), (2, 0), (1, 1)):
        node = Node()
        node.bring("held")
        for _ in range(before):
            node.say(Release(0, 1))
        assert ended(node.say(Release(0, epoch)))


def test_a_budget_that_is_over_ends_a_production_between_chunks() -> None:
    node = Node()
    node.prefill(0, 1, tokens=20)
    assert completions(node.chunk(0, 1, later_ms=BUDGET_MS - 1)) == []
    [failure] = completions(node.chunk(0, 1, later_ms=1))
    assert failure.code is ErrorCode.PREFILL_TIMEOUT
    assert node.states()[0] == "idle"


def test_a_production_that_is_done_when_its_budget_ends_is_done() -> None:
    node = Node()
    node.prefill(0, 1, tokens=4)
    assert isinstance(completions(node.chunk(0, 1, later_ms=BUDGET_MS))[0], PrefillDone)


def test_a_budget_that_is_over_in_the_queue_is_answered_without_compute() -> None:
    node = Node()
    node.prefill(0, 1, tokens=20)
    node.prefill(1, 1)
    assert node.core.deadline_ms() == BUDGET_MS
    assert node.step(ev.TimePassed(), BUDGET_MS - 1) == []
    [failure] = completions(node.step(ev.TimePassed(), 1))
    assert (failure.slot, failure.code) == (1, ErrorCode.PREFILL_TIMEOUT)
    assert node.states() == ["computing", "idle"]


def test_status_tells_each_slot_its_job_and_its_age() -> None:
    node = Node()
    node.prefill(0, 1, tokens=20)
    node.prefill(1, 3)
    node.now_ms += 40
    first, second = node.core.status(node.now_ms)["slots"]
    assert (first["state"], first["epoch"], first["job"], first["age_ms"]) == ("computing", 1, "job1", 40)
    assert (second["state"], second["epoch"]) == ("queued", 3)
