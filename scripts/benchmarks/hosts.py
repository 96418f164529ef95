"""A pair on two test hosts: how much of the transfer hides behind the prefill's compute.

Decides the load (prompts of one length, one at a time, two tokens out) and what is compared: what a job's
timings say of its transfer, in all and beyond the last chunk's compute, against the busy time of its prefill.
Part of `bench.py transfer`. The link is made by `shaping.py`. Daemons on network namespaces bind addresses
that are not loopback, so they have keys, and what they send is encrypted; over the relay it is not.
"""

import argparse
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import prompts, spread
from benchmarks.on_host import MARK
from benchmarks.shaping import Link, make_link
from common.engines.registry import NAMED_MODEL
from common.errors import NodeUnavailable, TandemError
from common.messages import Finished
from transport.client import Client
from transport.key_files import make_key_pair
from transport.launch.batch import Batch, BatchJob
from transport.launch.daemon_process import DaemonProcess
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan

EXPOSED_GOAL = 0.10
GOAL_MBIT = 1_000
TCP_FLAGS = ("--kv-plane", "tcp")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts",
        nargs="*",
        type=int,
        metavar="MBIT",
        help="two test hosts, with links of these rates (1000 10000)",
    )
    parser.add_argument(
        "--link", choices=["auto", "namespaces", "relay"], default="auto", help="how hosts are joined (auto)"
    )
    parser.add_argument("--delay-us", type=int, default=200, help="delay of the link, each way (200)")
    parser.add_argument("--kind", choices=list(BACKENDS), default="torch", help="pair of backends (torch)")
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument("--tokens", type=int, default=1_024, help="tokens of each prompt (1024)")
    parser.add_argument("--jobs", type=int, default=5, help="prompts over each link (5)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    ids = prompts(BACKENDS[options.kind][1], options.model, [options.tokens] * options.jobs)
    load_before = os.getloadavg()[0]
    links: dict[str, Any] = {}
    for mbit_per_s in options.hosts or (1_000, 10_000):
        control_port, bulk_port = free_ports("127.0.0.1", 2)
        with make_link(options.link, mbit_per_s, options.delay_us, (control_port, bulk_port)) as link:
            console.print(f"{mbit_per_s} Mbit/s: {link.note}")
            plan = plan_of(options, link, control_port, bulk_port)
            links[str(mbit_per_s)] = {"link": link.note, **_run(plan, link, ids)}
    figures = {
        "prompt_tokens": options.tokens,
        "links": links,
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
    }
    _show(figures, console)
    return figures


def free_ports(host: str, count: int) -> list[int]:
    """Ports of `host` that nobody listens at."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [plain.getsockname()[1] for plain in sockets]
    for plain in sockets:
        plain.close()
    return ports


def plan_of(options: argparse.Namespace, link: Link, control_port: int, bulk_port: int) -> PairPlan:
    """A pair whose nodes meet over the link; the decode node's clients come by a socket file."""
    return PairPlan(
        options.kind,
        options.model,
        max_tokens=options.tokens + 64,
        prefetch_depth=0,
        prefill_endpoint=f"tcp://{link.prefill_host}:{control_port}",
        prefill_extra=(*TCP_FLAGS, "--kv-port", str(bulk_port)),
        decode_extra=(*TCP_FLAGS, "--pd-prefill-worker", f"tcp://{link.worker_host}:{control_port}"),
    )


def daemon_on(link: Link) -> Callable[[str, list[str], Path, str], DaemonProcess]:
    """What starts a daemon on its host, for `Pair`."""

    def start(program: str, arguments: list[str], directory: Path, suffix: str) -> DaemonProcess:
        if program not in link.hosts:
            return DaemonProcess(program, arguments, directory, suffix)
        own = directory / f"{program}{suffix}"
        own.mkdir()
        words = [MARK + link.hosts[program], program, *arguments]
        return DaemonProcess("scripts.benchmarks.on_host", words, own)

    return start


def _run(plan: PairPlan, link: Link, ids: list[list[int]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        if link.hosts:
            secret, _ = make_key_pair("hosts", Path(directory) / "keys")
            plan = replace(plan, key_file=str(secret))
        with Pair(plan, daemon_on(link)) as pair:
            pair.wait_ready()
            with Client(pair.decode_endpoint, keys=plan.client_keys()) as client:
                return figures_of(finish(client, ids))


def finish(client: Client, ids: list[list[int]]) -> list[Finished]:
    """The answers of prompts that are sent one after another, less the first, which warms up."""
    sampling = {"max_tokens": 2, "ignore_eos": True}
    jobs = [BatchJob(str(number), prompt_ids=prompt, sampling=sampling) for number, prompt in enumerate(ids)]
    outcomes = Batch(client, [jobs[0], *jobs], concurrency=1).run()
    answers = [outcome.answer for outcome in outcomes]
    if not all(isinstance(answer, Finished) and answer.path == "remote" for answer in answers):
        raise NodeUnavailable(f"not every job went the remote way: {answers}")
    return answers[1:]


def figures_of(answers: list[Finished]) -> dict[str, Any]:
    """Times in ms, and the exposed share of each prompt's transfer."""
    timings = [answer.timings for answer in answers]
    if not any(timing.transfer_us for timing in timings):
        raise TandemError("no transfer was measured: did the pair use another plane than tcp?")
    return {
        "prefill_ms": spread([timing.prefill_busy_us / 1e3 for timing in timings]),
        "transfer_ms": spread([timing.transfer_us / 1e3 for timing in timings]),
        "exposed_ms": spread([timing.transfer_exposed_us / 1e3 for timing in timings]),
        "exposed_of_prefill": spread(
            [timing.transfer_exposed_us / max(1, timing.prefill_busy_us) for timing in timings]
        ),
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Two hosts, {figures['prompt_tokens']} tokens: medians")
    for column in ("Mbit/s", "prefill (ms)", "transfer (ms)", "not hidden (ms)", "of prefill", "goal"):
        table.add_column(column, justify="right")
    for rate, values in figures["links"].items():
        share = values["exposed_of_prefill"]["median"]
        goal = f"{EXPOSED_GOAL:.0%} {'met' if share <= EXPOSED_GOAL else 'missed'}"
        times = [f"{values[key]['median']:,.1f}" for key in ("prefill_ms", "transfer_ms", "exposed_ms")]
        table.add_row(rate, *times, f"{share:.1%}", goal if int(rate) >= GOAL_MBIT else "")
    console.print(table)
    loads = figures["load_average"]
    console.print(f"load average {loads['before']:.2f} before, {loads['after']:.2f} after")
