"""The flow-shop bound: worked out by hand, and against a search through all schedules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.launch.flow_shop import makespan, plain_sum

DURATIONS = st.lists(
    st.tuples(st.integers(1, 20).map(float), st.integers(1, 20).map(float)), min_size=1, max_size=8
)


def shortest_by_search(prefills: list[int], decodes: list[int], slots: int) -> int:
    """Try all whole start times, idle ones too, at which no node and no slot is used twice."""
    horizon = sum(prefills) + sum(decodes)

    def shortest(takes: list[int], prefill_end: int, decode_end: int) -> int:
        job = len(takes)
        if job == len(prefills):
            return decode_end
        slot_free = takes[job - slots] if job >= slots else 0
        ends = [horizon]
        for begin in range(max(prefill_end, slot_free), horizon):
            prefilled = begin + prefills[job]
            ends.extend(
                shortest([*takes, take], prefilled, take + decodes[job])
                for take in range(max(prefilled, decode_end), horizon)
            )
        return min(ends)

    return shortest([], 0, 0)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [([1, 1, 1], [1, 1, 1]), ([2, 1, 1], [1, 2, 1]), ([1, 2, 1], [2, 1, 1]), ([1, 1, 2], [2, 1, 1])],
)
def test_the_bound_is_the_best_of_all_schedules(prefills: list[int], decodes: list[int], slots: int) -> None:
    assert makespan(prefills, decodes, slots) == shortest_by_search(prefills, decodes, slots)


def test_one_slot_worked_out_by_hand() -> None:
    # prefill: A 0-3, B 3-5 (the lane took A at 3), C waits until the lane takes B at 7, then 7-11.
    # decode:  A 3-7, B 7-8, C 11-16.
    assert makespan([3, 2, 4], [4, 1, 5], slots=1) == 16


def test_a_second_slot_lets_prefill_run_further_ahead() -> None:
    # prefill: A 0-3, B 3-5, C 5-9. decode: A 3-7, B 7-8, C 9-14.
    assert makespan([3, 2, 4], [4, 1, 5], slots=2) == 14


def test_nothing_to_do_takes_no_time() -> None:
    assert makespan([], [], slots=1) == 0
    assert plain_sum([], []) == 0


def test_without_overlap_the_times_add_up() -> None:
    assert plain_sum([3, 2, 4], [4, 1, 5]) == 19


@given(jobs=DURATIONS, slots=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_the_bound_lies_between_the_busier_node_and_the_sum(
    jobs: list[tuple[float, float]], slots: int
) -> None:
    prefills, decodes = [job[0] for job in jobs], [job[1] for job in jobs]
    bound = makespan(prefills, decodes, slots)
    assert bound <= plain_sum(prefills, decodes)
    assert bound >= max(sum(prefills) + decodes[-1], prefills[0] + sum(decodes))
    assert makespan(prefills, decodes, slots + 1) <= bound


@pytest.mark.parametrize(
    ("prefills", "decodes", "slots"), [([1.0], [], 1), ([], [1.0], 1), ([1.0], [1.0], 0)]
)
def test_times_that_do_not_fit_together_are_refused(
    prefills: list[float], decodes: list[float], slots: int
) -> None:
    with pytest.raises(ValueError):
        makespan(prefills, decodes, slots)
