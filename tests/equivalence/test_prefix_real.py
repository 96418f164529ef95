"""The real model with prefix caches: the tokens that it gives without them.

A pair with both caches and a pair without answer the same prompts. A hit moves the borders of chunks, which
changes sums in their last bits; so INV-9 allows another token only where the two best logits are closer than
`TIE`, and each such place is looked at with a model of this process.
"""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.engines.hf_tokenizer import HuggingFaceTokenizer
from common.engines.model_fetch import fetch_named_model
from common.engines.model_files import ModelFiles
from common.messages import Finished
from tests.equivalence.test_torch_engine import TEXT
from transport.client import Client
from transport.launch.batch import Batch, BatchJob
from transport.launch.pair import Pair
from transport.launch.pair_plan import PairPlan

pytestmark = pytest.mark.real_model

TIE = 1e-3
BLOCK = 16
CHUNK = 64
NEW_TOKENS = 8
CACHE = ("--prefix-cache-mb", "64")
# Lengths of prompts that all begin alike: round the borders of blocks and chunks, then the longest again.
LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 150, 150)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return fetch_named_model(lambda stage, done, total: None)


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    ids = HuggingFaceTokenizer(files.directory).encode(TEXT * 3)
    return [ids[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def pairs(files: ModelFiles) -> Iterator[dict[str, Pair]]:
    chunk = ("--chunk-tokens", str(CHUNK))
    plans = {
        name: PairPlan("torch", max_tokens=256, prefill_extra=(*chunk, *cache), decode_extra=cache)
        for name, cache in (("off", ()), ("on", CACHE))
    }
    with Pair(plans["off"]) as off, Pair(plans["on"]) as on:
        running = {"off": off, "on": on}
        for pair in running.values():
            pair.wait_ready()
        yield running
        assert on.status()["prefix_cache"]["locks"] == 0


def ask(pair: Pair, prompts: list[list[int]], concurrency: int = 1) -> tuple[list[list[int]], list[Finished]]:
    """Tokens and terminal answers of prompts."""
    sampling = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
    jobs = [BatchJob(str(n), prompt_ids=prompt, sampling=sampling) for n, prompt in enumerate(prompts)]
    with Client(pair.decode_endpoint) as client:
        outcomes = Batch(client, jobs, concurrency=concurrency).run()
    answers = [outcome.answer for outcome in outcomes]
    assert all(isinstance(answer, Finished) for answer in answers), answers
    return [outcome.token_ids for outcome in outcomes], answers


def near_ties(files: ModelFiles, prompt: list[int], one: list[int], other: list[int]) -> int:
    """How many differences there are, at most 1: after it, the two go on from different tokens.

    Fails unless the two best logits are as good as equal there.
    """
    if one == other:
        return 0
    place = next(n for n, (first, second) in enumerate(zip(one, other, strict=True)) if first != second)
    model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + one[:place]])).logits[0, -1]
    best = logits.topk(2).values
    assert best[0] - best[1] < TIE, f"token {place} of a prompt of {len(prompt)} differs without a tie"
    return 1


def test_with_caches_on_the_tokens_are_those_with_caches_off(
    files: ModelFiles, pairs: dict[str, Pair], prompts: list[list[int]]
) -> None:
    expected, _ = ask(pairs["off"], prompts)
    tokens, answers = ask(pairs["on"], prompts)
    compared = zip(prompts, expected, tokens, strict=True)
    differences = sum(near_ties(files, *each) for each in compared)
    assert differences <= 1, "so many near ties are no chance"

    hits = [(end.usage.cached_tokens_decode, end.usage.cached_tokens_prefill) for end in answers]
    assert hits[0] == (0, 0)
    whole = LENGTHS[-1] // BLOCK * BLOCK
    assert hits[-1] == (whole, whole)
    assert all(decode or prefill for decode, prefill in hits[2:])


def test_the_next_turn_uses_the_kv_of_generated_tokens_and_answers_alike(
    files: ModelFiles, pairs: dict[str, Pair], prompts: list[list[int]]
) -> None:
    [answer], _ = ask(pairs["on"], [prompts[-1]])
    turn = prompts[-1] + answer + prompts[2]
    [expected], _ = ask(pairs["off"], [turn])
    [tokens], [end] = ask(pairs["on"], [turn])

    near_ties(files, turn, expected, tokens)
    assert end.usage.cached_tokens_decode == (LENGTHS[-1] + NEW_TOKENS - 1) // BLOCK * BLOCK
    assert end.usage.cached_tokens_prefill == LENGTHS[-1] // BLOCK * BLOCK


def test_prompts_that_are_prefetched_while_others_decode_answer_alike(
    files: ModelFiles, pairs: dict[str, Pair], prompts: list[list[int]]
) -> None:
    tails = [prompts[-1] + prompts[-1][start : start + 20] for start in (3, 40, 77)]
    expected, _ = ask(pairs["off"], tails, concurrency=3)
    tokens, answers = ask(pairs["on"], tails, concurrency=3)
    differences = sum(near_ties(files, *each) for each in zip(tails, expected, tokens, strict=True))
    assert differences <= 1
    whole = LENGTHS[-1] // BLOCK * BLOCK
    assert all(end.usage.cached_tokens_decode >= whole for end in answers)
