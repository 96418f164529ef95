"""Who works with whom: mismatches, smaller limits, an absent prefill node, and the other profiles."""

import pytest

from tests.process.world import PREFETCH, REMOTE, Pair, World, expected, prompt_of

A, B = prompt_of(300, 40), prompt_of(20, 41)


def test_nodes_of_different_models_do_not_pair_and_the_fields_are_named(world: World) -> None:
    prefill = world.prefill("--emulated-seed", "1")
    decode = world.launch("decode_node", "--pd-prefill-worker", prefill.endpoint, *PREFETCH)
    assert world.exit_of(decode) == 3
    refusal = world.wait_for_log(decode, "hello.refused")["detail"]
    assert "model_id: emulated-1 and emulated-0" in refusal
    assert "weights_digest" in refusal
    assert decode.logged("node.stopped", status=3)
    assert prefill.status is None
    world.check_remains(decode)
    # It takes the right partner afterwards.
    pair = Pair(world, prefill, world.decode(prefill, *PREFETCH, "--emulated-seed", "1"))
    pair.check_job("A", A, seed=1)
    pair.audit(imports=1)


def test_a_mismatch_after_the_first_session_is_waited_out(world: World) -> None:
    pair = world.pair()
    pair.check_job("A", A)
    world.stop(pair.prefill)
    other = world.prefill("--emulated-seed", "1", bind=pair.prefill.endpoint)
    world.wait_for_log(pair.decode, "hello.refused")
    status = world.wait_status(pair.decode, lambda status: status["workers"][0]["refusal"], "STATUS shows it")
    assert "weights_digest" in status["workers"][0]["refusal"]
    assert not status["accepting"]
    world.stop(other)
    pair.prefill = world.prefill(bind=pair.prefill.endpoint)
    pair.check_job("B", B)
    pair.audit(imports=2)


@pytest.mark.parametrize(("prefill_tokens", "decode_tokens"), [(256, 1024), (1024, 256)])
def test_the_smaller_limit_counts(world: World, prefill_tokens: int, decode_tokens: int) -> None:
    pair = world.pair(("--max-tokens", str(prefill_tokens)), (*PREFETCH, "--max-tokens", str(decode_tokens)))
    assert world.status(pair.decode)["max_tokens"] == 256
    answer = pair.run("A", A, max_tokens=8)
    assert answer.code == "CONTEXT_LENGTH_EXCEEDED"
    assert "300 tokens and max_tokens is 8, together 308; the limit is 256" in answer.end.detail
    pair.check_job("fits", prompt_of(250, 42), max_tokens=6)
    assert world.status(pair.prefill)["counters"]["prefills_failed"] == 0
    pair.audit(imports=1)


def test_without_a_prefill_node_remote_jobs_fail_after_a_while_and_are_not_computed_later(
    world: World,
) -> None:
    endpoint = f"ipc://{world.directory}/prefill"
    decode = world.decode(endpoint, *PREFETCH, "--prefill-wait-ms", "300")
    assert not world.status(decode)["accepting"]
    client = world.client(decode)
    given_up = [client.submit(f"{number}", A, max_tokens=9) for number in range(3)]
    for answer in given_up:
        world.end_of(answer, deadline_ms=3_000)
        assert (answer.code, answer.end.definite, answer.token_ids) == ("NO_PREFILL_NODE", True, [])
    pair = Pair(world, world.prefill(bind=endpoint), decode)
    world.wait_status(decode, lambda status: status["accepting"], "the prefill node is found")
    pair.check_job("B", B)
    assert world.status(pair.prefill)["counters"]["prefills_done"] == 1
    pair.audit(imports=1)


def test_a_job_waits_for_a_prefill_node_that_comes_late(world: World) -> None:
    endpoint = f"ipc://{world.directory}/prefill"
    decode = world.decode(endpoint, *PREFETCH)
    pair = Pair(world, decode, decode)
    answer = pair.client.submit("A", A, max_tokens=9)
    world.wait(lambda: answer.accepted, "it is accepted")
    pair.prefill = world.prefill(bind=endpoint)
    assert world.end_of(answer).token_ids == expected(A, 9)
    pair.audit(imports=1)


def test_where_local_prefill_is_allowed_nothing_waits_for_an_absent_node(world: World) -> None:
    decode = world.decode(f"ipc://{world.directory}/nobody")
    client = world.client(decode)
    answer = world.end_of(client.submit("A", A, max_tokens=9))
    assert (answer.end.path, answer.token_ids) == ("local", expected(A, 9))
    assert answer.end.timings.stages_ms.get("queued", 0) < 300
    assert world.status(decode)["counters"]["local_prefill_tokens"] == len(A)
    world.stop(decode)


def test_a_decode_node_alone_serves_jobs(world: World) -> None:
    decode = world.decode(None)
    client = world.client(decode)
    answers = [client.submit(f"{number}", prompt_of(99, number), max_tokens=9) for number in range(5)]
    for number, answer in enumerate(answers):
        assert world.end_of(answer).token_ids == expected(prompt_of(99, number), 9)
    world.stop(decode)


@pytest.mark.parametrize("route", [PREFETCH, REMOTE], ids=["prefetch", "plain"])
def test_the_profiles_of_the_two_accelerators_work_as_a_pair(world: World, route: tuple[str, ...]) -> None:
    prefill = ("--backend", "rngd", "--emulated-prefill-tokens-per-s", "100000")
    decode = ("--backend", "atom", "--slots", "1", "--emulated-decode-ms", "1")
    pair = world.pair(prefill, (*decode, *route))
    answers = [
        pair.client.submit(f"{number}", prompt_of(255 + number, number), max_tokens=9) for number in range(4)
    ]
    for number, answer in enumerate(answers):
        assert world.end_of(answer).token_ids == expected(prompt_of(255 + number, number), 9)
        assert answer.end.path == "remote"
    pair.audit(imports=4)


def test_a_pair_over_tcp_gives_the_same_tokens(world: World) -> None:
    prefill = world.prefill(bind="tcp://127.0.0.1:0")
    decode = world.decode(prefill, *PREFETCH, bind="tcp://127.0.0.1:0")
    pair = Pair(world, prefill, decode)
    for number in range(3):
        pair.check_job(f"{number}", prompt_of(200, number))
    pair.audit(imports=3)
