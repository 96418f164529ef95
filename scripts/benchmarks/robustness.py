"""What robustness costs: KV digests, sequence checks and ledger checks on against off.

Decides the two loads and how the arms are compared. Two pairs stay up, one as shipped and one whose daemons
are started by `unchecked.py`; blocks of jobs alternate between them, in turned order from round to round, so
that a machine that changes speed changes it for both. First the throughput of the overlap benchmark's load
with four clients and prefetch; then the raw hand-over, with emulated engines that take no declared time: one
client, one job at a time, two tokens, so that a job is little more than PREFILL, DONE, import and release.

Beside the time on the clock stands the CPU time of both daemons, which other processes of a busy machine
disturb less. Machines still differ from run to run by more than the checks can cost. So a third pair, a twin
of the first, tells by how much two equal pairs differ here; and the cost is counted as well: what digests
take in a job, and what the raw hand-over takes longer, against the time of a job.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import even, prompts, spread
from benchmarks.unchecked import NOTE
from common.clock import now_us
from common.engines.registry import NAMED_MODEL
from common.errors import ConfigError, NodeUnavailable, TandemError
from common.messages import Finished
from transport.client import Client
from transport.launch.batch import Batch, BatchJob
from transport.launch.daemon_process import DaemonProcess
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan

ARMS = ("on", "off", "twin")
# Of a job's KV: by the producer as it is computed, again before the logits, and at the import.
DIGESTS_PER_JOB = 3
# No declared time: what is left is arithmetic, threads and messages.
AT_ONCE = ("--emulated-prefill-tokens-per-s", "1e9"), ("--emulated-decode-ms", "0.0001")
HAND_OVER_TOKENS = 512
BLOCK_JOBS = 50


class UncheckedDaemon(DaemonProcess):
    """A daemon whose checks are off."""

    def __init__(self, program: str, arguments: list[str], directory: Path, suffix: str) -> None:
        own = directory / f"{program}{suffix}"
        own.mkdir()
        super().__init__("scripts.benchmarks.unchecked", [program, *arguments], own)


def cpu_ms(pair: Pair) -> float:
    """CPU time of both daemons so far, all threads, user and system; the kernel counts in ticks of 10 ms."""
    ticks = 0
    for daemon in pair.daemons:
        fields = Path(f"/proc/{daemon.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return 1_000 * ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def all_pairs(plan: PairPlan) -> Iterator[dict[str, Pair]]:
    """The same pair three times, ready: as shipped, unchecked, and as shipped again."""
    with Pair(plan) as checked, Pair(plan, UncheckedDaemon) as unchecked, Pair(plan) as twin:
        for pair in (checked, unchecked, twin):
            pair.wait_ready()
        for daemon in unchecked.daemons:
            if NOTE not in daemon.log_path.read_text(encoding="utf-8"):
                raise TandemError(f"the checks of the {daemon.name} are not off: see {daemon.log_path}")
        yield {"on": checked, "off": unchecked, "twin": twin}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=list(BACKENDS), default="torch", help="pair of backends (torch)")
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument("--jobs", type=int, default=8, help="jobs in a run of the overlap load (8)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each arm, at least 3 (5)")
    parser.add_argument("--hand-overs", type=int, default=2_000, help="raw hand-overs of each arm (2000)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if options.repeats < 3:
        raise ConfigError("--repeats: a median needs at least 3 runs of each arm")
    loads = {"before": os.getloadavg()[0]}
    with Progress(console=console, transient=True) as progress:
        hand_over = _measure_hand_over(options, progress)
        overlap = _measure_overlap(options, progress)
    loads["after"] = os.getloadavg()[0]
    counted = overlap["digest_share"] + max(0.0, hand_over["cost_us"]["median"]) / overlap["job_us"]
    figures = {"overlap": overlap, "hand_over": hand_over, "counted": counted, "load_average": loads}
    _show(figures, console)
    return figures


def _alternate(rounds: int, progress: Progress, what: str, run: Callable[[str], None]) -> None:
    """All arms in every round, in turned order from round to round."""
    bar = progress.add_task(what, total=rounds * len(ARMS))
    for number in range(rounds):
        for arm in ARMS if number % 2 else reversed(ARMS):
            progress.update(bar, description=f"{what}: checks {arm}")
            run(arm)
            progress.advance(bar)


def _finish(client: Client, jobs: list[BatchJob], concurrency: int) -> list[Any]:
    """Outcomes of jobs that all must finish over the prefill node."""
    outcomes = Batch(client, jobs, concurrency=concurrency).run()
    answers = [outcome.answer for outcome in outcomes]
    if not all(isinstance(answer, Finished) and answer.path == "remote" for answer in answers):
        raise NodeUnavailable(f"not every job went the remote way: {answers}")
    return outcomes


def _measure_overlap(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    lengths, outputs = even(128, 384, options.jobs), even(24, 48, options.jobs)[::-1]
    ids = prompts(BACKENDS[options.kind][1], options.model, lengths)
    jobs = [
        BatchJob(str(index), prompt_ids=prompt, sampling={"max_tokens": outputs[index], "ignore_eos": True})
        for index, prompt in enumerate(ids)
    ]
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    digests_us: dict[str, list[int]] = {arm: [] for arm in ARMS}
    cpus_ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
    tokens: list[Any] = []
    plan = PairPlan(options.kind, options.model, max_tokens=512, prefetch_depth=1)
    with all_pairs(plan) as pairs:

        def run(arm: str) -> None:
            with Client(pairs[arm].decode_endpoint) as client:
                started_us, started_cpu_ms = now_us(), cpu_ms(pairs[arm])
                outcomes = _finish(client, jobs, concurrency=4)
                wall_s = (now_us() - started_us) / 1e6
                cpus_ms[arm].append((cpu_ms(pairs[arm]) - started_cpu_ms) / len(jobs))
            rates[arm].append(sum(outputs) / wall_s)
            digests_us[arm] += [outcome.answer.timings.digest_us for outcome in outcomes]
            tokens.append([outcome.token_ids for outcome in outcomes])

        for arm in ARMS:
            with Client(pairs[arm].decode_endpoint) as client:
                _finish(client, jobs[:2], concurrency=1)
        _alternate(options.repeats, progress, "overlap load", run)
    if any(ids != tokens[0] for ids in tokens):
        raise TandemError("the runs gave different tokens")
    job_us = 1e6 * sum(outputs) / len(jobs) / statistics.median(rates["on"])
    return {
        "tokens_per_s": {arm: spread(rates[arm]) for arm in ARMS},
        "digest_us": {arm: spread(digests_us[arm]) for arm in ARMS},
        "cost": _share_lost(rates, "off"),
        "twin_cost": _share_lost(rates, "twin"),
        "job_us": job_us,
        "digest_share": DIGESTS_PER_JOB * statistics.median(digests_us["on"]) / job_us,
        "cpu_ms": {arm: spread(cpus_ms[arm]) for arm in ARMS},
        "cpu_cost": spread([on / off - 1 for on, off in zip(cpus_ms["on"], cpus_ms["off"], strict=True)]),
    }


def _share_lost(rates: dict[str, list[float]], against: str) -> dict[str, float]:
    """How much slower the checked pair is, round by round."""
    return spread([1 - on / other for on, other in zip(rates["on"], rates[against], strict=True)])


def _measure_hand_over(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    times_us: dict[str, list[int]] = {arm: [] for arm in ARMS}
    blocks_us: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpus_us: dict[str, list[float]] = {arm: [] for arm in ARMS}
    (prompt,) = prompts("emulated", "", [HAND_OVER_TOKENS])
    job = BatchJob("job", prompt_ids=prompt, sampling={"max_tokens": 2, "ignore_eos": True})
    prefill_speed, decode_speed = AT_ONCE
    plan = PairPlan(
        "emulated",
        max_tokens=1_024,
        prefetch_depth=1,
        prefill_extra=prefill_speed,
        decode_extra=(*decode_speed, *prefill_speed),
    )
    with all_pairs(plan) as pairs:

        def run(arm: str) -> None:
            with Client(pairs[arm].decode_endpoint) as client:
                taken_us = []
                started_cpu_ms = cpu_ms(pairs[arm])
                for _ in range(BLOCK_JOBS):
                    started_us = now_us()
                    _finish(client, [job], concurrency=1)
                    taken_us.append(now_us() - started_us)
                cpus_us[arm].append(1_000 * (cpu_ms(pairs[arm]) - started_cpu_ms) / BLOCK_JOBS)
            times_us[arm] += taken_us
            blocks_us[arm].append(statistics.median(taken_us))

        for arm in ARMS:
            run(arm)
            for figures in (times_us, blocks_us, cpus_us):
                figures[arm].clear()
        _alternate(max(3, options.hand_overs // BLOCK_JOBS), progress, "raw hand-over", run)
    return {
        "job_us": {arm: spread(times_us[arm]) for arm in ARMS},
        "cost_us": _difference(blocks_us),
        "cpu_us": {arm: spread(cpus_us[arm]) for arm in ARMS},
        "cpu_cost_us": _difference(cpus_us),
    }


def _difference(values: dict[str, list[float]]) -> dict[str, float]:
    """On less off, round by round."""
    return spread([on - off for on, off in zip(values["on"], values["off"], strict=True)])


def _show(figures: dict[str, Any], console: Console) -> None:
    overlap, hand_over = figures["overlap"], figures["hand_over"]
    table = Table(title="Checks on against off: medians; cost round by round (least to greatest)")
    for column in ("", "on", "off", "cost"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        ("overlap load, four clients (tokens/s)", overlap["tokens_per_s"], overlap["cost"], 100, "%"),
        ("  CPU of both nodes per job (ms)", overlap["cpu_ms"], overlap["cpu_cost"], 100, "%"),
        ("  digest at the import (us)", overlap["digest_us"], None, 1, ""),
        (
            f"raw hand-over, {HAND_OVER_TOKENS} tokens (us)",
            hand_over["job_us"],
            hand_over["cost_us"],
            1,
            "us",
        ),
        ("  CPU of both nodes per job (us)", hand_over["cpu_us"], hand_over["cpu_cost_us"], 1, "us"),
    ]
    for label, arms, cost, scale, unit in rows:
        shown = "" if cost is None else f"{_spread(cost, scale)} {unit}"
        table.add_row(label, *(f"{arms[arm]['median']:,.1f}" for arm in ("on", "off")), shown)
    console.print(table)
    twin = _spread(overlap["twin_cost"], 100)
    console.print(f"two equal pairs differ by {twin} %; counted, the checks cost {figures['counted']:.2%}")
    loads = figures["load_average"]
    console.print(f"load average {loads['before']:.2f} before, {loads['after']:.2f} after")


def _spread(figure: dict[str, float], scale: float) -> str:
    median, least, greatest = (f"{figure[key] * scale:,.1f}" for key in ("median", "min", "max"))
    return f"{median} ({least} to {greatest})"
