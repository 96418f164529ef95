"""`--on-prefill-failure retry`: the same prompt once more, at its old place, and what must not change."""

from dataclasses import replace

import pytest

from common.errors import ErrorCode
from common.messages import Finished
from prefill_node.events import ComputeFailed
from tests.actors import PREFILL_WAIT_MS, ROUTE
from tests.cores import Pair
from tests.devices import expected_tokens

X = [1, 2, 3, 4, 5]
RETRY = replace(ROUTE, on_prefill_failure="retry")


def fail_chunk(pair: Pair) -> None:
    chunk = pair.prefill.chunks.popleft()
    pair.prefill.step(ComputeFailed(chunk.slot, chunk.epoch, "boom"), pair.now_ms)
    pair.deliver()


def finish(pair: Pair, label: str = "x") -> Finished:
    pair.finish()
    answer = pair.client.answer(label)
    assert isinstance(answer, Finished), answer
    assert pair.client.tokens(label) == expected_tokens(X, 4)
    assert pair.slot_states() == ["free"]
    return answer


def test_a_failed_prefill_is_sent_again_and_the_answer_is_the_same() -> None:
    pair = Pair(route=RETRY)
    pair.client.submit("x", X)
    fail_chunk(pair)
    assert [request.epoch for request in pair.sent] == [1, 2]
    finish(pair)
    assert pair.core.counters["prefill_retries"] == 1


def test_a_prompt_that_always_fails_is_answered_after_its_retries() -> None:
    pair = Pair(route=RETRY, prefill_retries=2)
    pair.client.submit("x", X)
    for _ in range(3):
        fail_chunk(pair)
    answer = pair.client.answer("x")
    assert answer.code is ErrorCode.PREFILL_ERROR
    assert "after 2 of --prefill-retries" in answer.detail
    assert len(pair.sent) == 3
    assert pair.slot_states() == ["free"]


def test_a_prompt_that_kills_its_prefill_node_is_not_sent_for_ever() -> None:
    pair = Pair(route=RETRY)
    pair.client.submit("x", X)
    for number in (2, 3):
        pair.end_session("the node died")
        pair.start_prefill(f"prefill-{number}")
        pair.advance(500)
    assert pair.client.answer("x").code is ErrorCode.PEER_LOST
    assert len(pair.sent) == 2


def test_a_retried_job_keeps_its_place() -> None:
    pair = Pair(route=RETRY)
    pair.client.submit("x", X)
    pair.client.submit("later", [7, 7])
    fail_chunk(pair)
    assert pair.sent[1].job_id == pair.sent[0].job_id
    finish(pair)


def test_a_retry_does_not_wait_for_the_orphan_of_the_first_attempt() -> None:
    pair = Pair(route=RETRY, slots=2, prefill_timeout_ms=300)
    pair.client.submit("x", X)
    pair.advance(350)
    assert pair.slot_states() == ["orphaned", "producing"]
    pair.finish()
    assert pair.client.tokens("x") == expected_tokens(X, 4)
    assert pair.slot_states() == ["free", "free"]
    assert pair.worker.counters["late_completions"] == 1


def test_a_token_that_was_shown_stays_and_the_new_logits_are_not_sampled() -> None:
    pair = Pair(route=RETRY)
    pair.client.submit("x", X)
    pair.prefill_all()
    pair.compute_one()  # the first token
    shown = pair.client.tokens("x")
    assert shown == expected_tokens(X, 1)
    pair.prefill.slab.slots[0].token_ids[2] ^= 1
    pair.compute()
    assert len(pair.sent) == 2, "the copy did not verify"
    pair.prefill_all()
    samples = [item for item in pair.device.commands if type(item).__name__ == "SampleFirst"]
    assert samples == []
    finish(pair)


def test_a_job_that_waits_in_vain_for_its_retry_is_not_told_that_nothing_happened() -> None:
    pair = Pair(route=RETRY)
    pair.client.submit("x", X)
    pair.prefill_all()
    pair.compute_one()
    pair.prefill.slab.slots[0].token_ids[2] ^= 1
    pair.end_session("gone")
    pair.prefill_exists = False
    pair.compute()
    pair.advance(2 * PREFILL_WAIT_MS + 500)
    answer = pair.client.answer("x")
    assert (answer.code, answer.definite) == (ErrorCode.PEER_LOST, False)
    assert "no prefill node" in answer.detail


@pytest.mark.parametrize("stop", ["decode", "prefill"])
def test_nothing_is_retried_in_a_drain(stop: str) -> None:
    pair = Pair(route=RETRY)
    pair.client.submit("x", X)
    if stop == "decode":
        pair.stop_decode()
        fail_chunk(pair)
        assert pair.client.answer("x").code is ErrorCode.PREFILL_ERROR
    else:
        pair.stop_prefill()
        fail_chunk(pair)
        assert pair.client.answer("x") is None, "it waits for a prefill node that does not drain"
    assert len(pair.sent) == 1
