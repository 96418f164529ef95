"""Both daemons with the real model: the tokens of `generate()`, whatever the hand-off goes through.

One prefetching, remote-only pair serves all tests of this module. The reference runs in this process, greedy,
without chunks; the lengths lie around the engine's chunk.
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
from transport.launch.batch import Batch, BatchJob, Outcome
from transport.launch.pair import Pair
from transport.launch.pair_plan import PairPlan

pytestmark = pytest.mark.real_model

CHUNK = 64
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 200)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return fetch_named_model(lambda stage, done, total: None)


@pytest.fixture(scope="module")
def prompts(files: ModelFiles) -> list[list[int]]:
    ids = HuggingFaceTokenizer(files.directory).encode(TEXT * 6)
    return [ids[length : 2 * length] for length in LENGTHS]


@pytest.fixture(scope="module")
def pair(files: ModelFiles) -> Iterator[Pair]:
    with Pair(PairPlan("torch", max_tokens=256, prefill_extra=("--chunk-tokens", str(CHUNK)))) as running:
        running.wait_ready()
        yield running
        status = running.status()
        assert status["idle"]
        assert status["counters"]["local_prefill_tokens"] == 0
        assert [slot["state"] for slot in status["workers"][0]["slots"]] == ["free"]


@pytest.fixture(scope="module")
def reference(files: ModelFiles, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate()` makes of each prompt, eight tokens long unless it ends itself."""
    model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, local_files_only=True)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        whole = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def run(pair: Pair, prompts: list[list[int]], **sampling: object) -> list[Outcome]:
    jobs = [BatchJob(str(number), prompt_ids=ids, sampling=sampling) for number, ids in enumerate(prompts)]
    with Client(pair.decode_endpoint) as client:
        return Batch(client, jobs, concurrency=4).run()


def test_tokens_are_those_of_generate_and_every_prompt_went_the_remote_way(
    pair: Pair, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    before = pair.status()["counters"]
    outcomes = run(pair, prompts, max_tokens=8)
    after = pair.status()["counters"]

    assert [outcome.token_ids for outcome in outcomes] == reference
    assert all(isinstance(outcome.answer, Finished) for outcome in outcomes)
    assert {outcome.answer.path for outcome in outcomes} == {"remote"}
    assert [outcome.answer.usage.prompt_tokens for outcome in outcomes] == list(LENGTHS)
    assert after["remote_imports"] - before["remote_imports"] == len(prompts)
    assert after["prefetches"] > before["prefetches"]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_an_answer_of_one_or_two_tokens_is_the_beginning_of_a_longer_one(
    pair: Pair, prompts: list[list[int]], reference: list[list[int]], max_tokens: int
) -> None:
    outcomes = run(pair, prompts[:4], max_tokens=max_tokens)

    assert [outcome.token_ids for outcome in outcomes] == [ids[:max_tokens] for ids in reference[:4]]


def test_a_seed_gives_the_same_answer_again_and_an_unseeded_neighbour_does_not_change_it(
    pair: Pair, prompts: list[list[int]]
) -> None:
    seeded = {"max_tokens": 8, "temperature": 1.0, "top_p": 0.9, "seed": 11, "ignore_eos": True}
    first = run(pair, [prompts[2]], **seeded)[0].token_ids
    run(pair, [prompts[3]], max_tokens=3, temperature=1.5)

    assert run(pair, [prompts[2]], **seeded)[0].token_ids == first
    assert len(first) == 8


def test_the_parts_of_the_timing_sum_to_the_whole(pair: Pair, prompts: list[list[int]]) -> None:
    timings = run(pair, [prompts[4]], max_tokens=3)[0].answer.timings

    assert sum(timings.stages_ms.values()) == timings.total_ms
    assert timings.prefill_busy_us > 0
    assert timings.copy_us > 0


def test_over_tcp_the_tokens_are_the_same_and_every_job_imported_its_kv(
    prompts: list[list[int]], reference: list[list[int]]
) -> None:
    tcp, chunks = ("--kv-plane", "tcp"), ("--chunk-tokens", str(CHUNK))
    plan = PairPlan("torch", max_tokens=256, prefill_extra=(*chunks, *tcp), decode_extra=tcp)
    with Pair(plan) as over_tcp:
        over_tcp.wait_ready()
        outcomes = run(over_tcp, prompts, max_tokens=8)
        status = over_tcp.status()

    assert [outcome.token_ids for outcome in outcomes] == reference
    assert status["workers"][0]["kv_plane"] == "tcp"
    assert status["counters"]["remote_imports"] == len(prompts)
    assert status["counters"]["local_prefill_tokens"] == 0
    assert [slot["state"] for slot in status["workers"][0]["slots"]] == ["free"]
