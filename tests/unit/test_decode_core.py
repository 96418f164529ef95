"""The decode core: every job state under every cause ends in one answer, free slots and a node that goes on.

Job `x` of the first client is brought into each state; `blocker`, where one is needed, belongs to the second.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import ErrorCode, ExitStatus
from common.lifecycle import JobState
from common.messages import Failed, Finished
from decode_node.events import LaneFailed, TextFailed
from prefill_node.events import ComputeFailed
from tests.actors import LOCAL_ROUTE, ROUTE, STALL_MS, TIMES
from tests.cores import Pair
from tests.devices import expected_tokens

X, BLOCKER = [1, 2, 3, 4, 5], [9, 9]
MAX_TOKENS = 3
PLAIN = replace(ROUTE, prefetch_depth=0)
LIVE_STATES = [state for state in JobState if state is not JobState.ENDED]
FINISHED = "finished"
PREFILL_TIMEOUT_MS = 1_000


def submit_x(pair: Pair) -> None:
    pair.client.submit("x", X, max_tokens=MAX_TOKENS)


def in_tokenizing(pair: Pair) -> None:
    pair.hold_text = True
    submit_x(pair)


def in_queued(pair: Pair) -> None:
    pair.clients[1].submit("blocker", BLOCKER, max_tokens=20)
    pair.prefill_all()
    pair.compute()
    submit_x(pair)


def in_prefilling(pair: Pair) -> None:
    submit_x(pair)
    pair.prefill_chunk()


def in_prefilled(pair: Pair) -> None:
    submit_x(pair)
    pair.prefill_all()


def in_importing(pair: Pair) -> None:
    in_prefilled(pair)
    pair.compute_one()


def in_local_prefilling(pair: Pair) -> None:
    submit_x(pair)


def in_decoding(pair: Pair) -> None:
    in_prefilled(pair)
    pair.compute()
    pair.decode_steps(1)


def in_flushing(pair: Pair) -> None:
    in_decoding(pair)
    pair.hold_text = True
    pair.decode_steps(1)


WAYS = {state: globals()[f"in_{state}"] for state in LIVE_STATES}


def reach(state: JobState, **settings: int) -> Pair:
    local = state is JobState.LOCAL_PREFILLING
    route = LOCAL_ROUTE if local else PLAIN if state is JobState.QUEUED else ROUTE
    pair = Pair(route=route, connect=not local, **settings)
    pair.add_client("client-2")
    pair.tick()
    WAYS[state](pair)
    assert pair.job("x").state is state
    return pair


def wind_up(pair: Pair) -> None:
    """Nothing is held back any more; let everything end."""
    pair.hold_text = False
    pair.deliver()
    if pair.exit is None:
        pair.finish()
        pair.advance(300)
        pair.finish()


def outcome(pair: Pair) -> str | None:
    """How `x` ended; whatever it got is a beginning of the right answer."""
    answer = pair.client.answer("x")
    tokens, right = pair.client.tokens("x"), expected_tokens(X, MAX_TOKENS)
    assert tokens == right[: len(tokens)]
    if isinstance(answer, Finished):
        assert tokens == right
        return FINISHED
    return None if answer is None else str(answer.code)


def check_everything_is_free(pair: Pair) -> None:
    assert pair.core.idle
    assert set(pair.slot_states()) <= {"free"}
    assert set(pair.source_states()) <= {"idle", "pool"}
    assert list(pair.worker.ledger.survivors()) == []
    assert pair.worker.counters["late_completions"] <= pair.worker.counters["orphans"]
    assert (pair.device.samplers, pair.text.streams) == ({}, {})
    assert pair.core.desk.timers.deadline_ms() is None
    assert pair.core.desk.waiting_count == 0


def check_the_node_goes_on(pair: Pair) -> None:
    check_everything_is_free(pair)
    probe = pair.clients[1]
    probe.submit("probe", [7, 7, 7], max_tokens=2)
    pair.finish()
    assert isinstance(probe.answer("probe"), Finished)
    assert probe.tokens("probe") == expected_tokens([7, 7, 7], 2)


@pytest.mark.parametrize("state", LIVE_STATES)
def test_undisturbed_a_job_goes_on_from_every_state(state: JobState) -> None:
    pair = reach(state)
    wind_up(pair)
    assert outcome(pair) == FINISHED
    check_the_node_goes_on(pair)


@pytest.mark.parametrize("state", LIVE_STATES)
def test_a_client_cancels(state: JobState) -> None:
    pair = reach(state)
    pair.client.cancel("x")
    assert outcome(pair) == ErrorCode.CANCELLED
    pair.client.cancel("x")
    wind_up(pair)
    check_the_node_goes_on(pair)


@pytest.mark.parametrize("state", LIVE_STATES)
def test_a_client_says_goodbye(state: JobState) -> None:
    pair = reach(state)
    pair.client.leave()
    assert [job.label for job in pair.core.desk.live() if job.label == "x"] == []
    wind_up(pair)
    assert outcome(pair) is None
    check_the_node_goes_on(pair)


@pytest.mark.parametrize("state", LIVE_STATES)
def test_a_client_goes_silent(state: JobState) -> None:
    pair = reach(state)
    pair.client.silent = True
    pair.advance(TIMES.lease_ms + TIMES.ping_ms)
    assert [job.label for job in pair.core.desk.live() if job.label == "x"] == []
    wind_up(pair)
    check_the_node_goes_on(pair)


@pytest.mark.parametrize("state", LIVE_STATES)
def test_every_state_has_a_deadline(state: JobState) -> None:
    pair = reach(state, job_timeout_ms=1_000)
    pair.advance(999)
    assert pair.client.answer("x") is None
    pair.advance(1)
    assert outcome(pair) == ErrorCode.JOB_TIMEOUT
    assert str(state) in pair.client.answer("x").detail, "a timeout says in which state"
    wind_up(pair)
    check_the_node_goes_on(pair)


SURVIVE_A_LOST_WORKER = [state for state in LIVE_STATES if state is not JobState.PREFILLING]


@pytest.mark.parametrize("state", LIVE_STATES)
def test_the_prefill_node_is_lost(state: JobState) -> None:
    pair = reach(state)
    if pair.worker.session is not None:
        pair.end_session()
    wind_up(pair)
    assert outcome(pair) == (FINISHED if state in SURVIVE_A_LOST_WORKER else ErrorCode.PEER_LOST)
    check_the_node_goes_on(pair)


@pytest.mark.parametrize("state", LIVE_STATES)
def test_the_prefill_node_is_restarted(state: JobState) -> None:
    pair = reach(state)
    pair.start_prefill("prefill-2")
    pair.prefill_exists = True
    pair.advance(TIMES.dead_after_ms + 300)
    assert pair.worker.usable
    wind_up(pair)
    assert outcome(pair) == (FINISHED if state in SURVIVE_A_LOST_WORKER else ErrorCode.PEER_LOST)
    check_the_node_goes_on(pair)


SHUT_DOWN_AT_ONCE = [JobState.TOKENIZING, JobState.QUEUED]


@pytest.mark.parametrize("state", LIVE_STATES)
def test_the_node_drains(state: JobState) -> None:
    pair = reach(state)
    pair.stop_decode()
    wind_up(pair)
    assert outcome(pair) == (ErrorCode.SHUTTING_DOWN if state in SHUT_DOWN_AT_ONCE else FINISHED)
    assert pair.exit.status == ExitStatus.OK


@pytest.mark.parametrize("state", LIVE_STATES)
def test_a_client_cancels_in_a_drain(state: JobState) -> None:
    pair = reach(state)
    pair.stop_decode()
    pair.client.cancel("x")
    wind_up(pair)
    assert outcome(pair) == (ErrorCode.SHUTTING_DOWN if state in SHUT_DOWN_AT_ONCE else ErrorCode.CANCELLED)
    assert pair.exit.status == ExitStatus.OK


@pytest.mark.parametrize("state", LIVE_STATES[2:])
def test_the_drain_takes_too_long(state: JobState) -> None:
    pair = reach(state, drain_ms=1_000)
    pair.stop_decode()
    pair.advance(1_000)
    assert outcome(pair) == ErrorCode.DRAIN_TIMEOUT
    assert pair.exit.status == ExitStatus.DRAIN_INCOMPLETE


HANGS = [JobState.PREFILLED, JobState.IMPORTING, JobState.DECODING, JobState.LOCAL_PREFILLING]


@pytest.mark.parametrize("state", HANGS)
def test_a_hung_node_answers_every_job_before_it_exits(state: JobState) -> None:
    pair = reach(state)
    other = pair.clients[1]
    other.submit("waiting", BLOCKER)
    pair.advance(STALL_MS - 1)
    assert pair.exit is None
    pair.advance(1)
    assert pair.exit.status == ExitStatus.HUNG
    assert outcome(pair) == ErrorCode.ENGINE_HUNG
    assert other.answer("waiting").code is ErrorCode.ENGINE_HUNG
    assert not pair.client.answer("x").definite


def test_compute_that_goes_on_is_not_hung_however_long_it_takes() -> None:
    pair = Pair()
    pair.client.submit("x", X, max_tokens=6)
    pair.prefill_all()
    pair.compute()
    for _ in range(4):
        pair.advance(STALL_MS - 1)
        pair.decode_steps(1)
    assert pair.exit is None
    pair.finish()
    assert pair.client.tokens("x") == expected_tokens(X, 6)


def test_an_idle_node_is_not_hung() -> None:
    pair = Pair()
    pair.advance(10 * STALL_MS)
    assert (pair.exit, pair.prefill.exit) == (None, None)


def prefill_error(pair: Pair) -> None:
    chunk = pair.prefill.chunks.popleft()
    pair.prefill.step(ComputeFailed(chunk.slot, chunk.epoch, "boom"), pair.now_ms)
    pair.deliver()


def prefill_timeout(pair: Pair) -> None:
    pair.advance(PREFILL_TIMEOUT_MS - 1)
    assert pair.client.answer("x") is None
    pair.advance(1)
    assert pair.slot_states() == ["orphaned"]


@pytest.mark.parametrize(
    ("cause", "code"),
    [(prefill_error, ErrorCode.PREFILL_ERROR), (prefill_timeout, ErrorCode.PREFILL_TIMEOUT)],
)
def test_a_production_fails(cause: Callable, code: ErrorCode) -> None:
    pair = reach(JobState.PREFILLING, prefill_timeout_ms=PREFILL_TIMEOUT_MS)
    cause(pair)
    assert outcome(pair) == code
    wind_up(pair)
    check_the_node_goes_on(pair)


def spoil_logits(pair: Pair) -> None:
    pair.hold_down = True
    pair.prefill_all()
    pair.edit_down(lambda message: replace(message, logits=b"\x01" + message.logits[1:]))
    pair.hold_down = False
    pair.deliver()


def spoil_memory(pair: Pair) -> None:
    pair.prefill_all()
    pair.prefill.slab.slots[0].token_ids[2] ^= 1


def reuse_memory(pair: Pair) -> None:
    """Another decode node has been given the slot, and its bytes happen to be the same."""
    pair.prefill_all()
    pair.prefill.slab.slots[0].epoch += 1


@pytest.mark.parametrize(
    ("cause", "code", "tokens"),
    [
        (spoil_logits, ErrorCode.KV_CORRUPT, 0),
        (spoil_memory, ErrorCode.KV_CORRUPT, 1),
        (reuse_memory, ErrorCode.KV_STALE, 1),
    ],
)
def test_kv_that_does_not_verify_yields_no_token(cause: Callable, code: ErrorCode, tokens: int) -> None:
    pair = reach(JobState.PREFILLING)
    cause(pair)
    pair.finish()
    assert outcome(pair) == code
    assert len(pair.client.tokens("x")) == tokens, "the first token comes from the verified logits"
    assert pair.device.steps == [], "no decode step read the lane"
    assert pair.core.counters["kv_refused"] == 1
    check_the_node_goes_on(pair)


@pytest.mark.parametrize("state", [JobState.DECODING, JobState.LOCAL_PREFILLING])
def test_the_engine_raises(state: JobState) -> None:
    pair = reach(state)
    job = pair.job("x")
    pair.device.commands.clear()
    pair.device.running.clear()
    pair.step_decode(LaneFailed(job.job_id, job.lane, "boom"))
    wind_up(pair)
    assert outcome(pair) == ErrorCode.ENGINE_ERROR
    assert isinstance(pair.client.answer("x"), Failed)
    check_the_node_goes_on(pair)


@pytest.mark.parametrize("state", [JobState.PREFILLED, JobState.DECODING, JobState.FLUSHING])
def test_the_tokenizer_raises(state: JobState) -> None:
    pair = reach(state)
    pair.step_decode(TextFailed(pair.job("x").job_id, "boom"))
    wind_up(pair)
    assert outcome(pair) == ErrorCode.ENGINE_ERROR
    check_the_node_goes_on(pair)


def test_a_terminal_answer_is_final() -> None:
    pair = Pair(job_timeout_ms=1_000)
    pair.client.submit("a", X)
    pair.prefill_all()
    pair.advance(1_000)
    assert pair.client.answer("a").code is ErrorCode.JOB_TIMEOUT
    pair.finish()
    pair.advance(10_000)
    assert pair.client.answer("a").code is ErrorCode.JOB_TIMEOUT
    assert pair.client.tokens("a") == []


def lose_worker(pair: Pair) -> None:
    pair.end_session()


@pytest.mark.parametrize("cause", [prefill_error, lose_worker])
def test_the_deadline_of_a_failed_production_does_not_follow_the_job_to_its_local_prefill(
    cause: Callable,
) -> None:
    pair = Pair(route=LOCAL_ROUTE, prefill_timeout_ms=PREFILL_TIMEOUT_MS)
    submit_x(pair)
    cause(pair)
    pair.advance(PREFILL_TIMEOUT_MS - 1)
    pair.compute()
    pair.advance(1)
    assert pair.job("x").state is JobState.DECODING
    wind_up(pair)
    assert outcome(pair) == FINISHED
