"""A session lost while a first token is sampled: what comes of its logits decides, then the policy.

Its record is verified and its chunks are not all here; see `test_landed.py` for the rest.
"""

from dataclasses import replace

import pytest

from common.errors import ErrorCode
from common.messages import PrefillDone
from prefill_node import events as prefill_ev
from tests.actors import LOCAL_ROUTE
from tests.devices import expected_tokens
from tests.landing import PROMPT, RETRY_ROUTE, LandingPair


@pytest.fixture
def pair() -> LandingPair:
    return LandingPair()


def lose_while_sampling(pair: LandingPair) -> None:
    """The session ends when the record is here, the first token is not, and chunks are missing."""
    pair.job_with_record()
    pair.end_session()
    pair.prefill.sent.clear()
    assert pair.client.answer("a") is None, "what comes of its logits decides"
    pair.hold_pieces = False
    [session] = pair.prefill.closed
    pair.prefill.step(prefill_ev.BulkReleased(session), pair.now_ms)


def test_a_session_lost_while_the_first_token_is_sampled_fails_the_job_once_compute_has_answered(
    pair: LandingPair,
) -> None:
    lose_while_sampling(pair)
    pair.compute()
    answer = pair.client.answer("a")
    assert (answer.code, answer.definite) == (ErrorCode.PEER_LOST, ErrorCode.PEER_LOST.definite)
    pair.advance(1_000)
    pair.check_at_rest()


def test_a_retry_keeps_the_token_that_was_sampled_meanwhile() -> None:
    pair = LandingPair(route=RETRY_ROUTE)
    lose_while_sampling(pair)
    pair.compute()
    assert pair.client.tokens("a") == expected_tokens(PROMPT, 1)
    pair.advance(1_000)
    pair.finish()
    pair.check_finished("a", PROMPT)
    assert len(pair.sent) == 2
    pair.check_at_rest()


def test_a_local_prefill_keeps_the_token_that_was_sampled_meanwhile() -> None:
    pair = LandingPair(route=LOCAL_ROUTE)
    lose_while_sampling(pair)
    pair.compute()
    pair.finish()
    pair.check_finished("a", PROMPT)
    assert pair.client.answer("a").path == "local"


def test_a_job_whose_first_token_is_its_last_needs_no_policy(pair: LandingPair) -> None:
    pair.job_with_record(max_tokens=1)
    pair.end_session()
    pair.compute()
    pair.deliver()
    pair.check_finished("a", PROMPT, 1)


def test_a_cancel_while_the_lost_jobs_token_is_sampled_is_a_cancel(pair: LandingPair) -> None:
    lose_while_sampling(pair)
    pair.client.cancel("a")
    assert pair.client.answer("a").code is ErrorCode.CANCELLED
    pair.compute()
    assert pair.client.tokens("a") == []
    pair.advance(1_000)
    pair.check_at_rest()


def test_bad_logits_of_a_lost_session_follow_the_policy_once() -> None:
    pair = LandingPair(route=RETRY_ROUTE)
    pair.hold_pieces = pair.hold_down = True
    pair.client.submit("a", PROMPT)
    pair.prefill_all()
    pair.let_go_unseen()
    pair.edit_down(
        lambda message: (
            replace(message, logits_digest=b"0" * 16) if isinstance(message, PrefillDone) else message
        )
    )
    pair.hold_down = False
    pair.deliver()
    pair.end_session()
    pair.prefill.sent.clear()
    pair.hold_pieces = False
    pair.prefill.step(prefill_ev.BulkReleased(pair.prefill.closed[0]), pair.now_ms)
    pair.compute()
    assert pair.client.tokens("a") == []
    pair.advance(1_000)
    pair.finish()
    pair.check_finished("a", PROMPT)
    assert pair.job("a") is None
