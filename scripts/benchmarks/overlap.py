"""What prefetch gains, and how close it comes to the bound.

Decides the load (real text, prompts of 128 to 384 tokens, 24 to 48 tokens out), and how a run becomes
figures. Two pairs stay up, one with prefetch and one without, both remote-only; the runs alternate between
them, so that a machine that changes speed changes it for both. Per job, p is compute's busy time in prefill
chunks and d its busy time in decode steps, both measured in the same run (docs/performance.md).
"""

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import even, percentile, prompts, spread
from common.clock import now_us
from common.engines.registry import NAMED_MODEL
from common.errors import ConfigError, NodeUnavailable, TandemError
from common.messages import Finished
from transport.client import Client
from transport.launch.batch import Batch, BatchJob
from transport.launch.flow_shop import makespan, plain_sum
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all jobs: seconds, and microseconds for the gaps."""

    wall_s: float
    prefill_s: list[float]
    decode_s: list[float]
    gaps_us: list[int]
    gaps_beyond_us: list[int]
    copies_us: list[int]
    digests_us: list[int]
    token_ids: list[list[int]]

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=list(BACKENDS), default="torch", help="pair of backends (torch)")
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument("--jobs", type=int, default=12, help="jobs in a run (12)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm, at least 3 (3)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if options.repeats < 3:
        raise ConfigError("--repeats: a median needs at least 3 runs of each arm")
    jobs = _jobs(options)
    arms: dict[tuple[int, str], list[Run]] = {
        (clients, arm): [] for clients in (1, 4) for arm in ("off", "on")
    }
    off = PairPlan(options.kind, options.model, max_tokens=512, prefetch_depth=0)
    on = PairPlan(options.kind, options.model, max_tokens=512, prefetch_depth=1)
    with Pair(off) as pair_off, Pair(on) as pair_on, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting two pairs", total=4 * options.repeats + 2)
        pairs = {"off": pair_off, "on": pair_on}
        for arm, pair in pairs.items():
            pair.wait_ready()
            progress.update(bar, description=f"warming up, prefetch {arm}", advance=1)
            _run(pair, jobs[:2], 1)
        for repeat in range(options.repeats):
            # Turned from repeat to repeat: a machine that drifts favours each arm as often.
            for clients, arm in arms if repeat % 2 else reversed(arms):
                progress.update(bar, description=f"repeat {repeat + 1}: c{clients}, prefetch {arm}")
                arms[clients, arm].append(_run(pairs[arm], jobs, clients))
                progress.advance(bar)
    figures = _figures(arms)
    _show(figures, console)
    if not figures["tokens_equal"]:
        raise TandemError("the runs gave different tokens")
    return figures


def _jobs(options: argparse.Namespace) -> list[BatchJob]:
    lengths = even(128, 384, options.jobs)
    outputs = even(24, 48, options.jobs)[::-1]
    ids = prompts(BACKENDS[options.kind][1], options.model, lengths)
    return [
        BatchJob(str(index), prompt_ids=prompt, sampling={"max_tokens": outputs[index], "ignore_eos": True})
        for index, prompt in enumerate(ids)
    ]


def _run(pair: Pair, jobs: list[BatchJob], clients: int) -> Run:
    with Client(pair.decode_endpoint) as client:
        before = client.status()["counters"]
        started_us = now_us()
        outcomes = Batch(client, jobs, concurrency=clients).run()
        wall_s = (now_us() - started_us) / 1e6
        after = client.status()["counters"]
    answers = [outcome.answer for outcome in outcomes]
    if not all(isinstance(answer, Finished) and answer.path == "remote" for answer in answers):
        raise NodeUnavailable(f"not every job went the remote way: {answers}")
    if after["remote_imports"] - before["remote_imports"] != len(jobs):
        raise NodeUnavailable("not every job was imported")
    timings = [answer.timings for answer in answers]
    return Run(
        wall_s,
        [timing.prefill_busy_us / 1e6 for timing in timings],
        [timing.decode_busy_us / 1e6 for timing in timings],
        # The first job's gap is the pause before the run.
        [timing.lane_gap_us for timing in timings[1:] if timing.lane_gap_us is not None],
        [
            timing.lane_gap_us - timing.copy_us - timing.digest_us
            for timing in timings[1:]
            if timing.lane_gap_us is not None
        ],
        [timing.copy_us for timing in timings],
        [timing.digest_us for timing in timings],
        [outcome.token_ids for outcome in outcomes],
    )


def _figures(arms: dict[tuple[int, str], list[Run]]) -> dict[str, Any]:
    tokens = [run.token_ids for runs in arms.values() for run in runs]
    figures: dict[str, Any] = {"tokens_equal": all(ids == tokens[0] for ids in tokens)}
    for clients in (1, 4):
        off, on = arms[clients, "off"], arms[clients, "on"]
        pairs = list(zip(off, on, strict=True))
        figures[f"c{clients}"] = {
            "off_wall_s": spread([run.wall_s for run in off]),
            "on_wall_s": spread([run.wall_s for run in on]),
            "speedup": spread([one.wall_s / other.wall_s for one, other in pairs]),
            "ideal_speedup": spread([plain_sum(run.prefill_s, run.decode_s) / _bound(run) for run in off]),
            "overlap_efficiency": spread([_bound(run) / run.wall_s for run in on]),
            "overlap_efficiency_against_off": spread([_bound(one) / other.wall_s for one, other in pairs]),
            "off_busy_share": spread([plain_sum(run.prefill_s, run.decode_s) / run.wall_s for run in off]),
            "lane_gap_us": _gap([gap for run in on for gap in run.gaps_us]),
            "lane_gap_beyond_copy_and_digest_us": _gap([gap for run in on for gap in run.gaps_beyond_us]),
            "copy_us": spread([value for run in on for value in run.copies_us]),
            "digest_us": spread([value for run in on for value in run.digests_us]),
            "output_tokens_per_s": spread([run.output_tokens / run.wall_s for run in on]),
        }
    return figures


def _bound(run: Run) -> float:
    return makespan(run.prefill_s, run.decode_s, slots=1)


def _gap(gaps: list[int]) -> dict[str, float]:
    if not gaps:
        return {"p50": 0.0, "p95": 0.0}
    return {"p50": statistics.median(gaps), "p95": percentile(gaps, 0.95)}


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="Overlap: medians over the repeats")
    for column in ("", "c1", "c4"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        ("wall, prefetch off (s)", "off_wall_s", 1),
        ("wall, prefetch on (s)", "on_wall_s", 1),
        ("speed-up", "speedup", 1),
        ("ideal speed-up (off run's p and d)", "ideal_speedup", 1),
        ("overlap efficiency (own p and d)", "overlap_efficiency", 1),
        ("overlap efficiency (off run's p and d)", "overlap_efficiency_against_off", 1),
        ("busy share without prefetch", "off_busy_share", 1),
        ("KV copy (ms)", "copy_us", 1e-3),
        ("digest (ms)", "digest_us", 1e-3),
    ]
    for label, key, scale in rows:
        cells = [f"{figures[arm][key]['median'] * scale:.3f}" for arm in ("c1", "c4")]
        table.add_row(label, *cells)
    for share in ("p50", "p95"):
        cells = [f"{figures[arm]['lane_gap_us'][share] / 1e3:.2f}" for arm in ("c1", "c4")]
        table.add_row(f"lane gap {share}, prefetch on (ms)", *cells)
        beyond = [
            f"{figures[arm]['lane_gap_beyond_copy_and_digest_us'][share] / 1e3:.2f}" for arm in ("c1", "c4")
        ]
        table.add_row(f"  of it beyond copy and digest, {share} (ms)", *beyond)
    table.add_row("tokens equal in all runs", "", str(figures["tokens_equal"]))
    console.print(table)
