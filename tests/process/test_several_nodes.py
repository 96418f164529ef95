"""Several prefill nodes for one decode node, and several decode nodes on one prefill node, as processes."""

from typing import Any

import pytest

from tests.process.harness import Daemon
from tests.process.world import PREFETCH, Pair, World, expected, prompt_of

SLOW = ("--emulated-prefill-tokens-per-s", "2000")
TWO_LANES = (*PREFETCH, "--slots", "2")


def two_sources(world: World, *decode: str, prefill: tuple[str, ...] = ()) -> tuple[list[Daemon], Daemon]:
    """Two prefill nodes, and a decode node that has a session with both."""
    sources = [world.prefill(*SLOW, *prefill) for _ in range(2)]
    endpoints = ",".join(source.endpoint for source in sources)
    lane = world.decode(endpoints, *decode)
    world.wait_for_log(lane, "session.opened", 2)
    return sources, lane


def check_jobs(world: World, lane: Daemon, count: int, length: int = 300) -> list[Any]:
    """So many jobs at once, each with the tokens of the oracle."""
    client = world.client(lane)
    prompts = [prompt_of(length + number, number) for number in range(count)]
    answers = [client.submit(f"{number}", prompt, max_tokens=9) for number, prompt in enumerate(prompts)]
    for answer, prompt in zip(answers, prompts, strict=True):
        assert world.end_of(answer).token_ids == expected(prompt, 9)
    return answers


def prefills_done(world: World, source: Daemon) -> int:
    return world.status(source)["counters"]["prefills_done"]


def at_rest(status: dict[str, Any]) -> bool:
    return status["idle"] and not any(worker["orphans"] for worker in status["workers"])


def test_two_prefill_nodes_share_the_prompts_of_one_decode_node(world: World) -> None:
    sources, lane = two_sources(world, *TWO_LANES)
    check_jobs(world, lane, 8)
    done = [prefills_done(world, source) for source in sources]
    assert sum(done) == 8
    assert min(done) >= 2, done
    for daemon in (lane, *sources):
        world.stop(daemon)


def test_a_prompt_follows_its_beginning_to_the_node_that_has_it(world: World) -> None:
    sources, lane = two_sources(world, *PREFETCH, prefill=("--prefix-cache-mb", "4"))
    client = world.client(lane)
    beginning = prompt_of(256, 3)
    for number in range(4):
        prompt = beginning + prompt_of(20, number)
        answer = client.submit(f"{number}", prompt, max_tokens=5)
        assert world.end_of(answer).token_ids == expected(prompt, 5)
    assert sorted(prefills_done(world, source) for source in sources) == [0, 4]
    world.stop(lane)


def test_the_loss_of_one_prefill_node_is_made_up_for_by_the_other(world: World) -> None:
    sources, lane = two_sources(world, *TWO_LANES, "--on-prefill-failure", "retry")
    client = world.client(lane)
    prompts = [prompt_of(900, number) for number in range(4)]
    answers = [client.submit(f"{number}", prompt, max_tokens=9) for number, prompt in enumerate(prompts)]

    def both_work(status: dict[str, Any]) -> bool:
        return all(worker["counters"]["prefills_sent"] for worker in status["workers"])

    world.wait_status(lane, both_work, "both were sent a prompt")
    world.kill(sources[0])
    for answer, prompt in zip(answers, prompts, strict=True):
        assert world.end_of(answer).token_ids == expected(prompt, 9), answer.end
    status = world.wait_status(lane, at_rest, "nothing is held")
    assert status["counters"]["prefill_retries"] >= 1
    assert status["accepting"]
    # Back on its address, it is used again; nobody was restarted for it.
    again = world.prefill(*SLOW, bind=sources[0].endpoint)
    world.wait_for_log(lane, "session.opened", 3)
    check_jobs(world, lane, 6)
    assert prefills_done(world, again) >= 1
    world.stop(lane)


def test_two_decode_nodes_share_the_slots_of_one_prefill_node_and_give_them_back(world: World) -> None:
    source = world.prefill(*SLOW, "--source-slots", "4")
    first = world.decode(source, *PREFETCH)
    world.wait_for_log(first, "session.opened", slots=4)
    second = world.decode(source, *PREFETCH)

    def granted(number: int):
        return lambda status: len(status["workers"][0]["slots"]) == number

    for lane in (first, second):
        world.wait_status(lane, granted(2), "each has its share")
    clients = [world.client(lane) for lane in (first, second)]
    answers = []
    for number in range(12):
        prompt = prompt_of(200 + number, number)
        answers.append((clients[number % 2].submit(f"{number}", prompt, max_tokens=9), prompt))
    for answer, prompt in answers:
        assert world.end_of(answer).token_ids == expected(prompt, 9)
    world.stop(second)
    world.wait_status(first, granted(4), "what the other had comes back")
    pair = Pair(world, source, first)
    pair.check_job("last", prompt_of(99, 1))
    pair.audit(imports=7)


def test_a_slot_in_use_is_returned_when_its_job_is_through_with_it(world: World) -> None:
    source = world.prefill("--source-slots", "2")
    first = world.decode(source, *PREFETCH, "--pd-prefetch-next", "2")
    source.hold("prefill.chunk")
    client = world.client(first)
    answers = [client.submit(f"{number}", prompt_of(50, number), max_tokens=9) for number in range(2)]
    world.wait_held(source, "prefill.chunk")
    second = world.decode(source, *PREFETCH)
    world.wait_for_log(second, "session.opened", slots=0)
    assert world.status(second)["accepting"] is False, "it has no slot yet"
    source.release("prefill.chunk")
    for number, answer in enumerate(answers):
        assert world.end_of(answer).token_ids == expected(prompt_of(50, number), 9)
    world.wait_status(second, lambda status: status["accepting"], "it was given a slot")
    check_jobs(world, second, 2)
    for lane in (first, second):
        world.stop(lane)


def test_a_decode_node_too_many_waits_and_is_told_the_flag(world: World) -> None:
    source = world.prefill()
    first = world.decode(source, *PREFETCH)
    second = world.decode(source, *PREFETCH)
    detail = world.wait_for_log(second, "hello.refused")["detail"]
    assert "--source-slots 2" in detail
    world.stop(first)
    world.wait_for_log(second, "session.opened")
    check_jobs(world, second, 1)
    world.stop(second)


@pytest.mark.parametrize("flags", [("--pd-prefetch-next", "auto")])
def test_an_automatic_depth_is_shown_and_grows_where_prompts_take_longer_than_answers(
    world: World, flags: tuple[str, ...]
) -> None:
    source = world.prefill("--emulated-prefill-tokens-per-s", "3000", "--source-slots", "4")
    lane = world.decode(source, "--pd-remote-only", *flags, "--slots", "2")
    assert world.status(lane)["prefetch_depth_asked"] == "auto"
    check_jobs(world, lane, 10, length=200)
    status = world.status(lane)
    assert 2 <= status["prefetch_depth"] <= 4
    pair = Pair(world, source, lane)
    pair.audit(imports=10)


def test_an_automatic_shortest_remote_prompt_keeps_here_what_does_not_pay_elsewhere(world: World) -> None:
    source = world.prefill("--emulated-prefill-tokens-per-s", "1000")
    # Fifty times as fast, and nothing need travel.
    flags = ("--min-remote-prompt-tokens", "auto", "--emulated-prefill-tokens-per-s", "50000")
    lane = world.decode(source, *flags)
    world.wait_for_log(lane, "session.opened")
    client = world.client(lane)
    # A line needs prompts of two lengths.
    for number, (length, path) in enumerate([(200, "remote"), (400, "remote"), (300, "local"), (2, "local")]):
        prompt = prompt_of(length, number)
        answer = world.end_of(client.submit(f"{number}", prompt, max_tokens=4))
        assert (answer.token_ids, answer.end.path) == (expected(prompt, 4), path)
    status = world.status(lane)
    assert status["min_remote_prompt_tokens"] == status["max_tokens"] + 1
    world.stop(lane)
