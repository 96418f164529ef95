"""Random events on a pair of nodes, then calm: each job has had one answer, and nothing is held.

The seed of a failing test replays its walk.
"""

import random
from dataclasses import replace

import pytest

from common.messages import Failed, Finished, Rejected
from prefill_node.events import ComputeFailed
from tests.actors import LOCAL_ROUTE, ROUTE, Client
from tests.cores import Pair
from tests.devices import VOCABULARY, expected_tokens

ROUTES = [
    (ROUTE, 1),
    (replace(ROUTE, prefetch_depth=3), 3),
    (replace(ROUTE, prefetch_depth=0), 2),
    (LOCAL_ROUTE, 2),
]
EVENTS = 80


class Walk:
    """One seeded run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        route, slots = ROUTES[seed % len(ROUTES)]
        self.pair = Pair(route=route, slots=slots, job_timeout_ms=5_000, prefill_timeout_ms=1_500)
        self.asked: dict[tuple[Client, str], tuple[list[int], int]] = {}
        self.present = [self.pair.client]
        self.names = iter(range(10_000))
        faults = [
            self.end_session,
            self.crash,
            self.drain,
            self.spoil,
            self.fail_chunk,
            self.hold,
            self.leave,
        ]
        usual = [self.submit, self.submit, self.chunk, self.chunk, self.compute, self.step, self.pass_time]
        # A swarm: each run knows some of the faults only, so that no one fault hides the others.
        some = self.random.sample(faults, self.random.randint(0, len(faults)))
        self.events = 3 * usual + 2 * [self.cancel] + some

    def submit(self) -> None:
        client, label = self.random.choice(self.present), f"job{next(self.names)}"
        prompt_ids = self.random.choices(range(VOCABULARY), k=self.random.randint(1, 14))
        max_tokens = self.random.randint(1, 6)
        self.asked[client, label] = (prompt_ids, max_tokens)
        client.submit(label, prompt_ids, max_tokens)

    def cancel(self) -> None:
        mine = [key for key in self.asked if key[0] in self.present]
        if mine:
            client, label = self.random.choice(mine)
            client.cancel(label)

    def leave(self) -> None:
        client = self.random.choice(self.present)
        self.present.remove(client)
        if self.random.random() < 0.5:
            client.leave()
        else:
            client.silent = True
        self.present.append(self.pair.add_client(f"guest-{next(self.names)}"))
        self.pair.tick()

    def chunk(self) -> None:
        if self.pair.prefill.chunks:
            self.pair.prefill_chunk()

    def fail_chunk(self) -> None:
        if self.pair.prefill.chunks:
            chunk = self.pair.prefill.chunks.popleft()
            failure = ComputeFailed(chunk.slot, chunk.epoch, "boom")
            self.pair.prefill.step(failure, self.pair.now_ms)
            self.pair.deliver()

    def compute(self) -> None:
        if self.pair.device.commands:
            self.pair.compute_one()

    def step(self) -> None:
        self.pair.decode_steps(1)

    def pass_time(self) -> None:
        self.pair.compute()
        self.step()
        self.chunk()
        self.pair.advance(self.random.choice([1, 20, 60, 200, 700]))

    def end_session(self) -> None:
        if self.pair.worker.session is not None:
            self.pair.end_session()

    def crash(self) -> None:
        self.pair.start_prefill(f"restart-{next(self.names)}")

    def drain(self) -> None:
        self.pair.stop_prefill()
        self.pass_time()
        self.crash()

    def spoil(self) -> None:
        """A bit flips in a slot that is complete; in one under way nothing could notice."""
        number = self.random.randrange(len(self.pair.prefill.slab.slots))
        slot = self.pair.prefill.slab.slots[number]
        if slot.token_ids and self.pair.source_states()[number] == "held":
            slot.token_ids[self.random.randrange(len(slot.token_ids))] ^= 1

    def hold(self) -> None:
        self.pair.hold_up = self.random.random() < 0.5
        self.pair.hold_down = self.random.random() < 0.5

    def calm(self) -> None:
        """No more faults; within their deadlines all jobs must end."""
        pair = self.pair
        pair.hold_up = pair.hold_down = False
        for _ in range(60):
            pair.finish()
            sessions = pair.prefill.core.status(pair.now_ms)["decode_sessions"]
            if pair.core.idle and pair.worker.usable and [pair.worker.session] == sessions:
                return
            pair.advance(100)
        raise AssertionError(f"INV-7: no rest: {pair.core.status(pair.now_ms)}")


def check_answers(run: Walk) -> None:
    for (client, label), (prompt_ids, max_tokens) in run.asked.items():
        answer, tokens = client.answer(label), client.tokens(label)
        right = expected_tokens(prompt_ids, max_tokens)
        assert tokens == right[: len(tokens)], "INV-9"
        if isinstance(answer, Finished):
            assert tokens == right
        elif client in run.present:
            assert isinstance(answer, (Failed, Rejected)), f"INV-7: {label} has no answer"


@pytest.mark.parametrize("seed", range(24))
def test_after_any_events_and_calm_every_job_was_answered_once_and_nothing_is_held(seed: int) -> None:
    run = Walk(seed)
    for _ in range(EVENTS):
        run.random.choice(run.events)()
    run.calm()
    check_answers(run)
    pair = run.pair
    assert set(pair.slot_states()) == {"free"}
    assert set(pair.source_states()) == {"idle"}
    assert set(pair.device.mappings) == {pair.worker.session}
    assert (pair.device.samplers, pair.text.streams) == ({}, {})
    assert pair.core.desk.timers.deadline_ms() is None
