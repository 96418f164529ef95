"""Logprobs of the real model: log-softmax of the logits that transformers computes for the same tokens.

Through both daemons, so that the first token's come from the record and the others' from the lane. Chunks and
kernels differ from the reference's in the last bits of float32, so the numbers are compared within `ERROR`.
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
from transport.launch.batch import Batch, BatchJob, Choice
from transport.launch.pair import Pair
from transport.launch.pair_plan import PairPlan

pytestmark = pytest.mark.real_model

ERROR = 2e-3
NEW_TOKENS = 6
TOP = 5
PROMPT_TOKENS = 70


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return fetch_named_model(lambda stage, done, total: None)


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(files.directory)


@pytest.fixture(scope="module")
def pair(files: ModelFiles) -> Iterator[Pair]:
    with Pair(PairPlan("torch", max_tokens=128, prefill_extra=("--chunk-tokens", "64"))) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32, local_files_only=True)


def ask(pair: Pair, prompt_ids: list[int], **sampling: object) -> Choice:
    job = BatchJob("job", prompt_ids=prompt_ids, sampling={"max_tokens": NEW_TOKENS, **sampling})
    with Client(pair.decode_endpoint) as client:
        (outcome,) = Batch(client, [job], concurrency=1).run()
    assert isinstance(outcome.answer, Finished), outcome.answer
    return outcome.choices[0]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"presence_penalty": 2.0, "repetition_penalty": 1.5, "temperature": 1.2, "seed": 3}],
    ids=["greedy", "drawn and penalized"],
)
def test_logprobs_are_the_log_softmax_of_the_references_logits(
    pair: Pair, tokenizer: HuggingFaceTokenizer, reference: AutoModelForCausalLM, sampling: dict
) -> None:
    prompt_ids = tokenizer.encode(TEXT)[:PROMPT_TOKENS]
    choice = ask(pair, prompt_ids, logprobs=TOP, **sampling)
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt_ids, *choice.token_ids]])).logits[0, PROMPT_TOKENS - 1 : -1]
    right = logits.double().log_softmax(-1)

    assert [told.token_id for told in choice.logprobs] == choice.token_ids
    for told, row in zip(choice.logprobs, right, strict=True):
        assert told.logprob == pytest.approx(float(row[told.token_id]), abs=ERROR)
        assert [one.logprob for one in told.top] == pytest.approx(row.topk(TOP).values.tolist(), abs=ERROR)
        assert [one.logprob for one in told.top] == pytest.approx(
            [float(row[one.token_id]) for one in told.top], abs=ERROR
        )
        if not sampling:
            assert told.logprob == told.top[0].logprob, "greedy takes the likeliest"
        assert told.text == tokenizer.decode([told.token_id])


def test_the_texts_of_the_tokens_make_the_answer(pair: Pair, tokenizer: HuggingFaceTokenizer) -> None:
    choice = ask(pair, tokenizer.encode(TEXT)[:PROMPT_TOKENS], logprobs=0)
    assert "".join(told.text for told in choice.logprobs) == choice.text
    assert all(told.top == () for told in choice.logprobs)
