"""The control path: PING to PONG, and what daemons cost that have nothing to do.

Decides how a round trip is timed: a client's session with an idle decode node over ipc, one PING at a time,
no pause in between. The CPU share comes from the kernel's account of the process, over some idle seconds.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures import percentile, spread
from common.clock import now_us, pause_ms
from common.errors import NodeUnavailable
from common.ids import new_incarnation
from common.messages import Hello, HelloOk, Ping, Role
from transport.codec import Header, decode, encode
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan
from transport.link import DealerLink
from transport.zmq_sockets import new_context

ANSWER_MS = 5_000


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=list(BACKENDS), default="torch", help="pair of backends (torch)")
    parser.add_argument("--count", type=int, default=2_000, help="round trips (2000)")
    parser.add_argument("--idle-s", type=int, default=20, help="idle seconds watched (20)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    with Pair(PairPlan(options.kind)) as pair:
        pair.wait_ready()
        trips_us = _round_trips(pair.decode_endpoint, options.count)
        pids = {"decode": pair.decode.pid, "prefill": pair.prefill.pid}
        before = {role: _cpu_s(pid) for role, pid in pids.items()}
        with console.status(f"watching idle daemons for {options.idle_s} s"):
            pause_ms(1_000 * options.idle_s)
        idle = {role: (_cpu_s(pid) - before[role]) / options.idle_s for role, pid in pids.items()}
    figures = {
        "round_trip_us": spread(trips_us) | {"p95": percentile(trips_us, 0.95)},
        "idle_core_share": idle,
    }
    trip = figures["round_trip_us"]
    console.print(f"PING to PONG over ipc: p50 {trip['median']:.0f} us, p95 {trip['p95']:.0f} us")
    for role, share in idle.items():
        console.print(f"idle {role} node: {100 * share:.2f} % of a core")
    return figures


def _round_trips(endpoint: str, count: int) -> list[int]:
    context = new_context()
    link = DealerLink(context, endpoint, b"bench")
    hello_ok = _exchange(link, Header(None, 0), Hello(new_incarnation(), 1, Role.CLIENT))
    if not isinstance(hello_ok, HelloOk):
        raise NodeUnavailable(f"the decode node answered {hello_ok}")
    trips_us = []
    for sequence in range(1, count + 1):
        started_us = now_us()
        _exchange(link, Header(hello_ok.session, sequence), Ping())
        trips_us.append(now_us() - started_us)
    link.close()
    context.term()
    return trips_us


def _exchange(link: DealerLink, header: Header, message: Any) -> Any:
    """Send a message and wait for the answer."""
    link.send(link.route, encode(header, message))
    if not link.socket.poll(ANSWER_MS):
        raise NodeUnavailable(f"no answer to {type(message).__name__} within {ANSWER_MS} ms")
    ((_, frames),) = link.receive(1)
    return decode(frames)[1]


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
