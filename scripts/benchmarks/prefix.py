"""What the prefix caches spare: time to the first token, bytes sent, tokens computed.

Decides the load (a chat of four turns, and questions under one system prompt of 512 tokens, one by one and
then together) and holds what is spared against the targets. Each arm (caches off and on, prefetch off and on)
is a pair of its own. p of a prompt is the busy time of its prefill chunks, of the same run.
"""

import argparse
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import LICENCE, spread
from common.clock import now_us
from common.engines.interface import Tokenizer
from common.engines.registry import NAMED_MODEL, EngineSettings, load_tokenizer
from common.errors import NodeUnavailable
from common.kv_layout import KvLayout
from common.messages import Finished, Tokens
from transport.client import Client
from transport.launch.pair import Pair
from transport.launch.pair_plan import BACKENDS, PairPlan

BLOCK_TOKENS = 16
CACHE = ("--prefix-cache-mb", "256", "--prefix-block-tokens", str(BLOCK_TOKENS))
SYSTEM_TOKENS = 512
ANSWER_TOKENS = {"chat": 24, "shared": 8, "together": 8}
FIRST_TOKEN_RATIO_MAX = 1.2
CHAT = (
    "My grandmother left me a wind-up clock that stops every night at about three. Where would you start?",
    "I opened the back. There is a spring, a row of brass wheels and a lot of black grease. Is that normal?",
    "It runs longer now, but it loses ten minutes a day. Can I change that without taking it apart?",
    "Thank you. One more thing: how often should I wind it, and can I wind it too far?",
)
QUESTIONS = (
    "May I sell copies of this work?",
    "What must I keep in a file that I change?",
    "Who answers for damage that the work does?",
    "May I use the name of its authors to advertise mine?",
    "What becomes of a patent that a contributor holds?",
    "Is there any warranty at all?",
)
TOGETHER = (
    "Can I add terms of my own?",
    "What is a derivative work here?",
    "Do I have to publish what I change?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One job. new_tokens: of its prompt, beyond what it shares with an earlier prompt and its answer.

    answer_tokens: of what it shares, those that were an answer, which the prefill node has never seen.
    prefill_ms: p. warm: it shares at least a block with an earlier job.
    """

    load: str
    prompt_tokens: int
    new_tokens: int
    answer_tokens: int
    warm: bool
    first_token_ms: float
    prefill_ms: float
    sent_tokens: int
    sent_bytes: int
    computed_tokens: int
    cached_tokens_decode: int
    cached_tokens_prefill: int


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=list(BACKENDS), default="torch", help="pair of backends (torch)")
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    tokenizer = load_tokenizer(EngineSettings(backend=BACKENDS[options.kind][1], model=options.model))
    arms: dict[str, list[Turn]] = {}
    answers: dict[str, list[list[int]]] = {}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=4)
        for prefetch in (0, 1):
            for cache in ("off", "on"):
                arm = f"cache {cache}, prefetch {'on' if prefetch else 'off'}"
                progress.update(bar, description=arm)
                extra = CACHE if cache == "on" else ()
                plan = PairPlan(
                    options.kind,
                    options.model,
                    max_tokens=1_536,
                    prefetch_depth=prefetch,
                    prefill_extra=extra,
                    decode_extra=extra,
                )
                with Pair(plan) as pair:
                    pair.wait_ready()
                    with Client(pair.decode_endpoint) as client:
                        run = _Run(client, tokenizer)
                        run.all()
                arms[arm], answers[arm] = run.turns, run.answers
                progress.advance(bar)
    figures = _figures(arms, answers)
    _show(figures, console)
    return figures


class _Run:
    """The load on one pair."""

    def __init__(self, client: Client, tokenizer: Tokenizer) -> None:
        profile = client.hello.profile
        self._client = client
        self._tokenizer = tokenizer
        # Nodes of one kind: KV travels as the engine writes it.
        layout = KvLayout(profile.layers, profile.kv_heads, profile.head_dim, profile.dtype, 1)
        self._token_bytes = layout.token_bytes
        self._known: list[tuple[list[int], list[int]]] = []
        self.turns: list[Turn] = []
        self.answers: list[list[int]] = []

    def all(self) -> None:
        self._ask("warm-up", [self._tokenizer.encode(QUESTIONS[0])], 2)
        self.turns.clear()
        self.answers.clear()
        self._known.clear()
        self._chat()
        system = self._tokenizer.encode(LICENCE.read_text(encoding="utf-8"))[:SYSTEM_TOKENS]
        for question in QUESTIONS:
            self._ask("shared", [system + self._tokenizer.encode(f"\n\n{question}")])
        self._ask("together", [system + self._tokenizer.encode(f"\n\n{question}") for question in TOGETHER])

    def _chat(self) -> None:
        messages: list[dict[str, str]] = []
        for text in CHAT:
            messages.append({"role": "user", "content": text})
            [answer] = self._ask("chat", [self._tokenizer.encode_chat(messages)])
            messages.append({"role": "assistant", "content": self._tokenizer.decode(answer)})

    def _ask(self, load: str, prompts: list[list[int]], max_tokens: int | None = None) -> list[list[int]]:
        """Send prompts at once; the answers, once all have finished."""
        max_tokens = max_tokens or ANSWER_TOKENS[load]
        sampling = {"max_tokens": max_tokens, "ignore_eos": True}
        answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        first_us: dict[str, int] = {}
        ends: dict[str, Finished] = {}
        started_us = now_us()
        for label in answers:
            self._client.submit(label, prompt_ids=prompts[int(label)], sampling=sampling)
        while len(ends) < len(prompts):
            for message in self._client.events(1_000):
                match message:
                    case Tokens(label=label, token_ids=token_ids):
                        first_us.setdefault(label, now_us() - started_us)
                        answers[label] += token_ids
                    case Finished(label=label):
                        ends[label] = message
            if len(ends) < len(prompts) and len(self._client.live) + len(ends) < len(prompts):
                raise NodeUnavailable("a job did not finish")
        for label, end in ends.items():
            self._note(load, prompts[int(label)], end, first_us[label])
        for label, answer in answers.items():
            self._known.append((prompts[int(label)], prompts[int(label)] + answer[:-1]))
            self.answers.append(answer)
        return list(answers.values())

    def _note(self, load: str, prompt: list[int], end: Finished, first_us: int) -> None:
        usage = end.usage
        shared, shared_prompt = max(
            ((_common(prompt, whole), _common(prompt, before)) for before, whole in self._known),
            default=(0, 0),
        )
        sent_tokens = usage.prompt_tokens - usage.cached_tokens_decode
        self.turns.append(
            Turn(
                load,
                usage.prompt_tokens,
                usage.prompt_tokens - shared,
                shared - shared_prompt,
                shared >= BLOCK_TOKENS,
                first_us / 1e3,
                end.timings.prefill_busy_us / 1e3,
                sent_tokens,
                sent_tokens * self._token_bytes,
                usage.prompt_tokens - usage.cached_tokens_prefill,
                usage.cached_tokens_decode,
                usage.cached_tokens_prefill,
            )
        )


def _common(first: list[int], other: list[int]) -> int:
    """Length of what both begin with."""
    pairs = zip(first, other, strict=False)
    shorter = min(len(first), len(other))
    return next((number for number, (one, two) in enumerate(pairs) if one != two), shorter)


def _figures(arms: dict[str, list[Turn]], answers: dict[str, list[list[int]]]) -> dict[str, Any]:
    reference = next(iter(answers.values()))
    return {
        "arms": {
            arm: {"turns": [asdict(turn) for turn in turns], "targets": _targets(turns)}
            for arm, turns in arms.items()
        },
        # Only where two ids are about as likely may they differ: chunks begin elsewhere.
        "answers_that_differ": {
            arm: sum(one != two for one, two in zip(reference, given, strict=True))
            for arm, given in answers.items()
        },
    }


def _targets(turns: list[Turn]) -> dict[str, Any]:
    """What the jobs that share something cost beyond their bounds, and the time to the first token in p.

    Jobs that wait for each other say nothing of that time.
    """
    warm = [turn for turn in turns if turn.warm]
    sent = [turn.sent_tokens - turn.new_tokens - BLOCK_TOKENS for turn in warm]
    computed = [turn.computed_tokens - turn.new_tokens - turn.answer_tokens - BLOCK_TOKENS for turn in warm]
    ratios = [turn.first_token_ms / turn.prefill_ms for turn in warm if turn.load != "together"]
    return {
        "sent_tokens_beyond_bound": max(sent),
        "computed_tokens_beyond_bound": max(computed),
        "first_token_in_p": spread(ratios),
        "sent_held": max(sent) <= 0,
        "computed_held": max(computed) <= 0,
        "first_token_held": statistics.median(ratios) <= FIRST_TOKEN_RATIO_MAX,
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    columns = ("", "prompt", "new", "first token (ms)", "p (ms)", "sent (KiB)", "computed", "cached d / p")
    for arm, found in figures["arms"].items():
        table = Table(title=arm)
        for column in columns:
            table.add_column(column, justify="right" if column else "left")
        for turn in found["turns"]:
            table.add_row(
                turn["load"],
                str(turn["prompt_tokens"]),
                str(turn["new_tokens"]),
                f"{turn['first_token_ms']:.1f}",
                f"{turn['prefill_ms']:.1f}",
                f"{turn['sent_bytes'] / 1024:.0f}",
                str(turn["computed_tokens"]),
                f"{turn['cached_tokens_decode']} / {turn['cached_tokens_prefill']}",
            )
        console.print(table)
        targets = found["targets"]
        console.print(
            f"sent within a block of the new tokens: {targets['sent_held']}; computed within the bound:"
            f" {targets['computed_held']}; first token in p: {targets['first_token_in_p']['median']:.2f}"
            f" (target {FIRST_TOKEN_RATIO_MAX}); answers unlike the first arm's:"
            f" {figures['answers_that_differ'][arm]}"
        )
