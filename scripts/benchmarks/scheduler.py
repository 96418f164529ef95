"""What a token costs beside the engine: CPU time of all threads of both nodes, with many lanes and jobs.

Decides the load: emulated engines of hardly any declared time, short prompts and answers, so that nearly all
of the time is scheduling, messages and text. Runs with a short and with a long queue alternate over one pair;
the nodes are started by `metered.py`, which clocks the engines' calls. The kernel says what each thread used.
A queue longer than a node takes is measured in the core alone.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figures import spread
from benchmarks.metered import COMPUTE_THREAD, ENGINE_NS, TEXT_THREAD
from common.clock import now_us
from common.decode_config import QUEUE_MAX
from common.errors import ConfigError, NodeUnavailable
from common.messages import Finished
from transport.client import Client
from transport.launch.batch import Batch, BatchJob
from transport.launch.daemon_process import DaemonProcess
from transport.launch.pair import Pair
from transport.launch.pair_plan import PairPlan

PROMPT_TOKENS = 16


class MeteredDaemon(DaemonProcess):
    """A daemon whose engine is clocked."""

    profiles: Path | None = None

    def __init__(self, program: str, arguments: list[str], directory: Path, suffix: str) -> None:
        own = directory / f"{program}{suffix}"
        own.mkdir()
        self.meter_path = own / "meter"
        if self.profiles is not None:
            kept = self.profiles.absolute() / f"{program}{suffix}"
            kept.mkdir(parents=True, exist_ok=True)
            self.meter_path.with_suffix(".profiles").symlink_to(kept)
        self.role = program.removesuffix("_node") + suffix
        super().__init__("scripts.benchmarks.metered", [str(self.meter_path), program, *arguments], own)

    def cpu_us(self) -> dict[str, float]:
        """CPU time so far: of the engine, of compute beside it, of text, of the loop, and of all else."""
        meter = np.memmap(self.meter_path, dtype=np.int64, mode="r", shape=(3,))
        threads = {int(task.name): _ran_us(task) for task in Path(f"/proc/{self.pid}/task").iterdir()}
        engine = float(meter[ENGINE_NS]) / 1e3
        return {
            "engine": engine,
            "compute": threads.pop(int(meter[COMPUTE_THREAD])) - engine,
            "text": threads.pop(int(meter[TEXT_THREAD]), 0.0),
            "loop": threads.pop(self.pid),
            "other": sum(threads.values()),
        }


def _ran_us(task: Path) -> float:
    """What the kernel's scheduler says a thread has run."""
    return int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e3


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lanes", type=int, default=64, help="lanes (64)")
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs in a run (10000)")
    parser.add_argument("--tokens", type=int, default=16, help="answer of each job (16)")
    parser.add_argument(
        "--queues", type=int, nargs="+", default=(10, QUEUE_MAX), help=f"waiting jobs (10 {QUEUE_MAX})"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each queue (1)")
    parser.add_argument("--decode-ms", type=float, default=0.1, help="declared time of a step (0.1)")
    parser.add_argument("--alone", action="store_true", help="without a prefill node")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="profile each thread into DIR instead")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if max(options.queues) > QUEUE_MAX:
        raise ConfigError(f"--queues: a node takes at most {QUEUE_MAX}")
    speed = ("--emulated-prefill-tokens-per-s", "1e9")
    plan = PairPlan(
        "emulated",
        max_tokens=128,
        lanes=options.lanes,
        alone=options.alone,
        prefill_extra=speed,
        decode_extra=(
            *speed,
            *("--emulated-decode-ms", str(options.decode_ms), "--max-queue", str(max(options.queues))),
        ),
    )
    runs: dict[int, list[dict[str, Any]]] = {queue: [] for queue in options.queues}
    daemon_class = type("ProfiledDaemon", (MeteredDaemon,), {"profiles": options.profile})
    with Pair(plan, daemon_class) as pair:
        pair.wait_ready()
        _run(pair, options, min(options.queues), options.jobs // 10 + 1)
        for _ in range(1 if options.profile else options.repeats):
            for queue in runs:
                runs[queue].append(_run(pair, options, queue, options.jobs))
    figures = {str(queue): _figures(values) for queue, values in runs.items()}
    _show(figures, console)
    return figures


def _run(pair: Pair, options: argparse.Namespace, queue: int, job_count: int) -> dict[str, Any]:
    """One run of all jobs with so many waiting: microseconds of each node's threads, tokens and seconds."""
    sampling = {"max_tokens": options.tokens, "ignore_eos": True}
    jobs = [
        BatchJob(
            "", prompt_ids=[97 + (index + place) % 26 for place in range(PROMPT_TOKENS)], sampling=sampling
        )
        for index in range(job_count)
    ]
    with Client(pair.decode_endpoint) as client:
        before = [daemon.cpu_us() for daemon in pair.daemons]
        started_us = now_us()
        outcomes = Batch(client, jobs, concurrency=options.lanes + queue).run()
        wall_us = now_us() - started_us
        after = [daemon.cpu_us() for daemon in pair.daemons]
    if not all(isinstance(outcome.answer, Finished) for outcome in outcomes):
        raise NodeUnavailable("not every job was finished")
    tokens = sum(len(outcome.token_ids) for outcome in outcomes)
    used = {
        f"{daemon.role}: {part}": (new[part] - old[part]) / tokens
        for daemon, old, new in zip(pair.daemons, before, after, strict=True)
        for part in new
    }
    return {"us_per_token": used, "tokens_per_s": 1e6 * tokens / wall_us}


def _figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    parts = {part: spread([run["us_per_token"][part] for run in runs]) for part in runs[0]["us_per_token"]}
    beside = [
        sum(us for part, us in run["us_per_token"].items() if not part.endswith(": engine")) for run in runs
    ]
    return {
        "us_per_token": parts,
        "us_per_token_beside_engine": spread(beside),
        "tokens_per_s": spread([run["tokens_per_s"] for run in runs]),
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title="CPU time per token (us): medians")
    table.add_column("")
    for queue in figures:
        table.add_column(f"{queue} waiting", justify="right")
    for part in next(iter(figures.values()))["us_per_token"]:
        table.add_row(part, *(f"{own['us_per_token'][part]['median']:.1f}" for own in figures.values()))
    beside = [own["us_per_token_beside_engine"]["median"] for own in figures.values()]
    table.add_row("all beside the engines", *(f"{value:.1f}" for value in beside))
    rates = [own["tokens_per_s"]["median"] for own in figures.values()]
    table.add_row("tokens/s", *(f"{value:.0f}" for value in rates))
    console.print(table)
