"""The prefill node as the decode core sees it: completions, orphans, progress, the end of a session."""

from dataclasses import replace

import pytest

from common import limits
from common.errors import ErrorCode, InvariantViolation
from common.lifecycle import SlotState
from common.messages import (
    Cancel,
    Draining,
    Grant,
    HelloOk,
    HelloRefused,
    Pong,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Release,
    ShmPlane,
    SlotGrant,
)
from decode_node.events import ClosePlane, CloseWorker, SendToWorker, WorkerSuspected
from decode_node.slots import Reservation
from decode_node.worker import Worker
from tests.devices import PROFILE

DEAD_AFTER_MS, STALL_MS = 600, 2_000
ORPHAN_BOUND_MS = STALL_MS + DEAD_AFTER_MS + limits.ORPHAN_GRACE_MS
HELLO = HelloOk(
    "s1", "p1", 1_000, STALL_MS, PROFILE, (SlotGrant(0, 0), SlotGrant(1, 4)), ShmPlane("slab", 2, 128)
)


def opened(hello: HelloOk = HELLO) -> Worker:
    worker = Worker("memory", DEAD_AFTER_MS)
    worker.opened(hello, 0)
    return worker


def send(worker: Worker, job_id: str, now_ms: int = 0) -> Reservation:
    slot = worker.ledger.reservable()
    reservation, effects = worker.send_prefill(slot, job_id, b"\1\0\0\0", "digest", 5_000, now_ms)
    assert effects == [
        SendToWorker("s1", Prefill(job_id, slot.index, reservation.epoch, b"\1\0\0\0", "digest", 0, 5_000))
    ]
    return reservation


def done(reservation: Reservation, job_id: str) -> PrefillDone:
    slot, epoch = reservation.slot, reservation.epoch
    return PrefillDone(job_id, slot, epoch, "digest", 1, 4, 2, (b"d" * 16,), b"", b"", 0, 0)


def failed(reservation: Reservation, job_id: str) -> PrefillFailed:
    return PrefillFailed(job_id, reservation.slot, reservation.epoch, ErrorCode.CANCELLED, "")


def ends_session(effects: list) -> bool:
    return [type(effect) for effect in effects] == [CloseWorker]


@pytest.mark.parametrize("message_of", [done, failed])
def test_a_completion_resolves_the_future_of_its_own_reservation(message_of: type) -> None:
    worker = opened()
    first, second = send(worker, "a"), send(worker, "b")
    assert (first.slot, second.slot, second.epoch) == (0, 1, 5)
    message = message_of(second, "b")
    completion, effects = worker.receive("s1", message, 0)
    assert (completion.reservation, completion.job_id, completion.message) == (second, "b", message)
    assert effects == []
    assert worker.ledger.find(first).state is SlotState.PRODUCING


def test_one_job_may_have_an_orphan_and_a_live_production() -> None:
    worker = opened()
    orphan = send(worker, "a")
    assert worker.detach(orphan, "timeout", 0) == [SendToWorker("s1", Cancel(orphan.slot, orphan.epoch))]
    live = send(worker, "a")
    completion, effects = worker.receive("s1", done(orphan, "a"), 0)
    assert completion is None
    assert effects == [SendToWorker("s1", Release(orphan.slot, orphan.epoch))]
    assert worker.ledger.find(live).state is SlotState.PRODUCING
    assert worker.receive("s1", done(live, "a"), 0)[0].reservation == live


def test_release_is_sent_for_done_only() -> None:
    worker = opened()
    orphan = send(worker, "a")
    worker.detach(orphan, "cancel", 0)
    assert worker.receive("s1", failed(orphan, "a"), 0) == (None, [])
    assert worker.ledger.idle


@pytest.mark.parametrize("times", [1, 2])
def test_a_duplicate_completion_ends_the_session(times: int) -> None:
    worker = opened()
    reservation = send(worker, "a")
    if times == 1:
        worker.receive("s1", failed(reservation, "a"), 0)
    else:
        worker.receive("s1", done(reservation, "a"), 0)
    completion, effects = worker.receive("s1", done(reservation, "a"), 0)
    assert completion is None
    assert ends_session(effects)


def test_a_completion_of_an_older_or_newer_epoch_ends_the_session_and_touches_no_slot() -> None:
    for step in (-1, 1):
        worker = opened()
        worker.receive("s1", failed(send(worker, "a"), "a"), 0)
        live = send(worker, "b")
        odd = replace(live, epoch=live.epoch + step)
        completion, effects = worker.receive("s1", done(odd, "b"), 0)
        assert completion is None
        assert ends_session(effects)
        assert worker.ledger.find(live).state is SlotState.PRODUCING


def test_a_completion_that_names_another_job_ends_the_session() -> None:
    worker = opened()
    reservation = send(worker, "a")
    completion, effects = worker.receive("s1", done(reservation, "b"), 0)
    assert completion is None
    assert ends_session(effects)
    assert worker.ledger.find(reservation).state is SlotState.PRODUCING


def test_messages_of_another_session_have_no_effect() -> None:
    worker = opened()
    reservation = send(worker, "a")
    for message in (done(reservation, "a"), failed(reservation, "a"), Draining(), Grant((SlotGrant(5, 0),))):
        assert worker.receive("s0", message, 0) == (None, [])
    assert worker.usable
    assert worker.ledger.granted_count == 2
    assert worker.ledger.find(reservation).state is SlotState.PRODUCING


def test_what_a_prefill_node_does_not_say_ends_the_session() -> None:
    assert ends_session(opened().receive("s1", Cancel(0, 1), 0)[1])


def test_a_slot_granted_twice_ends_the_session() -> None:
    assert ends_session(opened().receive("s1", Grant((SlotGrant(1, 9),)), 0)[1])


def test_zero_slots_are_legal_and_mean_waiting_for_grant() -> None:
    worker = opened(replace(HELLO, grants=()))
    assert not worker.usable
    assert worker.receive("s1", Grant((SlotGrant(3, 7),)), 0) == (None, [])
    assert worker.usable
    assert send(worker, "a").epoch == 8


def test_an_orphan_older_than_its_bound_ends_the_session_although_there_is_progress() -> None:
    worker = opened()
    worker.detach(send(worker, "a"), "cancel", 0)
    for now_ms in range(0, ORPHAN_BOUND_MS, 100):
        worker.receive("s1", Pong(1, now_ms), now_ms)
        assert worker.expire(now_ms) == []
    assert worker.deadline_ms() == ORPHAN_BOUND_MS
    assert ends_session(worker.expire(ORPHAN_BOUND_MS))


def test_no_progress_while_work_exists_ends_the_session() -> None:
    worker = opened()
    send(worker, "a", now_ms=500)
    bound_ms = 500 + STALL_MS + limits.ORPHAN_GRACE_MS
    worker.receive("s1", Pong(1, 0), 1_000)
    assert worker.deadline_ms() == bound_ms, "a sign of life is no progress"
    assert worker.expire(bound_ms - 1) == []
    assert ends_session(worker.expire(bound_ms))


def test_without_work_no_progress_is_asked_for() -> None:
    worker = opened()
    assert worker.deadline_ms() is None
    worker.receive("s1", done(send(worker, "a"), "a"), 0)
    assert worker.deadline_ms() is None, "a record that waits for a lane is not the peer's work"
    send(worker, "b", now_ms=100_000)
    assert worker.deadline_ms() > 100_000, "the clock starts with the work"


def test_progress_has_an_age_only_while_something_is_owed() -> None:
    worker = Worker("memory", DEAD_AFTER_MS)
    assert worker.status(5_000)["progress_age_ms"] is None
    worker.opened(HELLO, 5_000)
    assert worker.status(6_000)["progress_age_ms"] is None
    reservation = send(worker, "a", now_ms=7_000)
    assert worker.status(7_300)["progress_age_ms"] == 300
    worker.receive("s1", done(reservation, "a"), 8_000)
    assert worker.status(9_000)["progress_age_ms"] is None


def test_a_misfit_is_who_refuses_for_good_and_never_had_a_session() -> None:
    worker = Worker("memory", DEAD_AFTER_MS)
    for refusal, misfit in ((HelloRefused(True, "full"), False), (HelloRefused(False, "dtype"), True)):
        worker.refused(refusal)
        status = worker.status(0)
        assert (status["refusal"], status["misfit"]) == (refusal.detail, misfit)
    worker.opened(HELLO, 0)
    worker.refused(HelloRefused(False, "dtype"))
    assert worker.status(0)["misfit"] is False


def test_a_draining_node_gets_no_more_work_and_our_goodbye_once_nothing_is_owed() -> None:
    worker = opened()
    live, orphan = send(worker, "a"), send(worker, "b")
    assert worker.receive("s1", Draining(), 0) == (None, [])
    assert not worker.usable
    worker.detach(orphan, "cancel", 0)
    completion, effects = worker.receive("s1", done(live, "a"), 0)
    assert completion is not None
    assert effects == []
    assert ends_session(worker.receive("s1", failed(orphan, "b"), 0)[1])


def test_a_draining_node_that_is_owed_nothing_gets_the_goodbye_at_once_and_only_once() -> None:
    worker = opened()
    assert ends_session(worker.receive("s1", Draining(), 0)[1])
    assert worker.receive("s1", Draining(), 0) == (None, [])


def test_the_end_of_a_session_resolves_every_future_and_unmaps_what_nobody_reads() -> None:
    worker = opened()
    send(worker, "a")
    worker.detach(send(worker, "b"), "cancel", 0)
    assert worker.lost("s1", 0) == (["a"], [ClosePlane("s1")])
    assert worker.session is None
    with pytest.raises(InvariantViolation):
        worker.lost("s1", 0)


@pytest.mark.parametrize("ending", ["detach", "copy"])
def test_the_mapping_of_an_ended_session_stays_until_its_last_survivor_is_let_go(ending: str) -> None:
    worker = opened()
    first, second = send(worker, "a"), send(worker, "b")
    worker.receive("s1", done(first, "a"), 0)
    worker.receive("s1", done(second, "b"), 0)
    worker.import_started(first, 0)
    assert worker.lost("s1", 0) == ([], [])
    worker.opened(replace(HELLO, session="s2"), 0)
    assert worker.ledger.reservable() is None, "same incarnation, same slots"
    assert worker.detach(first, "cancel", 0) == [], "the copy runs to its end"
    if ending == "detach":
        assert worker.detach(second, "cancel", 0) == []
        assert worker.copy_ended(first, 0) == [ClosePlane("s1")]
    else:
        assert worker.copy_ended(first, 0) == []
        assert worker.detach(second, "cancel", 0) == [ClosePlane("s1")]
    assert worker.ledger.reservable() is not None


def test_silence_makes_it_unusable_until_it_speaks_again() -> None:
    worker = opened()
    worker.on_suspected(WorkerSuspected("s0", True), 10)
    assert worker.usable
    worker.on_suspected(WorkerSuspected("s1", True), 10)
    assert not worker.usable
    assert worker.unusable_since_ms == 10
    worker.on_suspected(WorkerSuspected("s1", False), 20)
    assert worker.usable
