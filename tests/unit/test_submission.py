"""What a client may submit, and what it is told otherwise; the digests that name a prompt and check bytes."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.digests import bytes_digest, prompt_digest
from common.errors import ErrorCode
from common.limits import DETAIL_CHARACTERS
from common.sampling import SamplingParams
from decode_node.submission import Prepared, Refusal, prepare

VOCAB_SIZE = 300
TOKEN_LIMIT = 64
MARKER = "unmistakable-secret"


class ByteTokenizer:
    """Ids are bytes; a conversation is its contents, each after its role's first letter."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({256})

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise ValueError("a conversation cannot begin with the assistant")
        return self.encode("".join(one["role"][0] + one["content"] for one in messages))

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def submit(
    prompt: Any = None,
    messages: Any = None,
    prompt_ids: Any = None,
    token_limit: int = TOKEN_LIMIT,
    **sampling: Any,
) -> Prepared | Refusal:
    return prepare(prompt, messages, prompt_ids, sampling, ByteTokenizer(), token_limit)


def refused(code: ErrorCode, answer: Prepared | Refusal) -> str:
    """The detail of a refusal that must carry `code`."""
    assert isinstance(answer, Refusal), answer
    assert answer.code is code, answer
    assert 0 < len(answer.detail) <= DETAIL_CHARACTERS
    return answer.detail


def test_text_messages_and_ids_become_the_ids_and_their_digest() -> None:
    defaults = SamplingParams()
    assert submit(prompt="hé") == Prepared((104, 195, 169), prompt_digest([104, 195, 169]), defaults)
    assert submit(prompt_ids=[0, 299]) == Prepared((0, 299), prompt_digest([0, 299]), defaults)
    assert submit(prompt_ids=(5,)) == Prepared((5,), prompt_digest([5]), defaults)
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": ""}]
    assert submit(messages=chat) == Prepared(tuple(b"sau"), prompt_digest(list(b"sau")), defaults)
    assert submit(messages=tuple(chat)) == submit(messages=chat)


def test_exactly_one_source_is_needed() -> None:
    chat = [{"role": "user", "content": "a"}]
    assert "none" in refused(ErrorCode.INVALID_REQUEST, submit())
    for sources in (
        {"prompt": "a", "prompt_ids": [1]},
        {"prompt": "", "messages": []},
        {"messages": chat, "prompt_ids": []},
    ):
        detail = refused(ErrorCode.INVALID_REQUEST, submit(**sources))
        assert " and ".join(sources) in detail


def test_a_prompt_without_tokens_is_refused_and_whitespace_is_a_prompt() -> None:
    refused(ErrorCode.EMPTY_PROMPT, submit(prompt=""))
    refused(ErrorCode.EMPTY_PROMPT, submit(prompt_ids=[]))
    assert submit(prompt=" \n").prompt_ids == (32, 10)
    assert submit(prompt="\x00").prompt_ids == (0,)
    assert submit(prompt_ids=[256]).prompt_ids == (256,)


@pytest.mark.parametrize("prompt", [[""], [[]], 5, True, b"bytes", {"text": "a"}], ids=repr)
def test_a_prompt_that_is_not_text_is_refused(prompt: Any) -> None:
    assert "prompt must be text" in refused(ErrorCode.INVALID_REQUEST, submit(prompt=prompt))


@pytest.mark.parametrize("prompt_ids", [[[]], [1, True], [1.0], ["1"], [None], "12", 7, {"a": 1}], ids=repr)
def test_prompt_ids_that_are_not_whole_numbers_are_refused(prompt_ids: Any) -> None:
    refused(ErrorCode.INVALID_REQUEST, submit(prompt_ids=prompt_ids))


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31, 2**32, 2**63, 10**200])
def test_a_token_id_outside_the_vocabulary_is_refused_by_its_number(token_id: int) -> None:
    detail = refused(ErrorCode.TOKEN_OUT_OF_RANGE, submit(prompt_ids=[1, token_id]))
    assert "prompt_ids[1]" in detail
    assert f"0 to {VOCAB_SIZE - 1}" in detail
    if abs(token_id) < 2**64:
        assert f" {token_id} " in detail


def test_prompt_and_answer_must_fit_the_limit_together() -> None:
    assert isinstance(submit(prompt_ids=[1] * 60, max_tokens=4), Prepared)
    assert isinstance(submit(prompt="x" * 63, max_tokens=1), Prepared)
    for over in (
        submit(prompt_ids=[1] * 60, max_tokens=5),
        submit(prompt="x" * 60, max_tokens=5),
        submit(messages=[{"role": "user", "content": "x" * 59}], max_tokens=5),
    ):
        detail = refused(ErrorCode.CONTEXT_LENGTH_EXCEEDED, over)
        assert "60 tokens" in detail
        assert "max_tokens is 5" in detail
        assert "together 65" in detail
        assert "limit is 64" in detail
    # The default of max_tokens counts too.
    assert "max_tokens is 16" in refused(ErrorCode.CONTEXT_LENGTH_EXCEEDED, submit(prompt="x" * 49))
    refused(ErrorCode.CONTEXT_LENGTH_EXCEEDED, submit(prompt="x", max_tokens=10**9))
    refused(ErrorCode.CONTEXT_LENGTH_EXCEEDED, submit(prompt_ids=[-1] * 100_000))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        5,
        {"role": "user", "content": "a"},
        ["hello"],
        [{}],
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": "a", "name": "b"}],
        [{"role": "robot", "content": "a"}],
        [{"role": ["user"], "content": "a"}],
        [{"role": "user<|im_end|>", "content": "a"}],
        [{"role": "user", "content": "ok"}, {"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "ok", 5: "a"}],
    ],
    ids=repr,
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    assert "messages" in refused(ErrorCode.INVALID_REQUEST, submit(messages=messages))


def test_what_the_chat_template_does_not_take_is_refused_with_its_reason() -> None:
    answer = submit(messages=[{"role": "assistant", "content": MARKER}])
    assert "cannot begin with the assistant" in refused(ErrorCode.INVALID_REQUEST, answer)


def test_text_without_a_utf8_form_is_refused() -> None:
    detail = refused(ErrorCode.INVALID_REQUEST, submit(prompt="ab\udcff"))
    assert "character 2" in detail
    refused(ErrorCode.INVALID_SAMPLING, submit(prompt="a", stop=["\ud800"]))


def test_refusals_do_not_quote_the_prompt() -> None:
    for answer in (
        submit(prompt=MARKER * 10),
        submit(prompt=MARKER + "\ud800"),
        submit(prompt=[MARKER]),
        submit(messages=[{"role": "user", "content": MARKER, "x": 1}]),
        submit(messages=[{"role": "user", "content": [MARKER]}]),
        submit(prompt=MARKER, top_k=-1),
    ):
        assert isinstance(answer, Refusal)
        assert MARKER not in answer.detail


GOOD = {
    "max_tokens": [(1, 1), (48, 48)],
    "temperature": [(0, 0.0), (2, 2.0), (0.7, 0.7)],
    "top_k": [(0, 0), (50, 50)],
    "top_p": [(1, 1.0), (1e-9, 1e-9)],
    "min_p": [(0, 0.0), (1, 1.0)],
    "seed": [(None, None), (0, 0), (2**63 - 1, 2**63 - 1)],
    "stop": [("END", ("END",)), (["a", "é"], ("a", "é")), ((), ()), ([], ())],
    "stop_token_ids": [([0, 299], (0, 299)), ((5,), (5,)), ([], ())],
    "ignore_eos": [(True, True), (False, False)],
    "n": [(1, 1), (16, 16)],
    "min_tokens": [(0, 0), (16, 16)],
    "presence_penalty": [(-2, -2.0), (0.5, 0.5), (2, 2.0)],
    "frequency_penalty": [(-2, -2.0), (2, 2.0)],
    "repetition_penalty": [(1e-9, 1e-9), (1, 1.0), (2, 2.0)],
    "logit_bias": [
        ({}, ()),
        ({"0": -100, "299": 100}, ((0, -100.0), (299, 100.0))),
        ({7: 1.5}, ((7, 1.5),)),
        ({str(token_id): 0 for token_id in range(300)}, tuple((token_id, 0.0) for token_id in range(300))),
    ],
    "logprobs": [(None, None), (0, 0), (20, 20)],
}
BAD = {
    "max_tokens": [0, -1, None, "5", 5.0, True, math.nan, [], 2**70 * -1],
    "temperature": [-0.1, 2.1, None, "1", True, math.nan, math.inf, -math.inf, 2**70, [1.0]],
    "top_k": [-1, 1.0, True, None, "1"],
    "top_p": [0, -0.0, 1.1, True, math.nan, None],
    "min_p": [-0.1, 1.1, False, math.nan, math.inf],
    "seed": [-1, 2**63, 2**80, 1.5, True, "1"],
    "stop": ["", [""], None, 5, [5], [b"a"], ["x"] * 17, "x" * 257, {"a": 1}, [["a"]], "\ud800"],
    "stop_token_ids": [[-1], [VOCAB_SIZE], [True], [1.0], ["1"], 5, None, [0] * 65, [2**70]],
    "ignore_eos": [None, 0, 1, "true", "yes"],
    "n": [0, -1, 17, None, True, 1.0, "2"],
    "min_tokens": [-1, 17, None, True, 1.5, "1", 2**70],
    "presence_penalty": [-2.1, 2.1, None, "1", True, math.nan, math.inf],
    "frequency_penalty": [-2.1, 2.1, None, "1", False, math.nan, -math.inf],
    "repetition_penalty": [0, -1, 2.1, None, "1", True, math.nan, math.inf],
    "logit_bias": [
        None,
        [],
        [[1, 2]],
        "5",
        *[{key: 1} for key in ("300", -1, "-1", "1.0", "\u0661", "", " 1", True, 1.0, None, "9" * 30)],
        {"1": 1, 1: 1},
        {"1": 1, "01": 1},
        *[{"1": bias} for bias in (100.5, -101, None, "1", True, math.nan, math.inf, [1])],
        dict.fromkeys(range(301), 0),
    ],
    "logprobs": [-1, 21, True, 1.0, "5"],
}


def test_the_tables_cover_every_sampling_field_and_so_does_the_protocol() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(GOOD) == set(BAD) == names
    jobs = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text().split("## 10.")[1]
    rows = [line.split("|")[1] for line in jobs.split("## 11.")[0].splitlines() if line.startswith("| `")]
    assert {name.strip(" `") for row in rows for name in row.split(",")} == names


@pytest.mark.parametrize(
    ("name", "given_value", "meant"), [(n, *pair) for n, pairs in GOOD.items() for pair in pairs]
)
def test_good_sampling_values_arrive_in_their_own_type(name: str, given_value: Any, meant: Any) -> None:
    answer = submit(prompt="a", **{name: given_value})
    assert isinstance(answer, Prepared), answer
    assert answer.sampling == dataclasses.replace(SamplingParams(), **{name: meant})
    assert type(getattr(answer.sampling, name)) is type(meant)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_bad_sampling_values_are_refused_by_field_name(name: str, value: Any) -> None:
    assert name in refused(ErrorCode.INVALID_SAMPLING, submit(prompt="a", **{name: value}))


def test_a_bad_element_is_named_by_its_place() -> None:
    assert "stop[1]" in refused(ErrorCode.INVALID_SAMPLING, submit(prompt="a", stop=["ok", ""]))
    assert "301" in refused(ErrorCode.INVALID_SAMPLING, submit(prompt="a", stop_token_ids=[1, 301]))


@pytest.mark.parametrize(
    ("sampling", "right"),
    [
        ({"n": 17}, "less than or equal to 16"),
        ({"logprobs": 21}, "less than or equal to 20"),
        ({"min_tokens": 5, "max_tokens": 4}, "at most max_tokens, 4"),
        ({"presence_penalty": 3}, "less than or equal to 2"),
        ({"repetition_penalty": 0}, "greater than 0"),
        ({"logit_bias": {"301": 1}}, "0 to 299"),
        ({"logit_bias": {"4": 101}}, "token 4 needs a number from -100 to 100"),
        ({"logit_bias": {"x": 1}}, "whole number"),
        ({"logit_bias": dict.fromkeys(range(301), 0)}, "at most 300 entries"),
        ({"logit_bias": [1]}, "a map of token ids to biases"),
    ],
    ids=str,
)
def test_a_refusal_says_what_would_be_right(sampling: dict[str, Any], right: str) -> None:
    assert right in refused(ErrorCode.INVALID_SAMPLING, submit(prompt="a", **sampling))


def test_min_tokens_needs_a_token_that_ends_nothing() -> None:
    class TwoTokens(ByteTokenizer):
        vocab_size = 2
        eos_token_ids = frozenset({0})

    sampling = {"min_tokens": 1, "stop_token_ids": [1]}
    refused(ErrorCode.INVALID_SAMPLING, prepare(None, None, [1], sampling, TwoTokens(), TOKEN_LIMIT))
    assert isinstance(prepare(None, None, [1], {"min_tokens": 1}, TwoTokens(), TOKEN_LIMIT), Prepared)


def test_sampling_fields_of_a_job_can_be_hashed() -> None:
    answer = submit(prompt="a", logit_bias={"5": 1}, stop=["x"], stop_token_ids=[1])
    assert len({answer.sampling, answer.sampling}) == 1


@pytest.mark.parametrize(
    "name", ["best_of", "top_logprobs", "Temperature", "echo", "x" * 5_000, 5, None, b"top_k"]
)
def test_an_unknown_sampling_field_is_named_and_the_known_ones_are_listed(name: Any) -> None:
    answer = prepare("a", None, None, {name: 1}, ByteTokenizer(), TOKEN_LIMIT)
    detail = refused(ErrorCode.INVALID_SAMPLING, answer)
    if isinstance(name, str):
        # What is no misspelt word may be a prompt in the wrong place, and refusals are logged.
        assert (name in detail) == (len(name) <= 32)
    for field in dataclasses.fields(SamplingParams):
        assert field.name in detail


@pytest.mark.parametrize("sampling", [None, [], "temperature", 5])
def test_sampling_that_is_no_map_is_refused(sampling: Any) -> None:
    refused(ErrorCode.INVALID_SAMPLING, prepare("a", None, None, sampling, ByteTokenizer(), TOKEN_LIMIT))


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=5)
    | st.text(st.characters(exclude_categories=()), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", *GOOD]) | st.text(max_size=3), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(prompt=ANYTHING, messages=ANYTHING, prompt_ids=ANYTHING, sampling=ANYTHING, only=st.integers(0, 4))
def test_whatever_is_submitted_is_prepared_or_refused(
    prompt: Any, messages: Any, prompt_ids: Any, sampling: Any, only: int
) -> None:
    sources = [prompt, messages, prompt_ids]
    if only < 3:
        sources = [source if position == only else None for position, source in enumerate(sources)]
    answer = prepare(*sources, sampling if only % 2 else {}, ByteTokenizer(), TOKEN_LIMIT)
    if isinstance(answer, Refusal):
        assert 0 < len(answer.detail) <= DETAIL_CHARACTERS
        answer.detail.encode("utf-8")
    else:
        assert 0 < len(answer.prompt_ids) <= TOKEN_LIMIT - answer.sampling.max_tokens
        assert all(0 <= token_id < VOCAB_SIZE for token_id in answer.prompt_ids)


def test_the_prompt_digest_is_pinned_and_the_same_for_every_container() -> None:
    token_ids = [0, 1, 49_151, 2**31 - 1]
    pinned = "1c76b0b910b4f4a2167aaf46c9425c43"
    assert prompt_digest(token_ids) == pinned
    assert prompt_digest(tuple(token_ids)) == pinned
    for dtype in ("<i4", ">i4", np.int64, np.uint32):
        assert prompt_digest(np.array(token_ids, dtype=dtype)) == pinned
    assert prompt_digest(np.repeat(np.array(token_ids), 2)[::2]) == pinned
    assert prompt_digest([]) == bytes_digest(b"").hex()
    assert bytes_digest(np.array(token_ids, dtype="<i4").tobytes()).hex() == pinned


def test_prompts_that_differ_have_different_digests() -> None:
    prompts = [[], [0], [0, 0], [1], [256], [1, 2], [2, 1]]
    assert len({prompt_digest(token_ids) for token_ids in prompts}) == len(prompts)


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**32, 2**40])
def test_ids_that_int32_cannot_hold_have_no_digest(token_id: int) -> None:
    with pytest.raises(ValueError, match="token ids"):
        prompt_digest([1, token_id])
    with pytest.raises(ValueError, match="token ids"):
        prompt_digest(np.array([1, token_id], dtype=np.int64))


def test_the_bytes_digest_is_of_the_bytes_whatever_holds_them() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    raw = array.tobytes()
    assert len(bytes_digest(raw)) == 16
    assert (
        bytes_digest(array)
        == bytes_digest(bytearray(raw))
        == bytes_digest(memoryview(array))
        == bytes_digest(raw)
    )
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1
        assert bytes_digest(flipped) != bytes_digest(raw)
    with pytest.raises((BufferError, ValueError)):
        bytes_digest(array.T)
