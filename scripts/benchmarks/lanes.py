"""Decode throughput of several lanes against one, in the engine and through the daemons.

Decides the load: lanes of different lengths, 200 to 500 positions. The engine is measured on one core with
one thread, all counts of lanes in turn in every round; what the KV holds does not change the time, so it is
noise. Through the daemons, one pair for each count of lanes stays up, each gets as many jobs at once as it
has lanes, and the tokens are counted between the last job's first token and the first job's last one: there,
all lanes decode and nobody prefills.
"""

import argparse
import statistics
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.figures import even, prompts, spread
from common.clock import now_us
from common.cpus import available_cpus
from common.engines.registry import NAMED_MODEL, EngineSettings, load_decode_engine
from common.errors import ConfigError, NodeUnavailable
from common.messages import Failed, Finished, Rejected, Tokens
from transport.client import Client
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan

COUNTS = (1, 2, 4)
LENGTHS = (200, 500)
STEP_LENGTHS = (64, 256, 512, 1_024)
WARM_UP_TOKENS = 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=list(BACKENDS), default="torch", help="pair of backends (torch)")
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument(
        "--lanes", type=int, nargs="+", default=COUNTS, metavar="N", help="counts of lanes beside 1 (1 2 4)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds in the engine (9)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each count in a round (8)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each pair; 0: the engine alone (3)")
    parser.add_argument(
        "--tokens", type=int, default=128, help="answer of each job through the daemons (128)"
    )


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if min(options.lanes) < 1 or 0 < options.repeats < 3:
        raise ConfigError("--lanes: 1 or more; --repeats: a median needs at least 3 runs, or none")
    counts = sorted({1, *options.lanes})
    figures: dict[str, Any] = {"daemons": _through_daemons(options, counts) if options.repeats else {}}
    figures |= _engine(options, counts)
    _show(figures, counts, console)
    return figures


def _engine(options: argparse.Namespace, counts: list[int]) -> dict[str, Any]:
    """Rates of each count of lanes, and what a step takes at several lengths."""
    engine = _loaded(options, max(counts))
    lengths = even(*LENGTHS, max(counts)) if max(counts) > 1 else [sum(LENGTHS) // 2]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    steps: dict[tuple[int, int], list[float]] = {(n, at): [] for n in counts for at in STEP_LENGTHS}
    for turn in range(options.rounds):
        for count in counts:
            # Turned from round to round: one lane alone has each of the lengths in turn.
            lanes = [(turn + index) % len(lengths) for index in range(count)]
            taken_us = _step_us(engine, lanes, [lengths[lane] for lane in lanes], options.steps)
            rates[count].append(1e6 * count * options.steps / taken_us)
        for count, length in steps:
            taken_us = _step_us(engine, list(range(count)), [length] * count, 2)
            steps[count, length].append(taken_us / 2_000)
    return {
        "engine": _against_one(rates),
        "step_ms": {
            str(count): {str(length): statistics.median(steps[count, length]) for length in STEP_LENGTHS}
            for count in counts
        },
    }


def _loaded(options: argparse.Namespace, lanes: int) -> Any:
    """A decode engine whose lanes are full of noise."""
    settings = EngineSettings(
        backend=BACKENDS[options.kind][1],
        model=options.model,
        max_tokens=max(STEP_LENGTHS) + 2,
        lanes=lanes,
        threads=1,
    )
    engine = load_decode_engine(settings)
    layout = engine.capabilities.layout
    draw = np.random.default_rng(0)
    noise = draw.integers(0, 256, layout.shape, dtype=np.uint8)
    if engine.capabilities.dtype == "float32":
        noise = draw.standard_normal(layout.shape, dtype=np.float32)
    for lane in range(lanes):
        engine.write_kv(lane, 0, 0, noise)
    return engine


def _step_us(engine: Any, lanes: list[int], lengths: list[int], step_count: int) -> int:
    for lane, length in zip(lanes, lengths, strict=True):
        engine.set_length(lane, length)
    token_ids = [1] * len(lanes)
    started_us = now_us()
    for _ in range(step_count):
        token_ids = [int(row.argmax()) for row in engine.step(lanes, token_ids)]
    return now_us() - started_us


def _against_one(rates: dict[int, list[float]]) -> dict[str, Any]:
    """Tokens per second of each count, and their median as a multiple of one lane's."""
    one = statistics.median(rates[1])
    return {
        str(count): {"tokens_per_s": spread(values), "times_one_lane": statistics.median(values) / one}
        for count, values in rates.items()
    }


def _through_daemons(options: argparse.Namespace, counts: list[int]) -> dict[str, Any]:
    rates: dict[int, list[float]] = {count: [] for count in counts}
    first, last = LENGTHS[0], LENGTHS[0] + options.tokens
    # One decode thread, however many CPUs there are.
    decode_cpu = ("--cpus", str(max(available_cpus())))
    pairs: dict[int, Pair] = {}
    try:
        for count in counts:
            pairs[count] = Pair(
                PairPlan(options.kind, options.model, max_tokens=last, lanes=count, decode_extra=decode_cpu)
            )
        for pair in pairs.values():
            pair.wait_ready()
        ids = prompts(BACKENDS[options.kind][1], options.model, [first - 1] * max(counts))
        for _ in range(options.repeats):
            for count, pair in pairs.items():
                rates[count].append(_rate(pair, ids[:count], options.tokens))
    finally:
        for pair in pairs.values():
            pair.stop()
    return _against_one(rates)


def _rate(pair: Pair, prompt_ids: list[list[int]], token_count: int) -> float:
    """Tokens per second while all jobs decode."""
    arrivals: dict[str, list[tuple[int, int]]] = {str(index): [] for index in range(len(prompt_ids))}
    waiting = set(arrivals)
    with Client(pair.decode_endpoint) as client:
        for label, ids in zip(arrivals, prompt_ids, strict=True):
            sampling = {"max_tokens": token_count, "ignore_eos": True}
            client.submit(label, prompt_ids=ids, sampling=sampling)
        while waiting:
            for message in client.events():
                if isinstance(message, Tokens):
                    arrivals[message.label].append((now_us(), len(message.token_ids)))
                elif isinstance(message, Finished):
                    waiting.discard(message.label)
                elif isinstance(message, (Failed, Rejected)):
                    raise NodeUnavailable(f"the decode node answered {message}")
    return _rate_between(list(arrivals.values()))


def _rate_between(arrivals: list[list[tuple[int, int]]]) -> float:
    begin_us = max(job[min(WARM_UP_TOKENS, len(job) - 1)][0] for job in arrivals)
    end_us = min(job[-1][0] for job in arrivals)
    if end_us <= begin_us:
        raise ConfigError("--tokens: the first job ended before the last one began; give more")
    tokens = sum(count for job in arrivals for at_us, count in job if begin_us < at_us <= end_us)
    return 1e6 * tokens / (end_us - begin_us)


def _show(figures: dict[str, Any], counts: list[int], console: Console) -> None:
    table = Table(title="Lanes: medians")
    table.add_column("")
    for count in counts:
        table.add_column(f"{count} lanes" if count > 1 else "1 lane", justify="right")
    for name in ("engine", "daemons"):
        if figures[name]:
            cells = [figures[name][str(count)] for count in counts]
            table.add_row(f"{name}: tokens/s", *(f"{cell['tokens_per_s']['median']:.1f}" for cell in cells))
            table.add_row("  times one lane", *(f"{cell['times_one_lane']:.2f}" for cell in cells))
    for length in STEP_LENGTHS:
        cells = [f"{figures['step_ms'][str(count)][str(length)]:.1f}" for count in counts]
        table.add_row(f"step behind {length} positions (ms)", *cells)
    console.print(table)
