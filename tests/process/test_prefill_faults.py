"""The prefill node dies, stops, hangs or comes back: what the decode node makes of it."""

import signal

from tests.process.world import PREFETCH, Answer, Pair, World, expected, prompt_of

A, B, C = prompt_of(50, 7), prompt_of(280, 8), prompt_of(120, 9)
SLOW_DECODE = (*PREFETCH, "--emulated-decode-ms", "3")
STALL_MS = 1_500


def restart_prefill(pair: Pair) -> None:
    pair.prefill = pair.world.prefill(bind=pair.prefill.endpoint)
    pair.world.wait_status(pair.decode, lambda status: status["workers"][0]["usable"], "it is back")


def decoding(pair: Pair, max_tokens: int = 400) -> Answer:
    answer = pair.client.submit("A", A, max_tokens=max_tokens, ignore_eos=True)
    pair.world.wait(lambda: answer.token_ids, "A decodes")
    return answer


def test_a_prefill_node_killed_while_computing_fails_that_job_alone(world: World) -> None:
    pair = world.pair(decode=SLOW_DECODE)
    running = decoding(pair)
    pair.prefill.hold("prefill.chunk")
    lost = pair.client.submit("B", B, max_tokens=9)
    waiting = pair.client.submit("C", C, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    incarnation = world.status(pair.decode)["incarnation"]
    world.kill(pair.prefill)
    assert world.end_of(lost).code == "PEER_LOST"
    assert (lost.token_ids, lost.end.definite, waiting.end) == ([], False, None)
    restart_prefill(pair)
    assert world.end_of(running).token_ids == expected(A, 400, ignore_eos=True)
    assert world.end_of(waiting).token_ids == expected(C, 9)
    status = world.status(pair.decode)
    assert (status["incarnation"], status["workers"][0]["counters"]["sessions"]) == (incarnation, 2)
    assert len(pair.prefill.logged("prefill.done")) == 1, "the lost job must not be computed again"
    pair.audit(imports=2)


def test_a_lost_prefill_node_leads_to_local_prefill_where_the_policy_says_so(world: World) -> None:
    pair = world.pair(decode=("--on-prefill-failure", "local"))
    pair.prefill.hold("prefill.chunk")
    answer = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    world.kill(pair.prefill)
    assert world.end_of(answer).end.path == "local"
    assert answer.token_ids == expected(B, 9)
    restart_prefill(pair)
    assert pair.check_job("C", C).end.path == "remote"
    pair.audit(imports=1, local_tokens=len(B))


def test_kv_that_is_ready_outlives_its_producer(world: World) -> None:
    pair = world.pair(decode=SLOW_DECODE)
    running = decoding(pair)
    survivor = pair.client.submit("B", B, max_tokens=9)
    pair.wait_slot("ready")
    world.kill(pair.prefill)
    status = world.wait_status(
        pair.decode, lambda status: status["workers"][0]["survivors"], "B has survived"
    )
    assert (status["workers"][0]["session"], status["idle"], running.end) == (None, False, None)
    assert world.end_of(running).token_ids == expected(A, 400, ignore_eos=True)
    assert world.end_of(survivor).token_ids == expected(B, 9)
    restart_prefill(pair)
    pair.check_job("C", C)
    pair.audit(imports=3)


def test_an_import_that_runs_outlives_its_producer(world: World) -> None:
    pair = world.pair()
    pair.decode.hold("import.piece")
    answer = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.decode, "import.piece")
    world.kill(pair.prefill)
    world.wait_status(pair.decode, lambda status: status["workers"][0]["survivors"], "the copy has survived")
    restart_prefill(pair)
    following = pair.client.submit("C", C, max_tokens=9)
    pair.decode.release("import.piece")
    assert world.end_of(answer).token_ids == expected(B, 9)
    assert world.end_of(following).token_ids == expected(C, 9)
    pair.audit(imports=2)


def test_a_lane_that_decodes_does_not_notice_the_loss(world: World) -> None:
    pair = world.pair(decode=SLOW_DECODE)
    running = decoding(pair)
    pair.prefill.signal(signal.SIGSTOP)
    world.wait_for_log(
        pair.decode, "session.ended", session=pair.decode.logged("session.opened")[0]["session"]
    )
    assert running.end is None, "the loss must show while A decodes"
    seen = len(running.token_ids)
    world.wait(lambda: len(running.token_ids) > seen, "the lane goes on")
    assert world.end_of(running).token_ids == expected(A, 400, ignore_eos=True)
    world.kill(pair.prefill)
    restart_prefill(pair)
    pair.check_job("C", C)
    pair.audit(imports=2)


def test_a_prefill_node_stopped_for_too_long_loses_its_session_and_is_served_again(world: World) -> None:
    pair = world.pair()
    pair.prefill.hold("prefill.chunk")
    lost = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    pair.prefill.signal(signal.SIGSTOP)
    assert world.end_of(lost).code == "PEER_LOST"
    waiting = pair.client.submit("C", C, max_tokens=9)
    pair.prefill.signal(signal.SIGCONT)
    pair.prefill.release("prefill.chunk")
    assert world.end_of(waiting).token_ids == expected(C, 9)
    assert lost.token_ids == [], "the record of the ended session came too late for everybody"
    assert world.status(pair.decode)["workers"][0]["counters"]["sessions"] >= 2
    pair.audit(imports=1)


def test_a_prefill_node_that_hangs_exits_with_its_own_status(world: World) -> None:
    pair = world.pair(prefill=("--stall-ms", str(STALL_MS)))
    pair.prefill.hold("prefill.chunk")
    lost = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    assert world.exit_of(pair.prefill) == 5
    world.check_remains(pair.prefill)
    assert world.end_of(lost).code == "PEER_LOST"
    pair.prefill.release("prefill.chunk")
    restart_prefill(pair)
    pair.check_job("C", C)
    pair.audit(imports=1)


def test_a_long_chunk_is_not_taken_for_a_dead_node(world: World) -> None:
    pair = world.pair()
    pair.prefill.hold("prefill.chunk")
    answer = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")

    def age_ms(status: dict) -> int:
        return status["workers"][0]["slots"][0]["age_ms"]

    # Longer than dead-after and the lease together: the sockets live while compute does not answer.
    world.wait_status(pair.decode, lambda status: age_ms(status) > 2_500, "the chunk takes long")
    assert answer.end is None
    pair.prefill.release("prefill.chunk")
    assert world.end_of(answer).token_ids == expected(B, 9)
    assert world.status(pair.decode)["workers"][0]["counters"]["sessions"] == 1
    pair.audit(imports=1)


def test_a_prompt_that_takes_too_long_is_given_up_and_its_slot_comes_back(world: World) -> None:
    pair = world.pair(decode=(*PREFETCH, "--prefill-timeout-ms", "300"))
    pair.prefill.hold("prefill.chunk")
    late = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    assert world.end_of(late).code == "PREFILL_TIMEOUT"
    assert pair.slots() == ["orphaned"]
    pair.prefill.release("prefill.chunk")
    # No new work is needed for the slot to come back.
    pair.wait_clean()
    pair.check_job("C", C)
    pair.audit(imports=1)


def test_an_orphan_whose_producer_never_answers_ends_the_session(world: World) -> None:
    pair = world.pair(prefill=("--stall-ms", "1500"))
    pair.prefill.hold("prefill.chunk")
    cancelled = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    pair.client.cancel("B")
    waiting = pair.client.submit("C", C, max_tokens=9)
    assert world.end_of(cancelled).code == "CANCELLED"
    assert world.exit_of(pair.prefill) == 5
    restart = world.prefill(bind=pair.prefill.endpoint)
    pair.prefill = restart
    restart.release("prefill.chunk")
    assert world.end_of(waiting).token_ids == expected(C, 9)
    pair.audit(imports=1)
