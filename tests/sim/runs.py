"""Seeded runs: a plan drawn from the seed, faults by swarm, then heal and rest.

Each run knows a random subset of the faults only, so that no one fault hides the others. Then all faults end,
whatever is broken is mended and restarted, and the world must come to rest within the bound of INV-7.
"""

from dataclasses import dataclass, replace

from common.data_planes import SHM, TCP
from common.errors import InvariantViolation
from tests.sim import aim, faults, faults_bulk
from tests.sim.choices import Choices
from tests.sim.coverage import Coverage
from tests.sim.plan import CUT, HUGE, LAYERED, PROFILE, JobPlan, Option, Plan
from tests.sim.world import World

EVENTS = 200
START_EVENTS = 30
HEAL_STEPS_MAX = 6_000
JOBS_MIN = 3
AIMED_SHARE = 0.04
PASSING_SHARE = 0.35
HURRY_SHARE = 0.5
STOP_SHARE = 0.4
# Decode nodes, prefill nodes.
_SHAPES = ((1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (1, 2))
_HARSH_OF_CONTROL = tuple(name for name in faults.HARSH if name not in faults_bulk.HARSH)
_RARE = (
    *faults.HARSH,
    "late_completion",
    "late_request",
    "slow_compute",
    "text_error",
    "short_record",
    "compute_error",
    *faults_bulk.FAULTS,
)
_SOUGHT = (*_RARE, "hung_compute", "client_gone")
_LAZY = ("deliver_up", "deliver_down", "compute", "mail", "text", "restart", "bulk_up", "bulk_down", "let_go")
_PLANES = ((SHM,), (SHM,), (TCP,), (TCP, SHM))
_PROFILES = (PROFILE, PROFILE, LAYERED, LAYERED, CUT, HUGE)


class SimulationFailed(AssertionError):
    """An invariant did not hold in a seeded run."""


@dataclass(slots=True)
class Outcome:
    """What one run was."""

    seed: int
    events: int
    jobs: int
    faults: int
    simulated_ms: int


def draw_plan(choices: Choices) -> Plan:
    """A world and the faults that it knows."""
    local = choices.chance(0.3)
    decode_nodes, prefill_nodes = choices.one_of(_SHAPES)
    clients = max(decode_nodes, 1 + choices.below(2))
    some = choices.some_of([name for name in faults.NAMES if name not in faults.HARSH])
    if choices.chance(0.3):
        some += _HARSH_OF_CONTROL
    plan = Plan(
        jobs=tuple(_draw_job(choices, clients) for _ in range(JOBS_MIN + choices.below(7))),
        clients=clients,
        decode_nodes=decode_nodes,
        prefill_nodes=prefill_nodes,
        lanes=1 + choices.chance(0.4),
        # With one slot for two, what one of them lets go of is what the other one waits for.
        slots=choices.one_of((1, 2, 3, 3) if decode_nodes == 1 else (1, 1, 3)),
        depth=0 if local else choices.one_of((0, 1, 2, 2)),
        remote_only=not local,
        policy=choices.one_of(("local", "local", "retry", "fail") if local else ("retry", "fail")),
        prefill_retries=1 + choices.below(2),
        slots_per_session=choices.one_of((None, 1)),
        faults=tuple((name, _budget(name, choices)) for name in some),
        drain_ms=choices.one_of((500, 3_000)),
        max_queue=choices.one_of((3, 9)),
        job_timeout_ms=choices.one_of((1_800, 5_000)),
        prefill_wait_ms=choices.one_of((800, 4_000)),
    )
    planes = choices.one_of(_PLANES)
    if TCP not in planes:
        return replace(plan, faults=tuple(item for item in plan.faults if item[0] not in faults_bulk.FAULTS))
    if choices.chance(0.5):
        harsh = tuple((name, _budget(name, choices)) for name in faults_bulk.HARSH)
        plan = replace(plan, faults=plan.faults + harsh)
    return replace(plan, planes=planes, profile=choices.one_of(_PROFILES))


def _budget(name: str, choices: Choices) -> int:
    """How often a fault may happen: what spoils single messages finds fewer chances."""
    return 1 + choices.below(4) if name not in _RARE else 4 + choices.below(4)


def _draw_job(choices: Choices, clients: int) -> JobPlan:
    length = choices.below(14) + (choices.below(40) > 0)
    return JobPlan(
        client=choices.below(clients),
        prompt=tuple(choices.below(200) for _ in range(length)),
        max_tokens=1 + choices.below(4),
        eos=choices.chance(0.3),
        stop=choices.chance(0.3),
    )


class Run:
    """One seeded run. taken: every option so far, which is the whole story."""

    def __init__(self, seed: int, coverage: Coverage | None = None) -> None:
        self.seed = seed
        self.choices = Choices(seed)
        self.plan = draw_plan(self.choices)
        self.world = World(self.plan, self.choices)
        self.coverage = coverage
        self.taken: list[Option] = []
        self.fault_count = 0
        self.delays = "delay" in self.world.budget
        self.fault_share = 0.01 + 0.07 * (self.choices.below(100) / 100) ** 2
        self.submit_share = 0.05 + 0.2 * self.choices.below(100) / 100
        self.lazy = self.choices.some_of(_LAZY)
        self.burst = False

    def complete(self) -> Outcome:
        """Both phases. Raises SimulationFailed naming the seed."""
        try:
            while len(self.taken) < EVENTS:
                self._take(self._draw())
            self._heal()
            self.world.audit.final(self.world)
        except Exception as error:
            command = f"python -m tests.sim --seed {self.seed}"
            raise SimulationFailed(f"after {len(self.taken)} events: {error!r}\nreplay: {command}") from error
        waiting = sum(len(client.waiting) for client in self.world.clients)
        jobs = len(self.plan.jobs) - waiting
        return Outcome(self.seed, len(self.taken), jobs, self.fault_count, self.world.now_ms)

    def _take(self, option: Option) -> None:
        self.taken.append(option)
        if option.kind in faults.FAULTS:
            self.fault_count += 1
            if self.coverage is not None:
                self.coverage.fault(option, self.world)
        self.world.take(option)

    def _draw(self) -> Option:
        """What happens next."""
        choices, world = self.choices, self.world
        share = 0.4 if self.burst else self.fault_share
        if choices.chance(share if len(self.taken) > START_EVENTS else share / 8):
            found = faults.options(world)
            if found:
                kinds = sorted({option.kind for option in found})
                kind = choices.one_of(kinds + 3 * [kind for kind in kinds if kind in _SOUGHT])
                # What one fault has left behind is where the next one hurts.
                self.burst = choices.chance(0.5)
                return choices.one_of([option for option in found if option.kind == kind])
        if (aimed := aim.to_hurry(world)) and choices.chance(HURRY_SHARE):
            return choices.one_of(aimed)
        if choices.chance(AIMED_SHARE) and (aimed := aim.in_work(world)):
            return choices.one_of(aimed)
        if choices.chance(PASSING_SHARE) and (aimed := aim.in_passing(world, choices)):
            return choices.one_of(aimed)
        if (stops := aim.in_copy(world)) and choices.chance(STOP_SHARE):
            return choices.one_of(stops)
        if choices.chance(self.submit_share):
            ready = [client for client in world.clients if world.may_submit(client)]
            if ready:
                return Option("submit", choices.one_of(ready).name)
        prompt = world.prompt_options()
        late = self.delays and choices.chance(0.12)
        if prompt and not late:
            option = choices.one_of(prompt)
            return choices.one_of(prompt) if option.kind in self.lazy else option
        if prompt and self.coverage is not None:
            self.coverage.fault(Option("delay"), world)
        return Option("time", detail=1 + choices.below(90) if choices.chance(0.15) else 0)

    def _heal(self) -> None:
        """No more faults; everything that is down comes back, and rest must come in time."""
        world, plan = self.world, self.plan
        world.budget.clear()
        for option in faults.repairs(world):
            self._take(option)
        healed_ms, steps = world.now_ms, 0
        while True:
            self._settle()
            rest = world.audit.unrest(world)
            if not rest:
                return
            age_ms = world.now_ms - healed_ms
            if age_ms > plan.rest_bound_ms:
                left = world.audit.leftovers(world)
                world.audit.that(not left, f"INV-7: {age_ms} ms after the last fault {left}")
            if age_ms > plan.rest_bound_ms + plan.job_timeout_ms:
                raise InvariantViolation(f"INV-7: no rest {age_ms} ms after the last fault: {rest}")
            self._take(Option("time"))
            steps += 1
            world.audit.that(steps < HEAL_STEPS_MAX, "time does not pass")

    def _settle(self) -> None:
        """Everything that happens without time passing, in any order, and all jobs submitted."""
        choices, world = self.choices, self.world
        while True:
            prompt = world.prompt_options()
            if not prompt:
                prompt = [
                    Option("submit", client.name) for client in world.clients if world.may_submit(client)
                ]
                if not prompt:
                    return
            self._take(choices.one_of(prompt))
