"""The sampler: distributions against a reference, seeds, endings, bad logits."""

import dataclasses
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantViolation
from common.sampling import SamplingParams
from decode_node.sampler import JobSampler, ending_token_ids

NO_EOS = frozenset()
EOS = 7
MANY = 1_000_000


def normal_logits(vocab_size: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)


def peaked_logits(token_id: int, vocab_size: int = 16) -> np.ndarray:
    logits = np.zeros(vocab_size, dtype=np.float32)
    logits[token_id] = 50
    return logits


def reference_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Plain float64 statement of: temperature, min_p, top_k, top_p. For logits without equal values."""

    def softmax(scores: np.ndarray) -> np.ndarray:
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    scores = logits.astype(np.float64) / params.temperature
    probabilities = softmax(scores)
    scores[probabilities < params.min_p * probabilities.max()] = -np.inf
    if params.top_k:
        scores[np.argsort(-scores)[params.top_k :]] = -np.inf
    probabilities = softmax(scores)
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= params.top_p]] = 0
    return probabilities / probabilities.sum()


def assert_distributed(tokens: list[int], probabilities: np.ndarray) -> None:
    """Chi-square; the bound is about six standard deviations of the statistic above its mean."""
    observed = np.bincount(tokens, minlength=probabilities.size)
    assert not observed[probabilities == 0].any(), "drew a token that the parameters exclude"
    order = np.argsort(probabilities)[::-1]
    expected = probabilities[order] * len(tokens)
    common = expected >= 5
    rest = expected[~common].sum()
    statistic = ((observed[order][common] - expected[common]) ** 2 / expected[common]).sum()
    if rest >= 5:
        statistic += (observed[order][~common].sum() - rest) ** 2 / rest
    freedom = max(1, common.sum())
    assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 10


DISTRIBUTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_p": 0.9999999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 12, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
]


@pytest.mark.parametrize("fields", DISTRIBUTIONS, ids=str)
def test_tokens_follow_the_reference_distribution(fields: dict) -> None:
    params = SamplingParams(max_tokens=MANY, seed=11, **fields)
    logits = normal_logits(60)
    sampler = JobSampler(params, NO_EOS)
    tokens = [sampler.sample(logits).token_id for _ in range(4_000)]
    assert_distributed(tokens, reference_probabilities(logits, params))


def test_the_first_token_is_sampled_like_any_other() -> None:
    logits = normal_logits(30)
    firsts = []
    for seed in range(2_000):
        params = SamplingParams(temperature=1.5, top_p=0.9, seed=seed)
        firsts.append(JobSampler(params, NO_EOS).sample(logits).token_id)
    assert_distributed(firsts, reference_probabilities(logits, params))


def test_top_p_counts_only_what_top_k_and_min_p_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    # Of 0.4 and 0.3 alone, the first holds 4/7 > 0.5; of all four it holds only 0.4.
    for limit in ({"top_k": 2}, {"min_p": 0.6}):
        params = SamplingParams(max_tokens=MANY, temperature=1.0, top_p=0.5, seed=1, **limit)
        sampler = JobSampler(params, NO_EOS)
        assert {sampler.sample(logits).token_id for _ in range(300)} == {0}
    sampler = JobSampler(SamplingParams(max_tokens=MANY, temperature=1.0, top_p=0.5, seed=1), NO_EOS)
    assert {sampler.sample(logits).token_id for _ in range(300)} == {0, 1}


@settings(max_examples=150, deadline=None)
@given(
    vocab_size=st.integers(1, 1_500),
    logits_seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 2.0),
    top_k=st.integers(0, 1_600),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.5),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_draw_is_where_the_reference_puts_its_random_number(
    vocab_size: int, logits_seed: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(
        max_tokens=MANY, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    logits = normal_logits(vocab_size, logits_seed)
    probabilities = reference_probabilities(logits, params)
    by_rank = top_p < 1
    order = np.argsort(-probabilities) if by_rank else np.arange(vocab_size)
    upper = np.cumsum(probabilities[order])
    uniforms = np.random.Generator(np.random.PCG64(seed))
    sampler = JobSampler(params, NO_EOS)
    for _ in range(20):
        uniform = uniforms.random()
        position = int(np.flatnonzero(order == sampler.sample(logits).token_id)[0])
        assert probabilities[order[position]] > 0
        assert upper[position] - probabilities[order[position]] - 1e-5 <= uniform <= upper[position] + 1e-5


def test_greedy_takes_the_greatest_logit_and_the_lowest_id_among_equals() -> None:
    sampler = JobSampler(SamplingParams(max_tokens=MANY), NO_EOS)
    for seed in range(20):
        logits = normal_logits(500, seed)
        assert sampler.sample(logits).token_id == int(np.argmax(logits.astype(np.float64)))
    assert sampler.sample(np.array([1, 3, 3, 2, 3], dtype=np.float32)).token_id == 1
    assert sampler.sample(np.zeros(9, dtype=np.float32)).token_id == 0


def test_a_temperature_too_small_to_matter_is_greedy() -> None:
    logits = np.array([1.0, 2.0, 2.0], dtype=np.float32)
    for temperature in (5e-324, 9e-6):
        sampler = JobSampler(SamplingParams(max_tokens=MANY, temperature=temperature), NO_EOS)
        assert {sampler.sample(logits).token_id for _ in range(50)} == {1}


def test_equal_logits_at_the_edge_all_stay_in_top_k_and_the_lowest_ids_in_top_p() -> None:
    logits = np.array([1, 5, 1, 1, 1], dtype=np.float32)
    sampler = JobSampler(SamplingParams(max_tokens=MANY, temperature=2.0, top_k=2, seed=3), NO_EOS)
    assert {sampler.sample(logits).token_id for _ in range(2_000)} == {0, 1, 2, 3, 4}
    uniform = np.zeros(8, dtype=np.float32)
    sampler = JobSampler(SamplingParams(max_tokens=MANY, temperature=1.0, top_p=0.5, seed=3), NO_EOS)
    assert {sampler.sample(uniform).token_id for _ in range(300)} == {0, 1, 2, 3}


def test_extreme_but_finite_logits_neither_warn_nor_fail() -> None:
    greatest = np.finfo(np.float32).max
    logits = np.array([-greatest, 0, greatest, greatest, -greatest], dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fields in DISTRIBUTIONS:
            sampler = JobSampler(SamplingParams(max_tokens=MANY, seed=1, **fields), NO_EOS)
            assert {sampler.sample(logits).token_id for _ in range(100)} <= {2, 3}


def test_logits_are_only_read() -> None:
    logits = normal_logits(300)
    logits.flags.writeable = False
    before = logits.copy()
    for fields in DISTRIBUTIONS:
        JobSampler(SamplingParams(seed=1, **fields), NO_EOS).sample(logits)
    assert np.array_equal(logits, before)


def tokens_of(sampler: JobSampler, count: int = 12, vocab_size: int = 400) -> list[int]:
    return [sampler.sample(normal_logits(vocab_size, step)).token_id for step in range(count)]


def sampled_params(seed: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=MANY, temperature=1.2, top_p=0.95, seed=seed)


def test_a_seed_gives_the_same_tokens_whatever_ran_before_or_between() -> None:
    alone = tokens_of(JobSampler(sampled_params(42), NO_EOS))
    tokens_of(JobSampler(sampled_params(7), NO_EOS))
    assert tokens_of(JobSampler(sampled_params(42), NO_EOS)) == alone

    first, second = JobSampler(sampled_params(42), NO_EOS), JobSampler(sampled_params(42), NO_EOS)
    other = JobSampler(sampled_params(None), NO_EOS)
    interleaved: tuple[list[int], list[int]] = ([], [])
    for step in range(12):
        logits = normal_logits(400, step)
        interleaved[0].append(first.sample(logits).token_id)
        other.sample(logits)
        interleaved[1].append(second.sample(logits).token_id)
    assert interleaved == (alone, alone)


def test_different_seeds_and_the_greatest_seed_work() -> None:
    runs = {tuple(tokens_of(JobSampler(sampled_params(seed), NO_EOS))) for seed in (0, 1, 2, 2**63 - 1)}
    assert len(runs) == 4


def test_jobs_without_a_seed_draw_fresh_entropy_each() -> None:
    tokens_of(JobSampler(sampled_params(42), NO_EOS))
    runs = {tuple(tokens_of(JobSampler(sampled_params(None), NO_EOS))) for _ in range(5)}
    assert len(runs) == 5


def test_entropy_stands_in_for_a_missing_seed_only() -> None:
    assert tokens_of(JobSampler(sampled_params(None), NO_EOS, 5)) == tokens_of(
        JobSampler(sampled_params(None), NO_EOS, 5)
    )
    assert tokens_of(JobSampler(sampled_params(42), NO_EOS, 5)) == tokens_of(
        JobSampler(sampled_params(42), NO_EOS, 6)
    )


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.3, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_ends_the_job_at_exactly_that_token(fields: dict, max_tokens: int) -> None:
    sampler = JobSampler(SamplingParams(max_tokens=max_tokens, **fields), frozenset({EOS}))
    logits = normal_logits(50)
    logits[EOS] = -1_000
    reasons = [sampler.sample(logits).finish_reason for _ in range(max_tokens)]
    assert reasons == [None] * (max_tokens - 1) + ["length"]
    assert sampler.token_count == max_tokens
    with pytest.raises(InvariantViolation):
        sampler.sample(logits)
    assert sampler.token_count == max_tokens


@pytest.mark.parametrize("position", [0, 1, 4])
def test_eos_and_stop_tokens_end_the_job_wherever_they_come_and_are_counted(position: int) -> None:
    cases = [
        (SamplingParams(max_tokens=9), EOS),
        (SamplingParams(max_tokens=9, temperature=1.0, seed=1), EOS),
        (SamplingParams(max_tokens=9, stop_token_ids=(5, 6)), 6),
        (SamplingParams(max_tokens=9, stop_token_ids=(5, EOS), ignore_eos=True), EOS),
    ]
    for params, ending in cases:
        sampler = JobSampler(params, frozenset({EOS}))
        for _ in range(position):
            assert sampler.sample(peaked_logits(3)).finish_reason is None
        last = sampler.sample(peaked_logits(ending))
        assert (last.token_id, last.finish_reason) == (ending, "stop")
        assert sampler.token_count == position + 1


def test_ignored_eos_as_first_token_goes_on_to_max_tokens() -> None:
    sampler = JobSampler(SamplingParams(max_tokens=3, ignore_eos=True), frozenset({EOS}))
    reasons = [sampler.sample(peaked_logits(EOS)).finish_reason for _ in range(3)]
    assert reasons == [None, None, "length"]


def test_stop_wins_when_the_last_allowed_token_is_eos() -> None:
    sampler = JobSampler(SamplingParams(max_tokens=1), frozenset({EOS}))
    assert sampler.sample(peaked_logits(EOS)).finish_reason == "stop"


def test_ending_tokens_are_eos_and_stop_tokens() -> None:
    assert ending_token_ids(SamplingParams(stop_token_ids=(3,)), frozenset({EOS})) == {3, EOS}
    assert ending_token_ids(SamplingParams(stop_token_ids=(3,), ignore_eos=True), frozenset({EOS})) == {3}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}], ids=str)
def test_a_logit_that_is_not_finite_yields_no_token_and_changes_no_state(poison: float, fields: dict) -> None:
    params = SamplingParams(max_tokens=MANY, seed=9, **fields)
    untouched, sampler = JobSampler(params, NO_EOS), JobSampler(params, NO_EOS)
    for position in (0, 150, 299):
        logits = normal_logits(300)
        logits[position] = poison
        with pytest.raises(ValueError, match="finite"):
            sampler.sample(logits)
    assert sampler.token_count == 0
    assert tokens_of(sampler) == tokens_of(untouched)


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros(0, dtype=np.float32),
        np.zeros((1, 9), dtype=np.float32),
        np.zeros(9, dtype=np.float64),
        np.zeros(9, dtype=np.uint16),
    ],
    ids=["empty", "matrix", "float64", "bfloat16 bits"],
)
def test_logits_of_another_shape_or_type_are_refused(logits: np.ndarray) -> None:
    with pytest.raises(ValueError, match="float32"):
        JobSampler(SamplingParams(), NO_EOS).sample(logits)


def test_every_sampling_field_has_an_effect() -> None:
    """A field that is accepted and then ignored is worse than one that is refused."""
    base = SamplingParams(max_tokens=8, temperature=1.5, seed=1, stop_token_ids=(39,))
    changed = {
        "max_tokens": 9,
        "temperature": 0.3,
        "top_k": 1,
        "top_p": 0.05,
        "min_p": 0.9,
        "seed": 2,
        "stop_token_ids": tuple(range(10)),
        "ignore_eos": True,
        "min_tokens": 7,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 2.0,
        "logit_bias": ((3, 4.0),),
    }
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    elsewhere = {"stop", "n", "logprobs"}  # of the text stream, of the core, and told beside the token
    assert set(changed) == names - elsewhere, "add any new field here"

    def run(params: SamplingParams) -> list[int]:
        sampler = JobSampler(params, frozenset(range(30, 39)))
        tokens: list[int] = []
        while True:
            sampled = sampler.sample(normal_logits(40, len(tokens)))
            tokens.append(sampled.token_id)
            if sampled.finish_reason:
                return tokens

    seeds = range(1, 30)
    for name, value in changed.items():
        differs = [
            run(dataclasses.replace(base, seed=seed))
            != run(dataclasses.replace(base, **{"seed": seed, name: value if name != "seed" else seed + 100}))
            for seed in seeds
        ]
        assert any(differs), name
