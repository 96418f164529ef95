"""The depth of prefetch and the shortest remote prompt, from what jobs were measured to take."""

import pytest

from decode_node.pace import Pace

LIMIT = 2_048


@pytest.mark.parametrize(
    ("production_ms", "occupied_ms", "lanes", "depth"),
    [
        (100, 400, 1, 1),
        (399, 400, 1, 1),
        (500, 400, 1, 2),
        (100, 400, 4, 2),
        (250, 400, 4, 3),
        (5, 400, 1, 1),
    ],
)
def test_as_many_prompts_are_under_way_as_lanes_are_released_meanwhile(
    production_ms: int, occupied_ms: int, lanes: int, depth: int
) -> None:
    pace = Pace()
    for _ in range(20):
        pace.produced(1_000 * production_ms, 0)
        pace.lane_released(occupied_ms)
    assert pace.depth(lanes) == depth


def test_the_way_of_the_kv_is_part_of_a_production() -> None:
    pace = Pace()
    pace.produced(100_000, 450_000)
    pace.lane_released(500)
    assert pace.depth(1) == 2


def test_nothing_measured_means_one_prefetch_and_everything_remote() -> None:
    pace = Pace()
    assert (pace.depth(8), pace.min_remote_tokens(LIMIT)) == (1, 0)
    pace.lane_released(0)
    pace.produced(1_000, 0)
    assert pace.depth(1) == 1, "a lane that was released at once says nothing"


def test_one_odd_job_does_not_decide() -> None:
    pace = Pace()
    for _ in range(20):
        pace.produced(100_000, 0)
        pace.lane_released(400)
    pace.produced(900_000, 0)
    assert pace.depth(1) == 1


def test_short_prompts_stay_here_when_the_remote_way_has_a_fixed_cost() -> None:
    pace = Pace(chunk_us=128_000, chunk_tokens=128)
    for tokens in (100, 200, 400):
        pace.imported(tokens, 50 + tokens // 2)
    assert pace.min_remote_tokens(LIMIT) in (100, 101), "where the lines meet"


def test_a_remote_way_that_never_pays_is_not_taken() -> None:
    pace = Pace(chunk_us=128_000, chunk_tokens=128)
    for tokens in (100, 200, 400):
        pace.imported(tokens, 50 + 2 * tokens)
    assert pace.min_remote_tokens(LIMIT) == LIMIT + 1


def test_local_prefills_correct_what_was_measured_at_load() -> None:
    pace = Pace(chunk_us=128_000, chunk_tokens=128)
    for tokens in (100, 200, 400):
        pace.imported(tokens, 50 + tokens // 2)
    for _ in range(60):
        pace.computed_locally(100, 300_000)
    assert pace.min_remote_tokens(LIMIT) == 21
    pace.computed_locally(0, 0)


def test_prompts_of_one_length_draw_no_line() -> None:
    pace = Pace(chunk_us=1_000, chunk_tokens=1)
    for _ in range(5):
        pace.imported(100, 10)
    assert pace.min_remote_tokens(LIMIT) == 0
