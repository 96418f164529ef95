"""The prefetch contract on real processes: {success, cancel, producer error}, order, idle and drain."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from common.messages import Finished
from tests.process.world import PREFETCH, Answer, Pair, World, expected, prompt_of

# A decodes for longer than anything here takes; B is prefetched meanwhile; C waits.
A, B, C = prompt_of(40, 1), prompt_of(300, 2), prompt_of(150, 3)
A_TOKENS = 400
SLOW_DECODE = (*PREFETCH, "--emulated-decode-ms", "3")


@pytest.fixture(scope="module", params=["shm", "tcp"])
def slow_pair(request: pytest.FixtureRequest, shared_world: World) -> Iterator[Pair]:
    """One source slot, and a lane that takes its time; every test leaves it clean. On each data plane."""
    plane = ("--kv-plane", request.param)
    pair = shared_world.pair(plane, (*SLOW_DECODE, *plane, "--lease-ms", "20000"))
    yield pair
    pair.audit()


def begin(pair: Pair, point: str) -> dict[str, Answer]:
    """A decodes, B's prefill stands at `point`, C is queued."""
    world, client = pair.world, pair.client
    answers = {"A": client.submit("A", A, max_tokens=A_TOKENS, ignore_eos=True)}
    world.wait(lambda: answers["A"].token_ids, "A decodes")
    held = len(pair.prefill.logged("hook.held", point=point))
    pair.prefill.hold(point)
    answers["B"] = client.submit("B", B, max_tokens=9)
    world.wait_held(pair.prefill, point, held + 1)
    answers["C"] = client.submit("C", C, max_tokens=9)
    world.wait(lambda: answers["C"].accepted, "C is accepted")
    return answers


def check_tokens(answers: dict[str, Answer], labels: str) -> None:
    prompts = {"A": (A, A_TOKENS, True), "B": (B, 9, False), "C": (C, 9, False)}
    for label in labels:
        prompt_ids, max_tokens, ignore_eos = prompts[label]
        assert isinstance(answers[label].end, Finished), answers[label].end
        assert answers[label].token_ids == expected(prompt_ids, max_tokens, ignore_eos=ignore_eos), label


def prefills_sent(status: dict[str, Any]) -> int:
    return status["workers"][0]["counters"]["prefills_sent"]


def test_prefetch_success_holds_the_slot_until_the_import_has_ended(world: World) -> None:
    # Two slots: it is the depth, not the want of a slot, that keeps C back.
    pair = world.pair(("--source-slots", "2"), SLOW_DECODE)
    answers = begin(pair, "prefill.answer")

    seen = len(answers["A"].token_ids)
    world.wait(lambda: len(answers["A"].token_ids) > seen + 20, "the lane decodes while B is computed")
    status = world.status(pair.decode)
    assert sorted(slot["state"] for slot in status["workers"][0]["slots"]) == ["free", "producing"]
    assert (status["idle"], status["jobs"]) == (False, {"decoding": 1, "prefilling": 1, "queued": 1})

    pair.prefill.release("prefill.answer")
    status = pair.wait_slot("ready")
    assert status["jobs"] == {"decoding": 1, "prefilled": 1, "queued": 1}
    assert "held" in [slot["state"] for slot in world.status(pair.prefill)["slots"]]

    pair.decode.hold("import.piece")
    world.wait_held(pair.decode, "import.piece")
    status = pair.wait_slot("importing")
    assert (prefills_sent(status), status["jobs"]["queued"]) == (2, 1), "C was sent before B's import ended"
    pair.decode.release("import.piece")

    for answer in answers.values():
        world.end_of(answer)
    check_tokens(answers, "ABC")
    counters = world.status(pair.decode)
    assert prefills_sent(counters) == 3, "a job was sent twice"
    assert counters["counters"]["prefetches"] == 2
    pair.audit(imports=3)


def test_prefetch_cancel_keeps_the_slot_until_the_producer_has_answered(slow_pair: Pair) -> None:
    pair, world, before = slow_pair, slow_pair.world, slow_pair.counts()
    answers = begin(pair, "prefill.chunk")

    pair.client.cancel("B")
    assert world.end_of(answers["B"]).code == "CANCELLED"
    status = pair.wait_slot("orphaned")
    epoch = status["workers"][0]["slots"][0]["epoch"]
    sent = before["prefills_sent"] + 2
    assert (status["idle"], prefills_sent(status), status["jobs"]["queued"]) == (False, sent, 1)

    # The lane falls free, and still nothing may be sent into B's slot.
    world.end_of(answers["A"])
    status = world.status(pair.decode)
    assert status["lanes"][0]["state"] == "free"
    assert [slot["state"] for slot in status["workers"][0]["slots"]] == ["orphaned"]
    assert (status["idle"], prefills_sent(status), status["jobs"]) == (False, sent, {"queued": 1})

    pair.prefill.release("prefill.chunk")
    world.end_of(answers["C"])
    check_tokens(answers, "AC")
    assert answers["B"].token_ids == []
    assert pair.prefill.logged("prefill.cancelled", epoch=epoch)
    assert pair.prefill.logged("prefill.done", epoch=epoch + 1), "C must get a greater epoch than the orphan"
    pair.check_counts(before, remote_imports=2, prefills_sent=3, late_completions=1, prefills_cancelled=1)


def test_a_cancel_that_crosses_the_record_changes_nothing_but_its_own_job(slow_pair: Pair) -> None:
    pair, world, before = slow_pair, slow_pair.world, slow_pair.counts()
    # B is computed to the end: its record, not CANCELLED, is the completion that frees the slot.
    answers = begin(pair, "prefill.answer")
    for _ in range(3):
        pair.client.cancel("B")
    assert world.end_of(answers["B"]).code == "CANCELLED"
    pair.wait_slot("orphaned")
    pair.client.cancel("B")
    pair.prefill.release("prefill.answer")
    for label in "AC":
        world.end_of(answers[label])
    check_tokens(answers, "AC")
    assert answers["B"].token_ids == []
    pair.check_counts(before, remote_imports=2, prefills_sent=3, late_completions=1)


def test_prefetch_producer_error_frees_the_slot_and_fails_that_job_alone(slow_pair: Pair) -> None:
    pair, world, before = slow_pair, slow_pair.world, slow_pair.counts()
    answers = begin(pair, "prefill.answer")
    assert pair.slots() == ["producing"]
    pair.prefill.spoil("prefill.answer", "fail")
    assert world.end_of(answers["B"]).code == "PREFILL_ERROR"
    for label in "AC":
        world.end_of(answers[label])
    check_tokens(answers, "AC")
    pair.check_counts(before, remote_imports=2, prefills_sent=3, jobs_failed=1, orphans=0)


def test_a_prefetched_job_that_is_cancelled_when_ready_gives_its_slot_to_the_next(slow_pair: Pair) -> None:
    pair, world, before = slow_pair, slow_pair.world, slow_pair.counts()
    answers = begin(pair, "prefill.answer")
    pair.prefill.release("prefill.answer")
    pair.wait_slot("ready")
    pair.client.cancel("B")
    assert world.end_of(answers["B"]).code == "CANCELLED"
    for label in "AC":
        world.end_of(answers[label])
    check_tokens(answers, "AC")
    pair.check_counts(before, remote_imports=2, prefills_sent=3, orphans=0)


def test_a_cancel_during_the_import_waits_for_the_end_of_the_copy(slow_pair: Pair) -> None:
    pair, world, before = slow_pair, slow_pair.world, slow_pair.counts()
    pair.decode.hold("import.piece")
    answer = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.decode, "import.piece")
    pair.client.cancel("B")
    assert world.end_of(answer).code == "CANCELLED"
    status = world.status(pair.decode)
    assert [slot["state"] for slot in status["workers"][0]["slots"]] == ["importing"]
    assert (status["lanes"][0]["state"], status["idle"]) == ("importing", False)
    following = pair.client.submit("C", C, max_tokens=9)
    world.wait(lambda: following.accepted, "C is accepted")
    sent = prefills_sent(world.status(pair.decode)) - before["prefills_sent"]
    assert sent == 1, "C was sent into a slot that is being copied"
    pair.decode.release("import.piece")
    assert world.end_of(following).token_ids == expected(C, 9)
    pair.check_counts(before, prefills_sent=2, jobs_cancelled=1)


@pytest.mark.parametrize("policy", ["fail", "local"])
def test_a_producer_error_follows_the_policy(world: World, policy: str) -> None:
    pair = world.pair(decode=("--on-prefill-failure", policy))
    pair.prefill.spoil("prefill.chunk", "fail")
    answer = pair.run("job", B, max_tokens=9)
    if policy == "fail":
        assert (answer.code, answer.token_ids) == ("PREFILL_ERROR", [])
        pair.audit(imports=0)
    else:
        assert answer.end.path == "local"
        assert answer.token_ids == expected(B, 9)
        pair.audit(imports=0, local_tokens=len(B))


def test_a_drain_waits_for_an_orphan_and_then_exits_in_good_order(world: World) -> None:
    pair = world.pair(decode=SLOW_DECODE)
    answers = begin(pair, "prefill.chunk")
    pair.client.cancel("B")
    pair.wait_slot("orphaned")
    pair.decode.signal(signal.SIGTERM)
    assert world.end_of(answers["C"]).code == "SHUTTING_DOWN"
    world.end_of(answers["A"])
    check_tokens(answers, "A")
    status = world.status(pair.decode)
    assert (status["draining"], status["accepting"], status["idle"]) == (True, False, False)
    assert pair.decode.status is None, "the node left its orphan behind"
    pair.prefill.release("prefill.chunk")
    assert world.exit_of(pair.decode) == 0
    world.check_remains(pair.decode)
    world.wait_status(pair.prefill, lambda status: not status["decode_sessions"], "the session has ended")
    assert world.status(pair.prefill)["slots"][0]["state"] == "pool"
    world.stop(pair.prefill)


def test_without_prefetch_nothing_is_sent_while_the_lane_is_taken(world: World) -> None:
    pair = world.pair(decode=("--pd-remote-only", "--emulated-decode-ms", "2"))
    first = pair.client.submit("A", A, max_tokens=100, ignore_eos=True)
    world.wait(lambda: first.token_ids, "A decodes")
    second = pair.client.submit("B", B, max_tokens=9)
    world.wait(lambda: second.accepted, "B is accepted")
    status = world.status(pair.decode)
    assert (prefills_sent(status), status["prefetch_depth"]) == (1, 0)
    world.wait(lambda: first.end and second.end, "both end")
    assert first.token_ids == expected(A, 100, ignore_eos=True)
    assert second.token_ids == expected(B, 9)
    assert world.status(pair.decode)["counters"]["prefetches"] == 0
    pair.audit(imports=2)


def test_a_depth_beyond_the_granted_slots_is_clamped_and_shown(world: World) -> None:
    pair = world.pair(("--source-slots", "2"), ("--pd-remote-only", "--pd-prefetch-next", "5"))
    status = world.status(pair.decode)
    assert (status["prefetch_depth"], status["prefetch_depth_asked"]) == (2, 5)
    assert pair.decode.logged("prefetch.depth_clamped", asked=5, slots=2, level="warning")
    answers = [pair.client.submit(f"{number}", prompt_of(50, number), max_tokens=5) for number in range(6)]
    for number, answer in enumerate(answers):
        assert world.end_of(answer).token_ids == expected(prompt_of(50, number), 5)
    pair.audit(imports=6)
