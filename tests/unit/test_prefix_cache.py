"""The prefix caches of both nodes, over the whole way of a job: what is found, sent, computed and let go.

Production cores and stacks; `tests.prefix_devices` plays compute. Tokens are held against those of a single
process without a cache, and each step checks the invariants of both indices.
"""

from dataclasses import replace

import pytest

from common.errors import ErrorCode
from common.messages import Finished, Rejected, Submit
from decode_node.scheduler import Route
from prefill_node.events import ComputeFailed
from tests.actors import LOCAL_ROUTE, ROUTE
from tests.devices import CHUNK_TOKENS, TOKEN_BYTES, expected_tokens, letters
from tests.prefix_devices import BLOCK, PrefixPair, shorten

PROMPT = [1, 4, 2, 8, 5, 7, 1, 4, 2, 8, 5, 7, 9]
SUFFIX = [11, 3, 6, 10, 2]
WHOLE_BLOCKS = len(PROMPT) // BLOCK
NO_PREFETCH = replace(ROUTE, prefetch_depth=0)
ROUTES = {"prefetch off": NO_PREFETCH, "prefetch on": ROUTE}
HITS = (0, 1, 2, WHOLE_BLOCKS)

every_route = pytest.mark.parametrize("route", ROUTES.values(), ids=list(ROUTES))
every_decode_hit = pytest.mark.parametrize("decode_hit", HITS)
every_prefill_hit = pytest.mark.parametrize("prefill_hit", HITS)


def check(pair: PrefixPair, label: str, prompt: list[int], max_tokens: int = 6) -> Finished:
    """The job of that label has ended with the tokens of one process."""
    answer = pair.client.answer(label)
    assert isinstance(answer, Finished), answer
    assert pair.client.tokens(label) == expected_tokens(prompt, max_tokens)
    return answer


def run(pair: PrefixPair, label: str, prompt: list[int], max_tokens: int = 6) -> Finished:
    pair.client.submit(label, prompt, max_tokens)
    pair.finish()
    return check(pair, label, prompt, max_tokens)


def warm(pair: PrefixPair, decode_hit: int = WHOLE_BLOCKS, prefill_hit: int = WHOLE_BLOCKS) -> None:
    """Have both nodes know so many blocks of PROMPT, and nothing else."""
    run(pair, "warm", PROMPT, 2)
    shorten(pair.index, decode_hit)
    shorten(pair.prefill.index, prefill_hit)


def behind_another(pair: PrefixPair, prompt: list[int]) -> None:
    """Submit a job while the lane is busy: it waits, or is prefetched."""
    pair.client.submit("before", [20, 21], 8)
    pair.prefill_all()
    pair.compute()
    pair.client.submit("job", prompt, 6)


@every_route
@every_prefill_hit
@every_decode_hit
def test_whatever_is_found_the_rest_is_sent_and_computed_and_the_tokens_are_the_same(
    decode_hit: int, prefill_hit: int, route: Route
) -> None:
    pair = PrefixPair(route=route)
    warm(pair, decode_hit, prefill_hit)
    prompt = PROMPT + SUFFIX
    behind_another(pair, prompt)
    prefetched = pair.job("job").reservation is not None
    computed = pair.prefill.slab.computed
    pair.finish()

    assert prefetched == (route is ROUTE)
    usage = check(pair, "job", prompt).usage
    assert usage.cached_tokens_decode == decode_hit * BLOCK
    assert usage.cached_tokens_prefill == prefill_hit * BLOCK
    assert pair.sent[-1].send_from == decode_hit * BLOCK
    assert pair.prefill.done[-1].byte_count == (len(prompt) - decode_hit * BLOCK) * TOKEN_BYTES
    assert pair.prefill.slab.computed - computed == len(prompt) - prefill_hit * BLOCK
    pair.check_unlocked()


@every_route
@pytest.mark.parametrize(("decode_hit", "prefill_hit"), [(0, 0), (2, 0), (0, 2), (2, 1), (4, 4)])
def test_cancelled_in_every_state_a_job_leaves_no_lock_and_the_next_one_is_right(
    decode_hit: int, prefill_hit: int, route: Route
) -> None:
    prompt = PROMPT + SUFFIX
    for turns in range(100):
        pair = PrefixPair(route=route)
        warm(pair, decode_hit, prefill_hit)
        behind_another(pair, prompt)
        for _ in range(turns):
            pair.turn()
        if pair.job("job") is None:
            break
        pair.client.cancel("job")
        pair.finish()

        assert pair.client.answer("job").code is ErrorCode.CANCELLED
        pair.check_unlocked()
        run(pair, "next", prompt)
        pair.check_unlocked()
    assert turns > 10, "the job was hardly ever alive"


@every_route
@every_prefill_hit
@every_decode_hit
def test_when_the_producer_fails_no_lock_is_left_and_the_next_one_is_right(
    decode_hit: int, prefill_hit: int, route: Route
) -> None:
    pair = PrefixPair(route=route)
    warm(pair, decode_hit, prefill_hit)
    pair.client.submit("job", PROMPT + SUFFIX, 6)
    chunk = pair.prefill.chunks.popleft()
    pair.prefill.step(ComputeFailed(chunk.slot, chunk.epoch, "no memory"), pair.now_ms)
    pair.finish()

    assert pair.client.answer("job").code is ErrorCode.PREFILL_ERROR
    pair.check_unlocked()
    assert run(pair, "next", PROMPT + SUFFIX).usage.cached_tokens_decode == decode_hit * BLOCK


LENGTHS = sorted(
    {
        1,
        *(number * BLOCK + away for number in (1, 2, 5) for away in (-1, 0, 1)),
        *(number * CHUNK_TOKENS + away for number in (1, 2, 5) for away in (-1, 0, 1)),
        2 * BLOCK * CHUNK_TOKENS,
    }
)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_round_the_borders_of_blocks_and_chunks_give_the_same_tokens_again(length: int) -> None:
    pair = PrefixPair()
    prompt = [(3 * position) % 19 for position in range(length)]
    run(pair, "first", prompt)
    sent = len(pair.sent)
    usage = run(pair, "second", prompt).usage

    known = min(length - 1, length // BLOCK * BLOCK)
    assert (usage.cached_tokens_decode, usage.cached_tokens_prefill) == (known, known)
    assert [request.send_from for request in pair.sent[sent:]] == [known]
    run(pair, "longer", [*prompt, 7, 8])
    pair.check_unlocked()


def test_a_full_match_still_computes_the_last_token() -> None:
    pair = PrefixPair()
    prompt = PROMPT[: 4 * BLOCK]
    run(pair, "first", prompt)
    computed = pair.prefill.slab.computed
    usage = run(pair, "second", prompt).usage

    assert usage.cached_tokens_decode == usage.cached_tokens_prefill == len(prompt) - 1
    assert pair.prefill.slab.computed == computed + 1
    assert pair.prefill.done[-1].byte_count == TOKEN_BYTES


def test_the_next_turn_of_a_chat_finds_the_answer_of_the_last() -> None:
    pair = PrefixPair()
    run(pair, "first", PROMPT, 8)
    so_far = PROMPT + expected_tokens(PROMPT, 8)
    usage = run(pair, "second", so_far + SUFFIX).usage

    # The KV of the last token of an answer was never computed.
    assert usage.cached_tokens_decode == (len(so_far) - 1) // BLOCK * BLOCK > len(PROMPT)
    assert usage.cached_tokens_prefill == WHOLE_BLOCKS * BLOCK


def test_a_stop_string_ends_a_job_and_what_was_generated_is_kept() -> None:
    pair = PrefixPair()
    tokens = expected_tokens(PROMPT, 8)
    pair.client.submit("first", PROMPT, 8, stop=[letters(tokens[5:7])])
    pair.finish()
    assert isinstance(pair.client.answer("first"), Finished)
    assert pair.client.answer("first").reason == "stop"
    usage = run(pair, "second", PROMPT + tokens).usage

    assert usage.cached_tokens_decode >= (len(PROMPT) + 6) // BLOCK * BLOCK
    pair.check_unlocked()


def test_a_block_is_not_found_behind_another_one() -> None:
    first, other, block = [1] * BLOCK, [2] * BLOCK, [3] * BLOCK
    pair = PrefixPair()
    run(pair, "a b", [*first, *block, 9])
    usage = run(pair, "c b", [*other, *block, 9]).usage
    assert (usage.cached_tokens_decode, usage.cached_tokens_prefill) == (0, 0)
    run(pair, "c b again", [*other, *block, 9])


def test_keys_that_are_all_the_same_cost_hits_and_never_tokens() -> None:
    pair = PrefixPair()
    for index in (pair.index, pair.prefill.index):
        index._keys_of = lambda before, tokens, size: ("same",) * (len(tokens) // (4 * size))
    for number in range(3):
        for name, prompt in (("a", PROMPT), ("b", [*SUFFIX, *PROMPT]), ("c", PROMPT[::-1])):
            run(pair, f"{name}{number}", prompt)
    pair.check_unlocked()


@every_route
@pytest.mark.parametrize("places", [1, 2, 4, 7])
def test_under_pressure_nothing_that_is_held_is_evicted_and_no_place_is_added(
    places: int, route: Route
) -> None:
    pair = PrefixPair(places=places, prefill_places=places, route=route, slots=3)
    prompts = {
        f"{number}": PROMPT[: 3 * (number % 4) + 1] + [number] * (number % 7 + 1) for number in range(20)
    }
    waiting = list(prompts)
    while waiting or pair.core.desk.live():
        while waiting and len(pair.core.desk.live()) < 5:
            pair.client.submit(waiting[0], prompts[waiting.pop(0)], 6)
        pair.turn()
        for status in (pair.index.status(), pair.prefill.index.status()):
            assert status["blocks"] <= places
    pair.finish()

    for label, prompt in prompts.items():
        check(pair, label, prompt)
    assert pair.index.status()["evictions"] > 0
    assert len(pair.device.blocks.kept) <= places
    assert len(pair.prefill.slab.blocks.kept) <= places
    pair.check_unlocked()


@pytest.mark.parametrize("salts", [("one", None), (None, "one"), ("one", "two")])
def test_jobs_of_another_salt_share_nothing(salts: tuple[str | None, str | None]) -> None:
    pair = PrefixPair()
    for label, salt in zip(("first", "second"), salts, strict=True):
        sampling = {"max_tokens": 6}
        pair.client.say(Submit(label, prompt_ids=tuple(PROMPT), sampling=sampling, cache_salt=salt))
        pair.finish()
        usage = check(pair, label, PROMPT).usage
        assert (usage.cached_tokens_decode, usage.cached_tokens_prefill) == (0, 0)


def test_jobs_of_one_salt_share() -> None:
    pair = PrefixPair()
    for label in ("first", "second"):
        sampling = {"max_tokens": 6}
        pair.client.say(Submit(label, prompt_ids=tuple(PROMPT), sampling=sampling, cache_salt="one"))
        pair.finish()
    usage = check(pair, "second", PROMPT).usage
    assert usage.cached_tokens_decode == usage.cached_tokens_prefill == WHOLE_BLOCKS * BLOCK


@pytest.mark.parametrize("per_client", [False, True])
def test_clients_share_prompts_only_where_the_operator_lets_them(per_client: bool) -> None:
    pair = PrefixPair(per_client=per_client)
    run(pair, "first", PROMPT)
    other = pair.add_client("client-2")
    pair.tick()
    other.submit("second", PROMPT, 6)
    pair.finish()

    assert other.tokens("second") == expected_tokens(PROMPT, 6)
    usage = other.answer("second").usage
    known = 0 if per_client else WHOLE_BLOCKS * BLOCK
    assert (usage.cached_tokens_decode, usage.cached_tokens_prefill) == (known, known)


def test_a_local_prefill_computes_only_what_is_not_known() -> None:
    pair = PrefixPair(route=LOCAL_ROUTE, connect=False)
    run(pair, "first", PROMPT)
    computed = pair.device.computed
    before = pair.core.counters["local_prefill_tokens"]
    usage = run(pair, "job", PROMPT + SUFFIX).usage

    rest = len(PROMPT + SUFFIX) - usage.cached_tokens_decode
    assert usage.cached_tokens_decode >= WHOLE_BLOCKS * BLOCK
    assert pair.device.computed - computed == rest
    assert pair.core.counters["local_prefill_tokens"] - before == rest


def test_without_places_nothing_is_kept_or_counted() -> None:
    pair = PrefixPair(places=0, prefill_places=0)
    run(pair, "first", PROMPT)
    usage = run(pair, "second", PROMPT).usage
    assert (usage.cached_tokens_decode, usage.cached_tokens_prefill) == (0, 0)
    assert pair.core.cache.status() is None
    assert not isinstance(pair.client.answer("second"), Rejected)
    assert pair.device.blocks.kept == pair.prefill.slab.blocks.kept == {}
