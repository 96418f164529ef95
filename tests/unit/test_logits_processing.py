"""Biases, penalties, `min_tokens` and logprobs, against a plain statement of what they mean.

The oracle works on lists of Python numbers and looks at the whole answer each time; the code keeps counts. It
stands in `tests/oracle.py`.
"""

import math
import warnings
from collections.abc import Collection, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import InvariantViolation
from common.sampling import SamplingParams
from decode_node.logits_processing import LogitsProcessor, is_needed, raw_logprobs
from decode_node.sampler import JobSampler
from tests import oracle
from tests.unit.test_sampler import MANY, NO_EOS, normal_logits, peaked_logits, reference_probabilities

VOCABULARY = 40
ENDS = frozenset({5, 6})
PROMPT = (1, 2, 3, 3, 30)


def as_bytes(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, dtype="<i4").tobytes()


def oracle_scores(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    ends: Collection,
) -> np.ndarray:
    fields = {name: getattr(params, name) for name in oracle.LOGIT_FIELDS}
    fields["logit_bias"] = dict(params.logit_bias)
    return np.array(oracle.processed_logits(list(map(float, logits)), prompt_ids, answer, ends, **fields))


FIELDS = st.fixed_dictionaries(
    {
        "min_tokens": st.integers(0, 12),
        "presence_penalty": st.just(0.0) | st.floats(-2, 2),
        "frequency_penalty": st.just(0.0) | st.floats(-2, 2),
        "repetition_penalty": st.just(1.0) | st.floats(0.125, 2),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.5, 0.0, 2.0, 100.0]), max_size=6
        ).map(lambda biases: tuple(biases.items())),
        "stop_token_ids": st.sampled_from([(), (0,), (7, 39)]),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    fields=FIELDS, prompt_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=20), seed=st.integers(0, 999)
)
@example(fields={"repetition_penalty": 2.0}, prompt_ids=[], seed=1)
def test_processed_logits_are_those_of_the_oracle_at_every_token(
    fields: dict, prompt_ids: list[int], seed: int
) -> None:
    params = SamplingParams(max_tokens=MANY, **fields)
    ends = ENDS.union(params.stop_token_ids)
    processor = LogitsProcessor(params, ends, np.array(prompt_ids, dtype=np.int32))
    answer: list[int] = []
    for step in range(15):
        logits = normal_logits(VOCABULARY, seed + step, spread=4.0)
        logits.flags.writeable = False
        scores = processor.processed(logits)
        np.testing.assert_allclose(
            scores, oracle_scores(logits, params, prompt_ids, answer, ends), rtol=1e-5, atol=1e-4
        )
        answer.append((seed + step * step) % 7)
        processor.note(answer[-1])


@settings(max_examples=100, deadline=None)
@given(
    fields=FIELDS,
    temperature=st.floats(0.2, 2.0),
    limits=st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.5}]),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_draw_is_from_the_oracles_distribution(
    fields: dict, temperature: float, limits: dict, seed: int
) -> None:
    params = SamplingParams(max_tokens=MANY, temperature=temperature, seed=seed, **limits, **fields)
    ends = ENDS.union(params.stop_token_ids)
    sampler = JobSampler(params, ENDS, prompt=as_bytes(PROMPT))
    uniforms = np.random.Generator(np.random.PCG64(seed))
    answer: list[int] = []
    for step in range(12):
        logits = normal_logits(VOCABULARY, step)
        probabilities = reference_probabilities(oracle_scores(logits, params, PROMPT, answer, ends), params)
        order = np.argsort(-probabilities) if params.top_p < 1 else np.arange(VOCABULARY)
        upper = np.cumsum(probabilities[order])
        sampled, uniform = sampler.sample(logits), uniforms.random()
        position = int(np.flatnonzero(order == sampled.token_id)[0])
        assert upper[position] - probabilities[order[position]] - 1e-4 <= uniform <= upper[position] + 1e-4
        answer.append(sampled.token_id)
        if sampled.finish_reason:
            assert sampled.token_id in ends
            assert len(answer) > params.min_tokens
            return


@settings(max_examples=100, deadline=None)
@given(fields=FIELDS, seed=st.integers(0, 999))
def test_greedy_takes_the_best_of_the_processed_logits(fields: dict, seed: int) -> None:
    params = SamplingParams(max_tokens=MANY, ignore_eos=True, **(fields | {"stop_token_ids": ()}))
    sampler = JobSampler(params, ENDS, prompt=as_bytes(PROMPT))
    answer: list[int] = []
    for step in range(10):
        logits = normal_logits(VOCABULARY, seed + step)
        scores = oracle_scores(logits, params, PROMPT, answer, ENDS)
        answer.append(sampler.sample(logits).token_id)
        assert scores[answer[-1]] >= scores.max() - 1e-4


def greedy(
    params: SamplingParams, logits: np.ndarray, prompt_ids: Sequence[int] = (), count: int = 6
) -> list:
    sampler = JobSampler(params, NO_EOS, prompt=as_bytes(prompt_ids))
    return [sampler.sample(logits).token_id for _ in range(count)]


def test_a_presence_penalty_counts_once_and_a_frequency_penalty_every_time() -> None:
    logits = np.array([3.0, 2.5, 0.0], dtype=np.float32)
    assert greedy(SamplingParams(max_tokens=MANY, presence_penalty=1.0), logits, count=4) == [0, 1, 0, 0]
    assert greedy(SamplingParams(max_tokens=MANY, frequency_penalty=1.0), logits, count=4) == [0, 1, 0, 1]
    # The prompt is none of their business.
    assert greedy(SamplingParams(max_tokens=MANY, presence_penalty=1.0), logits, (0, 0, 1), 1) == [0]


def test_a_repetition_penalty_looks_at_prompt_and_answer_and_at_the_sign() -> None:
    logits = np.array([3.0, 2.0, -1.0, -1.5], dtype=np.float32)
    doubled = SamplingParams(max_tokens=MANY, repetition_penalty=2.0)
    assert greedy(doubled, logits, (), 3) == [0, 1, 0]
    assert greedy(doubled, logits, (0,), 1) == [1]
    negative = np.array([-1.0, -1.5], dtype=np.float32)
    assert greedy(doubled, negative, (0,), 1) == [1]
    assert greedy(SamplingParams(max_tokens=MANY, repetition_penalty=0.5), logits, (1,), 1) == [1]


def test_a_bias_forces_or_bans_a_token() -> None:
    logits = normal_logits(VOCABULARY)
    best = int(logits.argmax())
    assert greedy(SamplingParams(max_tokens=MANY, logit_bias=((9, 100.0),)), logits, count=1) == [9]
    assert greedy(SamplingParams(max_tokens=MANY, logit_bias=((best, -100.0),)), logits, count=1) != [best]
    assert greedy(SamplingParams(max_tokens=MANY, logit_bias=((best, 0.0),)), logits, count=1) == [best]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_end_nor_stop_token_comes_before_min_tokens(temperature: float, ignore_eos: bool) -> None:
    params = SamplingParams(
        max_tokens=9,
        min_tokens=3,
        temperature=temperature,
        seed=1,
        stop_token_ids=(4,),
        ignore_eos=ignore_eos,
    )
    for ending in (4, 5):
        sampler = JobSampler(params, ENDS)
        sampled = [sampler.sample(peaked_logits(ending)) for _ in range(4)]
        assert ending not in [one.token_id for one in sampled[:3]]
        assert [one.finish_reason for one in sampled[:3]] == [None] * 3
        assert sampled[3].token_id == ending
        assert sampled[3].finish_reason == (None if ignore_eos and ending == 5 else "stop")


def test_min_tokens_of_all_tokens_ends_by_length() -> None:
    sampler = JobSampler(SamplingParams(max_tokens=2, min_tokens=2), ENDS)
    assert [sampler.sample(peaked_logits(5)).finish_reason for _ in range(2)] == [None, "length"]
    with pytest.raises(InvariantViolation):
        sampler.sample(peaked_logits(5))


def test_an_end_that_the_model_cannot_say_is_no_end() -> None:
    sampler = JobSampler(SamplingParams(max_tokens=9, min_tokens=2), frozenset({2, 5_000}))
    assert sampler.sample(peaked_logits(2)).token_id != 2


def test_a_bias_against_everything_else_still_yields_a_token() -> None:
    biases = tuple((token_id, -100.0) for token_id in range(VOCABULARY))
    for fields in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_k": 3, "seed": 1}):
        sampler = JobSampler(
            SamplingParams(max_tokens=MANY, min_tokens=MANY, logit_bias=biases, **fields), ENDS
        )
        tokens = {sampler.sample(normal_logits(VOCABULARY, step)).token_id for step in range(60)}
        assert tokens
        assert not tokens & ENDS


def test_extreme_but_finite_logits_stay_finite_and_do_not_warn() -> None:
    greatest = np.finfo(np.float32).max
    logits = np.array([-greatest, 0, greatest, greatest, -greatest], dtype=np.float32)
    fields = {"repetition_penalty": 0.001, "frequency_penalty": -2.0, "logit_bias": ((2, 100.0), (0, -100.0))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=MANY, temperature=temperature, seed=1, logprobs=5, **fields)
            sampler = JobSampler(params, NO_EOS, prompt=as_bytes((0, 3)))
            assert {sampler.sample(logits).token_id for _ in range(50)} <= {2, 3}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_refused_before_it_is_hidden_and_changes_no_state(
    poison: float,
) -> None:
    params = SamplingParams(
        max_tokens=MANY, min_tokens=MANY, temperature=1.0, seed=3, presence_penalty=2.0, logprobs=1
    )
    sampler, untouched = JobSampler(params, ENDS), JobSampler(params, ENDS)
    logits = normal_logits(VOCABULARY)
    logits[5] = poison  # which min_tokens would overwrite
    with pytest.raises(ValueError, match="finite"):
        sampler.sample(logits)
    for step in range(9):
        assert sampler.sample(normal_logits(VOCABULARY, step)) == untouched.sample(
            normal_logits(VOCABULARY, step)
        )


@settings(max_examples=100, deadline=None)
@given(vocab_size=st.integers(1, 200), count=st.integers(0, 20), seed=st.integers(0, 999))
def test_logprobs_are_the_log_softmax_of_the_logits_as_they_came(
    vocab_size: int, count: int, seed: int
) -> None:
    logits = normal_logits(vocab_size, seed, spread=5.0)
    total = math.log(sum(math.exp(float(logit)) for logit in logits))
    token_id = seed % vocab_size
    (told_id, told), *top = raw_logprobs(logits, token_id, count)
    assert told_id == token_id
    assert told == pytest.approx(float(logits[token_id]) - total, abs=1e-5)
    best = sorted(range(vocab_size), key=lambda one: (-logits[one], one))[:count]
    assert [one for one, _ in top] == best
    assert [value for _, value in top] == pytest.approx(
        [float(logits[one]) - total for one in best], abs=1e-5
    )


def test_of_equal_logits_the_lowest_ids_are_told_first() -> None:
    logits = np.array([1, 4, 2, 4, 2, 2], dtype=np.float32)
    assert [token_id for token_id, _ in raw_logprobs(logits, 0, 4)] == [0, 1, 3, 2, 4]


def test_logprobs_come_with_every_token_and_neither_penalty_nor_temperature_changes_them() -> None:
    asked = SamplingParams(
        max_tokens=MANY, temperature=2.0, seed=5, logprobs=2, logit_bias=((3, 50.0),), presence_penalty=1.0
    )
    sampler = JobSampler(asked, NO_EOS)
    for step in range(5):
        logits = normal_logits(VOCABULARY, step)
        sampled = sampler.sample(logits)
        assert sampled.logprobs == raw_logprobs(logits, sampled.token_id, 2)
    assert JobSampler(SamplingParams(logprobs=0), NO_EOS).sample(logits).logprobs == raw_logprobs(
        logits, int(logits.argmax()), 0
    )


def test_asking_for_logprobs_changes_no_token() -> None:
    plain = SamplingParams(max_tokens=MANY, temperature=1.0, seed=8)
    asking = SamplingParams(max_tokens=MANY, temperature=1.0, seed=8, logprobs=20)
    first, second = JobSampler(plain, NO_EOS), JobSampler(asking, NO_EOS)
    for step in range(20):
        logits = normal_logits(VOCABULARY, step)
        told = first.sample(logits)
        assert told.logprobs is None
        assert told.token_id == second.sample(logits).token_id


def test_a_job_without_these_fields_is_not_processed() -> None:
    assert not is_needed(SamplingParams(temperature=1.0, top_k=4, logprobs=3, stop_token_ids=(1,), n=4))
    for field in (
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 0.9},
        {"logit_bias": ((1, 0.0),)},
    ):
        assert is_needed(SamplingParams(**field)), field


def test_the_state_of_one_job_is_not_that_of_another() -> None:
    params = SamplingParams(max_tokens=MANY, frequency_penalty=2.0, repetition_penalty=1.5)

    def run(sampler: JobSampler, step: int) -> int:
        return sampler.sample(normal_logits(VOCABULARY, step)).token_id

    alone = JobSampler(params, NO_EOS, prompt=as_bytes(PROMPT))
    expected = [run(alone, step) for step in range(12)]
    one, other = (JobSampler(params, NO_EOS, prompt=as_bytes(PROMPT)) for _ in range(2))
    mixed = []
    for step in range(12):
        mixed.append(run(one, step))
        run(other, step + 50)
    assert mixed == expected
