"""Many seeded runs on several processes, and what came of them all.

The runs are spread over processes in here, not by the test runner: what they cover has to be added up.
"""

import gc
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sim.coverage import Coverage, watching
from tests.sim.runs import Run, SimulationFailed

BLOCK_RUNS = 100
FAILURES_MAX = 10


@dataclass(slots=True)
class Summary:
    """Of a set of runs. events_min, jobs_min: of the smallest run. failures: seed and what went wrong."""

    runs: int = 0
    events: int = 0
    jobs: int = 0
    faults: int = 0
    simulated_ms: int = 0
    events_min: int = 10**9
    jobs_min: int = 10**9
    answers: Counter[str] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=Coverage)
    failures: list[tuple[int, str]] = field(default_factory=list)
    interrupted: bool = False

    def add(self, other: "Summary") -> None:
        self.runs += other.runs
        self.events += other.events
        self.jobs += other.jobs
        self.faults += other.faults
        self.simulated_ms += other.simulated_ms
        self.events_min = min(self.events_min, other.events_min)
        self.jobs_min = min(self.jobs_min, other.jobs_min)
        self.answers.update(other.answers)
        self.coverage.add(other.coverage)
        self.failures += other.failures


def run_block(block: tuple[int, int]) -> Summary:
    """The runs of seeds `[first, end)`."""
    summary = Summary()
    gc.disable()  # a world is full of cycles, and gone at once
    with watching(summary.coverage):
        for seed in range(*block):
            _run_one(seed, summary)
    gc.enable()
    gc.collect()
    return summary


def _run_one(seed: int, summary: Summary) -> None:
    run = Run(seed, summary.coverage)
    try:
        outcome = run.complete()
    except SimulationFailed as failure:
        summary.failures.append((seed, str(failure)))
        return
    finally:
        summary.runs += 1
    summary.events += outcome.events
    summary.jobs += outcome.jobs
    summary.faults += outcome.faults
    summary.simulated_ms += outcome.simulated_ms
    summary.events_min = min(summary.events_min, outcome.events)
    summary.jobs_min = min(summary.jobs_min, outcome.jobs)
    for answer in run.world.audit.answers.values():
        summary.answers[str(getattr(answer, "code", "FINISHED"))] += 1


def campaign(
    first_seed: int, runs: int, processes: int, progress: Callable[[Summary], None] | None = None
) -> Summary:
    """`runs` runs from a seed on; stops early after a few failures, or when interrupted."""
    total = Summary()
    pool = multiprocessing.get_context("spawn").Pool(processes, _ignore_interrupts)
    try:
        for summary in pool.imap_unordered(run_block, _blocks(first_seed, runs)):
            total.add(summary)
            if progress is not None:
                progress(total)
            if len(total.failures) >= FAILURES_MAX:
                break
    except KeyboardInterrupt:
        total.interrupted = True
    finally:
        pool.terminate()
        pool.join()
    return total


def _ignore_interrupts() -> None:
    """Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _blocks(first_seed: int, runs: int) -> list[tuple[int, int]]:
    """Seeds in blocks."""
    end = first_seed + runs
    return [(start, min(start + BLOCK_RUNS, end)) for start in range(first_seed, end, BLOCK_RUNS)]
