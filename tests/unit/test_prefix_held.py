"""What a job holds of the prefix caches when something goes wrong: damaged blocks, and ends in every state.

Driven as `tests/unit/test_prefix_cache.py` is. No lock may be left, and no wrong token may come.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.messages import Failed, Finished
from decode_node.scheduler import Route
from tests.actors import LOCAL_ROUTE, ROUTE
from tests.devices import expected_tokens
from tests.prefix_devices import BLOCK, PrefixPair
from tests.unit.test_prefix_cache import PROMPT, SUFFIX, WHOLE_BLOCKS, behind_another, check, run, warm

RETRY = replace(ROUTE, on_prefill_failure="retry")
TIMEOUT_MS = 1_500  # of a job, shorter than any time after which compute counts as hung


def test_a_damaged_block_at_the_decode_node_has_the_job_sent_again_from_there_on() -> None:
    pair = PrefixPair(places=8)
    warm(pair)
    known = pair.index.known_blocks()
    pair.device.blocks.damaged.add(known[1].place)
    sent = len(pair.sent)
    pair.client.submit("job", PROMPT + SUFFIX, 6)
    pair.finish()

    check(pair, "job", PROMPT + SUFFIX)
    assert [request.send_from for request in pair.sent[sent:]] == [WHOLE_BLOCKS * BLOCK, BLOCK]
    assert known[1].entry_id not in {each.entry_id for each in pair.index.known_blocks()}
    pair.check_unlocked()
    assert run(pair, "next", PROMPT + SUFFIX).usage.cached_tokens_decode > 0


def test_a_damaged_block_at_the_prefill_node_is_computed_again() -> None:
    pair = PrefixPair()
    warm(pair, decode_hit=0)
    known = pair.prefill.index.known_blocks()
    pair.prefill.slab.blocks.damaged.add(known[1].place)
    computed = pair.prefill.slab.computed
    usage = run(pair, "job", PROMPT + SUFFIX).usage

    assert usage.cached_tokens_prefill == BLOCK
    assert pair.prefill.slab.computed - computed == len(PROMPT + SUFFIX) - BLOCK
    assert known[1].entry_id not in {each.entry_id for each in pair.prefill.index.known_blocks()}
    pair.check_unlocked()


def test_a_damaged_block_in_a_local_prefill_has_the_prompt_computed_from_its_beginning() -> None:
    pair = PrefixPair(route=LOCAL_ROUTE, connect=False)
    run(pair, "first", PROMPT)
    computed = pair.device.computed
    pair.device.blocks.damaged.add(pair.index.known_blocks()[0].place)
    usage = run(pair, "job", PROMPT + SUFFIX).usage

    assert usage.cached_tokens_decode == 0
    assert pair.device.computed - computed == len(PROMPT + SUFFIX)
    pair.check_unlocked()


def _leave(pair: PrefixPair) -> None:
    pair.client.leave()


def _time_out(pair: PrefixPair) -> None:
    pair.advance(TIMEOUT_MS)


def _lose_the_session(pair: PrefixPair) -> None:
    pair.end_session()
    pair.advance(1_000)


def _lose_the_process(pair: PrefixPair) -> None:
    pair.start_prefill("prefill-2")
    pair.advance(1_000)


def _corrupt_everything(pair: PrefixPair) -> None:
    pair.device.blocks.damaged.update(pair.device.blocks.kept)
    pair.prefill.slab.blocks.damaged.update(pair.prefill.slab.blocks.kept)


BLOWS = [_leave, _time_out, _lose_the_session, _lose_the_process, _corrupt_everything]


@pytest.mark.parametrize("blow", BLOWS, ids=lambda blow: blow.__name__.strip("_"))
@pytest.mark.parametrize("route", [RETRY, LOCAL_ROUTE], ids=["retry", "local"])
def test_a_blow_in_any_state_leaves_no_lock_and_no_wrong_token(
    blow: Callable[[PrefixPair], None], route: Route
) -> None:
    prompt = PROMPT + SUFFIX
    for turns in range(100):
        pair = PrefixPair(route=route, job_timeout_ms=TIMEOUT_MS)
        warm(pair, 3, 2)
        behind_another(pair, prompt)
        for _ in range(turns):
            pair.turn()
        if pair.job("job") is None:
            break
        blow(pair)
        for _ in range(3):
            pair.finish()
            pair.advance(1_000)
        tokens = pair.client.tokens("job")
        assert tokens == expected_tokens(prompt, 6)[: len(tokens)]
        assert isinstance(pair.client.answer("job"), (Finished, Failed, type(None)))
        pair.check_unlocked()
    assert turns > 10, "the job was hardly ever alive"


def test_a_retry_after_a_lost_session_still_holds_what_was_found() -> None:
    pair = PrefixPair(route=RETRY)
    warm(pair, 3, 4)
    pair.client.submit("job", PROMPT + SUFFIX, 6)
    held = pair.job("job").prefix
    pair.end_session()

    assert pair.job("job").prefix == held
    pair.advance(1_000)
    pair.finish()
    assert check(pair, "job", PROMPT + SUFFIX).usage.cached_tokens_decode == 3 * BLOCK
    assert pair.sent[-1].send_from == 3 * BLOCK


def test_a_local_fallback_still_uses_what_was_found() -> None:
    pair = PrefixPair(route=LOCAL_ROUTE, prefill_timeout_ms=1_000)
    warm(pair, 3, 4)
    pair.client.submit("job", PROMPT + SUFFIX, 6)
    pair.advance(1_000)
    pair.finish()

    answer = check(pair, "job", PROMPT + SUFFIX)
    assert (answer.path, answer.usage.cached_tokens_decode) == ("local", 3 * BLOCK)
    assert pair.device.computed == len(PROMPT + SUFFIX) - 3 * BLOCK
    pair.check_unlocked()
