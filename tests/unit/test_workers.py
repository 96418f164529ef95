"""Several prefill nodes on one decode node: which of them gets the next prompt."""

from dataclasses import replace

import numpy as np

from common.lifecycle import JobEvent
from common.messages import GrantLimit, HelloOk, Hurry, ReturnSlots, ShmPlane, SlotGrant
from common.sampling import SamplingParams
from decode_node.affinity import BLOCK_TOKENS, PrefixAffinity
from decode_node.events import SendToWorker
from decode_node.jobs import Job
from decode_node.worker import Worker
from decode_node.workers import Workers
from tests.devices import PROFILE

NAMES = ("east", "west")


def prompt(first: int, length: int = 3 * BLOCK_TOKENS) -> bytes:
    return np.full(length, first, dtype="<i4").tobytes()


class World:
    """Two prefill nodes with their sessions, and jobs to send."""

    def __init__(
        self, slots: int = 3, max_tokens: tuple[int, int] = (512, 512), keeps_prefixes: bool = True
    ) -> None:
        self.workers = Workers(NAMES, 300)
        self.arrivals = 0
        for name, limit in zip(NAMES, max_tokens, strict=True):
            grants = tuple(SlotGrant(index, 0) for index in range(slots))
            profile = replace(PROFILE, max_tokens=limit, keeps_prefixes=keeps_prefixes)
            plane = ShmPlane("slab", slots, 64)
            hello = HelloOk(f"session-{name}", f"of-{name}", 5_000, 1_000, profile, grants, plane)
            self.worker(name).opened(hello, 0)

    def worker(self, name: str) -> Worker:
        return self.workers.get(name)

    def job(self, tokens: bytes = b"\1\0\0\0", max_tokens: int = 8) -> Job:
        self.arrivals += 1
        job = Job(f"job{self.arrivals}", "client", "label", self.arrivals, 0, 0)
        job.prompt, job.sampling = tokens, SamplingParams(max_tokens=max_tokens)
        job.advance(JobEvent.ACCEPTED, 0)
        return job

    def send(self, job: Job, urgent: bool = False) -> str:
        """The node that the job's prompt goes to."""
        slot = self.workers.choose(job)
        worker = self.workers.of(slot.session)
        worker.send_prefill(slot, job.job_id, job.prompt, "digest", 1_000, 0, urgent=urgent)
        self.workers.note_sent(job, worker)
        job.sent_to = worker.name
        return worker.name


def test_the_node_with_the_least_work_gets_the_next_prompt() -> None:
    world = World()
    names = [world.send(world.job(prompt(number))) for number in range(6)]
    assert names == ["east", "west"] * 3
    assert world.workers.choose(world.job()) is None


def test_a_prompt_goes_where_its_beginning_went_unless_that_node_has_much_more_to_do() -> None:
    world = World(slots=4)
    assert world.send(world.job(prompt(7))) == "east"
    assert world.send(world.job(prompt(7) + prompt(8))) == "east", "one more than the other is borne"
    assert world.send(world.job(prompt(7) + prompt(9))) == "west", "two more are not"
    assert world.send(world.job(prompt(7) + prompt(9) + prompt(1))) == "west"


def test_where_no_prefixes_are_kept_only_work_counts() -> None:
    world = World(keeps_prefixes=False)
    assert [world.send(world.job(prompt(7))) for _ in range(4)] == ["east", "west"] * 2


def test_a_prompt_that_failed_at_one_node_goes_to_the_other() -> None:
    world = World()
    job = world.job(prompt(3))
    assert world.send(job) == "east"
    assert world.send(job) == "west"


def test_a_node_that_is_alone_gets_even_what_it_failed_at() -> None:
    world = World()
    world.worker("west").lost("session-west", 0)
    job = world.job()
    assert [world.send(job), world.send(job)] == ["east", "east"]


def test_a_long_prompt_goes_to_the_node_whose_slots_hold_it() -> None:
    world = World(max_tokens=(64, 512))
    assert world.workers.max_tokens == 512
    assert [world.send(world.job(prompt(1, 100))) for _ in range(2)] == ["west", "west"]


def test_what_a_node_was_sent_is_forgotten_when_it_starts_anew() -> None:
    affinity = PrefixAffinity()
    affinity.note(b"root", prompt(1), "east")
    assert affinity.known_tokens(b"root", prompt(1)) == {"east": 3 * BLOCK_TOKENS}
    assert affinity.known_tokens(b"other", prompt(1)) == {}
    affinity.forget("east")
    assert affinity.known_tokens(b"root", prompt(1)) == {}


def test_affinity_remembers_no_more_blocks_than_its_bound() -> None:
    affinity = PrefixAffinity(blocks_max=2)
    affinity.note(b"", prompt(1, BLOCK_TOKENS), "east")
    affinity.note(b"", prompt(2, BLOCK_TOKENS), "east")
    affinity.note(b"", prompt(3, BLOCK_TOKENS), "west")
    known = [affinity.known_tokens(b"", prompt(first, BLOCK_TOKENS)) for first in (1, 2, 3)]
    assert known == [{}, {"east": BLOCK_TOKENS}, {"west": BLOCK_TOKENS}]


def test_free_slots_beyond_the_share_are_returned_and_the_others_when_they_are_free() -> None:
    world = World()
    east = world.worker("east")
    world.send(world.job(prompt(1)))
    east.receive("session-east", GrantLimit(0), 0)
    assert world.workers.give_back() == [SendToWorker("session-east", ReturnSlots((1, 2)))]
    assert (east.ledger.granted_count, world.workers.give_back()) == (1, [])
    east.ledger.check()


def test_producers_are_told_of_the_first_jobs_that_free_lanes_wait_for() -> None:
    world = World()
    jobs = [world.job(prompt(number)) for number in range(4)]
    for job in reversed(jobs):
        world.send(job)
    order = {job.job_id: job.order for job in jobs}
    first = world.workers.hurry(1, order.__getitem__)
    assert [(effect.session, type(effect.message)) for effect in first] == [("session-west", Hurry)]
    assert len(world.workers.hurry(2, order.__getitem__)) == 1, "one of the two is urgent already"
    assert world.workers.hurry(2, order.__getitem__) == []


def test_a_lane_that_an_urgent_production_was_sent_for_hurries_nobody_else() -> None:
    world = World()
    world.send(world.job(), urgent=True)
    world.send(world.job())
    assert world.workers.hurry(1, lambda job_id: 0) == []
