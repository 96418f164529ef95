"""The sampling flags of send.py, with emulated nodes: each reaches the sampler; --json shows what came."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests import oracle
from tests.process.script_runs import Up, run

PROMPT = "say something"
COUNT = 12


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        launched = Up(Path(directory))
        yield launched
        assert launched.stop() == 0, launched.errors


def send(up: Up, *flags: str) -> dict[str, Any]:
    done = run(up.runtime, "send", PROMPT, "--raw", "--json", "--max-tokens", str(COUNT), *flags)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def refusal(up: Up, status: int, *flags: str) -> str:
    done = run(up.runtime, "send", PROMPT, *flags)
    assert done.returncode == status
    assert done.stdout.strip() == b""
    return done.stderr.decode()


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (("--presence-penalty", "2"), {"presence_penalty": 2.0}),
        (("--frequency-penalty", "-2"), {"frequency_penalty": -2.0}),
        (("--repetition-penalty", "1.5"), {"repetition_penalty": 1.5}),
        (("--logit-bias", "120=50", "--logit-bias", "121=50.5"), {"logit_bias": {120: 50, 121: 50.5}}),
        (("--logit-bias", "257=100", "--min-tokens", "3"), {"logit_bias": {257: 100}, "min_tokens": 3}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_flag_reaches_the_sampler(up: Up, flags: tuple[str, ...], fields: dict[str, Any]) -> None:
    ids = list(PROMPT.encode())
    wanted = oracle.answer_to(ids, COUNT, **fields)
    assert wanted != oracle.answer_to(ids, COUNT), "this case would not notice a flag without effect"
    assert send(up, *flags)["token_ids"] == wanted


def test_logprobs_are_printed_for_each_token_and_only_if_asked_for(up: Up) -> None:
    job = send(up, "--logprobs", "2")
    assert [told["token_id"] for told in job["logprobs"]] == job["token_ids"]
    logprobs = oracle.logprobs_of(oracle.oracle_logits(list(PROMPT.encode())))
    first = job["logprobs"][0]
    assert first["logprob"] == pytest.approx(max(logprobs), abs=1e-6)
    assert first["text"] == chr(first["token_id"])
    assert [one["token_id"] for one in first["top"]] == sorted(range(259), key=lambda one: -logprobs[one])[:2]
    assert "logprobs" not in send(up)


@pytest.mark.parametrize("flag", ["5", "a=1", "5=x"])
def test_a_bias_that_is_none_is_told_before_anything_is_sent(up: Up, flag: str) -> None:
    assert "--logit-bias" in refusal(up, 2, "--logit-bias", flag)


def test_two_biases_of_one_token_are_refused(up: Up) -> None:
    assert "one bias for each token id" in refusal(up, 2, "--logit-bias", "5=1", "--logit-bias", "05=2")


def test_a_value_that_the_node_refuses_is_told_with_its_range(up: Up) -> None:
    assert "INVALID_SAMPLING: n: Input should be less than or equal to 16" in refusal(up, 1, "-n", "17")
