"""Who worked on which job when, as two rows of characters.

Decides how a job's timings become intervals of both nodes on one clock, and how intervals are drawn. Called
by the demonstration. It must never guess: all it knows are durations that the decode node measured and the
arrival of each answer at the client, so a row is exact to the few milliseconds that an answer travels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.client_messages import Timings

IDLE = "·"
_STAGES = ("tokenizing", "queued", "prefilling", "prefilled", "importing", "local_prefilling", "decoding")


@dataclass(frozen=True, slots=True)
class Interval:
    """Work on one job, in ms on the client's clock."""

    job: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Rows:
    """What both nodes did."""

    prefill: tuple[Interval, ...]
    decode: tuple[Interval, ...]


def rows_of(answers: Sequence[tuple[Timings, int]]) -> Rows:
    """Rows of jobs, given each one's timings and the arrival of its answer in ms on the client's clock.

    The prefill node works during the last `prefill_busy_us` of the stage `prefilling`. A prompt that the
    decode node computed itself belongs to its row.
    """
    prefill, decode = [], []
    for job, (timings, arrival_ms) in enumerate(answers):
        moment = float(arrival_ms - timings.total_ms)
        ends = {}
        for stage in _STAGES:
            moment += timings.stages_ms.get(stage, 0)
            ends[stage] = moment
        if "prefilling" in timings.stages_ms:
            end_ms = ends["prefilling"]
            prefill.append(Interval(job, end_ms - timings.prefill_busy_us / 1_000, end_ms))
        decode_ms = timings.stages_ms.get("local_prefilling", 0) + timings.stages_ms.get("decoding", 0)
        if decode_ms:
            decode.append(Interval(job, ends["decoding"] - decode_ms, ends["decoding"]))
    return Rows(tuple(prefill), tuple(decode))


def draw(intervals: Sequence[Interval], span_ms: float, width: int) -> str:
    """`width` characters for `span_ms`: each the letter of the job that takes most of it, or IDLE."""
    cell_ms = span_ms / width
    return "".join(_cell(intervals, cell * cell_ms, (cell + 1) * cell_ms) for cell in range(width))


def letter(job: int) -> str:
    """A job's name in a row: A to Z, then from A again."""
    return chr(ord("A") + job % 26)


def _cell(intervals: Sequence[Interval], start_ms: float, end_ms: float) -> str:
    best, best_ms = IDLE, (end_ms - start_ms) / 2
    for interval in intervals:
        shared_ms = min(end_ms, interval.end_ms) - max(start_ms, interval.start_ms)
        if shared_ms >= best_ms:
            best, best_ms = letter(interval.job), shared_ms
    return best
