"""What the scheduler decides for one queue, some lanes and some slots; and which routes it refuses."""

import gc
from dataclasses import replace

import pytest

from common.lifecycle import JobEvent, LaneEvent, SlotEvent
from common.messages import HelloOk, ShmPlane, SlotGrant
from common.sampling import SamplingParams
from decode_node.events import WorkerSuspected
from decode_node.jobs import Job
from decode_node.lanes import Lanes
from decode_node.scheduler import ImportInto, PrefillLocally, Route, Scheduler, SendPrefill
from decode_node.slots import GrantedSlot, SlotLedger
from decode_node.workers import Workers
from tests.actors import LOCAL_ROUTE, ROUTE, WORKER
from tests.devices import PROFILE

DEAD_AFTER_MS = 300


class World:
    """A scheduler with the lanes and slots that it is asked about."""

    def __init__(self, *, lanes: int = 1, slots: int = 2, route: Route = ROUTE) -> None:
        self.scheduler = Scheduler(route)
        self.lanes = Lanes(lanes)
        self.workers = Workers(route.prefill_workers, DEAD_AFTER_MS)
        self.open("s1", slots)
        self.arrivals = 0

    def open(self, session: str, slots: int, worker: str = WORKER) -> None:
        grants = tuple(SlotGrant(index, 0) for index in range(slots))
        hello = HelloOk(session, f"of {session}", 5_000, 1_000, PROFILE, grants, ShmPlane("slab", slots, 64))
        self.workers.get(worker).opened(hello, 0)

    @property
    def ledger(self) -> SlotLedger:
        return self.workers.get(WORKER).ledger

    def suspect(self) -> None:
        """The prefill node is not usable any more."""
        worker = self.workers.get(WORKER)
        worker.on_suspected(WorkerSuspected(worker.session, silent=True), 0)

    def queue(self, name: str) -> Job:
        self.arrivals += 1
        job = Job(name, "client", name, self.arrivals, 0, 0)
        job.advance(JobEvent.ACCEPTED, 0)
        self.scheduler.enqueue(job)
        return job

    def decide(self) -> ImportInto | PrefillLocally | SendPrefill | None:
        return self.scheduler.decide(self.lanes, self.workers)

    def send(self, decision: SendPrefill) -> GrantedSlot:
        job = decision.job
        job.reservation = self.ledger.reserve(decision.slot, job.job_id, 0)
        job.advance(JobEvent.PREFILL_SENT, 0)
        return decision.slot

    def complete(self, job: Job, slot: GrantedSlot, first_token: int | None = 3) -> None:
        self.ledger.advance(slot, SlotEvent.COMPLETED, 0)
        job.advance(JobEvent.RECORD_ARRIVED, 0)
        job.first_token, job.kv_here = first_token, True
        self.scheduler.hold(job)

    def start_import(self, decision: ImportInto) -> None:
        self.lanes.advance(decision.lane, LaneEvent.IMPORT_STARTED, decision.job.job_id)
        decision.job.advance(JobEvent.IMPORT_STARTED, 0)
        self.ledger.advance(self.ledger.find(decision.job.reservation), SlotEvent.IMPORT_STARTED, 0)

    def send_all(self) -> list[str]:
        """Ids of the jobs that may be sent now, one after the other."""
        sent = []
        while isinstance(decision := self.decide(), SendPrefill):
            self.send(decision)
            sent.append(decision.job.job_id)
        return sent


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("free_lanes", [0, 1, 2])
def test_productions_held_are_at_most_free_lanes_plus_depth(free_lanes: int, depth: int) -> None:
    world = World(lanes=2, slots=8, route=replace(ROUTE, prefetch_depth=depth))
    for number in range(2 - free_lanes):
        lane = world.lanes.free()
        world.lanes.advance(lane, LaneEvent.IMPORT_STARTED, f"running{number}")
    for number in range(8):
        world.queue(f"job{number}")
    assert len(world.send_all()) == free_lanes + depth


@pytest.mark.parametrize("free_lanes", [0, 1, 2])
def test_without_prefetch_only_a_free_lane_lets_a_prefill_out(free_lanes: int) -> None:
    world = World(lanes=2, slots=8, route=replace(ROUTE, prefetch_depth=0))
    for number in range(2 - free_lanes):
        world.lanes.advance(world.lanes.free(), LaneEvent.IMPORT_STARTED, f"running{number}")
    for number in range(4):
        world.queue(f"job{number}")
    assert len(world.send_all()) == free_lanes


def test_only_what_goes_out_without_a_lane_is_called_a_prefetch() -> None:
    world = World(slots=2)
    world.queue("a")
    world.queue("b")
    first = world.decide()
    world.send(first)
    second = world.decide()
    assert [first.prefetch, second.prefetch] == [False, True]


def test_an_orphan_does_not_count_towards_depth_but_keeps_its_slot() -> None:
    world = World(slots=2)
    for name in "abcd":
        world.queue(name)
    assert world.send_all() == ["a", "b"]
    orphan = next(slot for slot in world.ledger.slots() if slot.job_id == "b")
    world.ledger.advance(orphan, SlotEvent.JOB_DETACHED, 0)
    assert world.decide() is None
    world.ledger.advance(orphan, SlotEvent.PRODUCER_FAILED, 0)
    assert world.send_all() == ["c"]


def test_a_survivor_counts_towards_depth() -> None:
    world = World(slots=1)
    job = world.queue("a")
    world.complete(job, world.send(world.decide()), first_token=None)
    world.workers.get(WORKER).lost("s1", 0)
    world.open("s2", 2)
    for name in "bcd":
        world.queue(name)
    assert world.send_all() == ["b"], "one free lane, depth 1, one survivor"


def test_the_depth_in_force_is_clamped_to_the_slots_granted() -> None:
    scheduler = Scheduler(replace(ROUTE, prefetch_depth=3))
    assert [scheduler.depth(granted) for granted in (0, 1, 3, 9)] == [0, 1, 3, 3]


def test_a_prefilled_job_is_imported_before_anything_is_sent() -> None:
    world = World(slots=2)
    job = world.queue("a")
    world.complete(job, world.send(world.decide()))
    world.queue("b")
    decision = world.decide()
    assert isinstance(decision, ImportInto)
    assert decision.job is job


def test_a_prefilled_job_waits_for_its_first_token_and_for_a_stop_string_in_doubt() -> None:
    world = World(slots=1)
    job = world.queue("a")
    job.sampling = SamplingParams(stop=("x",))
    world.complete(job, world.send(world.decide()), first_token=None)
    assert world.decide() is None
    job.first_token, job.text_pending = 3, 1
    assert world.decide() is None
    job.text_pending = 0
    assert isinstance(world.decide(), ImportInto)


def test_without_stop_strings_the_text_of_the_first_token_is_not_waited_for() -> None:
    world = World(slots=1)
    job = world.queue("a")
    world.complete(job, world.send(world.decide()))
    job.text_pending = 1
    assert isinstance(world.decide(), ImportInto)


def test_jobs_are_taken_in_order_of_arrival_and_keep_their_place_when_they_come_back() -> None:
    world = World(slots=1)
    first = world.queue("a")
    world.queue("b")
    slot = world.send(world.decide())
    assert world.scheduler.head().job_id == "b"
    world.ledger.advance(slot, SlotEvent.PRODUCER_FAILED, 0)
    first.reservation = None
    first.advance(JobEvent.REQUEUED, 0)
    world.scheduler.enqueue(first)
    assert world.decide().job is first


def test_a_job_that_was_sent_is_not_sent_again() -> None:
    world = World(slots=4, route=replace(ROUTE, prefetch_depth=3))
    world.queue("a")
    assert world.send_all() == ["a"]
    assert world.decide() is None


def test_nothing_is_sent_while_no_worker_is_usable() -> None:
    world = World()
    job = world.queue("a")
    world.suspect()
    assert world.decide() is None
    assert world.scheduler.must_wait(job, world.workers)
    worker = world.workers.get(WORKER)
    worker.on_suspected(WorkerSuspected(worker.session, silent=False), 0)
    assert not world.scheduler.must_wait(job, world.workers)


def test_without_a_usable_worker_a_prompt_is_computed_here_if_that_is_allowed() -> None:
    world = World(route=LOCAL_ROUTE)
    job = world.queue("a")
    world.suspect()
    assert not world.scheduler.must_wait(job, world.workers)
    decision = world.decide()
    assert isinstance(decision, PrefillLocally)
    assert decision.job is job


def test_a_local_prefill_does_not_take_the_lane_a_production_was_sent_for() -> None:
    world = World(route=LOCAL_ROUTE)
    world.queue("a")
    slot = world.send(world.decide())
    forced = world.queue("b")
    forced.force_local = True
    assert world.decide() is None
    world.ledger.advance(slot, SlotEvent.PRODUCER_FAILED, 0)
    assert isinstance(world.decide(), PrefillLocally)


def test_jobs_that_end_while_they_wait_do_not_pile_up() -> None:
    world = World(slots=0)
    world.queue("head")
    for number in range(5_000):
        world.queue(f"job{number}").advance(JobEvent.RETIRED, 0)
    kept = sum(type(item) is Job for item in gc.get_objects())
    assert kept < 1_000
    assert world.scheduler.head().job_id == "head"


GOOD = {
    "prefill_workers": ("memory",),
    "remote_only": True,
    "backend": "emulated",
    "slots": 1,
    "prefetch_depth": 1,
    "on_prefill_failure": "fail",
}
BAD_ROUTES = [
    ({"prefill_workers": ()}, "--pd-prefill-worker"),
    ({"remote_only": False}, "--pd-remote-only"),
    ({"slots": 0}, "--slots 0"),
    ({"slots": 400}, "--slots 400"),
    ({"backend": "atom", "slots": 2}, "--slots 2"),
    ({"backend": "rngd"}, "cannot decode"),
    ({"backend": "abacus"}, "abacus"),
    ({"prefetch_depth": -1}, "at least 1"),
    ({"on_prefill_failure": "local"}, "--on-prefill-failure"),
    ({"backend": "atom", "remote_only": False, "prefetch_depth": 0}, "cannot prefill locally"),
]


@pytest.mark.parametrize(("change", "words"), BAD_ROUTES)
def test_a_route_that_cannot_work_is_a_value_error_that_names_the_remedy(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scheduler(Route(**{**GOOD, **change}))


@pytest.mark.parametrize("backend", ["emulated", "torch", "atom"])
def test_any_backend_that_decodes_may_prefetch(backend: str) -> None:
    assert Scheduler(Route(**{**GOOD, "backend": backend})).depth(1) == 1


def test_the_next_production_goes_to_the_prefill_node_with_the_least_work() -> None:
    world = World(slots=4, route=replace(ROUTE, prefill_workers=(WORKER, "other"), prefetch_depth=4))
    world.open("t1", 2, "other")
    sessions = []
    for name in "abcde":
        world.queue(name)
        decision = world.decide()
        sessions.append(decision.slot.session)
        world.workers.of(decision.slot.session).send_prefill(
            decision.slot, name, b"\1\0\0\0", "digest", 5_000, 0
        )
        decision.job.advance(JobEvent.PREFILL_SENT, 0)
    assert sessions == ["s1", "t1", "s1", "t1", "s1"]


def test_a_node_that_is_not_usable_gets_nothing_while_the_other_has_room() -> None:
    world = World(slots=1, route=replace(ROUTE, prefill_workers=(WORKER, "other"), prefetch_depth=2))
    world.open("t1", 2, "other")
    world.suspect()
    world.queue("a")
    assert world.decide().slot.session == "t1"


def test_a_prompt_that_is_too_short_to_be_sent_is_computed_here_where_that_is_allowed() -> None:
    for route in (LOCAL_ROUTE, ROUTE):
        world = World(route=replace(route, min_remote_prompt_tokens=3))
        for tokens in (2, 3):
            job = world.queue(f"{tokens} tokens")
            job.prompt = bytes(4 * tokens)
            local = world.scheduler.goes_local(job, world.workers)
            assert local is (route is LOCAL_ROUTE and tokens < 3)
