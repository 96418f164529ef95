"""Every sampling field through real daemons: the answer is the one that the oracle computes.

Each case runs where the first token comes from the record (with prefetch and without), where the lane has to
tell it because the prefill node answers no logits, and where the prompt is computed in the lane.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from common.errors import ErrorCode
from common.limits import TOKENIZE_REQUESTS
from common.messages import Finished, Rejected, Tokenize, Tokenized
from tests import oracle
from tests.process.raw_peer import RawPeer
from tests.process.world import PREFETCH, REMOTE, Answer, JobClient, Pair, World, expected, prompt_of

END = oracle.END_OF_SEQUENCE
COUNT = 14
PROMPT = prompt_of(24, 3)
PLACES = ("prefetch", "one at a time", "no logits", "local")
# The client is not turned between tests.
LEASE = ("--lease-ms", "20000")


class Node:
    """A decode node and the client that asks it."""

    def __init__(self, world: World, client: JobClient) -> None:
        self._world = world
        self._client = client

    def run(self, prompt_ids: list[int], **sampling: Any) -> Answer:
        answer = self._world.end_of(self._client.submit("job", prompt_ids, **sampling))
        assert isinstance(answer.end, Finished), answer.end
        assert answer.end.usage.completion_tokens == len(answer.token_ids)
        return answer


@pytest.fixture(scope="module", params=PLACES)
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    # Not pytest's own directory: its path would not fit a socket.
    with TemporaryDirectory(prefix="tandem-test-") as directory:
        world = World(Path(directory))
        if request.param == "local":
            decode = world.decode(None, *LEASE)
        else:
            source = ("--emulated-no-logits",) if request.param == "no logits" else ()
            route = PREFETCH if request.param == "prefetch" else REMOTE
            decode = world.pair(source, (*route, *LEASE)).decode
        yield Node(world, world.client(decode))
        world.close()


FIELDS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.0},
    "negative frequency": {"frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 1.2},
    "inverse repetition": {"repetition_penalty": 0.9},
    "bias for": {"logit_bias": {"122": 8.0, "120": 7.5}},
    "bias against": {"logit_bias": {"32": -100.0, "101": -3}},
    "bias to the end": {"logit_bias": {str(END): 100}},
    "min_tokens": {"logit_bias": {str(END): 100}, "min_tokens": 5},
    "min_tokens and a stop token": {"logit_bias": {"97": 100}, "min_tokens": 3, "stop_token_ids": [97]},
    "everything": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "logit_bias": {"32": 4, "101": -2, str(END): 30},
        "min_tokens": 9,
    },
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_field_changes_the_greedy_answer_as_the_oracle_says(node: Node, fields: dict[str, Any]) -> None:
    wanted = oracle.answer_to(PROMPT, COUNT, **fields)
    assert wanted != expected(PROMPT, COUNT), "this case would not notice a field without effect"
    answer = node.run(PROMPT, max_tokens=COUNT, **fields)
    assert answer.token_ids == wanted
    ends = {END, *fields.get("stop_token_ids", ())}
    assert answer.end.reason == ("stop" if wanted[-1] in ends else "length")


@pytest.mark.parametrize("name", ["frequency", "repetition", "everything"])
def test_drawn_answers_are_the_oracles_too(node: Node, name: str) -> None:
    for seed in (1, 2):
        uniforms = np.random.Generator(np.random.PCG64(seed)).random(COUNT)
        wanted = oracle.answer_to(PROMPT, COUNT, temperature=1.5, uniforms=uniforms, **FIELDS[name])
        answer = node.run(PROMPT, max_tokens=COUNT, temperature=1.5, seed=seed, **FIELDS[name])
        assert answer.token_ids == wanted


def test_a_job_does_not_inherit_what_the_one_before_had_counted(node: Node) -> None:
    node.run(PROMPT, max_tokens=COUNT, frequency_penalty=2.0, repetition_penalty=2.0)
    assert node.run(PROMPT, max_tokens=COUNT).token_ids == expected(PROMPT, COUNT)


def test_min_tokens_holds_off_a_stop_string(node: Node) -> None:
    whole = expected(PROMPT, COUNT)
    assert END not in whole
    text = bytes(whole).decode()
    first = text[0]
    later = next((place for place in range(4, COUNT) if text[place] == first), None)
    answer = node.run(PROMPT, max_tokens=COUNT, stop=[first], min_tokens=3)
    assert answer.text == (text if later is None else text[:later])
    assert answer.end.reason == ("length" if later is None else "stop")
    stopped = node.run(PROMPT, max_tokens=COUNT, stop=[text[3:5]], min_tokens=4)
    assert (stopped.text, stopped.token_ids, stopped.end.reason) == (text[:3], whole[:5], "stop")


@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_come_with_every_token_and_are_those_of_the_model(node: Node, count: int) -> None:
    fields = {"presence_penalty": 2.0, "logit_bias": {"233": 100}}
    answer = node.run(PROMPT, max_tokens=4, logprobs=count, **fields)
    assert answer.token_ids == oracle.answer_to(PROMPT, 4, **fields)
    assert 233 in answer.token_ids
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    for place, told in enumerate(answer.logprobs):
        logprobs = oracle.logprobs_of(oracle.oracle_logits([*PROMPT, *answer.token_ids[:place]]))
        best = sorted(range(oracle.VOCABULARY), key=lambda one, told=logprobs: (-told[one], one))[:count]
        assert told.logprob == pytest.approx(logprobs[told.token_id], abs=1e-6)
        assert told.text == bytes([told.token_id]).decode(errors="replace")
        assert [one.token_id for one in told.top] == best
        assert [one.logprob for one in told.top] == pytest.approx([logprobs[one] for one in best], abs=1e-6)


def test_who_does_not_ask_for_logprobs_gets_none(node: Node) -> None:
    assert node.run(PROMPT, max_tokens=3).logprobs == []


def test_the_token_that_ends_an_answer_has_a_logprob_and_no_text(node: Node) -> None:
    answer = node.run(PROMPT, max_tokens=3, logprobs=1, logit_bias={str(END): 100})
    assert (answer.token_ids, answer.text) == ([END], "")
    (told,) = answer.logprobs
    assert (told.token_id, told.text) == (END, "")


@pytest.mark.parametrize(("policy", "path"), [("local", "local"), ("retry", "remote")])
def test_a_token_is_kept_with_its_counts_when_its_kv_is_lost(world: World, policy: str, path: str) -> None:
    pair = world.pair(decode=("--on-prefill-failure", policy))
    fields = FIELDS["everything"] | {"temperature": 1.5, "seed": 5, "logprobs": 1}
    uniforms = np.random.Generator(np.random.PCG64(5)).random(COUNT)
    wanted = oracle.answer_to(PROMPT, COUNT, temperature=1.5, uniforms=uniforms, **FIELDS["everything"])
    pair.decode.spoil("import.piece", "fail")
    answer = pair.run("job", PROMPT, max_tokens=COUNT, **fields)
    assert isinstance(answer.end, Finished), answer.end
    assert (answer.end.path, answer.token_ids) == (path, wanted)
    assert [one.token_id for one in answer.logprobs] == wanted


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 17}, "less than or equal to 16"),
    "min_tokens": ({"min_tokens": 9, "max_tokens": 8}, "at most max_tokens, 8"),
    "presence_penalty": ({"presence_penalty": 2.5}, "less than or equal to 2"),
    "frequency_penalty": ({"frequency_penalty": -2.5}, "greater than or equal to -2"),
    "repetition_penalty": ({"repetition_penalty": 0}, "greater than 0"),
    "logit_bias": ({"logit_bias": {"259": 1}}, "0 to 258"),
    "logprobs": ({"logprobs": 21}, "less than or equal to 20"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_out_of_range_is_refused_with_the_range(shared_pair: Pair, name: str) -> None:
    sampling, words = REFUSED[name]
    answer = shared_pair.run("bad", PROMPT, **sampling)
    assert (type(answer.end), answer.code) == (Rejected, "INVALID_SAMPLING")
    assert name in answer.end.detail
    assert words in answer.end.detail


@pytest.fixture
def peer(shared_pair: Pair) -> Iterator[RawPeer]:
    with RawPeer(shared_pair.decode.endpoint) as peer:
        peer.hello()
        yield peer


def test_text_goes_to_ids_and_back(peer: RawPeer) -> None:
    text = "Straße 12, 東京 👍"
    peer.send(Tokenize("there", prompt=text))
    there = peer.receive()
    assert there == Tokenized("there", tuple(text.encode()), "")
    peer.send(Tokenize("back", token_ids=there.token_ids))
    assert peer.receive() == Tokenized("back", there.token_ids, text)


def test_a_chat_is_tokenised_as_the_job_that_it_could_be(shared_pair: Pair, peer: RawPeer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    peer.send(Tokenize("chat", messages=tuple(messages)))
    ids = peer.receive().token_ids
    answer = shared_pair.client.submit_body("chat", messages=messages, sampling={"max_tokens": 4})
    shared_pair.world.end_of(answer)
    assert answer.accepted.prompt_tokens == len(ids)
    assert answer.token_ids == expected(list(ids), 4)


@pytest.mark.parametrize(
    ("sources", "code", "words"),
    [
        ({}, ErrorCode.INVALID_REQUEST, "exactly one"),
        ({"prompt": "a", "token_ids": (1,)}, ErrorCode.INVALID_REQUEST, "exactly one"),
        ({"prompt": "a" * 1_000_001}, ErrorCode.INVALID_REQUEST, "at most 1000000"),
        ({"messages": ({"role": "x", "content": "a"},)}, ErrorCode.INVALID_REQUEST, "role must be"),
        ({"token_ids": (1, 259)}, ErrorCode.TOKEN_OUT_OF_RANGE, "0 to 258"),
    ],
    ids=["nothing", "two", "long", "role", "range"],
)
def test_a_tokenisation_that_cannot_be_is_rejected(
    peer: RawPeer, sources: dict[str, Any], code: ErrorCode, words: str
) -> None:
    peer.send(Tokenize("bad", **sources))
    rejected = peer.receive()
    assert (type(rejected), rejected.label, rejected.code) == (Rejected, "bad", code)
    assert words in rejected.detail


def test_a_tokenizer_that_breaks_is_told_and_serves_the_next(shared_pair: Pair, peer: RawPeer) -> None:
    shared_pair.decode.spoil("text.tokenize", "fail")
    peer.send(Tokenize("first", prompt="a"))
    peer.send(Tokenize("second", prompt="a"))
    broken, served = peer.receive(), peer.receive()
    assert (type(broken), broken.code) == (Rejected, ErrorCode.INVALID_REQUEST)
    assert served == Tokenized("second", (97,), "")


def test_too_many_tokenisations_at_once_are_busy(shared_pair: Pair, peer: RawPeer) -> None:
    shared_pair.decode.hold("text.tokenize")
    for number in range(TOKENIZE_REQUESTS + 1):
        peer.send(Tokenize(str(number), prompt="a"))
    rejected = peer.receive()
    assert (type(rejected), rejected.code) == (Rejected, ErrorCode.BUSY)
    assert rejected.label == str(TOKENIZE_REQUESTS)
    assert rejected.retry_ms > 0
    shared_pair.decode.release("text.tokenize")
    answers = [peer.receive() for _ in range(TOKENIZE_REQUESTS)]
    assert answers == [Tokenized(str(number), (97,), "") for number in range(TOKENIZE_REQUESTS)]
