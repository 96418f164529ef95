"""Several answers to one prompt, with real daemons: one prefill, one lane, each as a job of its own."""

from collections import defaultdict
from typing import Any

import pytest

from common.messages import Finished, Rejected
from tests.process.world import PREFETCH, Answer, Pair, World, expected, prompt_of

PROMPT = prompt_of(150, 3)
WAYS = {
    "remote": ((), PREFETCH),
    "two lanes": (("--source-slots", "2"), (*PREFETCH, "--slots", "2")),
    "no logits": (("--emulated-no-logits",), PREFETCH),
    "prefix cache": (("--prefix-cache-mb", "8"), (*PREFETCH, "--prefix-cache-mb", "8")),
}


def choices_of(answer: Answer) -> dict[int, list[int]]:
    """Token ids by choice."""
    found: dict[int, list[int]] = defaultdict(list)
    for choice, token_id in answer.choice_ids:
        found[choice].append(token_id)
    return dict(found)


def check_choices(pair: Pair, label: str, n: int, **sampling: Any) -> Finished:
    """Every choice is what a job of its own, with its own seed, answers."""
    answer = pair.run(label, PROMPT, n=n, **sampling)
    assert isinstance(answer.end, Finished), answer.end
    alone = []
    for choice in range(n):
        own = sampling | ({"seed": sampling["seed"] + choice} if "seed" in sampling else {})
        alone.append(pair.run(f"{label}-{choice}", PROMPT, **own))
    assert choices_of(answer) == {choice: job.token_ids for choice, job in enumerate(alone)}
    assert list(answer.end.reasons) == [job.end.reason for job in alone]
    assert answer.end.reason == answer.end.reasons[0]
    assert answer.end.usage.completion_tokens == sum(len(job.token_ids) for job in alone)
    return answer.end


@pytest.mark.parametrize("way", WAYS)
def test_choice_i_is_the_job_of_seed_plus_i_and_all_of_them_cost_one_prefill(world: World, way: str) -> None:
    prefill, decode = WAYS[way]
    pair = world.pair(prefill, decode)
    before = world.status(pair.prefill)["counters"]["prefills_done"]
    answer = pair.run("all", PROMPT, n=3, max_tokens=9, temperature=1.5, seed=5, ignore_eos=True)
    assert world.status(pair.prefill)["counters"]["prefills_done"] == before + 1
    found = choices_of(answer)
    assert [len(found[choice]) for choice in range(3)] == [9, 9, 9]
    assert len({tuple(ids) for ids in found.values()}) > 1, "the seeds differ"
    check_choices(pair, "drawn", 3, max_tokens=9, temperature=1.5, seed=5)
    check_choices(pair, "one-token", 4, max_tokens=1, temperature=1.5, seed=1)
    pair.audit()


def test_without_a_prefill_node_the_choices_are_made_here(world: World) -> None:
    decode = world.decode(None)
    pair = Pair(world, decode, decode)
    check_choices(pair, "local", 3, max_tokens=7, temperature=1.2, seed=11)
    world.stop(decode)


def test_greedy_choices_are_equal_and_a_stop_string_ends_each_of_them(world: World) -> None:
    pair = world.pair()
    whole = expected(PROMPT, 40, ignore_eos=True)
    stop = bytes(whole[20:23]).decode()
    answer = pair.run("stopped", PROMPT, n=2, max_tokens=40, ignore_eos=True, stop=[stop])
    assert list(answer.end.reasons) == ["stop", "stop"]
    assert choices_of(answer) == {0: whole[:23], 1: whole[:23]}
    assert stop not in answer.text
    pair.check_job("afterwards", PROMPT)
    pair.audit(imports=2)


def test_a_cancel_between_two_choices_ends_the_whole_job_and_frees_the_lane(world: World) -> None:
    pair = world.pair((), (*PREFETCH, "--emulated-decode-ms", "5"))
    answer = pair.client.submit("long", PROMPT, n=8, max_tokens=12, ignore_eos=True)
    world.wait(lambda: any(choice == 1 for choice, _ in answer.choice_ids), "the second answer has begun")
    pair.client.cancel("long")
    assert world.end_of(answer).code == "PEER_LOST" or answer.code == "CANCELLED"
    pair.check_job("next", PROMPT)
    pair.audit(imports=2)


def test_more_choices_than_the_limit_are_refused(world: World) -> None:
    pair = world.pair()
    answer = pair.run("many", PROMPT, n=17, max_tokens=2)
    assert isinstance(answer.end, Rejected)
    assert answer.code == "INVALID_SAMPLING"
    assert "n:" in answer.end.detail
    pair.audit(imports=0)
