"""Faults that other systems had, as event sequences on the pure cores; continues `test_known_faults`."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from common import limits
from common.engines.registry import BACKENDS
from common.errors import ErrorCode
from common.messages import (
    Cancel,
    Finished,
    Hello,
    HelloOk,
    Ping,
    PrefillDone,
    Role,
    ShmPlane,
    SlotGrant,
    StatusReply,
    StatusRequest,
    Submit,
)
from common.sampling import SamplingParams
from decode_node import commands
from decode_node import events as ev
from decode_node.core import DecodeCore
from decode_node.scheduler import Route
from tests.actors import DECODE_SETTINGS, LOCAL_ROUTE, PREFILL_WAIT_MS, ROUTE, STALL_MS, TIMES, names
from tests.cores import Pair
from tests.devices import CHUNK_TOKENS, MAX_TOKENS, PROFILE, VOCABULARY, expected_tokens
from tests.unit.test_known_faults import LONG, A, B, check_probe
from transport.codec import Header, decode, encode

ROUTES = {
    "one lane, no prefetch": (replace(ROUTE, prefetch_depth=0), 1),
    "one lane, prefetch": (ROUTE, 1),
    "two lanes, no prefetch": (replace(ROUTE, slots=2, prefetch_depth=0), 1),
    "two lanes, two slots": (replace(ROUTE, slots=2), 2),
    "local prefill allowed": (LOCAL_ROUTE, 1),
}
STEADY_MS = (STALL_MS + limits.ORPHAN_GRACE_MS) // 2
every_route = pytest.mark.parametrize(("route", "slots"), ROUTES.values(), ids=ROUTES)


@pytest.fixture(autouse=True)
def _several_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    # No engine so far has several lanes; the cores can.
    monkeypatch.setitem(BACKENDS, "emulated", replace(BACKENDS["emulated"], lanes_max=2))


@every_route
def test_k1_whatever_the_route_nothing_is_sent_into_a_slot_that_is_still_owed(
    route: Route, slots: int
) -> None:
    pair = Pair(route=route, slots=slots)
    pair.client.submit("a", A)
    owed = pair.sent[0].slot
    pair.hold_down = True
    pair.prefill_all()
    pair.client.cancel("a")
    for number in range(3):
        pair.client.submit(f"b{number}", B)
    pair.prefill_all()
    assert [request.slot for request in pair.sent].count(owed) == 1
    pair.hold_down = False
    pair.finish()
    assert pair.client.tokens("a") == []
    for number in range(3):
        assert pair.client.tokens(f"b{number}") == expected_tokens(B, 4)
    check_probe(pair)


def ignore_cancels(pair: Pair) -> int:
    """Turn each CANCEL on its way to the prefill node into a PING; how many there were."""
    arrived, ignored = pair.prefill.router.arrived, 0
    for _ in range(len(arrived)):
        route, frames = arrived.popleft()
        header, message = decode(frames)
        if isinstance(message, Cancel):
            ignored += 1
            frames = encode(Header(header.session, header.sequence), Ping())
        arrived.append((route, frames))
    return ignored


def test_k1_a_prefill_node_that_ignores_cancels_costs_its_own_time_and_nothing_else() -> None:
    pair = Pair()
    for number in range(20):
        pair.client.submit(f"a{number}", LONG)
        pair.hold_up = True
        pair.client.cancel(f"a{number}")
        assert ignore_cancels(pair) == 1
        pair.hold_up = False
        pair.deliver()
        assert pair.slot_states() == ["orphaned"]
        pair.prefill_all()
        assert pair.slot_states() == ["free"]
    assert pair.worker.counters["late_completions"] == 20
    assert pair.worker.counters["sessions"] == 1, "no orphan had to wait for a deadline"
    check_probe(pair)


def test_k2_load_that_is_killed_again_and_again_leaves_the_pair_as_quick_as_before() -> None:
    pair = Pair(max_queue=64)
    for number in range(4):
        killed = pair.add_client(f"load-{number}")
        pair.tick()
        for label in range(50):
            killed.submit(str(label), LONG)
        pair.prefill_chunk()
        killed.silent = True
        pair.advance(TIMES.lease_ms + TIMES.ping_ms)
        assert pair.core.desk.live() == []
    assert len(pair.prefill.chunks) <= 1, "at most the chunk that was running"
    check_probe(pair)


def test_k3_a_prefill_node_that_dies_in_the_handshake_fails_jobs_in_time_and_nothing_for_ever() -> None:
    pair = Pair(connect=False)
    pair.client.submit("a", A)
    pair.hold_down = pair.prefill_exists = True
    pair.advance(TIMES.hello_timeout_ms // 2)
    pair.tick()
    pair.prefill_exists = False
    pair.start_prefill("prefill-2")
    pair.advance(PREFILL_WAIT_MS)
    assert pair.client.answer("a").code is ErrorCode.NO_PREFILL_NODE
    assert pair.sent == []
    pair.hold_down = False
    pair.prefill_exists = True
    pair.advance(2 * TIMES.backoff_max_ms)
    check_probe(pair)


@every_route
def test_k3_cancelled_prefills_never_hang_the_job_behind_them(route: Route, slots: int) -> None:
    pair = Pair(route=route, slots=slots)
    for number in range(30):
        pair.client.submit("a", LONG)
        if number % 2 and pair.prefill.chunks:
            pair.prefill_chunk()
        pair.client.cancel("a")
        pair.client.submit("b", B, max_tokens=2)
        pair.finish()
        assert isinstance(pair.client.answer("b"), Finished), number
        pair.client.received.clear()
    check_probe(pair)


@every_route
def test_k3_twice_as_many_jobs_as_everything_can_hold_all_finish(route: Route, slots: int) -> None:
    pair = Pair(route=route, slots=slots, max_queue=32)
    others = [pair.add_client(f"client-{number}") for number in range(2, 5)]
    pair.tick()
    for number, client in enumerate(others * 4):
        client.submit(f"{number}", [number, *A], max_tokens=5)
    pair.finish()
    for number, client in enumerate(others * 4):
        assert client.tokens(f"{number}") == expected_tokens([number, *A], 5)
    check_probe(pair)


@every_route
def test_k3_jobs_that_fill_slot_and_lane_to_the_last_token_leave_each_other_room(
    route: Route, slots: int
) -> None:
    pair = Pair(route=route, slots=slots)
    prompts = {label: [number] * (MAX_TOKENS - 3) for number, label in enumerate("abc")}
    for label, prompt_ids in prompts.items():
        pair.client.submit(label, prompt_ids, max_tokens=3)
    pair.finish()
    for label, prompt_ids in prompts.items():
        assert pair.client.tokens(label) == expected_tokens(prompt_ids, 3)
    check_probe(pair)


def test_k4_a_job_that_a_restart_with_a_smaller_limit_made_too_long_is_never_sent() -> None:
    pair = Pair(route=replace(ROUTE, prefetch_depth=0))
    pair.client.submit("a", A, max_tokens=9)
    pair.prefill_all()
    pair.compute()
    too_long = [1] * 40
    pair.client.submit("b", too_long)
    pair.client.submit("c", B)
    pair.start_prefill("prefill-2", replace(PROFILE, max_tokens=32))
    pair.advance(TIMES.dead_after_ms + 2 * TIMES.backoff_max_ms)
    assert pair.worker.usable
    pair.finish()
    refused = pair.client.answer("b")
    assert refused.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert refused.definite
    assert {"44", "32"} <= set(refused.detail.replace(",", " ").split())
    assert [len(request.prompt) // 4 for request in pair.sent] == [len(A), len(B)]
    assert pair.client.tokens("a") == expected_tokens(A, 9)
    assert pair.client.tokens("c") == expected_tokens(B, 4)
    check_probe(pair)


@pytest.mark.parametrize("policy", ["local", "retry"])
@pytest.mark.parametrize("position", [0, CHUNK_TOKENS - 1, CHUNK_TOKENS, 11, len(LONG) - 1])
def test_k4_whichever_chunk_was_bad_the_second_try_gives_the_same_tokens(policy: str, position: int) -> None:
    route = LOCAL_ROUTE if policy == "local" else replace(ROUTE, on_prefill_failure="retry")
    pair = Pair(route=route)
    pair.client.submit("a", LONG, max_tokens=6)
    pair.prefill_all()
    pair.prefill.slab.slots[0].token_ids[position] ^= 1
    pair.finish()
    assert pair.core.counters["kv_refused"] == 1
    assert pair.client.tokens("a") == expected_tokens(LONG, 6)
    assert pair.client.answer("a").path == ("local" if policy == "local" else "remote")
    check_probe(pair)


def test_k6_asking_for_health_while_compute_stands_still_adds_no_work() -> None:
    pair = Pair()
    pair.client.submit("a", A)
    pair.prefill_all()
    waiting = list(pair.device.commands)
    for _ in range(50):
        pair.client.say(StatusRequest())
    replies = [message for message in pair.client.received if isinstance(message, StatusReply)]
    assert len(replies) == 50
    assert [job.label for job in pair.core.desk.live()] == ["a"]
    assert list(pair.device.commands) == waiting
    check_probe(pair)


def test_k7_no_two_productions_ever_share_a_name() -> None:
    pair = Pair(slots=4, route=replace(ROUTE, prefetch_depth=4), max_queue=32)
    for number in range(20):
        pair.client.submit(f"{number}", A if number % 2 else B)
        if number % 3 == 0:
            pair.client.cancel(f"{number}")
    pair.finish()
    assert len(pair.sent) >= 13
    assert Counter(request.job_id for request in pair.sent).most_common(1)[0][1] == 1
    places = Counter((request.slot, request.epoch) for request in pair.sent)
    assert places.most_common(1)[0][1] == 1
    check_probe(pair)


def test_k9_a_timeout_says_which_wait_was_over_after_how_long_and_why() -> None:
    pair = Pair(prefill_timeout_ms=400)
    pair.client.submit("a", A)
    pair.advance(400)
    assert "--prefill-timeout-ms 400" in pair.client.answer("a").detail
    pair.prefill_all()
    pair.map_refusal = "no shared memory here"
    pair.end_session()
    pair.client.submit("b", B)
    pair.advance(PREFILL_WAIT_MS)
    detail = pair.client.answer("b").detail
    assert f"for {PREFILL_WAIT_MS} ms" in detail
    assert "no shared memory here" in detail


ROW = bytes(4 * VOCABULARY)


class TwoPrefillNodes:
    """A decode core with the prefill nodes `near` and `far`, and two lanes; told and asked by hand."""

    def __init__(self) -> None:
        route = replace(ROUTE, prefill_workers=("near", "far"), slots=2)
        self.core = DecodeCore(DECODE_SETTINGS, route, names("client"), names("job"))
        for worker in ("near", "far"):
            self.open(worker, f"{worker}-1")
        [answer] = self.step(ev.ClientHello(b"route", Hello("client", 1, Role.CLIENT)))
        self.client = answer.message.session

    def step(self, event: object, now_ms: int = 0) -> list:
        effects = self.core.step(event, now_ms)
        self.core.check()
        return effects

    def open(self, worker: str, session: str) -> None:
        plane = ShmPlane(f"slab of {session}", 1, MAX_TOKENS)
        hello = HelloOk(session, f"process of {session}", 5_000, STALL_MS, PROFILE, (SlotGrant(0, 0),), plane)
        self.step(ev.WorkerOpened(worker, hello))

    def submit(self, label: str) -> ev.SendToWorker:
        """The PREFILL that a job leads to."""
        [prepare] = self.step(ev.ClientMessage(self.client, Submit(label, prompt_ids=(1, 2))))
        sampling = SamplingParams(max_tokens=4)
        effects = self.step(ev.SubmissionPrepared(prepare.job_id, bytes(8), "digest", sampling))
        [sent] = [effect for effect in effects if isinstance(effect, ev.SendToWorker)]
        return sent


def test_k11_the_loss_of_one_prefill_node_is_nothing_to_the_jobs_of_the_other() -> None:
    world = TwoPrefillNodes()
    lost, kept = world.submit("lost"), world.submit("kept")
    assert {lost.session, kept.session} == {"near-1", "far-1"}
    effects = world.step(ev.WorkerLost(lost.session.removesuffix("-1"), lost.session, "killed"))
    told = [effect.message for effect in effects if isinstance(effect, ev.SendToClient)]
    assert [(message.label, message.code) for message in told] == [("lost", ErrorCode.PEER_LOST)]
    assert [effect for effect in effects if isinstance(effect, ev.SendToWorker)] == []
    request = kept.message
    record = PrefillDone(
        request.job_id,
        request.slot,
        request.epoch,
        "digest",
        2,
        CHUNK_TOKENS,
        4,
        (bytes(16),),
        ROW,
        bytes(16),
        0,
        0,
    )
    effects = world.step(ev.WorkerMessage(kept.session, record))
    assert {type(effect) for effect in effects} >= {commands.SampleFirst}
    assert world.core.accepting, "one prefill node is enough"


def health(pair: Pair) -> tuple[bool, bool]:
    status = pair.core.status(pair.now_ms)
    return status["accepting"], status["ready"]


def test_k17_health_follows_what_each_part_does_and_not_how_busy_it_is() -> None:
    pair = Pair()
    assert health(pair) == (True, True), "idle"
    pair.client.submit("a", LONG)
    pair.advance(STEADY_MS - 1)
    assert health(pair) == (True, True), "a long chunk is work"
    pair.advance(1)
    assert health(pair) == (True, False), "the prefill node's compute stands still"
    pair.prefill_all()
    pair.advance(STALL_MS // 2 - 1)
    assert health(pair) == (True, True), "a long copy is work"
    pair.advance(1)
    assert health(pair) == (True, False), "this node's own compute stands still"
    pair.finish()
    assert health(pair) == (True, True)
    pair.prefill_exists = False
    pair.advance(TIMES.suspect_ms + TIMES.ping_ms)
    assert health(pair) == (False, False), "the prefill node is silent"


def test_k17_health_of_a_prefill_node_follows_its_compute() -> None:
    pair = Pair()
    pair.client.submit("a", LONG)
    pair.advance(STALL_MS // 2 - 1)
    assert pair.prefill.core.status(pair.now_ms)["ready"]
    pair.advance(1)
    assert not pair.prefill.core.status(pair.now_ms)["ready"]
    pair.prefill_chunk()
    assert pair.prefill.core.status(pair.now_ms)["ready"]


def test_k22_the_status_of_neither_node_shows_a_prompt_or_an_answer() -> None:
    pair = Pair(route=replace(ROUTE, prefetch_depth=1))
    marker = [17, 23, 5, 19, 11]
    for label in ("decoding", "ready", "queued"):
        pair.client.submit(label, marker, max_tokens=9)
        pair.prefill_all()
        pair.compute()
    pair.decode_steps(4)
    secrets = (marker, pair.client.tokens("decoding"))
    assert len(secrets[1]) == 5
    for status in (pair.core.status(pair.now_ms), pair.prefill.core.status(pair.now_ms)):
        shown = json.dumps(status)
        for token_ids in secrets:
            assert ", ".join(map(str, token_ids[:3])) not in shown
            assert "".join(chr(ord("a") + token_id) for token_id in token_ids[:5]) not in shown
