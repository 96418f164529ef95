"""Restarts and stale peer state (kind K11): sessions end once, start in any order, leave nothing behind."""

from itertools import permutations

import pytest

from common.errors import ExitStatus
from common.messages import Finished, Hello, Role, StatusReply, StatusRequest
from decode_node.events import ClientHello
from decode_node.stack import FromWorker
from tests.actors import STALL_MS, TIMES
from tests.cores import Pair
from tests.devices import PROFILE, expected_tokens
from transport.peers import FrameReceived, RouteLost

A, B = [1, 2, 3, 4, 5], [6, 7, 8]


def check_works(pair: Pair, label: str = "probe") -> None:
    pair.client.submit(label, B, max_tokens=3)
    pair.finish()
    assert isinstance(pair.client.answer(label), Finished)
    assert pair.client.tokens(label) == expected_tokens(B, 3)
    assert set(pair.slot_states()) == {"free"}
    assert set(pair.source_states()) == {"idle"}


def another_decode_node(prefill_side: Pair, incarnation: str) -> Pair:
    """A decode node at the same prefill process."""
    pair = Pair(connect=False, incarnation=incarnation)
    pair.prefill = prefill_side.prefill
    pair._slabs = prefill_side._slabs
    pair.now_ms = prefill_side.now_ms
    pair.prefill_exists = True
    return pair


def test_a_decode_node_that_dies_is_replaced_after_its_lease_and_its_prefills_are_freed() -> None:
    pair = Pair(slots=2)
    for number in range(5):
        pair.client.submit("a", A)
        pair.client.submit("b", B)
        if number % 2:
            pair.prefill_chunk()
        newer = another_decode_node(pair, f"decode-{number + 2}")
        newer.advance(TIMES.lease_ms + 2 * TIMES.backoff_max_ms)
        newer.prefill_all()
        assert newer.worker.usable
        assert newer.worker.ledger.granted_count == 2
        check_works(newer)
        pair = newer


def test_a_second_decode_node_waits_for_the_first_to_leave_and_does_not_give_up() -> None:
    first = Pair()
    second = another_decode_node(first, "decode-2")
    second.advance(TIMES.lease_ms // 2)
    assert second.exit is None
    assert "another decode node" in second.worker.refusal
    first.now_ms = second.now_ms
    first.stop_decode()
    assert first.exit.status == ExitStatus.OK
    second.advance(2 * TIMES.backoff_max_ms)
    check_works(second)


@pytest.mark.parametrize("order", list(permutations(["prefill", "crash", "session"])))
def test_every_order_of_starts_and_ends_leads_to_a_working_pair(order: tuple[str, ...]) -> None:
    pair = Pair(connect=False)
    for number, what in enumerate(order):
        if what == "prefill":
            pair.prefill_exists = True
        elif what == "crash":
            pair.start_prefill(f"prefill-{number + 2}")
        elif pair.worker.session is not None:
            pair.end_session()
        pair.advance(TIMES.dead_after_ms + TIMES.hello_timeout_ms)
    pair.advance(2 * TIMES.backoff_max_ms + TIMES.hello_timeout_ms)
    check_works(pair)


def test_a_handshake_whose_answer_is_lost_is_clean_the_second_time() -> None:
    pair = Pair(connect=False)
    pair.hold_down = True
    pair.prefill_exists = True
    pair.advance(TIMES.hello_timeout_ms + TIMES.backoff_min_ms + 10)
    assert pair.prefill.core.status(pair.now_ms)["decode_sessions"], "that side thinks it is open"
    pair.hold_down = False
    pair.advance(TIMES.hello_timeout_ms)
    assert [pair.worker.session] == pair.prefill.core.status(pair.now_ms)["decode_sessions"]
    assert pair.worker.counters["sessions"] == 1
    check_works(pair)


def test_an_older_attempt_that_arrives_after_the_newer_one_disturbs_nothing() -> None:
    pair = Pair()
    session = pair.worker.session
    stale = FrameReceived(b"ghost", None, 0, Hello("decode-1", 0, "decode", PROFILE))
    pair.prefill.step(stale, pair.now_ms)
    pair.deliver()
    pair.advance(300)
    assert pair.worker.session == session
    check_works(pair)


def test_a_session_that_is_lost_on_one_side_is_noticed_on_the_other_by_its_next_message() -> None:
    pair = Pair()
    session = pair.worker.session
    [peer] = pair.prefill.stack.listener.sessions
    pair.prefill.step(RouteLost(peer.route), pair.now_ms)
    assert pair.prefill.core.status(pair.now_ms)["decode_sessions"] == []
    pair.advance(TIMES.ping_ms)
    assert pair.worker.session != session, "PING was answered SESSION_GONE"
    pair.advance(300)
    check_works(pair)


@pytest.mark.parametrize("moment", ["producing", "ready", "importing"])
def test_slots_of_a_dead_incarnation_are_never_taken_for_those_of_the_new_one(moment: str) -> None:
    pair = Pair()
    pair.client.submit("a", A)
    if moment != "producing":
        pair.prefill_all()
    if moment == "importing":
        pair.compute_one()
    old_reservation = pair.job("a").reservation
    pair.step_decode(FromWorker("memory", RouteLost(pair.worker_port.link.route)))
    pair.start_prefill("prefill-2")
    pair.advance(500)
    pair.client.submit("b", B)
    pair.prefill_all()
    [slot] = pair.worker.ledger.slots()
    assert slot.incarnation == "prefill-2"
    assert slot.reservation != old_reservation
    pair.finish()
    if moment == "producing":
        assert pair.client.tokens("a") == []
    else:
        assert pair.client.tokens("a") == expected_tokens(A, 4), "its bytes were complete: it survived"
    assert pair.client.tokens("b") == expected_tokens(B, 4)
    assert "prefill-1-session-1" in pair.unmapped


def test_a_survivor_keeps_its_slot_from_being_used_in_the_next_session_of_the_same_process() -> None:
    pair = Pair()
    pair.client.submit("a", A, max_tokens=9)
    pair.prefill_all()
    pair.compute()
    pair.client.submit("b", B)
    pair.prefill_all()
    pair.compute()
    pair.client.submit("c", A)
    pair.end_session()
    pair.advance(300)
    assert pair.worker.usable
    assert len(pair.sent) == 2, "slot 0 is free in the new session, but b's bytes lie in it"
    pair.finish()
    assert pair.client.tokens("b") == expected_tokens(B, 4)
    assert pair.client.tokens("c") == expected_tokens(A, 4)


def test_a_slab_that_cannot_be_mapped_after_a_restart_is_shown_and_tried_again() -> None:
    pair = Pair()
    pair.map_refusal = "no such shared memory: is /dev/shm shared with this container?"
    pair.start_prefill("prefill-2")
    pair.advance(TIMES.dead_after_ms + 1_000)
    assert pair.exit is None
    assert not pair.worker.usable
    assert "/dev/shm" in pair.core.status(pair.now_ms)["workers"][0]["refusal"]
    assert pair.prefill.core.status(pair.now_ms)["decode_sessions"] == []
    pair.map_refusal = ""
    pair.advance(2 * TIMES.backoff_max_ms)
    check_works(pair)


def test_status_tells_the_sessions_and_counts_stale_messages() -> None:
    pair = Pair()
    pair.client.say(StatusRequest())
    [reply] = [item for item in pair.client.received if isinstance(item, StatusReply)]
    assert [entry["role"] for entry in reply.body["sessions"]] == ["client"]
    assert reply.body["stale_messages"] == 0
    assert reply.body["ready"] is True


def test_a_node_is_not_ready_while_its_text_thread_owes_and_ready_again_by_itself() -> None:
    pair = Pair()
    pair.hold_text = True
    pair.client.submit("x", [1, 2])
    assert pair.core.status(pair.now_ms)["ready"]
    pair.advance(STALL_MS)
    assert not pair.core.status(pair.now_ms)["ready"]
    pair.hold_text = False
    pair.finish()
    assert pair.core.status(pair.now_ms)["ready"]


def test_a_decode_node_that_was_given_another_one_as_its_prefill_node_is_told_so() -> None:
    pair = Pair()
    [answer] = pair.core.step(ClientHello(b"route", Hello("other", 1, Role.DECODE, PROFILE)), 0)
    assert (answer.message.temporary, answer.message.fields) == (False, ("role",))
    assert "--pd-prefill-worker" in answer.message.detail
