"""What the gateway costs: time added to the first token, and its CPU time for each token of a stream.

Decides both loads, on emulated engines. First token: the same prompts, one at a time, by turns through the
client class and through HTTP on a connection that stays open; the figure is the difference of the medians of
what the client sees. CPU: as many streams at once as there are lanes; what the kernel charged the gateway's
threads meanwhile, by the tokens that went through.
"""

import argparse
import http.client
import json
import threading
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures import percentile, spread
from common.clock import now_us
from common.errors import NodeUnavailable
from common.messages import Finished, Tokens
from transport.client import Client
from transport.launch.pair import Pair
from transport.launch.pair_plan import PairPlan

PROMPT_TOKENS = 64
WARM_UP = 10
ANSWER_MS = 10_000
FIRST_TOKEN_GOAL_MS = 3.0
CPU_GOAL_MS = 0.2


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=200, help="first tokens each way (200)")
    parser.add_argument("--streams", type=int, default=8, help="streams at once, and lanes (8)")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream (400)")
    parser.add_argument("--decode-ms", type=float, default=10, help="declared time of a decode step (10)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    steps = ("--emulated-decode-ms", str(options.decode_ms))
    plan = PairPlan(
        "emulated",
        prefetch_depth=0,
        lanes=options.streams,
        decode_extra=steps,
        gateway=("--port", "0"),
    )
    with Pair(plan) as pair:
        pair.wait_ready()
        first = _first_tokens(pair, options.count)
        stream = _streams(pair, options.streams, options.tokens)
    added_ms = (first["gateway"]["median"] - first["direct"]["median"]) / 1_000
    console.print(
        f"first token: {first['direct']['median'] / 1_000:.2f} ms directly, "
        f"{first['gateway']['median'] / 1_000:.2f} ms through the gateway (medians): {added_ms:.2f} ms added,"
        f" goal {FIRST_TOKEN_GOAL_MS} ms"
    )
    console.print(
        f"{options.streams} streams: {stream['cpu_ms_per_token']:.3f} ms of the gateway's CPU time per token "
        f"({stream['tokens']} tokens, {stream['tokens_per_s']:.0f} per second), goal {CPU_GOAL_MS} ms"
    )
    return {"first_token_us": first, "first_token_added_ms": added_ms, "streams": stream}


def _prompt(number: int) -> list[int]:
    return [97 + (position * 7 + number) % 26 for position in range(PROMPT_TOKENS)]


def _first_tokens(pair: Pair, count: int) -> dict[str, dict[str, float]]:
    taken: dict[str, list[int]] = {"direct": [], "gateway": []}
    connection = _connection(pair)
    with Client(pair.decode_endpoint) as client:
        for number in range(WARM_UP + count):
            direct_us = _direct(client, number)
            through_us = _through(connection, number)
            if number >= WARM_UP:
                taken["direct"].append(direct_us)
                taken["gateway"].append(through_us)
    connection.close()
    return {way: spread(times) | {"p95": percentile(times, 0.95)} for way, times in taken.items()}


def _direct(client: Client, number: int) -> int:
    started_us, first_us = now_us(), 0
    client.submit(str(number), prompt_ids=_prompt(number), sampling={"max_tokens": 2, "ignore_eos": True})
    while client.live:
        for message in client.events(ANSWER_MS):
            if isinstance(message, Tokens) and not first_us:
                first_us = now_us()
            elif not isinstance(message, Finished) and hasattr(message, "code"):
                raise NodeUnavailable(f"a job failed: {message.detail}")
    return first_us - started_us


def _through(connection: http.client.HTTPConnection, number: int) -> int:
    started_us = now_us()
    response = _ask(connection, number, 2)
    while not response.readline().startswith(b"data: "):
        continue
    first_us = now_us()
    response.read()
    return first_us - started_us


def _connection(pair: Pair) -> http.client.HTTPConnection:
    address = pair.gateway.endpoint.removeprefix("http://")
    return http.client.HTTPConnection(address, timeout=ANSWER_MS / 1_000)


def _ask(connection: http.client.HTTPConnection, number: int, tokens: int) -> http.client.HTTPResponse:
    body = {"model": "emulated-0", "prompt": _prompt(number), "max_tokens": tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise NodeUnavailable(f"the gateway answered {response.status}: {response.read(500)!r}")
    return response


def _streams(pair: Pair, streams: int, tokens: int) -> dict[str, float]:
    ended: list[bool] = []

    def one(number: int) -> None:
        connection = _connection(pair)
        ended.append(_ask(connection, number, tokens).read().endswith(b"data: [DONE]\n\n"))
        connection.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(streams)]
    used_ns, started_us = _cpu_ns(pair.gateway.pid), now_us()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used_ns, taken_us = _cpu_ns(pair.gateway.pid) - used_ns, now_us() - started_us
    if ended != [True] * streams:
        raise NodeUnavailable("a stream did not come to its end")
    total = streams * tokens
    return {
        "tokens": total,
        "cpu_ms_per_token": used_ns / total / 1e6,
        "tokens_per_s": 1e6 * total / taken_us,
    }


def _cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process so far, as the scheduler counts it, which is finer than ticks."""
    counts = [path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, counts))
