"""The first token is born from the record, not in the lane: stops and limits hold for it all the same."""

from collections.abc import Callable
from itertools import product

import pytest

from common.messages import Finished
from tests.process.world import Answer, Pair, expected, prompt_of

END = 257


def prompt_whose_answer(wanted: Callable[[list[int]], bool]) -> list[int]:
    """The first prompt, of three letters, whose greedy answer is as wanted."""
    prompts = (list(letters) for letters in product(range(97, 123), repeat=3))
    return next(prompt_ids for prompt_ids in prompts if wanted(prompt_ids))


def finished(pair: Pair, prompt_ids: list[int], **sampling) -> Answer:
    answer = pair.run("job", prompt_ids, **sampling)
    assert isinstance(answer.end, Finished), answer.end
    assert answer.end.usage.completion_tokens == len(answer.token_ids)
    return answer


@pytest.fixture(scope="module")
def plain_prompt() -> list[int]:
    """Its first six tokens are letters or spaces."""
    return prompt_whose_answer(lambda ids: END not in expected(ids, 6))


@pytest.fixture(scope="module")
def silent_prompt() -> list[int]:
    """Its first token is the end of the sequence."""
    return prompt_whose_answer(lambda ids: expected(ids, 1) == [END])


def imports(pair: Pair) -> int:
    return pair.wait_clean()["counters"]["remote_imports"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_counts_the_first_token(
    shared_pair: Pair, plain_prompt: list[int], max_tokens: int
) -> None:
    before = imports(shared_pair)
    answer = finished(shared_pair, plain_prompt, max_tokens=max_tokens)
    assert (answer.token_ids, answer.end.reason) == (expected(plain_prompt, max_tokens), "length")
    assert answer.text == bytes(answer.token_ids).decode()
    assert imports(shared_pair) - before == (max_tokens > 1), "one token needs no lane"


@pytest.mark.parametrize("position", [0, 1])
def test_a_stop_token_ends_the_answer(shared_pair: Pair, plain_prompt: list[int], position: int) -> None:
    whole = expected(plain_prompt, 6)
    stop = whole[position]
    kept = whole[: whole.index(stop)]
    answer = finished(shared_pair, plain_prompt, max_tokens=6, stop_token_ids=[stop])
    assert (answer.token_ids, answer.end.reason) == ([*kept, stop], "stop")
    assert answer.text == bytes(kept).decode()


def test_an_answer_that_is_nothing_but_its_end(shared_pair: Pair, silent_prompt: list[int]) -> None:
    before = imports(shared_pair)
    answer = finished(shared_pair, silent_prompt, max_tokens=6)
    assert (answer.token_ids, answer.text, answer.end.reason) == ([END], "", "stop")
    assert imports(shared_pair) == before


def test_ignore_eos_goes_on_behind_the_first_token(shared_pair: Pair, silent_prompt: list[int]) -> None:
    answer = finished(shared_pair, silent_prompt, max_tokens=6, ignore_eos=True)
    assert answer.token_ids == expected(silent_prompt, 6, ignore_eos=True)
    assert (len(answer.token_ids), answer.end.reason) == (6, "length")


def test_a_stop_string_at_the_first_token(shared_pair: Pair, plain_prompt: list[int]) -> None:
    before = imports(shared_pair)
    first = chr(expected(plain_prompt, 1)[0])
    answer = finished(shared_pair, plain_prompt, max_tokens=6, stop=[first])
    assert (answer.text, answer.end.reason) == ("", "stop")
    assert answer.token_ids == expected(plain_prompt, 1)
    assert imports(shared_pair) == before, "the lane was taken for nothing"


def test_a_stop_string_across_the_first_two_tokens(shared_pair: Pair, plain_prompt: list[int]) -> None:
    text = bytes(expected(plain_prompt, 2)).decode()
    answer = finished(shared_pair, plain_prompt, max_tokens=6, stop=[text])
    assert (answer.text, answer.end.reason) == ("", "stop")
    assert answer.token_ids == expected(plain_prompt, 2)


def test_a_stop_string_that_only_begins_at_the_first_token_is_given_out(
    shared_pair: Pair, plain_prompt: list[int]
) -> None:
    first = chr(expected(plain_prompt, 1)[0])
    answer = finished(shared_pair, plain_prompt, max_tokens=6, stop=[f"{first}\n"])
    assert answer.token_ids == expected(plain_prompt, 6)
    assert (answer.text, answer.end.reason) == (bytes(answer.token_ids).decode(), "length")


def test_the_same_seed_samples_the_same_answer(shared_pair: Pair) -> None:
    asked = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    prompt_ids = prompt_of(40, 16)
    answers = [finished(shared_pair, prompt_ids, seed=seed, **asked).token_ids for seed in (7, 8, 7)]
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]
