"""Transition tables of slots, lanes and jobs: the shape of the hand-off as data.

Decides which event may follow which state, on both nodes; the cores look transitions up here and nowhere
else, the documents are generated from here. A table never says why: guards and effects are code in the cores.
A pair that is missing is illegal, and `advance` raises without changing anything.

Prefill and decode each keep their own view of a slot. The decode node's ledger says who may use it; the
prefill node's table says whether compute may still write to it.
"""

from enum import StrEnum
from typing import TypeVar

from common.errors import InvariantViolation


class SlotState(StrEnum):
    """A granted source slot, as its decode node sees it."""

    FREE = "free"
    PRODUCING = "producing"
    READY = "ready"
    IMPORTING = "importing"
    ORPHANED = "orphaned"


class SlotEvent(StrEnum):
    """What happens to a granted slot.

    COMPLETED: the record and every chunk arrived. DETACHED_WITH_RECORD: the job let go when the record was
    here and chunks were not: nothing is owed any more.
    """

    RESERVED = "reserved"
    COMPLETED = "completed"
    PRODUCER_FAILED = "producer_failed"
    JOB_DETACHED = "job_detached"
    DETACHED_WITH_RECORD = "detached_with_record"
    IMPORT_STARTED = "import_started"
    COPY_ENDED = "copy_ended"


SLOT_TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.RESERVED): SlotState.PRODUCING,
    (SlotState.PRODUCING, SlotEvent.COMPLETED): SlotState.READY,
    (SlotState.PRODUCING, SlotEvent.PRODUCER_FAILED): SlotState.FREE,
    (SlotState.PRODUCING, SlotEvent.JOB_DETACHED): SlotState.ORPHANED,
    (SlotState.PRODUCING, SlotEvent.DETACHED_WITH_RECORD): SlotState.FREE,
    (SlotState.READY, SlotEvent.IMPORT_STARTED): SlotState.IMPORTING,
    (SlotState.READY, SlotEvent.JOB_DETACHED): SlotState.FREE,
    (SlotState.IMPORTING, SlotEvent.COPY_ENDED): SlotState.FREE,
    (SlotState.ORPHANED, SlotEvent.COMPLETED): SlotState.FREE,
    (SlotState.ORPHANED, SlotEvent.PRODUCER_FAILED): SlotState.FREE,
}


class SourceState(StrEnum):
    """A slot of the slab, as the prefill node sees it.

    POOL: granted to nobody. QUEUED: waiting for compute, at first or because one that is more urgent goes
    first. SENDING: compute is through with it, and its completion waits until everything sent from it has
    left. ABANDONED: of an ended session, and not let go of yet.
    """

    POOL = "pool"
    IDLE = "idle"
    QUEUED = "queued"
    COMPUTING = "computing"
    SENDING = "sending"
    HELD = "held"
    ABANDONED = "abandoned"


class SourceEvent(StrEnum):
    """What happens to a slot of the slab. LET_GO: neither compute nor a send uses an abandoned slot."""

    GRANTED = "granted"
    RETURNED = "returned"
    PREFILL = "prefill"
    COMPUTE_STARTED = "compute_started"
    PREEMPTED = "preempted"
    COMPUTE_ENDED = "compute_ended"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RELEASE = "release"
    SESSION_ENDED = "session_ended"
    LET_GO = "let_go"


SOURCE_TRANSITIONS: dict[tuple[SourceState, SourceEvent], SourceState] = {
    (SourceState.POOL, SourceEvent.GRANTED): SourceState.IDLE,
    (SourceState.IDLE, SourceEvent.PREFILL): SourceState.QUEUED,
    (SourceState.IDLE, SourceEvent.RETURNED): SourceState.POOL,
    (SourceState.IDLE, SourceEvent.SESSION_ENDED): SourceState.POOL,
    (SourceState.QUEUED, SourceEvent.COMPUTE_STARTED): SourceState.COMPUTING,
    (SourceState.QUEUED, SourceEvent.CANCELLED): SourceState.IDLE,
    (SourceState.QUEUED, SourceEvent.FAILED): SourceState.IDLE,
    (SourceState.QUEUED, SourceEvent.SESSION_ENDED): SourceState.ABANDONED,
    (SourceState.COMPUTING, SourceEvent.DONE): SourceState.HELD,
    (SourceState.COMPUTING, SourceEvent.FAILED): SourceState.IDLE,
    (SourceState.COMPUTING, SourceEvent.CANCELLED): SourceState.IDLE,
    (SourceState.COMPUTING, SourceEvent.SESSION_ENDED): SourceState.ABANDONED,
    (SourceState.COMPUTING, SourceEvent.COMPUTE_ENDED): SourceState.SENDING,
    (SourceState.COMPUTING, SourceEvent.PREEMPTED): SourceState.QUEUED,
    (SourceState.SENDING, SourceEvent.DONE): SourceState.HELD,
    (SourceState.SENDING, SourceEvent.FAILED): SourceState.IDLE,
    (SourceState.SENDING, SourceEvent.CANCELLED): SourceState.IDLE,
    (SourceState.SENDING, SourceEvent.SESSION_ENDED): SourceState.ABANDONED,
    (SourceState.HELD, SourceEvent.RELEASE): SourceState.IDLE,
    (SourceState.HELD, SourceEvent.SESSION_ENDED): SourceState.POOL,
    (SourceState.ABANDONED, SourceEvent.LET_GO): SourceState.POOL,
}


class LaneState(StrEnum):
    """A lane of the decode engine. STOPPING: its job is gone, compute has not yet let go of it."""

    FREE = "free"
    IMPORTING = "importing"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    STOPPING = "stopping"


class LaneEvent(StrEnum):
    """What happens to a lane. VACATED: compute let go of it, whatever the cause."""

    IMPORT_STARTED = "import_started"
    PREFILL_STARTED = "prefill_started"
    DECODE_STARTED = "decode_started"
    STOP_REQUESTED = "stop_requested"
    VACATED = "vacated"


LANE_TRANSITIONS: dict[tuple[LaneState, LaneEvent], LaneState] = {
    (LaneState.FREE, LaneEvent.IMPORT_STARTED): LaneState.IMPORTING,
    (LaneState.FREE, LaneEvent.PREFILL_STARTED): LaneState.PREFILLING,
    (LaneState.IMPORTING, LaneEvent.DECODE_STARTED): LaneState.DECODING,
    (LaneState.IMPORTING, LaneEvent.VACATED): LaneState.FREE,
    (LaneState.PREFILLING, LaneEvent.DECODE_STARTED): LaneState.DECODING,
    (LaneState.PREFILLING, LaneEvent.STOP_REQUESTED): LaneState.STOPPING,
    (LaneState.PREFILLING, LaneEvent.VACATED): LaneState.FREE,
    (LaneState.DECODING, LaneEvent.STOP_REQUESTED): LaneState.STOPPING,
    (LaneState.DECODING, LaneEvent.VACATED): LaneState.FREE,
    (LaneState.STOPPING, LaneEvent.VACATED): LaneState.FREE,
}


class JobState(StrEnum):
    """A job on the decode node. PREFILLED: its record is here, it waits for its first token or a lane."""

    TOKENIZING = "tokenizing"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"
    IMPORTING = "importing"
    LOCAL_PREFILLING = "local_prefilling"
    DECODING = "decoding"
    FLUSHING = "flushing"
    ENDED = "ended"


class JobEvent(StrEnum):
    """What happens to a job. REQUEUED: back to its old place, for local prefill or after a refusal."""

    ACCEPTED = "accepted"
    PREFILL_SENT = "prefill_sent"
    RECORD_ARRIVED = "record_arrived"
    REQUEUED = "requeued"
    IMPORT_STARTED = "import_started"
    LOCAL_PREFILL_STARTED = "local_prefill_started"
    DECODE_STARTED = "decode_started"
    LAST_TOKEN = "last_token"
    RETIRED = "retired"


JOB_TRANSITIONS: dict[tuple[JobState, JobEvent], JobState] = {
    (JobState.TOKENIZING, JobEvent.ACCEPTED): JobState.QUEUED,
    (JobState.QUEUED, JobEvent.PREFILL_SENT): JobState.PREFILLING,
    (JobState.QUEUED, JobEvent.LOCAL_PREFILL_STARTED): JobState.LOCAL_PREFILLING,
    (JobState.PREFILLING, JobEvent.RECORD_ARRIVED): JobState.PREFILLED,
    (JobState.PREFILLING, JobEvent.REQUEUED): JobState.QUEUED,
    (JobState.PREFILLED, JobEvent.REQUEUED): JobState.QUEUED,
    (JobState.PREFILLED, JobEvent.IMPORT_STARTED): JobState.IMPORTING,
    (JobState.PREFILLED, JobEvent.LAST_TOKEN): JobState.FLUSHING,
    (JobState.IMPORTING, JobEvent.REQUEUED): JobState.QUEUED,
    (JobState.IMPORTING, JobEvent.DECODE_STARTED): JobState.DECODING,
    (JobState.LOCAL_PREFILLING, JobEvent.DECODE_STARTED): JobState.DECODING,
    (JobState.LOCAL_PREFILLING, JobEvent.LAST_TOKEN): JobState.FLUSHING,
    (JobState.DECODING, JobEvent.LAST_TOKEN): JobState.FLUSHING,
} | {(state, JobEvent.RETIRED): JobState.ENDED for state in JobState if state is not JobState.ENDED}

State = TypeVar("State", SlotState, SourceState, LaneState, JobState)
Event = TypeVar("Event", SlotEvent, SourceEvent, LaneEvent, JobEvent)


def advance(table: dict[tuple[State, Event], State], state: State, event: Event) -> State:
    """The state that follows. Raises `InvariantViolation` for a pair that is not in the table."""
    following = table.get((state, event))
    if following is None:
        raise InvariantViolation(f"{type(state).__name__} {state} does not allow {event}")
    return following
