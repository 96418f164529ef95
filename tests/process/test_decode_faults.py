"""The decode node dies, stops, hangs or has a rival: what the prefill node and the clients make of it."""

import signal

from tests.process.harness import DEAD_AFTER_MS, LEASE_MS
from tests.process.world import PREFETCH, Pair, World, expected, prompt_of

A, B, C = prompt_of(50, 10), prompt_of(400, 11), prompt_of(120, 12)


def successor(pair: Pair, name: str = "second") -> Pair:
    """Another decode node on the same prefill node; its session may not be open yet."""
    return Pair(pair.world, pair.prefill, pair.world.decode(pair.prefill, *PREFETCH, name=name))


def wait_session(pair: Pair) -> None:
    pair.world.wait_status(pair.decode, lambda status: status["accepting"], "it is served")


def test_a_killed_decode_node_gives_its_slot_back_by_itself(world: World) -> None:
    pair = world.pair()
    pair.decode.hold("import.piece")
    pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.decode, "import.piece")
    assert world.status(pair.prefill)["slots"][0]["state"] == "held"
    world.kill(pair.decode)
    # The bound is the lease; the deadline allows for a busy machine and nothing else is going on.
    world.wait_status(
        pair.prefill,
        lambda status: status["slots"][0]["state"] == "pool",
        "the slot is free",
        deadline_ms=LEASE_MS + 1_000,
    )
    assert pair.prefill.logged("session.ended", cause="lease expired")
    after = successor(pair)
    wait_session(after)
    after.check_job("C", C)
    assert pair.prefill.slabs == [slab for slab in pair.prefill.slabs if slab.exists()]
    after.audit(imports=1)


def test_a_decode_node_killed_while_its_prompt_is_computed_does_not_keep_the_slot(world: World) -> None:
    pair = world.pair()
    pair.prefill.hold("prefill.chunk")
    pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    world.kill(pair.decode)
    status = world.wait_status(
        pair.prefill, lambda status: not status["decode_sessions"], "the session has ended"
    )
    assert status["slots"][0]["state"] == "abandoned", "compute still writes to it"
    after = successor(pair)
    world.wait_for_log(after.decode, "session.opened", slots=0)
    assert not world.status(after.decode)["accepting"], "zero slots are legal and mean waiting"
    pair.prefill.release("prefill.chunk")
    wait_session(after)
    after.check_job("C", C)
    assert world.status(pair.prefill)["counters"]["prefills_done"] == 1, "the abandoned prompt was stopped"
    after.audit(imports=1)


def test_a_decode_node_killed_again_and_again_is_replaced_on_its_endpoint(world: World) -> None:
    pair = world.pair()
    for number in range(3):
        pair.check_job("job", prompt_of(80, number))
        world.kill(pair.decode)
        endpoint = pair.decode.endpoint
        decode = world.decode(pair.prefill, *PREFETCH, bind=endpoint, name=f"again{number}")
        pair = Pair(world, pair.prefill, decode)
        wait_session(pair)
    pair.check_job("job", C)
    pair.audit(imports=1)


def test_an_orderly_exit_leaves_room_for_a_successor_at_once(world: World) -> None:
    pair = world.pair(("--lease-ms", "60000"))
    pair.check_job("A", A)
    world.stop(pair.decode)
    after = successor(pair)
    wait_session(after)
    after.check_job("C", C)
    after.audit(imports=1)


def test_a_second_decode_node_waits_until_the_first_leaves(world: World) -> None:
    pair = world.pair()
    rival = successor(pair)
    refusal = world.wait_for_log(rival.decode, "hello.refused")
    assert "another decode node" in refusal["detail"]
    assert rival.decode.status is None, "a temporary refusal does not end it"
    waiting = rival.client.submit("C", C, max_tokens=9)
    pair.check_job("A", A)
    assert waiting.end is None
    world.stop(pair.decode)
    assert world.end_of(waiting).token_ids == expected(C, 9)
    rival.audit(imports=1)


def copied_past_the_lease(world: World, successor_prompt: list[int]) -> tuple[Pair, Pair]:
    """The first node stops in mid-copy; past its lease a second one runs a job in the same slot."""
    pair = world.pair()
    pair.decode.hold("import.piece")
    answer = pair.client.submit("B", B, max_tokens=9)
    world.wait_held(pair.decode, "import.piece")
    pair.decode.signal(signal.SIGSTOP)
    world.wait_for_log(pair.prefill, "session.ended", cause="lease expired")
    after = successor(pair)
    wait_session(after)
    after.check_job("theirs", successor_prompt)
    assert [entry["slot"] for entry in pair.prefill.logged("prefill.done")] == [0, 0]
    pair.decode.signal(signal.SIGCONT)
    pair.decode.release("import.piece")
    assert world.end_of(answer).code == "KV_STALE", answer.end
    # The first token came from logits that were verified; none may come from the copy.
    assert answer.token_ids in ([], expected(B, 1))
    return pair, after


def finish_both(world: World, pair: Pair, after: Pair) -> None:
    status = world.wait_status(pair.decode, lambda status: status["idle"], "the first node is idle")
    assert status["counters"]["kv_refused"] == 1
    after.wait_clean()
    world.stop(after.decode)
    wait_session(pair)
    pair.check_job("A", A)
    pair.audit(imports=1)


def test_a_copy_stopped_past_its_lease_never_yields_a_successors_bytes(world: World) -> None:
    finish_both(world, *copied_past_the_lease(world, prompt_of(400, 13)))


def test_a_copy_stopped_past_its_lease_is_refused_even_when_the_bytes_are_the_same(world: World) -> None:
    finish_both(world, *copied_past_the_lease(world, B))


def test_a_node_that_was_stopped_blames_neither_its_clients_nor_its_engine(world: World) -> None:
    pair = world.pair(decode=(*PREFETCH, "--stall-ms", str(LEASE_MS)))
    running = pair.client.submit("A", A, max_tokens=300, ignore_eos=True)
    world.wait(lambda: len(running.token_ids) > 3, "A decodes")
    pair.decode.signal(signal.SIGSTOP)
    world.wait_for_log(pair.prefill, "session.ended", cause="lease expired")
    pair.decode.signal(signal.SIGCONT)
    assert world.end_of(running).token_ids == expected(A, 300, ignore_eos=True)
    assert pair.decode.logged("node.paused")[0]["ms"] > 0
    wait_session(pair)
    pair.check_job("C", C)
    pair.audit(imports=2)


def test_a_decode_engine_that_hangs_answers_its_jobs_and_exits(world: World) -> None:
    pair = world.pair(decode=(*PREFETCH, "--stall-ms", "1500"))
    running = pair.client.submit("A", A, max_tokens=300, ignore_eos=True)
    world.wait(lambda: len(running.token_ids) > 3, "A decodes")
    pair.decode.hold("decode.step")
    world.wait_held(pair.decode, "decode.step")
    waiting = pair.client.submit("C", C, max_tokens=9)
    for answer in (running, waiting):
        assert world.end_of(answer).code == "ENGINE_HUNG", world.end_of(answer)
    count = len(running.token_ids)
    assert running.token_ids == expected(A, 300, ignore_eos=True)[:count]
    assert world.exit_of(pair.decode) == 5
    world.check_remains(pair.decode)
    world.stop(pair.prefill)


def test_a_busy_decode_engine_keeps_its_lease(world: World) -> None:
    pair = world.pair()
    running = pair.client.submit("A", A, max_tokens=100, ignore_eos=True)
    world.wait(lambda: running.token_ids, "A decodes")
    pair.decode.hold("decode.step")
    world.wait_held(pair.decode, "decode.step")
    held = pair.client.submit("B", B, max_tokens=9)
    pair.wait_slot("ready")

    def age_ms(status: dict) -> int:
        return status["workers"][0]["slots"][0]["age_ms"]

    world.wait_status(pair.decode, lambda status: age_ms(status) > LEASE_MS + DEAD_AFTER_MS, "a lease passes")
    pair.decode.release("decode.step")
    assert world.end_of(running).token_ids == expected(A, 100, ignore_eos=True)
    assert world.end_of(held).token_ids == expected(B, 9)
    assert world.status(pair.decode)["workers"][0]["counters"]["sessions"] == 1
    pair.audit(imports=2)


def test_an_import_that_fails_fails_its_job_alone(world: World) -> None:
    pair = world.pair()
    pair.decode.spoil("import.piece", "fail")
    assert pair.run("B", B, max_tokens=9).code == "ENGINE_ERROR"
    pair.check_job("C", C)
    pair.audit(imports=1)
