"""Signals to running daemons: what is finished, what is refused, how long, and what is left."""

import signal

from tests.process.world import PREFETCH, World, expected, prompt_of

A, B, C = prompt_of(60, 4), prompt_of(200, 5), prompt_of(90, 6)


def test_a_drain_finishes_what_runs_and_refuses_the_rest(world: World) -> None:
    # Without prefetch the second job stays queued.
    pair = world.pair(decode=("--pd-remote-only", "--emulated-decode-ms", "2"))
    client = pair.client
    running = client.submit("running", A, max_tokens=150, ignore_eos=True)
    world.wait(lambda: running.token_ids, "the lane decodes")
    queued = client.submit("queued", B, max_tokens=9)
    world.wait(lambda: queued.accepted, "the second job is queued")
    pair.decode.signal(signal.SIGTERM)
    world.wait_for_log(pair.decode, "node.draining")
    late = client.submit("late", C, max_tokens=9)
    assert world.end_of(queued).code == "SHUTTING_DOWN"
    assert world.end_of(late).code == "SHUTTING_DOWN"
    assert (queued.end.definite, late.accepted) == (True, None)
    assert running.end is None, "the running job must outlast the refusals"
    assert world.end_of(running).token_ids == expected(A, 150, ignore_eos=True)
    assert world.exit_of(pair.decode) == 0
    world.check_remains(pair.decode)
    world.stop(pair.prefill)


def test_a_drain_lets_a_prefetched_job_run(world: World) -> None:
    pair = world.pair()
    pair.prefill.hold("prefill.answer")
    answer = pair.client.submit("job", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.answer")
    pair.decode.signal(signal.SIGTERM)
    world.wait_for_log(pair.decode, "node.draining")
    pair.prefill.release("prefill.answer")
    assert world.end_of(answer).token_ids == expected(B, 9)
    assert world.exit_of(pair.decode) == 0
    world.check_remains(pair.decode)
    world.stop(pair.prefill)


def test_the_drain_deadline_ends_the_rest_and_the_status_says_so(world: World) -> None:
    pair = world.pair(decode=(*PREFETCH, "--drain-ms", "300"))
    pair.prefill.hold("prefill.chunk")
    answer = pair.client.submit("job", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    pair.decode.signal(signal.SIGTERM)
    assert world.end_of(answer).code == "DRAIN_TIMEOUT"
    assert world.exit_of(pair.decode) == 1
    world.check_remains(pair.decode)
    pair.prefill.release("prefill.chunk")
    world.stop(pair.prefill)


def test_the_prefill_nodes_drain_deadline_ends_it_too(world: World) -> None:
    pair = world.pair(prefill=("--drain-ms", "300"))
    pair.prefill.hold("prefill.chunk")
    answer = pair.client.submit("job", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    pair.prefill.signal(signal.SIGTERM)
    assert world.exit_of(pair.prefill) == 1
    world.check_remains(pair.prefill)
    assert world.end_of(answer).code == "PEER_LOST"
    world.stop(pair.decode)


def test_a_second_signal_ends_both_nodes_at_once(world: World) -> None:
    pair = world.pair()
    pair.prefill.hold("prefill.chunk")
    pair.client.submit("job", B, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.chunk")
    for daemon in (pair.decode, pair.prefill):
        daemon.signal(signal.SIGTERM)
        world.wait_for_log(daemon, "node.draining")
        assert daemon.status is None
        daemon.signal(signal.SIGINT)
        assert world.exit_of(daemon, deadline_ms=3_000) == 6
        world.check_remains(daemon)


def test_a_draining_prefill_node_finishes_its_work_and_its_successor_takes_over(world: World) -> None:
    pair = world.pair()
    pair.prefill.hold("prefill.answer")
    first = pair.client.submit("first", B, max_tokens=9)
    second = pair.client.submit("second", C, max_tokens=9)
    world.wait_held(pair.prefill, "prefill.answer")
    pair.prefill.signal(signal.SIGTERM)
    world.wait_status(pair.decode, lambda status: status["workers"][0]["draining"], "DRAINING has arrived")
    assert pair.prefill.status is None, "it must not leave while it owes a completion"
    assert not world.status(pair.decode)["accepting"]
    pair.prefill.release("prefill.answer")
    assert world.end_of(first).token_ids == expected(B, 9)
    assert world.exit_of(pair.prefill) == 0
    world.check_remains(pair.prefill)
    assert second.end is None, "the second job waits for a prefill node"
    pair.prefill = world.prefill(bind=pair.prefill.endpoint)
    assert world.end_of(second).token_ids == expected(C, 9)
    assert len(pair.prefill.logged("prefill.done")) == 1
    pair.audit(imports=2)


def test_an_idle_prefill_node_leaves_at_once_and_comes_back(world: World) -> None:
    pair = world.pair()
    for _ in range(2):
        pair.check_job("job", A)
        world.stop(pair.prefill)
        world.wait_status(pair.decode, lambda status: not status["accepting"], "it is missed")
        pair.prefill = world.prefill(bind=pair.prefill.endpoint)
        world.wait_status(pair.decode, lambda status: status["accepting"], "it is back")
    pair.check_job("job", C)
    pair.audit(imports=3)


def test_a_tokenizer_that_hangs_does_not_keep_the_node(world: World) -> None:
    pair = world.pair()
    pair.decode.hold("text.prepare")
    answer = pair.client.submit("job", A, max_tokens=9)
    world.wait_held(pair.decode, "text.prepare")
    pair.decode.signal(signal.SIGTERM)
    assert world.end_of(answer).code == "SHUTTING_DOWN"
    assert world.exit_of(pair.decode, deadline_ms=5_000) == 0
    world.check_remains(pair.decode)
    world.stop(pair.prefill)


def test_ctrl_c_is_an_orderly_end(world: World) -> None:
    pair = world.pair()
    pair.check_job("job", A)
    for daemon in (pair.decode, pair.prefill):
        daemon.signal(signal.SIGINT)
        assert world.exit_of(daemon) == 0
        world.check_remains(daemon)
