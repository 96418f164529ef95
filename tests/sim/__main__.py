"""Run the simulator by hand.

python -m tests.sim --seed N                      one run, told step by step
python -m tests.sim --runs 20000 --processes 2    many runs, from --first on
python -m tests.sim --nightly                     without end, until Ctrl-C
"""

import argparse
import sys
from collections.abc import Iterator

from common.clock import now_ms
from tests.sim.campaign import BLOCK_RUNS, Summary, campaign
from tests.sim.coverage import least_covered
from tests.sim.runs import SimulationFailed
from tests.sim.story import told_run

NIGHTLY_STRETCH_RUNS = 100_000


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell(seed: int) -> int:
    """One run, line by line; the exit status."""
    try:
        for line in told_run(seed):
            say(line)
    except SimulationFailed as failure:
        say(f"FAILED {failure}")
        return 1
    return 0


def report(summary: Summary, elapsed_ms: int) -> Iterator[str]:
    seconds = max(elapsed_ms, 1) / 1000
    yield (
        f"{summary.runs} runs, {summary.events} events, {summary.jobs} jobs, {summary.faults} faults,"
        f" {summary.simulated_ms // 1000} s simulated in {seconds:.0f} s"
    )
    if not summary.events:
        return
    yield f"smallest run: {summary.events_min} events, {summary.jobs_min} jobs"
    yield "answers: " + ", ".join(f"{code} {count}" for code, count in summary.answers.most_common())
    yield "least covered: " + ", ".join(f"{name} {count}" for name, count in least_covered(summary.coverage))
    for seed, failure in summary.failures:
        yield f"FAILED seed {seed} {failure}"


def many(first_seed: int, runs: int, processes: int) -> Summary:
    """Runs with a line of progress now and then."""
    started_ms = now_ms()
    step = 20 * BLOCK_RUNS

    def progress(total: Summary) -> None:
        if total.runs % step < BLOCK_RUNS:
            say(f"{total.runs} runs, {len(total.failures)} failures, {(now_ms() - started_ms) // 1000} s")

    summary = campaign(first_seed, runs, processes, progress)
    for line in report(summary, now_ms() - started_ms):
        say(line)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="The deterministic simulator.")
    parser.add_argument("--seed", type=int, help="tell the run of this seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed of many")
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--nightly", action="store_true", help="run until interrupted")
    options = parser.parse_args()
    if options.seed is not None:
        return tell(options.seed)
    if not options.nightly:
        return 1 if many(options.first, options.runs, options.processes).failures else 0
    first_seed = options.first
    while True:
        summary = many(first_seed, NIGHTLY_STRETCH_RUNS, options.processes)
        if summary.failures or summary.interrupted:
            return 1 if summary.failures else 0
        first_seed += NIGHTLY_STRETCH_RUNS


if __name__ == "__main__":
    sys.exit(main())
