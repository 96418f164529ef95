"""The contract of prefetch, design section 4: one test, or one row of a matrix, for each of its sentences.

Two real nodes' cores, one lane, a remote-only route. Job `a` decodes in the lane, job `b` is prefetched, job
`c` waits behind it.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.decode_config import DecodeConfig
from common.errors import ConfigError, ErrorCode, ExitStatus
from common.messages import Cancel, Failed, Finished
from decode_node.scheduler import Route, Scheduler
from prefill_node.events import ComputeFailed
from tests.actors import ROUTE
from tests.cores import Pair
from tests.devices import expected_tokens
from transport.codec import decode

A, B, C = [1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11]
PLAIN = replace(ROUTE, prefetch_depth=0)


def decoding_a(route: Route = ROUTE, slots: int = 1) -> Pair:
    """Job `a` is in the lane, in the middle of its answer."""
    pair = Pair(route=route, slots=slots)
    pair.client.submit("a", A, max_tokens=6)
    pair.prefill_all()
    pair.compute()
    pair.decode_steps(1)
    return pair


def sent_labels(pair: Pair) -> list[str]:
    """The jobs sent to the prefill node, in order."""
    labels = {}
    for client in pair.clients:
        labels |= {item.job_id: item.label for item in client.received if hasattr(item, "job_id")}
    return [labels[request.job_id] for request in pair.sent]


def check_tokens(pair: Pair, label: str, prompt_ids: list[int], max_tokens: int) -> None:
    assert isinstance(pair.client.answer(label), Finished)
    assert pair.client.tokens(label) == expected_tokens(prompt_ids, max_tokens)


def test_while_the_lane_decodes_the_next_queued_job_is_submitted_to_the_prefill_node() -> None:
    pair = decoding_a()
    assert sent_labels(pair) == ["a"]
    pair.client.submit("b", B)
    assert sent_labels(pair) == ["a", "b"]
    assert pair.device.running, "the lane still decodes"
    assert pair.slot_states() == ["producing"]
    pair.prefill_chunk()
    pair.decode_steps(1)
    assert len(pair.client.tokens("a")) == 3
    assert pair.slot_states() == ["producing"], "both go on side by side"


def test_without_a_prefix_cache_it_is_sent_from_position_zero() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    assert pair.sent[-1].send_from == 0


def test_no_extra_slot_is_needed_for_it() -> None:
    pair = decoding_a(slots=1)
    pair.client.submit("b", B)
    pair.prefill_all()
    pair.compute()
    assert pair.core.counters["prefetches"] == 1
    pair.finish()
    check_tokens(pair, "a", A, 6)
    check_tokens(pair, "b", B, 4)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_at_most_depth_prefetches_are_held_at_a_time(depth: int) -> None:
    pair = decoding_a(replace(ROUTE, prefetch_depth=depth), slots=4)
    for number in range(5):
        pair.client.submit(f"waiting{number}", B)
    assert len(pair.sent) == 1 + depth
    pair.prefill_all()
    pair.compute()
    assert pair.slot_states().count("ready") == depth
    assert len(pair.sent) == 1 + depth, "a prefetch that is done is still held"


def test_a_free_lane_lets_one_more_out_until_its_import_starts() -> None:
    pair = Pair(slots=4)
    for label in ("a", "b", "c"):
        pair.client.submit(label, A)
    assert sent_labels(pair) == ["a", "b"], "one free lane + depth 1"
    pair.prefill_chunk()
    pair.compute_one()
    assert sorted(pair.slot_states()) == ["free", "free", "importing", "producing"]
    assert sent_labels(pair) == ["a", "b"], "the import has taken the lane, the copy still holds a slot"
    pair.compute_one()
    assert sent_labels(pair) == ["a", "b"], "b is the one prefetch that depth 1 allows"
    pair.prefill_all()
    pair.finish()
    assert sent_labels(pair) == ["a", "b", "c"]


def test_a_survivor_of_an_ended_session_counts() -> None:
    pair = decoding_a(slots=2)
    pair.client.submit("b", B)
    pair.prefill_all()
    pair.compute()
    pair.client.submit("c", C)
    pair.end_session()
    pair.advance(200)
    assert pair.worker.usable
    assert sent_labels(pair) == ["a", "b"], "depth 1, and the survivor is the one"
    pair.finish()
    check_tokens(pair, "b", B, 4)
    check_tokens(pair, "c", C, 4)


def test_the_slot_stays_reserved_until_its_owner_has_imported_the_kv() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.submit("c", C)
    pair.prefill_all()
    pair.compute()
    assert pair.slot_states() == ["ready"]
    pair.decode_steps(3)
    assert pair.slot_states() == ["ready"], "held for as long as the lane is busy"
    answers = pair.device.step()
    for answer in answers:
        pair.step_decode(answer)
    assert pair.slot_states() == ["importing"]
    assert sent_labels(pair) == ["a", "b"]
    pair.compute()
    assert sent_labels(pair) == ["a", "b", "c"], "only now"
    pair.finish()
    check_tokens(pair, "c", C, 4)


def end_well(pair: Pair) -> None:
    """Nothing happens to `b`."""


def cancel(pair: Pair) -> None:
    pair.client.cancel("b")


def producer_error(pair: Pair) -> None:
    chunk = pair.prefill.chunks.popleft()
    pair.prefill.step(ComputeFailed(chunk.slot, chunk.epoch, "out of memory"), pair.now_ms)


MATRIX = pytest.mark.parametrize("what_happens", [end_well, cancel, producer_error])


@MATRIX
def test_the_prefetched_job_is_in_flight_while_the_lane_decodes(what_happens: Callable) -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.prefill_chunk()
    assert pair.slot_states() == ["producing"]
    assert pair.source_states() == ["computing"]
    what_happens(pair)
    assert pair.core.lanes[0].job_id == pair.job("a").job_id
    pair.finish()
    check_tokens(pair, "a", A, 6)


@MATRIX
def test_nothing_else_is_sent_into_the_slot_before_the_producer_has_completed(what_happens: Callable) -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.submit("c", C)
    pair.prefill_chunk()
    pair.hold_down = True
    what_happens(pair)
    pair.deliver()
    for _ in range(5):
        pair.advance(100)
        assert sent_labels(pair) == ["a", "b"]
        assert pair.slot_states() in (["producing"], ["orphaned"])
    pair.hold_down = False
    pair.deliver()
    pair.finish()
    assert sent_labels(pair) == ["a", "b", "c"]
    check_tokens(pair, "c", C, 4)
    assert (pair.slot_states(), pair.source_states()) == (["free"], ["idle"])


def test_after_a_cancel_it_stays_reserved_until_the_producers_completion() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.submit("c", C)
    pair.prefill_chunk()
    pair.client.cancel("b")
    assert pair.client.answer("b").code is ErrorCode.CANCELLED
    assert pair.slot_states() == ["orphaned"]
    pair.decode_steps(1)
    assert pair.slot_states() == ["orphaned"], "the chunk is not done"
    assert sent_labels(pair) == ["a", "b"]
    pair.prefill_chunk()
    assert pair.slot_states() == ["producing"]
    assert sent_labels(pair) == ["a", "b", "c"], "CANCELLED arrived, the slot is used again at once"


def test_after_a_cancel_that_crosses_the_record_the_record_frees_the_slot_and_does_nothing_else() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.hold_up = True
    pair.client.cancel("b")
    pair.prefill_all()
    assert pair.client.answer("b").code is ErrorCode.CANCELLED
    assert pair.worker.counters["late_completions"] == 1
    assert pair.client.tokens("b") == []
    pair.hold_up = False
    pair.deliver()
    assert (pair.slot_states(), pair.source_states()) == (["free"], ["idle"]), "RELEASE was sent for DONE"
    assert not pair.device.commands or all(
        type(item).__name__ == "ForgetJob" for item in pair.device.commands
    )


def test_after_an_error_the_slot_is_free_with_the_completion_and_the_job_failed() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.submit("c", C)
    producer_error(pair)
    pair.deliver()
    answer = pair.client.answer("b")
    assert isinstance(answer, Failed)
    assert answer.code is ErrorCode.PREFILL_ERROR
    assert "out of memory" in answer.detail
    assert sent_labels(pair) == ["a", "b", "c"]


def test_idle_is_false_while_a_prefetch_is_held() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.cancel("a")
    pair.compute()
    assert pair.core.lanes.free_count == 1
    assert not pair.core.idle
    pair.prefill_all()
    assert pair.slot_states() == ["ready"]
    assert not pair.core.idle


def test_idle_is_false_while_an_orphan_is_outstanding() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.cancel("b")
    pair.client.cancel("a")
    pair.compute()
    assert pair.core.desk.live() == []
    assert not pair.core.idle
    pair.prefill_chunk()
    assert pair.core.idle


def test_a_draining_node_waits_for_its_orphans() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.cancel("b")
    pair.stop_decode()
    pair.decode_steps(4)
    check_tokens(pair, "a", A, 6)
    assert pair.exit is None, "the orphan is outstanding"
    pair.prefill_chunk()
    assert pair.exit.status == ExitStatus.OK


@MATRIX
def test_a_draining_node_lets_its_prefetch_end_first(what_happens: Callable) -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.submit("c", C)
    pair.stop_decode()
    assert pair.client.answer("c").code is ErrorCode.SHUTTING_DOWN
    what_happens(pair)
    pair.finish()
    assert pair.exit.status == ExitStatus.OK
    check_tokens(pair, "a", A, 6)
    assert sent_labels(pair) == ["a", "b"], "nothing new in a drain"
    if what_happens is end_well:
        check_tokens(pair, "b", B, 4)
    else:
        assert isinstance(pair.client.answer("b"), Failed)


def test_admission_never_submits_a_job_twice_a_prefetched_job_is_recognised_and_imported() -> None:
    pair = decoding_a()
    pair.client.submit("b", B)
    pair.client.submit("c", C)
    pair.finish()
    assert sent_labels(pair) == ["a", "b", "c"]
    assert pair.core.counters["remote_imports"] == 3
    assert pair.core.counters["local_prefill_tokens"] == 0


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("slots", [1, 3])
def test_tokens_are_the_same_with_and_without_prefetch(depth: int, slots: int) -> None:
    pair = Pair(slots=slots, route=replace(ROUTE, prefetch_depth=depth))
    prompts = {f"job{number}": list(range(number, number + 1 + 2 * number)) for number in range(6)}
    for label, prompt_ids in prompts.items():
        pair.client.submit(label, prompt_ids, max_tokens=5)
    pair.finish()
    for label, prompt_ids in prompts.items():
        check_tokens(pair, label, prompt_ids, 5)


def test_prefetch_is_off_by_default() -> None:
    config = DecodeConfig(pd_prefill_worker="tcp://127.0.0.1:5701", pd_remote_only=True)
    assert config.prefetch_depth == 0
    assert Route("memory", remote_only=True, backend="emulated", slots=1).prefetch_depth == 0


def test_with_it_off_nothing_is_sent_until_the_lane_is_free() -> None:
    pair = decoding_a(PLAIN, slots=3)
    pair.client.submit("b", B)
    pair.client.submit("c", C)
    pair.decode_steps(3)
    assert sent_labels(pair) == ["a"]
    assert pair.slot_states() == ["free"] * 3
    pair.decode_steps(1)
    assert isinstance(pair.client.answer("a"), Finished)
    assert sent_labels(pair) == ["a", "b"], "one lane is free, so one goes out"
    pair.finish()
    assert sent_labels(pair) == ["a", "b", "c"]
    assert pair.core.counters["prefetches"] == 0


REFUSED_ROUTES = [
    ({"prefill_workers": ()}, {"pd_prefill_worker": None}),
    ({"remote_only": False}, {"pd_remote_only": False}),
    ({"slots": 400}, {"slots": 400}),
    ({"prefetch_depth": -1}, {"pd_prefetch_next": -1}),
]


@pytest.mark.parametrize(("change", "flags"), REFUSED_ROUTES)
def test_a_route_that_cannot_support_it_is_refused_in_the_constructor_and_on_the_command_line(
    change: dict, flags: dict
) -> None:
    with pytest.raises(ValueError, match="--"):
        Scheduler(replace(ROUTE, **change))
    with pytest.raises(ValueError, match="--"):
        Pair(route=replace(ROUTE, **change))
    good = {"pd_prefill_worker": "tcp://127.0.0.1:5701", "pd_remote_only": True, "pd_prefetch_next": 1}
    with pytest.raises(ConfigError):
        DecodeConfig(**{**good, **flags})


def test_a_depth_of_zero_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="--pd-prefetch-next"):
        DecodeConfig(pd_prefill_worker="tcp://127.0.0.1:5701", pd_remote_only=True, pd_prefetch_next=0)


def test_a_depth_beyond_the_slots_granted_is_clamped_and_shown_in_status() -> None:
    pair = decoding_a(replace(ROUTE, prefetch_depth=5), slots=2)
    status = pair.core.status(pair.now_ms)
    assert (status["prefetch_depth"], status["prefetch_depth_asked"]) == (2, 5)
    for number in range(5):
        pair.client.submit(f"waiting{number}", B)
    assert len(pair.sent) == 3
    pair.finish()
    assert pair.core.counters["remote_imports"] == 6


@pytest.mark.parametrize("backend", ["atom", "emulated", "torch"])
def test_any_backend_may_prefetch(backend: str) -> None:
    pair = decoding_a(replace(ROUTE, backend=backend))
    pair.client.submit("b", B)
    assert sent_labels(pair) == ["a", "b"]


def test_a_cancelled_prefetch_is_cancelled_at_the_prefill_node_too() -> None:
    pair = decoding_a()
    pair.client.submit("b", list(range(20)))
    pair.hold_up = True
    pair.client.cancel("b")
    [(_, frames)] = pair.prefill.router.arrived
    assert decode(frames)[1] == Cancel(slot=0, epoch=2)
    pair.hold_up = False
    pair.deliver()
    pair.prefill_chunk()
    assert pair.prefill.core.line.counters["prefills_cancelled"] == 1
    assert not pair.prefill.chunks, "four of five chunks were not computed"
