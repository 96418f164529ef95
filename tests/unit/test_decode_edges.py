"""Edges of the decode core: first token, local fallback, waiting, labels, refusals, foreign records."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.errors import ErrorCode, ExitStatus
from common.lifecycle import JobState
from common.messages import Accepted, Draining, Failed, Finished, PrefillDone, Rejected, Submit
from decode_node.events import LocalChunkComputed
from prefill_node.events import ComputeFailed
from tests.actors import LOCAL_ROUTE, MAX_QUEUE, PREFILL_WAIT_MS, ROUTE, STALL_MS
from tests.cores import Pair
from tests.devices import MAX_TOKENS, PROFILE, VOCABULARY, expected_tokens, letters

X = [1, 2, 3, 4, 5]
FIRST, SECOND, THIRD = expected_tokens(X, 3)
PLAIN = replace(ROUTE, prefetch_depth=0)


def fail_chunk(pair: Pair, detail: str = "boom") -> None:
    chunk = pair.prefill.chunks.popleft()
    pair.prefill.step(ComputeFailed(chunk.slot, chunk.epoch, detail), pair.now_ms)
    pair.deliver()


def test_a_job_that_ends_at_its_first_token_never_takes_a_lane() -> None:
    for number, sampling in enumerate(
        [
            {"max_tokens": 1},
            {"stop_token_ids": [FIRST]},
            {"stop": letters([FIRST])},
            {"stop_token_ids": [FIRST], "ignore_eos": True},
        ]
    ):
        pair = Pair()
        pair.client.submit("x", X, **sampling)
        pair.finish()
        answer = pair.client.answer("x")
        assert answer.reason == ("length" if number == 0 else "stop")
        assert answer.usage.completion_tokens == 1
        assert pair.client.tokens("x") == [FIRST]
        assert pair.client.text("x") == ("" if "stop" in answer.reason else letters([FIRST]))
        assert pair.device.lanes == {}
        assert "importing" not in answer.timings.stages_ms
        assert (pair.slot_states(), pair.source_states()) == (["free"], ["idle"])


def test_the_first_token_is_streamed_before_a_lane_is_free() -> None:
    pair = Pair()
    pair.client.submit("a", [9], max_tokens=8)
    pair.prefill_all()
    pair.compute()
    pair.client.submit("x", X)
    pair.prefill_all()
    pair.compute()
    assert pair.client.tokens("x") == [FIRST]
    assert pair.slot_states() == ["ready"]
    assert pair.job("x").lane is None


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_is_exact_and_every_token_comes_once(max_tokens: int) -> None:
    pair = Pair()
    pair.client.submit("x", X, max_tokens=max_tokens)
    pair.finish()
    answer = pair.client.answer("x")
    assert (answer.reason, answer.usage.completion_tokens) == ("length", max_tokens)
    assert pair.client.tokens("x") == [FIRST, SECOND, THIRD][:max_tokens]
    assert pair.client.text("x") == letters([FIRST, SECOND, THIRD][:max_tokens])


def test_a_stop_string_across_the_first_and_second_token_ends_the_job_and_is_not_shown() -> None:
    pair = Pair()
    pair.client.submit("x", X, max_tokens=9, stop=letters([FIRST, SECOND]))
    pair.finish()
    answer = pair.client.answer("x")
    assert (answer.reason, answer.usage.completion_tokens) == ("stop", 2)
    assert pair.client.text("x") == ""
    assert pair.core.lanes.free_count == 1


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    pair = Pair()
    pair.client.submit("x", X, max_tokens=2, stop=letters([FIRST, SECOND, THIRD]))
    pair.finish()
    assert pair.client.answer("x").reason == "length"
    assert pair.client.text("x") == letters([FIRST, SECOND])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, MAX_TOKENS - 4, MAX_TOKENS - 3])
def test_prompts_around_chunk_and_context_limits(length: int) -> None:
    prompt_ids = [number % VOCABULARY for number in range(length)]
    pair = Pair()
    pair.client.submit("x", prompt_ids, max_tokens=4)
    pair.finish()
    if length + 4 > MAX_TOKENS:
        assert pair.client.answer("x").code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert pair.sent == []
    else:
        assert pair.client.tokens("x") == expected_tokens(prompt_ids, 4)


def test_the_limit_is_the_smaller_of_both_sides() -> None:
    pair = Pair(connect=False)
    pair.start_prefill("prefill-2", replace(PROFILE, max_tokens=8))
    pair.hold_text = True
    pair.client.submit("early", X, max_tokens=9)
    pair.prefill_exists = True
    pair.hold_text = False
    pair.deliver()
    assert isinstance(pair.client.of("early", Accepted)[0], Accepted), "nobody knew better then"
    pair.advance(400)
    assert pair.client.answer("early").code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    pair.client.submit("late", X, max_tokens=4)
    assert isinstance(pair.client.answer("late"), Rejected)
    assert "the limit is 8" in pair.client.answer("late").detail
    assert pair.sent == []


def production_fails(pair: Pair) -> None:
    fail_chunk(pair)


def worker_goes(pair: Pair) -> None:
    pair.end_session()
    pair.prefill_exists = False


def memory_goes_bad(pair: Pair) -> None:
    pair.prefill_all()
    pair.prefill.slab.slots[0].token_ids[0] ^= 1


@pytest.mark.parametrize("cause", [production_fails, worker_goes, memory_goes_bad])
def test_with_policy_local_the_job_goes_on_here_with_the_same_tokens(cause: Callable) -> None:
    pair = Pair(route=LOCAL_ROUTE)
    pair.client.submit("x", X, max_tokens=3)
    cause(pair)
    pair.finish()
    answer = pair.client.answer("x")
    assert (answer.path, answer.reason) == ("local", "length")
    assert pair.client.tokens("x") == [FIRST, SECOND, THIRD]
    assert pair.core.counters["local_prefill_tokens"] == len(X)
    assert sum(answer.timings.stages_ms.values()) == answer.timings.total_ms


def test_after_a_bad_import_the_local_prefill_keeps_the_first_token_and_the_random_state() -> None:
    runs = []
    for spoilt in (False, True):
        pair = Pair(route=LOCAL_ROUTE)
        pair.client.submit("x", X, max_tokens=6, temperature=1.9, seed=5)
        pair.prefill_all()
        if spoilt:
            pair.prefill.slab.slots[0].token_ids[0] ^= 1
        pair.finish()
        runs.append((pair.client.answer("x").path, pair.client.tokens("x")))
    assert [path for path, _ in runs] == ["remote", "local"]
    assert runs[0][1] == runs[1][1]
    assert len(runs[0][1]) == 6


def test_no_local_prefill_begins_in_a_drain() -> None:
    pair = Pair(route=LOCAL_ROUTE)
    pair.client.submit("x", X)
    pair.stop_decode()
    fail_chunk(pair)
    assert pair.client.answer("x").code is ErrorCode.PREFILL_ERROR
    assert pair.exit.status == ExitStatus.OK


def test_a_local_prefill_that_makes_progress_is_not_hung() -> None:
    pair = Pair(route=LOCAL_ROUTE, connect=False)
    pair.client.submit("x", X)
    for _ in range(3):
        pair.advance(STALL_MS - 1)
        pair.step_decode(LocalChunkComputed(pair.job("x").job_id, 0))
    assert pair.exit is None
    pair.finish()
    assert isinstance(pair.client.answer("x"), Finished)


def test_without_a_prefill_node_a_job_waits_and_then_fails() -> None:
    pair = Pair(connect=False)
    pair.advance(500)
    pair.client.submit("x", X)
    pair.advance(PREFILL_WAIT_MS - 1)
    assert pair.client.answer("x") is None
    pair.advance(1)
    answer = pair.client.answer("x")
    assert answer.code is ErrorCode.NO_PREFILL_NODE
    assert answer.definite
    assert pair.exit is None


def test_a_job_that_waits_runs_when_the_prefill_node_comes() -> None:
    pair = Pair(connect=False)
    pair.client.submit("x", X)
    pair.advance(PREFILL_WAIT_MS - 500)
    pair.prefill_exists = True
    pair.advance(499)
    pair.finish()
    assert isinstance(pair.client.answer("x"), Finished)


def test_the_wait_begins_when_the_prefill_node_becomes_unusable_not_when_the_job_came() -> None:
    pair = Pair()
    pair.client.submit("a", [9], max_tokens=40)
    pair.prefill_all()
    pair.compute()
    pair.client.submit("b", list(range(20)))
    pair.client.submit("x", X)
    for _ in range(2):
        pair.advance(PREFILL_WAIT_MS)
        pair.prefill_chunk()
        pair.decode_steps(1)
    pair.stop_prefill()
    assert not pair.worker.usable
    pair.advance(PREFILL_WAIT_MS - 1)
    assert pair.client.answer("x") is None
    pair.advance(1)
    assert pair.client.answer("x").code is ErrorCode.NO_PREFILL_NODE


def test_a_prefill_that_crosses_draining_returns_to_its_old_place_and_no_policy_counts_it() -> None:
    pair = Pair(route=PLAIN)
    pair.hold_up = pair.hold_down = True
    pair.client.submit("x", X)
    pair.client.submit("y", [6, 7])
    pair.hold_down = False
    pair.stop_prefill()
    pair.hold_up = False
    pair.deliver()
    assert pair.job("x").state is JobState.QUEUED
    assert pair.core.counters["kv_refused"] == 0
    assert pair.prefill.exit.status == ExitStatus.OK, "BYE came as nothing was owed"
    pair.start_prefill("prefill-2")
    pair.advance(500)
    assert [request.job_id for request in pair.sent] == ["job-1", "job-1"]
    pair.finish()
    assert pair.client.tokens("x") == expected_tokens(X, 4)
    assert isinstance(pair.client.answer("y"), Finished)


def test_a_full_queue_is_refused_early_with_a_hint() -> None:
    pair = Pair(connect=False)
    for number in range(MAX_QUEUE):
        pair.client.submit(f"job{number}", X)
    pair.client.submit("one-more", X)
    answer = pair.client.answer("one-more")
    assert (answer.code, answer.retry_ms) == (ErrorCode.BUSY, 500)
    pair.client.cancel("job3")
    pair.client.submit("another", X)
    assert pair.client.of("another", Accepted)


def test_a_label_may_not_be_used_twice_at_a_time_and_again_afterwards() -> None:
    pair = Pair()
    pair.client.submit("x", X)
    pair.client.submit("x", [6, 7])
    assert [item.code for item in pair.client.of("x", Rejected)] == [ErrorCode.DUPLICATE_ID]
    pair.client.received.clear()
    pair.finish()
    assert pair.client.tokens("x") == expected_tokens(X, 4), "the first is untouched"
    pair.client.received.clear()
    pair.client.submit("x", [6, 7])
    pair.finish()
    assert pair.client.tokens("x") == expected_tokens([6, 7], 4)


def test_a_rejected_submit_leaves_nothing_behind() -> None:
    pair = Pair()
    pair.client.submit("x", [])
    assert pair.client.answer("x").code is ErrorCode.EMPTY_PROMPT
    pair.client.say(Submit("y", prompt_ids=(VOCABULARY,), sampling={}))
    assert pair.client.answer("y").code is ErrorCode.TOKEN_OUT_OF_RANGE
    pair.compute()
    assert pair.core.idle
    assert (pair.text.streams, pair.core.desk.waiting_count) == ({}, 0)
    assert pair.core.desk.timers.deadline_ms() is None


def test_nonsense_from_a_client_is_answered_and_then_ends_its_session_alone() -> None:
    pair = Pair()
    other = pair.add_client("client-2")
    pair.tick()
    other.submit("x", X)
    session = pair.client.session
    for _ in range(6):
        pair.client.say(Draining())
    assert session not in pair.core.desk.clients.sessions
    pair.finish()
    assert isinstance(other.answer("x"), Finished)


FOREIGN_RECORDS: list[tuple[str, dict[str, Any]]] = [
    ("of another prompt", {"prompt_digest": "0" * 32}),
    ("4 tokens of 5", {"token_count": 4}),
    ("bytes of", {"byte_count": 9}),
    ("chunk size", {"chunk_tokens": 0}),
    ("1 digests for 2", {"chunk_digests": (b"d" * 16,)}),
    ("malformed digest", {"chunk_digests": (b"d" * 16, b"d")}),
    ("bytes of logits", {"logits": b"\0" * 4 * (VOCABULARY - 1)}),
]


@pytest.mark.parametrize(("words", "change"), FOREIGN_RECORDS)
def test_a_record_that_does_not_fit_its_job_yields_no_token(words: str, change: dict[str, Any]) -> None:
    pair = Pair()
    pair.client.submit("x", X)
    pair.hold_down = True
    pair.prefill_all()
    pair.edit_down(
        lambda message: replace(message, **change) if isinstance(message, PrefillDone) else message
    )
    pair.hold_down = False
    pair.deliver()
    answer = pair.client.answer("x")
    assert answer.code is ErrorCode.KV_CORRUPT
    assert words in answer.detail
    assert pair.client.tokens("x") == []
    assert (pair.slot_states(), pair.source_states()) == (["free"], ["idle"])


def test_a_mismatch_before_the_first_session_ends_the_node_and_answers_its_jobs() -> None:
    pair = Pair(connect=False)
    pair.start_prefill("prefill-2", replace(PROFILE, weights_digest="other", dtype="float32"))
    pair.client.submit("x", X)
    pair.prefill_exists = True
    pair.advance(500)
    assert pair.exit.status == ExitStatus.REFUSED
    assert "weights_digest" in pair.exit.reason
    assert "dtype" in pair.exit.reason
    assert pair.client.answer("x").code is ErrorCode.NO_PREFILL_NODE


@pytest.mark.parametrize("stage", ["local_prefilling", "decoding"])
def test_a_mismatch_does_not_call_a_job_with_tokens_one_that_never_happened(stage: str) -> None:
    pair = Pair(route=LOCAL_ROUTE, connect=False)
    pair.client.submit("x", X)
    if stage == "decoding":
        pair.compute()
        pair.decode_steps(1)
        assert pair.client.tokens("x") != []
    pair.start_prefill("prefill-2", replace(PROFILE, layers=2))
    pair.prefill_exists = True
    pair.advance(500)
    assert pair.exit.status == ExitStatus.REFUSED
    answer = pair.client.answer("x")
    assert isinstance(answer, Failed)
    assert answer.definite is (stage == "local_prefilling")


def test_after_the_first_session_a_mismatch_is_shown_and_retried_not_obeyed() -> None:
    pair = Pair()
    pair.start_prefill("prefill-2", replace(PROFILE, weights_digest="other"))
    pair.advance(2_000)
    assert pair.exit is None
    assert "weights_digest" in pair.core.status(pair.now_ms)["workers"][0]["refusal"]
    pair.start_prefill("prefill-3")
    pair.advance(1_000)
    assert pair.worker.usable
    assert pair.core.status(pair.now_ms)["workers"][0]["refusal"] == ""


def test_a_lease_not_longer_than_our_patience_is_refused() -> None:
    pair = Pair(connect=False, dead_after_ms=1_000)
    pair.prefill_exists = True
    pair.advance(500)
    assert pair.exit.status == ExitStatus.REFUSED
    assert "--dead-after-ms" in pair.exit.reason
    assert pair.prefill.core.status(pair.now_ms)["decode_sessions"] == []


def test_status_names_what_a_person_needs() -> None:
    pair = Pair()
    assert pair.core.accepting
    pair.client.submit("x", X)
    pair.client.cancel("x")
    status = pair.core.status(pair.now_ms + 7)
    assert status["workers"][0]["orphans"] == 1
    [slot] = status["workers"][0]["slots"]
    assert (slot["state"], slot["age_ms"]) == ("orphaned", 7)
    assert "CANCELLED" in slot["cause"]
    assert status["idle"] is False
    pair.stop_decode()
    assert not pair.core.accepting


def test_remote_only_accepts_only_from_the_first_session_on() -> None:
    pair = Pair(connect=False)
    assert not pair.core.accepting
    pair.prefill_exists = True
    pair.advance(400)
    assert pair.core.accepting
