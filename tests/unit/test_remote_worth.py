"""From which prompt length on the prefill node pays, by hand-made costs and by trying every length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.remote_worth import (
    LinearCost,
    fit,
    min_remote_prompt_tokens,
    paying_lengths,
    paying_lengths_with_prefetch,
)

MAX_TOKENS = 2_048
COST = st.builds(
    LinearCost, st.integers(0, 400).map(float), st.integers(0, 8).map(lambda eighths: eighths / 8)
)


def test_a_line_is_found_again_from_its_points() -> None:
    cost = fit([(tokens, 12.5 + 0.25 * tokens) for tokens in (16, 100, 700)])
    assert cost.fixed_ms == pytest.approx(12.5)
    assert cost.token_ms == pytest.approx(0.25)


def test_outliers_on_both_sides_of_a_line_leave_it_where_it_is() -> None:
    samples = [(100, 9.0), (100, 11.0), (200, 19.0), (200, 21.0)]
    assert fit(samples).at(150) == pytest.approx(15.0)


@pytest.mark.parametrize("samples", [[], [(5, 1.0)], [(5, 1.0), (5, 2.0)]])
def test_one_length_is_no_line(samples: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="two different lengths"):
        fit(samples)


def test_a_faster_node_behind_a_fixed_cost_pays_beyond_the_break_even_length() -> None:
    paying = paying_lengths(LinearCost(0, 1.0), LinearCost(90, 0.5), MAX_TOKENS)
    assert paying == range(181, MAX_TOKENS + 1)
    assert min_remote_prompt_tokens(paying, MAX_TOKENS) == 181


def test_a_faster_node_without_a_fixed_cost_pays_always() -> None:
    paying = paying_lengths(LinearCost(5, 1.0), LinearCost(5, 0.5), MAX_TOKENS)
    assert min_remote_prompt_tokens(paying, MAX_TOKENS) == 1


def test_an_equal_node_never_pays() -> None:
    paying = paying_lengths(LinearCost(5, 1.0), LinearCost(5, 1.0), MAX_TOKENS)
    assert list(paying) == []
    assert min_remote_prompt_tokens(paying, MAX_TOKENS) is None


def test_a_break_even_length_that_no_prompt_reaches_is_never() -> None:
    assert not paying_lengths(LinearCost(0, 1.0), LinearCost(MAX_TOKENS, 0.5), MAX_TOKENS)


def test_a_node_that_pays_for_short_prompts_alone_has_no_least_length() -> None:
    paying = paying_lengths(LinearCost(100, 0.5), LinearCost(0, 1.0), MAX_TOKENS)
    assert paying == range(1, 200)
    assert min_remote_prompt_tokens(paying, MAX_TOKENS) is None


@given(COST, COST)
def test_the_lengths_are_those_at_which_the_remote_way_is_faster(
    local: LinearCost, remote: LinearCost
) -> None:
    cheaper = [tokens for tokens in range(1, 301) if remote.at(tokens) < local.at(tokens)]
    assert list(paying_lengths(local, remote, 300)) == cheaper


@given(COST, COST, COST, st.integers(0, 500))
def test_with_prefetch_the_slower_of_producer_and_lane_sets_the_pace(
    local: LinearCost, producer: LinearCost, lane: LinearCost, decode_ms: int
) -> None:
    faster = [
        tokens
        for tokens in range(1, 301)
        if max(producer.at(tokens), lane.at(tokens) + decode_ms) < local.at(tokens) + decode_ms
    ]
    assert list(paying_lengths_with_prefetch(local, producer, lane, decode_ms, 300)) == faster


def test_a_slower_node_pays_for_throughput_when_decoding_hides_it() -> None:
    local, producer, lane = LinearCost(0, 1.0), LinearCost(0, 2.0), LinearCost(1, 0.01)
    assert not paying_lengths(local, producer, MAX_TOKENS)
    paying = paying_lengths_with_prefetch(local, producer, lane, 500.0, MAX_TOKENS)
    assert paying == range(2, 500)
