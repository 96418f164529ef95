"""Queues of one message and pauses at every hand-over, under a load with cancels.

With sockets of one message nothing is lost: what does not fit waits in an outbox, and every job has the
answer it has anyhow. With outboxes of one message as well, a peer that is written to faster than it reads
loses its session, and then every job of it still has exactly one answer and no wrong token, and nothing stays
behind.
"""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.process.world import Answer, Pair, World, expected, prompt_of

SOCKETS_OF_ONE = {"high_water_mark": 1, "delay_ms": 3.0}
OUTBOXES_OF_ONE = SOCKETS_OF_ONE | {"outbox": 1}
PROMPTS = [prompt_of(length, 100 + number) for number, length in enumerate((1, 40, 130, 260, 400))]
JOBS = 30
CLIENTS = 2
ATTEMPTS = 20


def load(pair: Pair, chance: random.Random) -> list[tuple[Answer, list[int]]]:
    """Jobs of two clients, one in three cancelled at some moment; each answer and its right tokens."""
    clients = [pair.world.client(pair.decode) for _ in range(CLIENTS)]
    jobs = []
    for number in range(JOBS):
        client, prompt_ids = chance.choice(clients), chance.choice(PROMPTS)
        max_tokens = chance.randint(1, 20)
        answer = client.submit(f"{number}", prompt_ids, max_tokens=max_tokens, ignore_eos=True)
        jobs.append((answer, expected(prompt_ids, 20, ignore_eos=True)[:max_tokens]))
        for _ in range(chance.randint(0, 4)):
            client.turn()
        if chance.random() < 1 / 3:
            client.cancel(f"{number}")
    return jobs


def check_serves(pair: Pair) -> None:
    """A job gets through, if not the first: three messages are enough to lose a session of one."""
    for number in range(ATTEMPTS):
        answer = pair.run(f"probe {number}", PROMPTS[2], max_tokens=1, ignore_eos=True)
        if answer.code is None:
            assert answer.token_ids == expected(PROMPTS[2], 1, ignore_eos=True)
            return
    raise AssertionError(f"none of {ATTEMPTS} jobs got through")


def run(conditions: dict[str, Any], seed: int, codes: set[str | None]) -> None:
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        world = World(Path(directory), conditions | {"seed": seed})
        try:
            pair = world.pair(("--source-slots", "2"), ("--pd-remote-only", "--pd-prefetch-next", "2"))
            jobs = load(pair, random.Random(seed))
            for answer, whole in jobs:
                world.end_of(answer)
                assert answer.code in codes, answer.end
                count = len(whole) if answer.code is None else len(answer.token_ids)
                assert answer.token_ids == whole[:count]
            check_serves(pair)
            pair.wait_clean()
            world.wait_status(pair.decode, lambda status: status["workers"][0]["usable"], "they are a pair")
            assert world.status(pair.decode)["counters"]["kv_refused"] == 0
            pair.audit()
        finally:
            world.close()


@pytest.mark.parametrize("seed", [1])
def test_sockets_of_one_message_change_no_answer(seed: int) -> None:
    run(SOCKETS_OF_ONE, seed, {None, "CANCELLED"})


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 30))
def test_sockets_of_one_message_change_no_answer_whatever_the_pauses(seed: int) -> None:
    run(SOCKETS_OF_ONE, seed, {None, "CANCELLED"})


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(30, 50))
def test_outboxes_of_one_message_cost_sessions_but_no_answer(seed: int) -> None:
    run(OUTBOXES_OF_ONE, seed, {None, "CANCELLED", "PEER_LOST", "NO_PREFILL_NODE"})
