"""What each wire dtype costs: error, tokens, bytes and time, with a real model and real prompts.

Decides the comparison: KV that the torch engine computed in a slot is made into the wire dtype and back, and
imported into a decode lane. Its next logits are held against those behind the untouched KV, as a share of
their spread. Then both lanes are fed the tokens that the untouched one chooses: where the choices first
differ, two free runs part. The engine's own dtype is the untouched KV itself (a unit test holds that nothing
is done to it). One thread, one core; the digest and the link are not in the figures.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common.clock import now_us
from common.cpus import available_cpus, pin_process
from common.engines.registry import (
    NAMED_MODEL,
    EngineSettings,
    load_decode_engine,
    load_prefill_engine,
    load_tokenizer,
)
from common.kv_convert import KvConverter
from common.kv_layout import WIRE_DTYPES, chunk_bounds
from common.log import NodeLog

PROMPTS = Path(__file__).with_name("prompts.txt")
MAX_TOKENS = 512


@dataclass
class Outcome:
    """What was seen of one wire dtype, an item for each prompt; errors are shares of the logits' spread."""

    error_max: list[float] = field(default_factory=list)
    error_rms: list[float] = field(default_factory=list)
    same_choices: list[int] = field(default_factory=list)
    same_until: list[int] = field(default_factory=list)
    margins_lost: list[float] = field(default_factory=list)
    encode_us: int = 0
    decode_us: int = 0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument("--prompts", type=int, help="prompts (all of scripts/benchmarks/prompts.txt)")
    parser.add_argument("--tokens", type=int, default=16, help="greedy tokens for each prompt (16)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    pin_process((max(available_cpus()),), NodeLog(node="bench", incarnation="bench"))
    settings = EngineSettings(backend="torch", model=options.model, max_tokens=MAX_TOKENS, threads=1)
    tokenizer = load_tokenizer(settings)
    texts = [text.strip() for text in PROMPTS.read_text().split("\n\n") if text.strip()]
    prompts = [
        np.array(tokenizer.encode_chat([{"role": "user", "content": text}]))
        for text in texts[: options.prompts]
    ]
    bench = _Bench(settings)
    outcomes = {dtype: Outcome() for dtype in WIRE_DTYPES if dtype != bench.layout.dtype}
    for prompt in track(prompts, "running prompts", console=console, transient=True):
        bench.run(prompt, options.tokens, outcomes)
    kv_bytes = sum(len(prompt) for prompt in prompts) * bench.layout.token_bytes
    figures = {
        "prompts": len(prompts),
        "prompt_tokens": {"min": min(map(len, prompts)), "max": max(map(len, prompts))},
        "greedy_tokens": options.tokens * len(prompts),
        "bytes_per_token": {dtype: replace(bench.layout, dtype=dtype).token_bytes for dtype in WIRE_DTYPES},
        "wire_dtypes": {
            dtype: _figures(outcome, options.tokens, kv_bytes) for dtype, outcome in outcomes.items()
        },
    }
    _show(figures, console)
    return figures


class _Bench:
    """Both engines, with one slot between them."""

    def __init__(self, settings: EngineSettings) -> None:
        self._prefill, self._decode = load_prefill_engine(settings), load_decode_engine(settings)
        self.layout = self._prefill.capabilities.layout
        self._slot = np.zeros(self.layout.shape, dtype=self.layout.numpy_dtype)
        self._prefill.attach([memoryview(self._slot).cast("B")])

    def run(self, prompt: np.ndarray, token_count: int, outcomes: dict[str, Outcome]) -> None:
        """Compute a prompt, then decode behind its KV as it is and behind that of each wire dtype."""
        for start, end in chunk_bounds(0, len(prompt), self._prefill.capabilities.chunk_tokens):
            first_logits = self._prefill.prefill_chunk(0, prompt, start, end)
        kv = self._slot[:, :, : len(prompt)]
        tokens, expected = [int(first_logits.argmax())], []
        self._import(kv)
        for _ in range(token_count):
            expected.append(self._decode.step([0], tokens[-1:])[0])
            tokens.append(int(expected[-1].argmax()))
        for dtype, outcome in outcomes.items():
            self._import(self._there_and_back(kv, dtype, outcome))
            logits = [self._decode.step([0], [token_id])[0] for token_id in tokens[:-1]]
            _compare(logits, expected, outcome)

    def _there_and_back(self, kv: np.ndarray, dtype: str, outcome: Outcome) -> np.ndarray:
        own = self._prefill.capabilities.form
        sent, head_dim = replace(own, dtype=dtype), self.layout.head_dim
        started_us = now_us()
        wire = KvConverter(own, sent, head_dim).convert(kv)
        encoded_us = now_us()
        back = KvConverter(sent, own, head_dim).convert(wire)
        outcome.encode_us += encoded_us - started_us
        outcome.decode_us += now_us() - encoded_us
        return back

    def _import(self, kv: np.ndarray) -> None:
        self._decode.write_kv(0, 0, 0, kv)
        self._decode.set_length(0, kv.shape[2])


def _compare(logits: Sequence[np.ndarray], expected: Sequence[np.ndarray], outcome: Outcome) -> None:
    """Hold one prompt's logits against those behind the untouched KV."""
    difference = logits[0] - expected[0]
    outcome.error_max.append(float(np.abs(difference).max() / expected[0].std()))
    outcome.error_rms.append(float(np.sqrt(np.square(difference).mean()) / expected[0].std()))
    choices = [(int(ours.argmax()), right) for ours, right in zip(logits, expected, strict=True)]
    lost = [place for place, (choice, right) in enumerate(choices) if choice != right.argmax()]
    outcome.same_choices.append(len(choices) - len(lost))
    outcome.same_until.append(lost[0] if lost else len(choices))
    outcome.margins_lost += [
        float(expected[place].max() - expected[place][choices[place][0]]) for place in lost
    ]


def _figures(outcome: Outcome, token_count: int, kv_bytes: int) -> dict[str, float]:
    """One dtype's figures; rates are in the engine's own bytes, both ways."""
    prompt_count = len(outcome.same_until)
    return {
        "logits_error_max": max(outcome.error_max),
        "logits_error_rms": float(np.sqrt(np.square(outcome.error_rms).mean())),
        "same_choice_share": sum(outcome.same_choices) / prompt_count / token_count,
        "same_until_first_difference_share": sum(outcome.same_until) / prompt_count / token_count,
        "same_answer_share": sum(count == token_count for count in outcome.same_until) / prompt_count,
        "margin_lost_max": max(outcome.margins_lost, default=0.0),
        "encode_gb_per_s": kv_bytes / max(1, outcome.encode_us) / 1e3,
        "decode_gb_per_s": kv_bytes / max(1, outcome.decode_us) / 1e3,
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table("", *figures["wire_dtypes"])
    for name in next(iter(figures["wire_dtypes"].values())):
        table.add_row(
            name.replace("_", " "), *(f"{values[name]:,.4g}" for values in figures["wire_dtypes"].values())
        )
    console.print(f"{figures['prompts']} prompts, {figures['greedy_tokens']} greedy tokens")
    sizes = (f"{dtype} {count:,}" for dtype, count in figures["bytes_per_token"].items())
    console.print(f"bytes per token: {', '.join(sizes)}")
    console.print(table)
