"""The timeline: from a job's stages to the rows of both nodes."""

from common.client_messages import Timings
from transport.launch.timeline import IDLE, Interval, draw, letter, rows_of


def timings(prefill_busy_us: int = 0, **stages_ms: int) -> Timings:
    return Timings(
        total_ms=sum(stages_ms.values()),
        first_token_ms=None,
        stages_ms=stages_ms,
        prefill_queue_us=0,
        prefill_busy_us=prefill_busy_us,
        decode_busy_us=0,
        copy_us=0,
        digest_us=0,
        lane_gap_us=None,
    )


def test_a_remote_job_has_a_part_in_both_rows() -> None:
    job = timings(
        20_000, tokenizing=5, queued=10, prefilling=30, prefilled=15, importing=2, decoding=40, flushing=1
    )
    rows = rows_of([(job, 1_103)])
    # It arrived at 1,103 - 103 = 1,000; prefilling ended at 1,045, decoding ran from 1,062 to 1,102.
    assert rows.prefill == (Interval(0, 1_025, 1_045),)
    assert rows.decode == (Interval(0, 1_062, 1_102),)


def test_a_local_job_is_the_decode_nodes_alone() -> None:
    rows = rows_of([(timings(tokenizing=1, queued=9, local_prefilling=20, decoding=30, flushing=0), 60)])
    assert rows.prefill == ()
    assert rows.decode == (Interval(0, 10, 60),)


def test_a_job_that_ends_at_its_first_token_never_decodes() -> None:
    rows = rows_of([(timings(8_000, tokenizing=1, queued=1, prefilling=8, prefilled=1, flushing=1), 12)])
    assert rows.prefill == (Interval(0, 2, 10),)
    assert rows.decode == ()


def test_a_cell_shows_the_job_that_takes_most_of_it() -> None:
    intervals = [Interval(0, 0, 24), Interval(1, 24, 44), Interval(2, 71, 100)]
    assert draw(intervals, 100, 10) == "AABB" + 3 * IDLE + "CCC"


def test_a_cell_that_is_mostly_empty_shows_nobody() -> None:
    assert draw([Interval(0, 0, 4)], 20, 2) == IDLE + IDLE


def test_letters_start_again_after_z() -> None:
    assert [letter(0), letter(25), letter(26)] == ["A", "Z", "A"]
