"""Every state of a job against every cause of trouble: the table of right answers.

Decides, for each pair of a place where a job can stand and something that happens there, the one right
answer: the error code or none, and who has the source slot before compute goes on. Data alone; how a job gets
to a place and how a cause is brought about is in `tests/process/matrix_scene.py`, the test over the table in
`tests/process/test_matrix.py`. A cell that cannot be has the reason instead of an outcome.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.errors import ErrorCode
from common.lifecycle import JobState


class Place(StrEnum):
    """Where the job stands. PREFILLED is two places: before and after its first token is sampled."""

    TOKENIZING = "tokenizing"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    UNSAMPLED = "prefilled-unsampled"
    PREFILLED = "prefilled"
    IMPORTING = "importing"
    LOCAL_PREFILLING = "local_prefilling"
    DECODING = "decoding"
    FLUSHING = "flushing"

    @property
    def state(self) -> JobState:
        return JobState(self.value.removesuffix("-unsampled"))

    @property
    def tokens_out(self) -> int:
        """How many tokens its client has: the first comes from the record, before a lane is there."""
        return int(self in (Place.PREFILLED, Place.IMPORTING, Place.DECODING))


class Cause(StrEnum):
    """What happens to it. LEAVE: its client says goodbye; SILENCE: its client is heard no more."""

    CANCEL = "cancel"
    LEAVE = "leave"
    SILENCE = "silence"
    PREFILL_TIMEOUT = "prefill-timeout"
    JOB_TIMEOUT = "job-timeout"
    PREFILL_ERROR = "prefill-error"
    PREFILL_KILLED = "prefill-killed"
    PREFILL_STOPPED = "prefill-stopped"
    DECODE_DRAIN = "decode-drain"


@dataclass(frozen=True)
class Outcome:
    """The right answer. code: None when the job finishes with all its tokens.

    slot: the source slot before compute goes on, as the decode node sees it: a `SlotState`, `survivor`, or
    `lost` when its session has ended; None when the node is gone by then.
    """

    code: ErrorCode | None
    slot: str | None


# Before compute goes on: the slot of a job that stands there, of one that is over, and of one whose prefill
# node is gone. A copy runs to its end; KV that is there outlives its producer.
_STANDS = {
    Place.TOKENIZING: "free",
    Place.QUEUED: "free",
    Place.PREFILLING: "producing",
    Place.UNSAMPLED: "ready",
    Place.PREFILLED: "ready",
    Place.IMPORTING: "importing",
    Place.LOCAL_PREFILLING: "free",
    Place.DECODING: "free",
    Place.FLUSHING: "free",
}
_OVER = {**dict.fromkeys(Place, "free"), Place.PREFILLING: "orphaned", Place.IMPORTING: "importing"}
_SURVIVORS = (Place.UNSAMPLED, Place.PREFILLED, Place.IMPORTING)
_ALONE = {**dict.fromkeys(Place, "lost"), **dict.fromkeys(_SURVIVORS, "survivor")}


def _fails(code: ErrorCode) -> dict[Place, Outcome]:
    return {place: Outcome(code, _OVER[place]) for place in Place}


_UNHARMED = {place: Outcome(None, _STANDS[place]) for place in Place}
_PRODUCER_GONE = {place: Outcome(None, _ALONE[place]) for place in Place} | {
    Place.PREFILLING: Outcome(ErrorCode.PEER_LOST, "lost")
}
_NOT_SENT = "no prefill has been sent for it"
_ANSWERED = "its prefill has been answered"

EXPECTED: dict[Cause, dict[Place, Outcome | str]] = {
    Cause.CANCEL: _fails(ErrorCode.CANCELLED),
    Cause.LEAVE: _fails(ErrorCode.CLIENT_GONE),
    Cause.SILENCE: _fails(ErrorCode.CLIENT_GONE),
    Cause.PREFILL_TIMEOUT: {
        **_UNHARMED,
        Place.TOKENIZING: _NOT_SENT,
        Place.QUEUED: _NOT_SENT,
        Place.PREFILLING: Outcome(ErrorCode.PREFILL_TIMEOUT, "orphaned"),
    },
    Cause.JOB_TIMEOUT: _fails(ErrorCode.JOB_TIMEOUT),
    Cause.PREFILL_ERROR: {
        **dict.fromkeys(Place, _ANSWERED),
        Place.TOKENIZING: _NOT_SENT,
        Place.QUEUED: _NOT_SENT,
        Place.PREFILLING: Outcome(ErrorCode.PREFILL_ERROR, "free"),
    },
    Cause.PREFILL_KILLED: {**_PRODUCER_GONE},
    Cause.PREFILL_STOPPED: {**_PRODUCER_GONE},
    Cause.DECODE_DRAIN: {
        **_UNHARMED,
        Place.TOKENIZING: Outcome(ErrorCode.SHUTTING_DOWN, None),
        Place.QUEUED: Outcome(ErrorCode.SHUTTING_DOWN, "free"),
    },
}

Cell = tuple[Place, Cause]
CELLS: list[Cell] = [(place, cause) for place in Place for cause in Cause]
POSSIBLE: list[Cell] = [
    (place, cause) for place, cause in CELLS if isinstance(EXPECTED[cause][place], Outcome)
]

# What runs on every change: each place and each cause, the ends of the hand-off more than once.
TELLING: list[Cell] = [
    (Place.TOKENIZING, Cause.CANCEL),
    (Place.TOKENIZING, Cause.DECODE_DRAIN),
    (Place.QUEUED, Cause.LEAVE),
    (Place.QUEUED, Cause.PREFILL_KILLED),
    (Place.PREFILLING, Cause.CANCEL),
    (Place.PREFILLING, Cause.PREFILL_TIMEOUT),
    (Place.PREFILLING, Cause.PREFILL_ERROR),
    (Place.PREFILLING, Cause.PREFILL_STOPPED),
    (Place.PREFILLING, Cause.DECODE_DRAIN),
    (Place.UNSAMPLED, Cause.CANCEL),
    (Place.UNSAMPLED, Cause.PREFILL_KILLED),
    (Place.PREFILLED, Cause.SILENCE),
    (Place.PREFILLED, Cause.PREFILL_STOPPED),
    (Place.IMPORTING, Cause.LEAVE),
    (Place.IMPORTING, Cause.JOB_TIMEOUT),
    (Place.IMPORTING, Cause.PREFILL_KILLED),
    (Place.IMPORTING, Cause.DECODE_DRAIN),
    (Place.LOCAL_PREFILLING, Cause.CANCEL),
    (Place.DECODING, Cause.CANCEL),
    (Place.FLUSHING, Cause.LEAVE),
]


def name_of(cell: Cell) -> str:
    return f"{cell[0]}-{cell[1]}"
