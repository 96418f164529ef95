"""Faults that other systems had, as event sequences on the pure cores, in the names of kinds K1 to K9."""

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from common.errors import ErrorCode
from common.messages import (
    Cancel,
    Draining,
    Finished,
    Grant,
    Pong,
    PrefillFailed,
    Release,
    SessionGone,
    SlotGrant,
)
from decode_node.jobs import Job
from prefill_node.events import ComputeFailed
from tests.actors import MAX_QUEUE, ROUTE
from tests.cores import Pair
from tests.devices import expected_tokens
from transport.codec import Header, encode
from transport.peers import Post

A, B, LONG = [1, 2, 3, 4, 5], [6, 7, 8], list(range(20))
PROBE = [9, 9, 9]


def check_probe(pair: Pair, label: str = "probe") -> None:
    """A job that has done nothing wrong gets its tokens, and nothing is held afterwards."""
    pair.client.submit(label, PROBE, max_tokens=3)
    pair.finish()
    assert isinstance(pair.client.answer(label), Finished)
    assert pair.client.tokens(label) == expected_tokens(PROBE, 3)
    assert pair.core.idle
    assert set(pair.slot_states()) == {"free"}
    assert set(pair.source_states()) == {"idle"}


def by_cancel(pair: Pair) -> None:
    pair.client.cancel("a")


def by_two_cancels(pair: Pair) -> None:
    pair.client.cancel("a")
    pair.client.cancel("a")


def by_timeout(pair: Pair) -> None:
    pair.advance(pair.settings.prefill_timeout_ms)


def by_error(pair: Pair) -> None:
    pair.hold_down = True
    chunk = pair.prefill.chunks.popleft()
    pair.prefill.step(ComputeFailed(chunk.slot, chunk.epoch, "boom"), pair.now_ms)


@pytest.mark.parametrize("cause", [by_cancel, by_two_cancels, by_timeout, by_error])
def test_k1_a_late_completion_never_reaches_the_next_owner_of_the_slot(cause: Callable) -> None:
    pair = Pair(prefill_timeout_ms=400)
    pair.client.submit("a", A)
    pair.prefill_chunk()
    cause(pair)
    pair.client.submit("b", B)
    assert len(pair.sent) == 1, "the producer of the slot still owes"
    pair.hold_down = False
    pair.prefill_all()
    pair.finish()
    assert pair.client.answer("a") is not None
    assert pair.client.tokens("b") == expected_tokens(B, 4)
    check_probe(pair)


def test_k1_twenty_cancels_in_a_row_keep_no_slot_once_the_producer_has_answered() -> None:
    pair = Pair(slots=2)
    for number in range(20):
        pair.client.submit(f"a{number}", LONG)
        pair.client.cancel(f"a{number}")
        if pair.prefill.chunks:
            pair.prefill_chunk()
    pair.prefill_all()
    assert pair.slot_states() == ["free", "free"]
    check_probe(pair)


def test_k1_a_timeout_shorter_than_the_prefill_never_imports_late() -> None:
    pair = Pair(prefill_timeout_ms=100)
    for number in range(30):
        pair.client.submit(f"a{number}", LONG)
        pair.advance(150)
        assert pair.client.answer(f"a{number}").code is ErrorCode.PREFILL_TIMEOUT
        pair.prefill_all()
    assert pair.device.lanes == {}
    check_probe(pair)


def test_k1_a_lane_whose_job_is_gone_is_not_given_away_before_the_copy_has_ended() -> None:
    pair = Pair()
    pair.client.submit("a", A)
    pair.client.submit("b", B)
    pair.prefill_all()
    pair.compute_one()
    assert pair.slot_states() == ["importing"]
    pair.client.cancel("a")
    assert pair.slot_states() == ["importing"]
    assert pair.core.lanes.free_count == 0
    assert len(pair.sent) == 1
    pair.finish()
    assert pair.client.tokens("b") == expected_tokens(B, 4)
    check_probe(pair)


def test_k2_a_job_cancelled_while_its_kv_waits_for_a_lane_gives_its_slot_back() -> None:
    pair = Pair()
    pair.client.submit("a", A, max_tokens=9)
    pair.prefill_all()
    pair.compute()
    for number in range(5):
        pair.client.submit(f"b{number}", B)
        pair.prefill_all()
        pair.compute()
        assert pair.slot_states() == ["ready"]
        pair.client.cancel(f"b{number}")
        assert (pair.slot_states(), pair.source_states()) == (["free"], ["idle"])
    check_probe(pair)


@pytest.mark.parametrize("chunks", [0, 1, 2, 4, 5])
def test_k2_a_cancel_between_any_two_chunks_leaves_nothing(chunks: int) -> None:
    pair = Pair()
    pair.client.submit("a", LONG)
    pair.hold_down = True
    for _ in range(chunks):
        pair.prefill_chunk()
    pair.client.cancel("a")
    pair.hold_down = False
    pair.deliver()
    pair.prefill_all()
    assert sum(pair.prefill.completions.values()) == 1
    check_probe(pair)


def test_k3_an_abort_storm_is_over_with_the_chunks_that_were_running() -> None:
    pair = Pair(slots=4, route=replace(ROUTE, prefetch_depth=3))
    for number in range(30):
        pair.client.submit(f"a{number}", LONG)
        pair.client.cancel(f"a{number}")
    pair.client.submit("b", B)
    chunks = 0
    while pair.client.tokens("b") == []:
        pair.prefill_chunk()
        pair.compute()
        chunks += 1
    assert chunks <= 3, "one for the cancel under way, then the good job"
    pair.finish()
    check_probe(pair)


def test_k3_after_a_cancelled_prefill_the_next_job_does_not_hang() -> None:
    pair = Pair()
    for number in range(50):
        pair.client.submit(f"a{number}", A)
        pair.client.cancel(f"a{number}")
        pair.client.submit(f"b{number}", B, max_tokens=1)
        pair.finish()
        assert isinstance(pair.client.answer(f"b{number}"), Finished)
    check_probe(pair)


def test_k3_an_outage_of_the_prefill_node_needs_no_restart_of_the_decode_node() -> None:
    pair = Pair()
    pair.client.submit("a", A)
    pair.client.submit("b", B)
    pair.prefill_exists = False
    pair.advance(1_000)
    assert pair.client.answer("a").code is ErrorCode.PEER_LOST, "it was in flight"
    assert pair.client.answer("b") is None, "it was not"
    pair.start_prefill("prefill-2")
    pair.prefill_exists = True
    pair.advance(700)
    pair.finish()
    assert pair.client.tokens("b") == expected_tokens(B, 4)
    check_probe(pair)


def test_k4_a_lane_that_got_bad_kv_is_clean_for_the_next_job() -> None:
    pair = Pair()
    pair.client.submit("a", A)
    pair.prefill_all()
    pair.prefill.slab.slots[0].token_ids[-1] ^= 1
    pair.finish()
    assert pair.client.answer("a").code is ErrorCode.KV_CORRUPT
    check_probe(pair)


def test_k6_jobs_whose_client_left_while_they_queued_reach_neither_node() -> None:
    pair = Pair()
    leaver = pair.add_client("client-2")
    pair.tick()
    pair.client.submit("a", A, max_tokens=9)
    pair.client.submit("b", B)
    for number in range(5):
        leaver.submit(f"c{number}", LONG)
    leaver.leave()
    pair.finish()
    assert [len(request.prompt) // 4 for request in pair.sent] == [len(A), len(B)]
    check_probe(pair)


def test_k6_decode_steps_stop_when_the_client_has_gone() -> None:
    pair = Pair()
    leaver = pair.add_client("client-2")
    pair.tick()
    leaver.submit("a", A, max_tokens=30)
    pair.prefill_all()
    pair.compute()
    pair.decode_steps(3)
    leaver.leave()
    pair.finish()
    assert len(pair.device.steps) == 3
    check_probe(pair)


@pytest.mark.parametrize("record_first", [True, False])
def test_k6_a_cancel_that_races_with_the_completion_is_harmless_in_both_orders(record_first: bool) -> None:
    pair = Pair()
    pair.client.submit("a", A)
    pair.hold_up = True
    if record_first:
        pair.prefill_all()
        pair.client.cancel("a")
    else:
        pair.client.cancel("a")
        pair.prefill_all()
    pair.hold_up = False
    pair.deliver()
    assert pair.client.answer("a").code is ErrorCode.CANCELLED
    assert pair.worker.session == "prefill-1-session-1", "the late CANCEL was a legal no-op"
    check_probe(pair)


def test_k6_all_clients_vanish_at_once() -> None:
    pair = Pair(slots=3, route=replace(ROUTE, prefetch_depth=2))
    crowd = [pair.add_client(f"crowd-{number}") for number in range(8)]
    pair.tick()
    for number, client in enumerate(crowd):
        client.submit("a", [number, *A], max_tokens=9)
    pair.prefill_chunk()
    pair.prefill_chunk()
    pair.compute()
    pair.decode_steps(2)
    for client in crowd:
        client.silent = True
    pair.advance(1_200)
    assert pair.core.desk.live() == []
    pair.finish()
    check_probe(pair)


def test_k7_two_clients_with_the_same_label_are_strangers() -> None:
    pair = Pair()
    other = pair.add_client("client-2")
    pair.tick()
    pair.client.submit("same", A)
    other.submit("same", B)
    assert len({job.job_id for job in pair.core.desk.live()}) == 2
    pair.client.cancel("same")
    pair.finish()
    assert pair.client.answer("same").code is ErrorCode.CANCELLED
    assert other.tokens("same") == expected_tokens(B, 4)


UNASKED = [
    PrefillFailed("job-1", 0, 1, ErrorCode.CANCELLED, ""),
    PrefillFailed("job-9", 7, 9, ErrorCode.CANCELLED, ""),
    Grant((SlotGrant(0, 0),)),
    Cancel(0, 1),
    Pong(1, 1),
    Draining(),
    SessionGone("prefill-1-session-1"),
]


@pytest.mark.parametrize("message", UNASKED)
@pytest.mark.parametrize("numbered_right", [True, False])
def test_k7_a_message_out_of_place_ends_at_most_its_session(message: object, numbered_right: bool) -> None:
    pair = Pair()
    pair.client.submit("a", A, max_tokens=9)
    pair.prefill_all()
    pair.compute()
    session = pair.worker.session
    if numbered_right:
        pair.prefill.step(Post(session, message), pair.now_ms)
    else:
        sequence = 0 if isinstance(message, SessionGone) else 99
        pair.worker_port.link.arrived.append(encode(Header(session, sequence), message))
    pair.deliver()
    if isinstance(message, Draining):
        pair.stop_prefill()
        pair.start_prefill("prefill-2")
    pair.advance(1_500)
    pair.finish()
    assert pair.client.tokens("a") == expected_tokens(A, 9), "the lane is untouched"
    check_probe(pair)


UNKNOWN = [Cancel(0, 1), Release(0, 1), Release(3, 1), Cancel(9, 9)]


@pytest.mark.parametrize("message", UNKNOWN)
def test_k7_unknown_slots_and_epochs_at_the_prefill_node_create_nothing(message: object) -> None:
    pair = Pair()
    session = pair.worker.session
    pair.worker_port.send(pair.decode.connectors["memory"]._session.frame(message), pair.now_ms)
    pair.deliver()
    pair.advance(500)
    assert pair.worker.session != session, "a pair outside the table ends the session"
    check_probe(pair)


def test_k7_late_messages_of_ended_sessions_keep_no_memory() -> None:
    pair = Pair()
    port, frame = pair.worker_port, pair.decode.connectors["memory"]._session.frame(Cancel(0, 1))
    pair.end_session()
    for _ in range(1_000):
        port.link.router = pair.prefill.router
        port.send(replace(frame, session="long-gone"), pair.now_ms)
        pair.deliver()
    assert pair.prefill.stack.listener.stale_messages == 1_000
    assert len(pair.prefill.stack.listener.sessions) == 0
    pair.advance(500)
    check_probe(pair)


def test_k7_jobs_that_came_and_went_behind_a_blocked_queue_keep_no_memory() -> None:
    pair = Pair(route=replace(ROUTE, prefetch_depth=0))
    pair.client.submit("a", A, max_tokens=9)
    pair.prefill_all()
    pair.compute()
    pair.client.submit("head", B)
    for _ in range(600):
        pair.client.submit("x", B)
        pair.client.cancel("x")
        pair.client.received.clear()
    assert pair.device.commands == deque(), "compute was not even told"
    assert sum(type(item) is Job for item in gc.get_objects()) < 300
    assert len(pair.core.desk.timers._heap) < 300


def test_k7_a_text_thread_that_is_behind_is_not_given_more_than_the_queue_allows() -> None:
    pair = Pair()
    pair.hold_text = True
    for number in range(10 * MAX_QUEUE):
        pair.client.submit(f"a{number}", A)
        pair.client.cancel(f"a{number}")
    assert pair.client.answer(f"a{MAX_QUEUE}").code is ErrorCode.BUSY
    assert len(pair.text_commands) == 2 * MAX_QUEUE
    pair.hold_text = False
    pair.deliver()
    check_probe(pair)


def test_k9_slots_come_back_by_themselves_without_any_traffic() -> None:
    pair = Pair(slots=2)
    pair.client.submit("a", LONG)
    pair.client.submit("b", LONG)
    pair.client.silent = True
    pair.advance(1_100)
    assert pair.core.desk.live() == []
    pair.prefill_all()
    assert set(pair.slot_states()) == {"free"}


def test_k9_a_queue_that_is_longer_than_a_lease_is_no_reason_to_expire() -> None:
    pair = Pair()
    pair.client.submit("a", A, max_tokens=9)
    pair.prefill_all()
    pair.compute()
    pair.client.submit("b", B)
    pair.prefill_all()
    pair.compute()
    for _ in range(5):
        pair.advance(1_500)
        pair.decode_steps(1)
    assert pair.worker.counters["sessions"] == 1
    pair.finish()
    assert pair.client.tokens("b") == expected_tokens(B, 4)
