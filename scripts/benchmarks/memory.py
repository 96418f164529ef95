"""Resident memory of both daemons over many jobs.

Decides what flat means: the growth from the end of the first tenth of the jobs to the end, in MiB and per
job. Memory is what the kernel counts as resident; pages of the slab count in both daemons, once in each.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.figures import even, prompts
from common.engines.registry import NAMED_MODEL
from transport.client import Client
from transport.launch.batch import Batch, BatchJob
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=list(BACKENDS), default="torch", help="pair of backends (torch)")
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument("--jobs", type=int, default=100, help="jobs (100)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    ids = prompts(BACKENDS[options.kind][1], options.model, even(32, 256, 7))
    sampling = {"max_tokens": 8, "ignore_eos": True}
    plan = PairPlan(options.kind, options.model, max_tokens=512)
    samples: dict[str, list[float]] = {"decode": [], "prefill": []}
    with Pair(plan) as pair, _ready_client(pair) as client:
        step = max(1, options.jobs // 10)
        for start in track(range(0, options.jobs, step), "running jobs", console=console, transient=True):
            count = min(step, options.jobs - start)
            jobs = [
                BatchJob(str(index), prompt_ids=ids[index % len(ids)], sampling=sampling)
                for index in range(start, start + count)
            ]
            Batch(client, jobs, concurrency=4).run()
            samples["decode"].append(_resident_mib(pair.decode.pid))
            samples["prefill"].append(_resident_mib(pair.prefill.pid))
    figures = {
        role: {"first_tenth_mib": values[0], "end_mib": values[-1], "growth_mib": values[-1] - values[0]}
        for role, values in samples.items()
    }
    for role, values in figures.items():
        console.print(
            f"{role} node: {values['end_mib']:.0f} MiB at the end,"
            f" {values['growth_mib']:+.1f} MiB since the first tenth of {options.jobs} jobs"
        )
    return figures


def _ready_client(pair: Pair) -> Client:
    pair.wait_ready()
    return Client(pair.decode_endpoint)


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1_024
