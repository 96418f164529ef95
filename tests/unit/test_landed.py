"""The decode core when KV comes over a socket: READY needs the record and every chunk, whichever is first.

Both stacks are the production ones; the bulk socket between them is two rows of messages that a test holds
back, loses or hands on.
"""

from dataclasses import replace

import pytest

from common.errors import ErrorCode
from common.messages import HelloOk, Release, TcpPlane
from decode_node import commands
from prefill_node import events as prefill_ev
from tests.actors import DECODE_SETTINGS, ROUTE, TIMES, WORKER
from tests.devices import PROFILE, expected_tokens
from tests.landing import DEAD_AFTER_MS, OTHER, PROMPT, LandingPair
from transport.bulk import BULK_ROUTE, FromBulk
from transport.peers import FrameReceived, RouteLost


@pytest.fixture
def pair() -> LandingPair:
    return LandingPair()


def test_a_job_over_tcp_has_the_tokens_of_a_single_process(pair: LandingPair) -> None:
    for number, prompt in enumerate([PROMPT, OTHER, [5], PROMPT + OTHER]):
        pair.client.submit(f"{number}", prompt)
        pair.finish()
        pair.check_finished(f"{number}", prompt)
    pair.check_at_rest()
    assert pair.core.status(0)["counters"]["remote_imports"] == 4
    assert pair.core.status(0)["workers"][0]["kv_plane"] == "tcp"


def test_chunks_that_come_before_the_record_do_not_make_it_ready(pair: LandingPair) -> None:
    pair.hold_down = True
    pair.client.submit("a", PROMPT)
    pair.prefill_all()
    assert pair.slot_states() == ["producing"]
    assert pair.source_states() == ["held"]
    pair.hold_down = False
    pair.deliver()
    assert pair.slot_states() == ["ready"]
    pair.finish()
    pair.check_finished("a", PROMPT)


def test_a_record_without_its_chunks_gives_the_first_token_and_nothing_more(pair: LandingPair) -> None:
    pair.job_with_record()
    pair.compute()
    assert pair.client.tokens("a") == expected_tokens(PROMPT, 1), "its KV is not here and it is out"
    assert pair.slot_states() == ["producing"]
    assert not [item for item in pair.device.commands if isinstance(item, commands.StartImport)]
    pair.arrive_late()
    pair.hold_pieces = False
    pair.finish()
    pair.check_finished("a", PROMPT)
    pair.check_at_rest()


def test_all_chunks_but_the_last_are_not_all(pair: LandingPair) -> None:
    pair.job_with_record()
    session, last = pair.prefill.sent.pop()
    pair.arrive_late()
    pair.compute()
    assert pair.slot_states() == ["producing"]
    pair.prefill.sent.append((session, last))
    pair.arrive_late()
    assert pair.slot_states() == ["importing"]


@pytest.mark.parametrize("last", ["chunks", "first token"])
def test_the_import_waits_for_both_the_chunks_and_the_first_token(pair: LandingPair, last: str) -> None:
    pair.job_with_record()
    if last == "chunks":
        pair.compute()
        pair.arrive_late()
    else:
        pair.arrive_late()
        assert pair.slot_states() == ["ready"]
        pair.compute_one()
    assert pair.slot_states() == ["importing"]
    pair.hold_pieces = False
    pair.finish()
    pair.check_finished("a", PROMPT)


def test_a_job_that_ends_at_its_first_token_does_not_wait_for_its_chunks(pair: LandingPair) -> None:
    pair.job_with_record(max_tokens=1)
    pair.compute()
    pair.deliver()
    pair.check_finished("a", PROMPT, 1)
    assert pair.slot_states() == ["free"], "the record is here: nothing is owed"
    assert pair.source_states() == ["idle"]
    pair.arrive_late()
    assert next(iter(pair.decode.receivers.values())).fenced_pieces == 3
    pair.check_at_rest()


def test_a_cancel_after_the_record_frees_the_slot_and_late_chunks_are_fenced(pair: LandingPair) -> None:
    pair.job_with_record()
    pair.client.cancel("a")
    assert pair.client.answer("a").code is ErrorCode.CANCELLED
    assert pair.slot_states() == ["free"]
    assert pair.worker.counters["orphans"] == 0
    assert pair.source_states() == ["idle"], "RELEASE went out"
    late = list(pair.prefill.sent)
    pair.prefill.sent.clear()
    pair.client.submit("b", OTHER)
    pair.prefill_all()
    # The late chunks of the first production come before those of the second, and go nowhere.
    pair.prefill.sent.extendleft(reversed(late))
    for _ in late:
        pair.deliver_piece(late=True)
    pair.hold_pieces = False
    pair.finish()
    pair.check_finished("b", OTHER)
    pair.check_at_rest()


def test_a_cancel_before_the_record_waits_for_the_completion(pair: LandingPair) -> None:
    pair.hold_pieces = True
    pair.client.submit("a", PROMPT)
    pair.prefill_all()
    assert pair.source_states() == ["sending"]
    pair.client.cancel("a")
    assert pair.slot_states() == ["orphaned"]
    assert pair.source_states() == ["sending"], "what is on its way still reads the slot"
    pair.hold_pieces = False
    pair.deliver()
    assert pair.prefill.core.line.counters["prefills_cancelled"] == 1
    pair.check_at_rest()
    assert next(iter(pair.decode.receivers.values())).fenced_pieces == 3


def test_chunks_that_never_come_end_the_session_after_their_deadline(pair: LandingPair) -> None:
    pair.job_with_record()
    pair.compute()
    session = pair.worker.session
    pair.prefill.sent.clear()
    pair.advance(DEAD_AFTER_MS - 1)
    assert pair.worker.session == session
    pair.advance(1)
    assert session in pair.bulk_closed
    assert session in pair.prefill.closed
    assert pair.client.answer("a").code is ErrorCode.PEER_LOST
    assert "KV is missing" in pair.client.answer("a").detail
    pair.prefill.step(prefill_ev.BulkReleased(session), pair.now_ms)
    pair.hold_pieces = False
    pair.advance(1_000)
    pair.client.submit("b", OTHER)
    pair.finish()
    pair.check_finished("b", OTHER)
    pair.check_at_rest()


def test_chunks_that_come_slowly_are_waited_for_and_the_deadline_counts_from_the_last(
    pair: LandingPair,
) -> None:
    pair.job_with_record()
    pair.compute()
    session = pair.worker.session
    for _ in range(2):
        pair.advance(DEAD_AFTER_MS - 1)
        pair.deliver_piece(late=True)
    pair.advance(DEAD_AFTER_MS - 1)
    assert pair.worker.session == session
    pair.advance(1)
    assert session in pair.bulk_closed


def test_the_deadline_counts_from_the_record_of_each_slot() -> None:
    pair = LandingPair(slots=2, route=replace(ROUTE, prefetch_depth=2))
    pair.hold_pieces = True
    pair.client.submit("a", PROMPT)
    pair.prefill_all()
    pair.let_go_unseen()
    pair.deliver()
    pair.advance(DEAD_AFTER_MS // 2)
    session, sent = pair.worker.session, list(pair.prefill.sent)
    pair.prefill.sent.clear()
    pair.client.submit("b", OTHER)
    pair.prefill_all()
    pair.let_go_unseen()
    pair.deliver()
    pair.prefill.sent.extendleft(reversed(sent))
    for _ in range(3):
        pair.deliver_piece(late=True)
    pair.deliver()
    pair.advance(DEAD_AFTER_MS - 1)
    assert pair.worker.session == session, "the chunks of the first are here"
    pair.advance(1)
    assert pair.worker.session != session


def test_kv_that_has_wholly_landed_survives_its_producer(pair: LandingPair) -> None:
    pair.client.submit("a", PROMPT)
    pair.prefill_all()
    assert pair.slot_states() == ["ready"]
    session = pair.worker.session
    pair.end_session()
    assert session in pair.bulk_closed
    assert [slot.session for slot in pair.worker.ledger.survivors()] == [session]
    assert pair.unmapped == [], "the landing buffer stays"
    pair.finish()
    pair.check_finished("a", PROMPT)
    assert pair.unmapped == [session]


def test_late_words_of_a_closed_bulk_socket_change_nothing(pair: LandingPair) -> None:
    pair.job_with_record()
    session = pair.worker.session
    pair.end_session()
    before = pair.core.status(pair.now_ms)
    pair.arrive_late()
    pair.step_decode(FromBulk(session, RouteLost(BULK_ROUTE)))
    assert pair.core.status(pair.now_ms) == before


@pytest.mark.parametrize("state", ["producing", "ready", "free"])
def test_the_end_of_the_bulk_socket_ends_the_session(pair: LandingPair, state: str) -> None:
    if state == "producing":
        pair.job_with_record()
        pair.prefill.sent.clear()
    elif state == "ready":
        pair.client.submit("a", PROMPT)
        pair.prefill_all()
    assert pair.slot_states() == [state]
    session = pair.worker.session
    pair.step_decode(FromBulk(session, RouteLost(BULK_ROUTE)))
    pair.deliver()
    assert session in pair.bulk_closed
    assert session in pair.prefill.closed, "the prefill node hears of it by BYE"


def test_a_piece_out_of_its_place_ends_the_session_and_no_token_comes_of_it(pair: LandingPair) -> None:
    pair.job_with_record()
    pair.prefill.sent.rotate(-1)
    session, frame = pair.prefill.sent[0]
    event = FrameReceived(BULK_ROUTE, session, 1, frame.message)
    pair.step_decode(FromBulk(session, event))
    pair.deliver()
    assert session in pair.bulk_closed
    pair.compute()
    assert pair.client.answer("a").code is ErrorCode.PEER_LOST


def test_bytes_that_were_changed_on_the_way_are_refused_after_the_copy(pair: LandingPair) -> None:
    pair.job_with_record()
    pair.arrive_late()
    pair.landings[pair.worker.session].slots[0].token_ids[5] ^= 1
    pair.hold_pieces = False
    pair.finish()
    assert pair.client.answer("a").code is ErrorCode.KV_CORRUPT
    assert pair.client.tokens("a") == expected_tokens(PROMPT, 1)
    pair.check_at_rest()


def test_a_decode_node_that_is_gone_leaves_its_slot_when_its_pieces_are_let_go_of(pair: LandingPair) -> None:
    pair.hold_pieces = pair.hold_up = pair.hold_down = True
    pair.hold_up = False
    pair.client.submit("a", PROMPT)
    pair.prefill_all()
    pair.hold_up = True
    session = pair.prefill.core.grants.sessions[0]
    pair.now_ms += TIMES.lease_ms
    pair.prefill.step(prefill_ev.TimePassed(), pair.now_ms)
    pair.tick()
    assert pair.prefill.closed == [session]
    assert pair.source_states() == ["abandoned"]
    pair.prefill.step(prefill_ev.BulkReleased(session), pair.now_ms)
    assert pair.source_states() == ["pool"]


def test_a_prefill_node_that_drains_is_left_only_when_the_chunks_are_here(pair: LandingPair) -> None:
    pair.job_with_record()
    pair.compute()
    pair.stop_prefill()
    assert pair.worker.session is not None, "chunks are owed"
    pair.arrive_late()
    pair.hold_pieces = False
    pair.finish()
    pair.check_finished("a", PROMPT)
    assert pair.worker.session is None
    assert pair.prefill.exit.status == 0


def test_while_one_job_decodes_the_next_one_lands_and_its_import_waits_for_the_lane(
    pair: LandingPair,
) -> None:
    pair.client.submit("a", PROMPT, max_tokens=6)
    pair.client.submit("b", OTHER)
    pair.prefill_all()
    pair.compute()
    pair.prefill_all()
    assert pair.slot_states() == ["ready"]
    pair.decode_steps(2)
    assert [item for item in pair.device.commands if isinstance(item, commands.StartImport)] == []
    pair.finish()
    pair.check_finished("a", PROMPT, 6)
    pair.check_finished("b", OTHER)
    assert Release(0, 2) not in pair.sent
    assert pair.core.status(0)["counters"]["prefetches"] >= 1
    pair.check_at_rest()


@pytest.mark.parametrize("missing", ["both", "neither"])
def test_a_session_must_offer_exactly_one_plane(missing: str) -> None:
    pair = LandingPair(connect=False)
    hello = HelloOk("s", "p", 1_000, DECODE_SETTINGS.stall_ms, PROFILE)
    if missing == "both":
        hello = replace(hello, plane=pair.prefill.core.settings.plane, bulk=TcpPlane(1))
    assert "exactly one data plane" in pair.decode._judge(WORKER, hello).detail
