"""What is explored: for every mutant, in CI to the end, and more of it at night.

Decides nothing; read by `tests.sim.explore`. Jobs are small, since a step more per job multiplies. Clients'
sessions never time out here: a client that is gone is a fault of its own.
"""

from dataclasses import dataclass, replace
from typing import Any

from common.data_planes import TCP
from tests.sim import faults, faults_bulk
from tests.sim.plan import HUGE, NEVER_MS, TIMES, JobPlan, Plan
from transport.peers import LivenessTimes

# Back-off as long as two PINGs: moments that do not differ in their order fall together.
BACKOFF_MS = 2 * TIMES.ping_ms
COARSE = replace(TIMES, backoff_min_ms=BACKOFF_MS)
ENDLESS = LivenessTimes(NEVER_MS, NEVER_MS, NEVER_MS, NEVER_MS, backoff_min_ms=BACKOFF_MS)
LONG = JobPlan(0, (1, 2, 3, 4, 5), 2)
SHORT = JobPlan(0, (6, 7), 2)
OF_THREADS = ("slow_compute", "hung_compute", "compute_error", "text_error")
OF_CLOCKS = ("stop_prefill", "stop_decode")
BRIEF = JobPlan(0, (8, 9), 1)


@dataclass(frozen=True, slots=True)
class Scenario:
    """leaps: how often on a path a clock runs ahead to a deadline, and to which: of the core (0) or of the
    sessions (1). faults_max: on a path, leaps included.

    eager: see `tests.sim.explore`. at_once: a client sends its jobs as soon as it can. states_max: stop
    there, if need be.
    """

    name: str
    plan: Plan
    leaps: int = 0
    leaps_to: tuple[int, ...] = (0, 1)
    faults_max: int = 99
    eager: bool = True
    at_once: bool = False
    states_max: int | None = None

    @property
    def may_hang(self) -> bool:
        """Whether something may hold a node up for longer than it may take."""
        held_up = {name for name, _ in self.plan.faults} & {*OF_THREADS, *OF_CLOCKS}
        return bool(self.leaps or held_up)


def faulty(name: str, *jobs: JobPlan, leaps: int = 0, **budget: int) -> Scenario:
    """One pair, its jobs, and a budget of faults. A job that is alone has a timeout of its own, too."""
    eager = budget.keys().isdisjoint(OF_THREADS)
    plan = Plan(
        jobs,
        codec=False,
        times=COARSE,
        client_times=ENDLESS,
        # Sooner than the next PING, or a leap to it would find the peer silent for too long as well.
        prefill_timeout_ms=TIMES.ping_ms // 2,
        job_timeout_ms=NEVER_MS if len(jobs) > 1 else 5_000,
        faults=tuple(budget.items()),
    )
    return Scenario(name, plan, leaps, eager=eager)


def over_tcp(scenario: Scenario, **changes: Any) -> Scenario:
    """The same with KV sent over a socket; changes: of the plan."""
    return replace(scenario, plan=replace(scenario.plan, planes=(TCP,), **changes))


_ANEW = faulty("two jobs, a session anew", SHORT, BRIEF, leaps=1, second_session=1)
_RESTART = faulty("two jobs, a restart", SHORT, BRIEF, leaps=1, crash_prefill=1)
GENERAL = (
    faulty("two jobs, a cancel", LONG, BRIEF, cancel=1),
    faulty("a job, a bad byte", LONG, corrupt_chunk=1),
    faulty("a job, a bad record", LONG, short_record=1),
    faulty("a job, a lost message", SHORT, dropped=1),
    faulty("a job, a new session, a cancel", LONG, second_session=1, cancel=1),
    faulty("two jobs, a timeout", SHORT, BRIEF, leaps=1),
    faulty("two jobs, a broken connection", SHORT, BRIEF, lost_suffix=1),
    replace(_ANEW, leaps_to=(1,), at_once=True),
    replace(_RESTART, leaps_to=(1,), at_once=True),
    replace(over_tcp(faulty("two jobs over tcp, a cancel", SHORT, BRIEF, cancel=1)), at_once=True),
)
"""Small enough to be run for every mutant."""

_PAIR = faulty("two jobs, one of each", SHORT, BRIEF, leaps=1, lost_suffix=1, crash_decode=1, cancel=1)
_ALONE = faulty(
    "a job, one of each",
    SHORT,
    leaps=1,
    lost_suffix=1,
    overtake=1,
    crash_decode=1,
    crash_prefill=1,
    cancel=1,
)
# A full queue fills the outbox of the control port, which stands behind the codec: seeded runs have both.
_FAULTS = sorted(faults.FAULTS.keys() - {"full_queue", *faults_bulk.FAULTS})
_ANY = faulty("a job, any two faults", SHORT, leaps=1, **dict.fromkeys(_FAULTS, 1))
_OTHERS = [name for name in _FAULTS if name not in OF_THREADS]

# Two pieces, and credit for one of them: what comes second waits.
_BULK = over_tcp(
    faulty("a job over tcp, any fault of its bulk connection", SHORT, **dict.fromkeys(faults_bulk.FAULTS, 1)),
    profile=HUGE,
)
_TCP_ALONE = over_tcp(
    faulty(
        "a job over tcp, one of each",
        SHORT,
        leaps=1,
        lost_suffix=1,
        bulk_lost=1,
        crash_prefill=1,
        cancel=1,
    )
)
_TCP_PAIR = over_tcp(
    faulty("two jobs over tcp, a cancel or a broken bulk connection", SHORT, BRIEF, cancel=1, bulk_lost=1)
)

CI = (
    replace(_ALONE, leaps_to=(0,), faults_max=2),
    replace(_PAIR, leaps_to=(0,), at_once=True),
    faulty("a job, any fault of a thread", SHORT, **dict.fromkeys(OF_THREADS, 1)),
    replace(faulty("a job, any other fault", SHORT, **dict.fromkeys(_OTHERS, 1)), faults_max=1),
    replace(_TCP_PAIR, at_once=True, faults_max=1),
    replace(_BULK, faults_max=1),
)
NIGHTLY = (
    replace(_ALONE, name="a job, all of each", leaps_to=(0,)),
    replace(_TCP_ALONE, leaps_to=(0,), faults_max=2),
    replace(_ALONE, name="a job, one of each, any deadline"),
    replace(_PAIR, name="two jobs, sent at any time, one of each", leaps_to=(0,)),
    replace(_PAIR, name="two jobs, sent at any time, one of each, any deadline"),
    replace(_ANY, faults_max=2, states_max=400_000),
    replace(_TCP_ALONE, name="a job over tcp, one of each, any deadline"),
    replace(
        over_tcp(_PAIR, profile=HUGE), name="two jobs over tcp, one of each", leaps_to=(0,), at_once=True
    ),
    replace(_TCP_PAIR, name="two jobs over tcp, a cancel and a broken bulk connection", at_once=True),
    replace(_TCP_PAIR, name="two jobs over tcp, sent at any time, a cancel, a broken bulk connection"),
    replace(_BULK, name="a job over tcp, any two faults of its bulk connection", faults_max=2),
)


def scenario(name: str) -> Scenario:
    """By name, for replays."""
    return next(item for item in (*GENERAL, *CI, *NIGHTLY) if item.name == name)
