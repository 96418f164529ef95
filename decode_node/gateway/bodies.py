"""What the gateway's endpoints accept, field by field.

Decides the fields of every request body, their types and defaults, and what of the OpenAI API is taken at its
default only. A field that is not here is refused by name, and so is a value that would have no effect:
nothing is silently ignored. Ranges are the decode node's to judge where it judges them anyway.
"""

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from common.sampling import MAX_CHOICES, MAX_LOGIT_BIASES, MAX_LOGPROBS
from decode_node.gateway.api_errors import ApiError, bad_request

CHAT_MAX_TOKENS = 1_024  # of an answer whose request does not say
COMPLETION_MAX_TOKENS = 16  # as in OpenAI's API
TEMPERATURE = 1.0
SALT_CHARACTERS = 64  # as many as SUBMIT has room for
_SHOWN_FAULTS = 3


def _only(*allowed: Any) -> BeforeValidator:
    """A field of the API that has no effect here, so that only values which ask for none are taken."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(other) and value == other for other in (None, *allowed)):
            shown = " or ".join(repr(other) for other in (*allowed, None))
            raise ValueError(f"is not supported here: leave it out, or give {shown}")
        return value

    return BeforeValidator(check)


Unsupported = Annotated[Any, _only()]
Off = Annotated[Any, _only(False)]
Empty = Annotated[Any, _only([])]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    include_usage: bool | None = Field(None, description="send the usage in a chunk of its own at the end")


class Generation(_Body):
    """Fields that chat and text completions share."""

    model: str = Field(description="a name that /v1/models lists")
    max_tokens: Count | None = Field(None, description="most tokens of an answer")
    temperature: Number | None = Field(None, description=f"0 is greedy; default {TEMPERATURE}")
    top_p: Number | None = None
    top_k: int | None = Field(None, description="0 or -1 is off")
    min_p: Number | None = None
    seed: int | None = Field(None, description="the same answer each time; choice i is drawn with seed + i")
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="how many answers")
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=MAX_LOGIT_BIASES)] | None = Field(
        None, description="by token id, from -100 to 100"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=SALT_CHARACTERS)] | None = Field(
        None, description="jobs with another one share no prefix cache with this one"
    )
    user: str | None = Field(None, description="a cache_salt, where that is not given; kept nowhere")
    metadata: Annotated[Any, _only({})] = None
    store: Off = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    safety_identifier: Unsupported = None
    prompt_cache_key: Unsupported = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: goes with stream=true only")
        return self

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens that were asked for."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many alternatives are told with each token, None without logprobs at all."""
        return None

    @property
    def salt(self) -> str | None:
        """Whose prompts may share KV with this one: those of the same salt, or of the same user."""
        if self.cache_salt is not None or self.user is None:
            return self.cache_salt
        # Of a kind that nobody can find a second user for.
        return hashlib.sha256(self.user.encode("utf-8", "surrogatepass")).hexdigest()

    def sampling(self) -> dict[str, Any]:
        """The sampling map of SUBMIT, without max_tokens."""
        names = ("top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "n")
        names += ("presence_penalty", "frequency_penalty", "repetition_penalty")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        fields["temperature"] = TEMPERATURE if self.temperature is None else self.temperature
        if self.top_k is not None:
            fields["top_k"] = max(0, self.top_k) if self.top_k >= -1 else self.top_k
        if self.logit_bias:
            fields["logit_bias"] = self.logit_bias
        if self.top is not None:
            fields["logprobs"] = self.top
        return fields


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One turn of a chat."""

    role: str = Field(description="system, user, assistant, tool or, as another name for system, developer")
    content: str | list[TextPart]
    name: Unsupported = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Empty = None
    tool_calls: Empty = None
    tool_call_id: Unsupported = None
    function_call: Unsupported = None
    reasoning: Unsupported = None

    def plain(self) -> dict[str, str]:
        """As the decode node wants it."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = Field(None, description="another name for max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Empty = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, _only(True, False)] = None
    functions: Empty = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    modalities: Annotated[Any, _only(["text"])] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError("max_completion_tokens: is another name for max_tokens, and they differ")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: goes with logprobs=true only")
        return self

    @property
    def answer_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


TokenIds = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = Field(None, description="begin the answer with the prompt; not with logprobs")
    suffix: Annotated[Any, _only("")] = None
    best_of: Count | None = Field(None, description="only as many as n")

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: cannot be combined with logprobs, which are told of answers only")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: must equal n; choosing among answers is not supported")
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int) and len(self.prompt) != 1:
            raise ValueError("prompt: one at a time; send a request for each of several prompts")
        return self

    @property
    def top(self) -> int | None:
        return self.logprobs

    def source(self) -> dict[str, Any]:
        """`prompt` or `prompt_ids`, as SUBMIT has them."""
        prompt = self.prompt
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": tuple(prompt)}


class TokenizeRequest(_Body):
    """POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def parse(body_class: type[_Body], text: bytes) -> Any:
    """The body. Raises `ApiError` that names the first fields at fault, and never quotes a value."""
    try:
        return body_class.model_validate_json(text)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise _readable(faults) from None


def _readable(faults: list[Any]) -> ApiError:
    described = [_described(fault) for fault in faults[:_SHOWN_FAULTS]]
    more = len(faults) - _SHOWN_FAULTS
    text = "; ".join(f"{place}: {message}" if place else message for place, message in described)
    return bad_request(text + (f"; and {more} more" if more > 0 else ""), described[0][0] or None)


def _described(fault: Any) -> tuple[str, str]:
    """Field and fault; a fault of several fields names the one in its own words."""
    if fault["type"] == "json_invalid":
        return "", f"the body is not JSON: {fault['ctx']['error']}"
    message = fault["msg"].removeprefix("Value error, ")
    place = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif not place or (part.isidentifier() and part not in ("str", "int", "float", "bool")):
            place += f".{part}" if place else part
    if not place and ": " in message:
        place, message = message.split(": ", 1)
    if fault["type"] == "extra_forbidden":
        message = "there is no such field here"
    if fault["type"] == "model_type":
        message = "must be a JSON object"
    return place, message
