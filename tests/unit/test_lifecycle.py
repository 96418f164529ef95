"""The tables of `common.lifecycle` against design, section 5, written out a second time, and their shape."""

import pytest

from common.errors import InvariantViolation
from common.lifecycle import (
    JOB_TRANSITIONS,
    LANE_TRANSITIONS,
    SLOT_TRANSITIONS,
    SOURCE_TRANSITIONS,
    JobEvent,
    JobState,
    LaneEvent,
    LaneState,
    SlotEvent,
    SlotState,
    SourceEvent,
    SourceState,
    advance,
)

# One line for each state: what may happen there, and where it leads.
SLOT = """
free: reserved>producing
producing: completed>ready producer_failed>free job_detached>orphaned detached_with_record>free
ready: import_started>importing job_detached>free
importing: copy_ended>free
orphaned: completed>free producer_failed>free
"""
SOURCE = """
pool: granted>idle
idle: prefill>queued returned>pool session_ended>pool
queued: compute_started>computing cancelled>idle failed>idle session_ended>abandoned
computing: done>held failed>idle cancelled>idle compute_ended>sending preempted>queued session_ended>abandoned
sending: done>held failed>idle cancelled>idle session_ended>abandoned
held: release>idle session_ended>pool
abandoned: let_go>pool
"""
LANE = """
free: import_started>importing prefill_started>prefilling
importing: decode_started>decoding vacated>free
prefilling: decode_started>decoding stop_requested>stopping vacated>free
decoding: stop_requested>stopping vacated>free
stopping: vacated>free
"""
JOB = """
tokenizing: accepted>queued retired>ended
queued: prefill_sent>prefilling local_prefill_started>local_prefilling retired>ended
prefilling: record_arrived>prefilled requeued>queued retired>ended
prefilled: requeued>queued import_started>importing last_token>flushing retired>ended
importing: requeued>queued decode_started>decoding retired>ended
local_prefilling: decode_started>decoding last_token>flushing retired>ended
decoding: last_token>flushing retired>ended
flushing: retired>ended
ended:
"""
TABLES = {
    "slot": (SLOT_TRANSITIONS, SlotState, SlotEvent, SLOT),
    "source": (SOURCE_TRANSITIONS, SourceState, SourceEvent, SOURCE),
    "lane": (LANE_TRANSITIONS, LaneState, LaneEvent, LANE),
    "job": (JOB_TRANSITIONS, JobState, JobEvent, JOB),
}
FIRST_STATES = {
    SlotState: SlotState.FREE,
    SourceState: SourceState.POOL,
    LaneState: LaneState.FREE,
    JobState: JobState.TOKENIZING,
}


def written_out(lines: str) -> dict[tuple[str, str], str]:
    pairs = {}
    for line in lines.strip().splitlines():
        state, _, steps = line.partition(":")
        for step in steps.split():
            event, _, following = step.partition(">")
            pairs[state, event] = following
    return pairs


def reachable(table: dict, first: str) -> set:
    found, waiting = {first}, [first]
    while waiting:
        state = waiting.pop()
        for (source, _), target in table.items():
            if source is state and target not in found:
                found.add(target)
                waiting.append(target)
    return found


ROWS = [(name, state) for name, (_, states, _, _) in TABLES.items() for state in states]


@pytest.mark.parametrize(("name", "state"), ROWS)
def test_each_pair_leads_where_it_is_written_or_raises_and_changes_nothing(name: str, state: str) -> None:
    table, _, events, lines = TABLES[name]
    expected = written_out(lines)
    before = dict(table)
    for event in events:
        following = expected.get((str(state), str(event)))
        if following is None:
            with pytest.raises(InvariantViolation, match=f"{state} does not allow {event}"):
                advance(table, state, event)
        else:
            assert advance(table, state, event) == following
    assert table == before


@pytest.mark.parametrize("name", TABLES)
def test_every_state_can_be_reached_and_every_event_happens_somewhere(name: str) -> None:
    table, states, events, _ = TABLES[name]
    assert reachable(table, FIRST_STATES[states]) == set(states)
    assert {event for _, event in table} == set(events)


@pytest.mark.parametrize("name", ["slot", "source", "lane"])
def test_from_every_state_there_is_a_way_back_to_the_start(name: str) -> None:
    table, states, _, _ = TABLES[name]
    for state in states:
        assert FIRST_STATES[states] in reachable(table, state)


def test_no_transition_leads_out_of_an_ended_job() -> None:
    assert [pair for pair in JOB_TRANSITIONS if pair[0] is JobState.ENDED] == []


def test_every_live_job_can_be_retired() -> None:
    for state in set(JobState) - {JobState.ENDED}:
        assert JOB_TRANSITIONS[state, JobEvent.RETIRED] is JobState.ENDED


def test_an_orphan_is_freed_by_its_producer_alone() -> None:
    ways_out = {event for state, event in SLOT_TRANSITIONS if state is SlotState.ORPHANED}
    assert ways_out == {SlotEvent.COMPLETED, SlotEvent.PRODUCER_FAILED}


def test_a_copy_runs_to_its_end_whatever_happens() -> None:
    ways_out = {event for state, event in SLOT_TRANSITIONS if state is SlotState.IMPORTING}
    assert ways_out == {SlotEvent.COPY_ENDED}


def test_a_slot_in_use_leaves_its_session_only_through_abandoned() -> None:
    ended = SourceEvent.SESSION_ENDED
    assert SOURCE_TRANSITIONS[SourceState.COMPUTING, ended] is SourceState.ABANDONED
    assert SOURCE_TRANSITIONS[SourceState.SENDING, ended] is SourceState.ABANDONED
    ways_out = {event for state, event in SOURCE_TRANSITIONS if state is SourceState.ABANDONED}
    assert ways_out == {SourceEvent.LET_GO}
