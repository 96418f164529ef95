"""What becomes of every field of a request: it changes the job, or it is refused by name."""

import json
from typing import Any

import pytest

from common.errors import ErrorCode
from common.sampling import SamplingParams
from decode_node.gateway import bodies
from decode_node.gateway.api_errors import STATUS_OF, ApiError, of_code

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
TEXT = {"model": "m", "prompt": "a"}
# A value that asks for something; None stands for a field that is taken at its default alone.
VALUES: dict[str, Any] = {
    "model": "other",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": "x",
    "stop_token_ids": [1],
    "ignore_eos": True,
    "min_tokens": 2,
    "n": 2,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": -1},
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_salt": "s",
    "user": "u",
    "messages": [{"role": "user", "content": "b"}],
    "max_completion_tokens": 6,
    "logprobs": True,
    "top_logprobs": 2,
    "prompt": "b",
    "echo": True,
}
# Their value beside others that they need.
WITH = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
UNSUPPORTED: dict[str, Any] = {
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "parallel_tool_calls": 5,
    "functions": [{}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["audio"],
    "audio": {},
    "prediction": {},
    "reasoning_effort": "low",
    "verbosity": "low",
    "web_search_options": {},
    "suffix": "x",
    "best_of": 3,
}
HARMLESS: dict[str, list[Any]] = {
    "metadata": [{}],
    "store": [False],
    "service_tier": ["auto", "default"],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "suffix": [""],
    "best_of": [1],
}


def parsed(body_class: type, body: dict[str, Any]) -> Any:
    return bodies.parse(body_class, json.dumps(body).encode())


def effect(body: Any) -> Any:
    """All that a body changes."""
    source = body.source() if isinstance(body, bodies.CompletionRequest) else body.messages[0].plain()
    told = (body.model, body.stream, body.includes_usage, body.salt, getattr(body, "echo", None))
    return source, body.sampling(), body.answer_tokens, told


FIELDS = [
    (body_class, base, name)
    for body_class, base in ((bodies.ChatRequest, CHAT), (bodies.CompletionRequest, TEXT))
    for name in body_class.model_fields
]


@pytest.mark.parametrize(
    ("body_class", "base", "name"), FIELDS, ids=[f"{cls.__name__}-{name}" for cls, _, name in FIELDS]
)
def test_every_field_changes_the_job_or_is_refused_by_name(
    body_class: type, base: dict[str, Any], name: str
) -> None:
    if name in UNSUPPORTED:
        with pytest.raises(ApiError) as caught:
            parsed(body_class, {**base, name: UNSUPPORTED[name]})
        assert (caught.value.status, caught.value.param) == (400, name)
        for value in (None, *HARMLESS.get(name, [])):
            assert effect(parsed(body_class, {**base, name: value})) == effect(parsed(body_class, base))
        return
    others = {**base, **WITH.get(name, {})}
    value = 1 if (name, body_class) == ("logprobs", bodies.CompletionRequest) else VALUES[name]
    changed = parsed(body_class, {**others, name: value})
    assert effect(changed) != effect(parsed(body_class, others))


def test_users_have_salts_of_their_own_unless_one_is_given() -> None:
    one, other = (parsed(bodies.ChatRequest, {**CHAT, "user": user}).salt for user in ("one", "other"))
    assert one != other
    assert one == parsed(bodies.ChatRequest, {**CHAT, "user": "one"}).salt
    assert len(one) <= bodies.SALT_CHARACTERS
    assert parsed(bodies.ChatRequest, {**CHAT, "user": "one", "cache_salt": "s"}).salt == "s"


def test_the_sampling_map_has_only_fields_that_the_sampler_knows() -> None:
    full = {name: value for name, value in VALUES.items() if name not in ("messages", "echo", "prompt")}
    full |= {"messages": CHAT["messages"], "max_completion_tokens": 5}
    sampling = parsed(bodies.ChatRequest, full).sampling()
    assert set(sampling) == set(SamplingParams.__dataclass_fields__) - {"max_tokens"}


def test_a_null_is_the_default() -> None:
    nulls = {name: None for name in bodies.ChatRequest.model_fields if name not in ("model", "messages")}
    assert effect(parsed(bodies.ChatRequest, {**CHAT, **nulls})) == effect(parsed(bodies.ChatRequest, CHAT))


def test_a_developer_speaks_as_the_system_and_minus_one_turns_top_k_off() -> None:
    body = {**CHAT, "messages": [{"role": "developer", "content": "a"}], "top_k": -1}
    request = parsed(bodies.ChatRequest, body)
    assert request.messages[0].plain() == {"role": "system", "content": "a"}
    assert request.sampling()["top_k"] == 0


def test_an_error_quotes_no_value() -> None:
    with pytest.raises(ApiError) as caught:
        parsed(bodies.CompletionRequest, {**TEXT, "temperature": "secret", "top_p": "secret", "x": "secret"})
    assert "secret" not in caught.value.message
    assert caught.value.message.count(";") == 2


def test_every_error_code_has_a_status_and_advice_and_busy_ones_say_when_to_come_back() -> None:
    assert set(STATUS_OF) == set(ErrorCode)
    for code in ErrorCode:
        error = of_code(code, "what happened", 1_001 if code is ErrorCode.BUSY else None)
        assert code.advice in error.message
        assert error.retry_after_s == {ErrorCode.BUSY: 2}.get(code, 1 if error.status == 503 else None)
