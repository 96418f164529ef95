"""Clients that cancel, die or fall silent, one or a hundred at a time: lanes and slots come back."""

import os
import random
import subprocess
import sys

from tests.process.harness import ROOT
from tests.process.world import PREFETCH, Pair, World, expected, prompt_of

A, B = prompt_of(60, 20), prompt_of(300, 21)
FOREIGN_CLIENT = """
import sys
from transport.client import Client
client = Client(sys.argv[1])
client.submit("theirs", prompt_ids=[97, 98, 99], sampling={"max_tokens": 900, "ignore_eos": True})
while True:
    for message in client.events():
        print(type(message).__name__, flush=True)
"""


def foreign_client(endpoint: str) -> subprocess.Popen:
    """Another process with a long job, accepted when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", FOREIGN_CLIENT, endpoint],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().strip() == "Accepted"
    return process


def test_a_client_that_dies_while_its_job_decodes_frees_the_lane(world: World) -> None:
    pair = world.pair(decode=(*PREFETCH, "--emulated-decode-ms", "20"))
    with foreign_client(pair.decode.endpoint) as theirs:
        world.wait_status(pair.decode, lambda status: status["jobs"].get("decoding"), "their job decodes")
        theirs.kill()
    world.wait_status(pair.decode, lambda status: status["idle"], "the lane is free", deadline_ms=3_000)
    assert world.status(pair.decode)["counters"]["jobs_cancelled"] == 1
    pair.check_job("A", A, max_tokens=3)
    pair.audit(imports=2)


def test_a_client_that_dies_while_nothing_is_sent_to_it_is_missed_within_its_lease(world: World) -> None:
    pair = world.pair()
    pair.prefill.hold("prefill.chunk")
    with foreign_client(pair.decode.endpoint) as theirs:
        world.wait_held(pair.prefill, "prefill.chunk")
        theirs.kill()
    pair.wait_slot("orphaned")
    assert pair.decode.logged("session.ended", cause="lease expired")
    assert world.status(pair.decode)["counters"]["jobs_cancelled"] == 1
    pair.prefill.release("prefill.chunk")
    pair.check_job("A", A, max_tokens=3)
    pair.audit(imports=1)


def test_a_client_that_falls_silent_loses_its_jobs_and_is_told(world: World) -> None:
    pair = world.pair(decode=(*PREFETCH, "--emulated-decode-ms", "20"))
    silent = world.client(pair.decode)
    answer = silent.submit("theirs", A, max_tokens=300, ignore_eos=True)
    world.wait(lambda: answer.token_ids, "its job decodes")
    world.clients.remove(silent)
    other = pair.client.submit("B", B, max_tokens=9)
    assert world.end_of(other).token_ids == expected(B, 9)
    assert world.status(pair.decode)["counters"]["jobs_cancelled"] == 1
    world.clients.append(silent)
    assert world.end_of(answer).code == "PEER_LOST"
    # A new session follows by itself.
    assert world.end_of(silent.submit("again", A, max_tokens=4)).token_ids == expected(A, 4)
    pair.audit(imports=3)


def test_a_client_that_says_goodbye_takes_its_jobs_with_it(world: World) -> None:
    pair = world.pair(decode=(*PREFETCH, "--emulated-decode-ms", "20"))
    leaving = world.client(pair.decode)
    first = leaving.submit("first", A, max_tokens=300, ignore_eos=True)
    leaving.submit("second", B, max_tokens=9)
    world.wait(lambda: first.token_ids, "its job decodes")
    pair.wait_slot("ready")
    world.clients.remove(leaving)
    leaving.close()
    pair.wait_clean()
    pair.check_job("A", A, max_tokens=3)
    assert world.status(pair.decode)["counters"]["jobs_cancelled"] == 2
    pair.audit(imports=2)


def test_jobs_cancelled_in_the_queue_reach_neither_the_prefill_node_nor_a_lane(shared_pair: Pair) -> None:
    pair, world, before = shared_pair, shared_pair.world, shared_pair.counts()
    pair.prefill.hold("prefill.chunk")
    running = pair.client.submit("running", A, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    queued = [pair.client.submit(f"{number}", B, max_tokens=9) for number in range(5)]
    world.wait(lambda: all(answer.accepted for answer in queued), "all wait")
    for number in range(5):
        pair.client.cancel(f"{number}")
    for answer in queued:
        assert world.end_of(answer).code == "CANCELLED"
    pair.prefill.release("prefill.chunk")
    assert world.end_of(running).token_ids == expected(A, 9)
    pair.check_counts(before, prefills_sent=1, remote_imports=1)


def test_long_prefills_that_were_cancelled_do_not_delay_a_short_one(world: World) -> None:
    # 900 tokens at 2,000 tokens/s: half a second each, a chunk takes 64 ms.
    pair = world.pair(("--emulated-prefill-tokens-per-s", "2000"))
    alone = pair.check_job("alone", A)
    cancelled = [pair.client.submit(f"{number}", prompt_of(900, number), max_tokens=9) for number in range(8)]
    pair.wait_slot("producing")
    for number in range(8):
        pair.client.cancel(f"{number}")
    short = pair.check_job("short", A)
    assert {world.end_of(answer).code for answer in cancelled} == {"CANCELLED"}
    # Two chunks, rather than the three and a half seconds of the eight.
    assert short.end.timings.total_ms - alone.end.timings.total_ms < 1_000
    assert world.status(pair.prefill)["counters"]["prefills_done"] == 2
    pair.audit(imports=2)


def test_a_cancelled_prefill_leaves_nothing_for_the_next_to_trip_over(shared_pair: Pair) -> None:
    pair, world, before = shared_pair, shared_pair.world, shared_pair.counts()
    for number in range(20):
        doomed = pair.client.submit("doomed", prompt_of(500, number), max_tokens=9)
        if number % 2:
            world.wait(lambda answer=doomed: answer.accepted, "it is accepted")
        pair.client.cancel("doomed")
        pair.check_job("next", prompt_of(30 + number, number), max_tokens=2)
        assert world.end_of(doomed).code == "CANCELLED"
    pair.check_counts(before, jobs_cancelled=20, jobs_finished=20)


def test_a_hundred_jobs_with_cancels_at_random_leave_the_pair_as_good_as_new(world: World) -> None:
    chance = random.Random(20260101)
    pair = world.pair(("--source-slots", "2"), ("--pd-remote-only", "--pd-prefetch-next", "2"))
    prompts = [prompt_of(chance.randint(1, 500), number) for number in range(12)]
    whole = [expected(prompt_ids, 25) for prompt_ids in prompts]
    answers, asked = {}, {}
    waiting: list[str] = []
    for number in range(100):
        label, max_tokens = f"{number}", chance.randint(1, 25)
        answers[label] = pair.client.submit(label, prompts[number % 12], max_tokens=max_tokens)
        asked[label] = whole[number % 12][:max_tokens]
        waiting.append(label)
        for _ in range(chance.randint(0, 3)):
            pair.client.turn()
        if chance.random() < 0.5:
            pair.client.cancel(waiting.pop(chance.randrange(len(waiting))))
    for label, answer in answers.items():
        world.end_of(answer)
        assert answer.code in (None, "CANCELLED")
        count = len(asked[label]) if answer.code is None else len(answer.token_ids)
        assert answer.token_ids == asked[label][:count], label
    codes = [answer.code for answer in answers.values()]
    assert codes.count(None) > 20
    assert codes.count("CANCELLED") > 20
    pair.wait_clean()
    for number in range(10):
        pair.check_job(f"probe {number}", prompts[number], max_tokens=25)
    pair.audit()


def test_all_clients_leave_in_the_same_moment(shared_pair: Pair) -> None:
    pair, world, before = shared_pair, shared_pair.world, shared_pair.counts()
    crowd = [world.client(pair.decode) for _ in range(6)]
    for number, client in enumerate(crowd):
        client.submit("job", prompt_of(200, number), max_tokens=600, ignore_eos=True)
    pair.wait_slot("ready")
    for client in crowd:
        world.clients.remove(client)
        client.close()
    pair.check_counts(before, jobs_cancelled=6)
    pair.check_job("probe", A)


def test_a_job_sent_to_the_prefill_node_is_refused_at_once(shared_pair: Pair) -> None:
    client = shared_pair.world.client(shared_pair.prefill)
    answer = client.submit("lost", prompt_of(4), max_tokens=2)
    assert shared_pair.world.end_of(answer).code == "BAD_MESSAGE"
    assert "ask the decode node" in answer.end.detail
