"""Whether, and from which prompt length on, the prefill node pays on this pair and this link.

Decides the load (prompts of a few lengths of real text, one at a time, each way in turn) and the words. One
decode node computes prompts itself, another one of the same kind has them computed; the times are those that
their jobs report, and become straight lines over the prompt's length. The arithmetic is
`common/remote_worth.py`. With `--worker` the prefill node is one that runs already, on another host.
"""

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import prompts
from common.client_messages import Timings
from common.engines.registry import NAMED_MODEL
from common.errors import ConfigError, NodeUnavailable
from common.messages import Finished
from common.remote_worth import (
    LinearCost,
    fit,
    min_remote_prompt_tokens,
    paying_lengths,
    paying_lengths_with_prefetch,
)
from transport.client import Client
from transport.launch.batch import Batch, BatchJob
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan

ANSWER_TOKENS = 8
UNSURE = (
    "At no length do both ways differ by more than equal prompts do among themselves: take them for equally"
    " fast, or measure again with more --rounds on a quiet machine."
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=list(BACKENDS), default="torch", help="pair of backends (torch)")
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[32, 128, 384, 768], help="prompt lengths (32 128 384 768)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each length, each way (3)")
    parser.add_argument("--answer-tokens", type=int, default=64, help="usual length of an answer (64)")
    parser.add_argument(
        "--kv-plane", choices=["auto", "shm", "tcp"], default="auto", help="data plane (auto)"
    )
    parser.add_argument("--worker", help="endpoint of a prefill node that runs already")
    parser.add_argument("--key-file", help="secret key of the decode node, if that prefill node has keys")
    parser.add_argument("--server-key", help="public key of that prefill node")
    parser.add_argument(
        "--prefill-flag", action="append", default=[], help="for the prefill node, repeatable"
    )
    parser.add_argument("--decode-flag", action="append", default=[], help="for the decode nodes, repeatable")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    if len(set(options.lengths)) < 2:
        raise ConfigError("--lengths: at least two different ones are needed")
    load_before = os.getloadavg()[0]
    samples: dict[str, list[tuple[int, Timings]]] = {"local": [], "remote": []}
    lengths = [length for length in options.lengths for _ in range(options.rounds)]
    ids = prompts(BACKENDS[options.kind][1], options.model, lengths)
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("starting the nodes", total=len(ids))
        pairs = {path: stack.enter_context(Pair(plan)) for path, plan in _plans(options).items()}
        for path, pair in pairs.items():
            pair.wait_ready()
            _time(pair, ids[0], path)
        progress.update(bar, description="one prompt at a time, each way")
        for number, prompt in enumerate(ids):
            for path in samples if number % 2 else reversed(samples):
                samples[path].append((len(prompt), _time(pairs[path], prompt, path)))
            progress.advance(bar)
    figures = figures_of(samples, options.answer_tokens, max(options.lengths))
    figures["load_average"] = {"before": load_before, "after": os.getloadavg()[0]}
    _show(figures, console)
    return figures


def _plans(options: argparse.Namespace) -> dict[str, PairPlan]:
    """A decode node alone, and a pair, or a decode node for a prefill node that runs already."""
    shape = {"kind": options.kind, "model": options.model, "max_tokens": max(options.lengths) + 64}
    flags = tuple(options.decode_flag)
    alone = PairPlan(**shape, alone=True, decode_extra=flags)
    plane = ("--kv-plane", options.kv_plane)
    if options.worker is None:
        prefill = (*plane, *options.prefill_flag)
        pair = PairPlan(**shape, prefetch_depth=0, prefill_extra=prefill, decode_extra=(*plane, *flags))
        return {"local": alone, "remote": pair}
    flags = (*plane, "--pd-prefill-worker", options.worker, "--pd-remote-only", *flags)
    if options.server_key is not None:
        flags = ("--server-key", options.server_key, *flags)
    return {
        "local": alone,
        "remote": PairPlan(**shape, alone=True, key_file=options.key_file, decode_extra=flags),
    }


def _time(pair: Pair, prompt: list[int], path: str) -> Timings:
    """What one job says of itself; a client for each, because an idle one would lose its session."""
    sampling = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    job = BatchJob("job", prompt_ids=prompt, sampling=sampling)
    with Client(pair.decode_endpoint, keys=pair.plan.client_keys()) as client:
        (outcome,) = Batch(client, [job], concurrency=1).run()
    if not isinstance(outcome.answer, Finished) or outcome.answer.path != path:
        raise NodeUnavailable(f"a job did not go the {path} way: {outcome.answer}")
    return outcome.answer.timings


def figures_of(
    samples: dict[str, list[tuple[int, Timings]]], answer_tokens: int, max_tokens: int
) -> dict[str, Any]:
    """Lines of each cost, and what follows from them, given each way's prompt lengths and timings."""
    local, remote = samples["local"], samples["remote"]
    steps = [timing.decode_busy_us / (ANSWER_TOKENS - 1) / 1e3 for _, timing in local + remote]
    step_ms = median(steps)
    lines = {
        "local_first_token": _line(local, lambda timing: timing.first_token_ms),
        "remote_first_token": _line(remote, lambda timing: timing.first_token_ms),
        "remote_compute": _line(remote, lambda timing: timing.prefill_busy_us / 1e3),
        "transfer": _line(remote, lambda timing: timing.transfer_us / 1e3),
        "transfer_exposed": _line(remote, lambda timing: timing.transfer_exposed_us / 1e3),
        "lane_import": _line(remote, lambda timing: (timing.copy_us + timing.digest_us) / 1e3),
    }
    first = paying_lengths(lines["local_first_token"], lines["remote_first_token"], max_tokens)
    producer = lines["remote_compute"].plus(lines["transfer_exposed"])
    throughput = paying_lengths_with_prefetch(
        lines["local_first_token"], producer, lines["lane_import"], answer_tokens * step_ms, max_tokens
    )
    return {
        "lines_ms": {
            name: {"fixed": line.fixed_ms, "per_token": line.token_ms} for name, line in lines.items()
        },
        "step_ms": step_ms,
        "answer_tokens": answer_tokens,
        "max_tokens": max_tokens,
        "first_token": _paying(first, max_tokens),
        "throughput": _paying(throughput, max_tokens),
        "within_spread": (within_spread := _is_within_spread(samples)),
        "words": [
            *words(first, throughput, max_tokens, answer_tokens, lines),
            *([UNSURE] if within_spread else []),
        ],
    }


def _by_length(samples: list[tuple[int, Timings]]) -> dict[int, list[Timings]]:
    return {length: [timing for tokens, timing in samples if tokens == length] for length, _ in samples}


def _line(samples: list[tuple[int, Timings]], cost_ms: Callable[[Timings], float]) -> LinearCost:
    """The line through the medians of each length: one prompt that was held up must not turn it."""
    by_length = _by_length(samples)
    return fit([(tokens, median(map(cost_ms, timings))) for tokens, timings in by_length.items()])


def _is_within_spread(samples: dict[str, list[tuple[int, Timings]]]) -> bool:
    """Whether, at every length, some prompt went the slower way as fast as another one the faster way."""
    local, remote = (_by_length(samples[path]) for path in ("local", "remote"))
    for length, timings in local.items():
        ours = [timing.first_token_ms for timing in timings]
        theirs = [timing.first_token_ms for timing in remote[length]]
        if min(ours) > max(theirs) or min(theirs) > max(ours):
            return False
    return True


def _paying(lengths: range, max_tokens: int) -> dict[str, int | None]:
    return {
        "from_tokens": lengths.start if lengths else None,
        "to_tokens": lengths.stop - 1 if lengths else None,
        "min_remote_prompt_tokens": min_remote_prompt_tokens(lengths, max_tokens),
    }


def words(
    first: range, throughput: range, max_tokens: int, answer_tokens: int, lines: dict[str, LinearCost]
) -> list[str]:
    """What the figures mean, in whole sentences."""
    told = [_sentence("For the first token", first, max_tokens)]
    row = f"For throughput, with prefetch and answers of {answer_tokens} tokens"
    told.append(_sentence(row, throughput, max_tokens))
    least = min_remote_prompt_tokens(first, max_tokens)
    if least is not None and least > 1:
        told.append(f"Keep shorter prompts local: --min-remote-prompt-tokens {least}")
    exposed = max(0.0, lines["transfer_exposed"].at(max_tokens))
    if lines["transfer"].at(max_tokens) > 0:
        told.append(
            f"The link delays the first token of a prompt of {max_tokens} tokens by {exposed:.0f} ms beyond"
            f" its compute of {lines['remote_compute'].at(max_tokens):.0f} ms."
        )
    else:
        told.append(
            "The nodes share memory, so there is no link; the import costs the lane"
            f" {lines['lane_import'].at(max_tokens):.0f} ms for a prompt of {max_tokens} tokens."
        )
    return told


def _sentence(what: str, paying: range, max_tokens: int) -> str:
    if not paying:
        return f"{what}, the prefill node never pays for prompts of up to {max_tokens} tokens."
    if len(paying) == max_tokens:
        return f"{what}, the prefill node always pays."
    if paying.stop == max_tokens + 1:
        return f"{what}, the prefill node pays from {paying.start} tokens on."
    return f"{what}, the prefill node pays only from {paying.start} to {paying.stop - 1} tokens."


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Times as straight lines over the prompt's length; step {figures['step_ms']:.1f} ms")
    for column in ("", "fixed (ms)", "per 1,000 tokens (ms)"):
        table.add_column(column, justify="right" if column else "left")
    for name, line in figures["lines_ms"].items():
        table.add_row(name.replace("_", " "), f"{line['fixed']:,.1f}", f"{1_000 * line['per_token']:,.1f}")
    console.print(table)
    for sentence in figures["words"]:
        console.print(sentence)
    loads = figures["load_average"]
    console.print(f"load average {loads['before']:.2f} before, {loads['after']:.2f} after")
