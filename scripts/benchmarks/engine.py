"""The torch engine against transformers' own `generate()`.

Decides the comparison: same dtype, one thread, one core, the same prompt, in alternation. Prefill: ours
against `generate()` for one token, once without chunks and once with the engine's usual chunk on both sides.
Decode: our steps against the time that further tokens add to `generate()`.
"""

import argparse
import statistics
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.figures import prompts
from common.clock import now_us
from common.cpus import available_cpus, pin_process
from common.engines.model_files import resolve_model
from common.engines.registry import NAMED_MODEL, EngineSettings, load_decode_engine
from common.kv_layout import chunk_bounds
from common.log import NodeLog

CHUNK_TOKENS = 256


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=NAMED_MODEL, help=f"model ({NAMED_MODEL})")
    parser.add_argument("--tokens", type=int, default=384, help="prompt length (384)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps (32)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (7)")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    pin_process((max(available_cpus()),), NodeLog(node="bench", incarnation="bench"))
    import torch
    from transformers import AutoModelForCausalLM

    directory = resolve_model(options.model).directory
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    settings = EngineSettings(
        backend="torch", model=options.model, max_tokens=1_024, chunk_tokens=options.tokens, threads=1
    )
    engine = load_decode_engine(settings)
    prompt = np.array(prompts("torch", options.model, [options.tokens])[0], dtype=np.int64)
    batch = torch.from_numpy(prompt)[None]
    whole, chunked, reference, reference_chunked, steps, reference_steps = [], [], [], [], [], []
    for _ in range(options.rounds):
        reference.append(_generate(theirs, batch, 1))
        whole.append(_prefill(engine, prompt, len(prompt)))
        reference_chunked.append(_generate(theirs, batch, 1, prefill_chunk_size=CHUNK_TOKENS))
        chunked.append(_prefill(engine, prompt, CHUNK_TOKENS))
        steps.append(_decode(engine, options.steps))
        more = _generate(theirs, batch, 1 + options.steps)
        reference_steps.append(more - reference[-1])
    figures = {
        "generate_prefill_ms": statistics.median(reference) / 1e3,
        "prefill_one_chunk_ms": statistics.median(whole) / 1e3,
        "generate_chunked_prefill_ms": statistics.median(reference_chunked) / 1e3,
        "prefill_chunked_ms": statistics.median(chunked) / 1e3,
        "prefill_rate_of_generate": _rate(reference, whole),
        "chunked_prefill_rate_of_generate": _rate(reference_chunked, chunked),
        "generate_step_ms": statistics.median(reference_steps) / options.steps / 1e3,
        "step_ms": statistics.median(steps) / options.steps / 1e3,
        "decode_rate_of_generate": _rate(reference_steps, steps),
    }
    for name, value in figures.items():
        console.print(f"{name:34} {value:10.3f}")
    return figures


def _rate(reference_us: list[int], ours_us: list[int]) -> float:
    """How fast we are, as a multiple of the reference: median over the rounds."""
    return statistics.median(other / own for other, own in zip(reference_us, ours_us, strict=True))


def _generate(model: Any, batch: Any, new_tokens: int, **options: Any) -> int:
    started_us = now_us()
    model.generate(
        batch,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return now_us() - started_us


def _prefill(engine: Any, prompt: np.ndarray, chunk_tokens: int) -> int:
    started_us = now_us()
    for start, end in chunk_bounds(0, len(prompt), chunk_tokens):
        logits = engine.prefill_chunk(0, prompt, start, end)
    logits.argmax()
    return now_us() - started_us


def _decode(engine: Any, step_count: int) -> int:
    token_id = 0
    started_us = now_us()
    for _ in range(step_count):
        token_id = int(engine.step([0], [token_id])[0].argmax())
    return now_us() - started_us
