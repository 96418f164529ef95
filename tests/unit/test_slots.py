"""The slot ledger: who may use which slot, through reservations, ended sessions and survivors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvariantViolation
from common.lifecycle import SLOT_TRANSITIONS, SlotEvent, SlotState
from common.messages import SlotGrant
from decode_node.slots import GrantedSlot, Reservation, SlotLedger

WAYS = {
    SlotState.FREE: [],
    SlotState.PRODUCING: [SlotEvent.RESERVED],
    SlotState.READY: [SlotEvent.RESERVED, SlotEvent.COMPLETED],
    SlotState.IMPORTING: [SlotEvent.RESERVED, SlotEvent.COMPLETED, SlotEvent.IMPORT_STARTED],
    SlotState.ORPHANED: [SlotEvent.RESERVED, SlotEvent.JOB_DETACHED],
}


def opened(slots: int = 1, session: str = "s1", incarnation: str = "p1", last_epoch: int = 0) -> SlotLedger:
    ledger = SlotLedger()
    ledger.open(session, incarnation, tuple(SlotGrant(index, last_epoch) for index in range(slots)))
    return ledger


def bring(ledger: SlotLedger, state: SlotState, job_id: str = "job") -> GrantedSlot:
    """A slot in `state`."""
    slot = ledger.reservable()
    for event in WAYS[state]:
        if event is SlotEvent.RESERVED:
            ledger.reserve(slot, job_id, 0)
        else:
            ledger.advance(slot, event, 0)
    return slot


def snapshot(ledger: SlotLedger) -> list[tuple]:
    return [(slot.index, slot.state, slot.last_epoch, slot.job_id, slot.since_ms) for slot in ledger.slots()]


@pytest.mark.parametrize("state", SlotState)
def test_a_pair_outside_the_table_raises_and_changes_nothing(state: SlotState) -> None:
    for event in SlotEvent:
        ledger = opened()
        slot = bring(ledger, state)
        before = snapshot(ledger)
        if (state, event) in SLOT_TRANSITIONS:
            assert ledger.advance(slot, event, 5) is SLOT_TRANSITIONS[state, event]
        else:
            with pytest.raises(InvariantViolation):
                ledger.advance(slot, event, 5)
            assert snapshot(ledger) == before


def test_each_reservation_has_a_greater_epoch_that_continues_from_the_grant() -> None:
    ledger = opened(last_epoch=7)
    epochs = []
    for _ in range(3):
        slot = bring(ledger, SlotState.PRODUCING)
        epochs.append(slot.reservation.epoch)
        ledger.advance(slot, SlotEvent.PRODUCER_FAILED, 0)
    assert epochs == [8, 9, 10]


def test_a_reservation_is_found_until_it_ends_and_never_under_another_epoch() -> None:
    ledger = opened()
    slot = bring(ledger, SlotState.PRODUCING)
    old = slot.reservation
    assert ledger.find(old) is slot
    assert ledger.find(Reservation("s1", 0, old.epoch + 1)) is None
    assert ledger.find(Reservation("s0", 0, old.epoch)) is None
    assert ledger.find(Reservation("s1", 1, old.epoch)) is None
    ledger.advance(slot, SlotEvent.PRODUCER_FAILED, 0)
    assert ledger.find(old) is None
    bring(ledger, SlotState.PRODUCING)
    assert ledger.find(old) is None


def test_a_slot_with_an_outstanding_producer_or_reader_is_not_reservable() -> None:
    for state in set(SlotState) - {SlotState.FREE}:
        ledger = opened()
        bring(ledger, state)
        assert ledger.reservable() is None, state


def test_a_second_grant_of_a_slot_is_refused_and_changes_nothing() -> None:
    ledger = opened(2)
    bring(ledger, SlotState.PRODUCING)
    before = snapshot(ledger)
    assert not ledger.grant((SlotGrant(2, 0), SlotGrant(1, 5)))
    assert snapshot(ledger) == before
    assert ledger.grant((SlotGrant(2, 4),))
    assert ledger.granted_count == 3


def test_a_session_ends_with_its_free_producing_and_orphaned_slots_gone() -> None:
    ledger = opened(3)
    bring(ledger, SlotState.PRODUCING, "live")
    bring(ledger, SlotState.ORPHANED, "gone")
    assert ledger.close() == ["live"]
    assert (ledger.granted_count, ledger.live_count, ledger.idle) == (0, 0, True)
    assert list(ledger.survivors()) == []


@pytest.mark.parametrize("state", [SlotState.READY, SlotState.IMPORTING])
def test_ready_and_importing_survive_the_session_and_count(state: SlotState) -> None:
    ledger = opened()
    slot = bring(ledger, state)
    assert ledger.close() == []
    assert ledger.find(slot.reservation) is slot
    assert (ledger.live_count, ledger.granted_count, ledger.idle) == (1, 0, False)
    ledger.check()


def test_a_survivor_blocks_its_own_slot_of_the_same_incarnation_only() -> None:
    for incarnation, blocked in (("p1", True), ("p2", False)):
        ledger = opened()
        survivor = bring(ledger, SlotState.READY)
        ledger.close()
        ledger.open("s2", incarnation, (SlotGrant(0, 1),))
        assert (ledger.reservable() is None) is blocked
        ledger.advance(survivor, SlotEvent.JOB_DETACHED, 0)
        assert ledger.reservable() is not None


def test_the_end_of_a_survivor_leaves_the_new_slot_of_the_same_index_alone() -> None:
    ledger = opened()
    survivor = bring(ledger, SlotState.IMPORTING, "old")
    ledger.close()
    ledger.open("s2", "p2", (SlotGrant(0, 0),))
    newer = bring(ledger, SlotState.PRODUCING, "new")
    ledger.advance(survivor, SlotEvent.COPY_ENDED, 0)
    assert (newer.state, newer.job_id) == (SlotState.PRODUCING, "new")
    assert list(ledger.survivors()) == []


def test_a_session_may_not_open_over_another() -> None:
    with pytest.raises(InvariantViolation):
        opened().open("s2", "p1", ())


def test_check_finds_a_slot_that_lost_its_owner() -> None:
    ledger = opened()
    bring(ledger, SlotState.READY).job_id = None
    with pytest.raises(InvariantViolation, match="INV-2"):
        ledger.check()


def test_check_finds_a_survivor_that_still_owes() -> None:
    ledger = opened()
    slot = bring(ledger, SlotState.READY)
    ledger.close()
    slot.state = SlotState.PRODUCING
    with pytest.raises(InvariantViolation, match="INV-1"):
        ledger.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_slots_are_conserved_and_epochs_only_grow_whatever_happens(choices: list[tuple[int, int]]) -> None:
    ledger = opened(3)
    epochs = dict.fromkeys(range(3), 0)
    for number, (choice, which) in enumerate(choices):
        if choice == 5:
            ledger.close()
            grants = tuple(SlotGrant(index, epochs[index]) for index in range(3))
            ledger.open(f"s{number}", "p1", grants)
        elif choice == 4:
            slot = ledger.reservable()
            if slot is not None:
                reservation = ledger.reserve(slot, f"job{number}", number)
                assert reservation.epoch > epochs[slot.index]
                epochs[slot.index] = reservation.epoch
        else:
            held = [*ledger.slots(), *ledger.survivors()]
            slot = held[which % len(held)]
            legal = [event for event in SlotEvent if (slot.state, event) in SLOT_TRANSITIONS]
            legal = [event for event in legal if event is not SlotEvent.RESERVED]
            if legal:
                ledger.advance(slot, legal[choice % len(legal)], number)
        ledger.check()
        busy = [slot for slot in [*ledger.slots(), *ledger.survivors()] if slot.state is not SlotState.FREE]
        assert ledger.granted_count == 3
        assert ledger.idle == (not busy)
        assert ledger.live_count == sum(slot.state is not SlotState.ORPHANED for slot in busy)
