"""Judges what a client submits, before the job is accepted.

Decides whether a SUBMIT body can become a job, and if not, what the client is told: a code, what was wrong
and what would be right. Called by the decode node's text thread; pure, so a refusal has no side effect. It
must never cut, repair or ignore anything: what is not understood is refused, and the prompt's text is never
quoted, because refusals are logged. A refusal is an expected thing, so it is a value, not an exception. The
same judgement of texts and ids serves TOKENIZE, which starts no job.

Text is always tokenised before it is judged too long: how many characters one token may stand for is not
part of the `Tokenizer` interface, so no length of text proves that it cannot fit. The length of a message
(transport's limit) bounds the work.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from common.digests import prompt_digest
from common.engines.interface import Tokenizer
from common.errors import ErrorCode
from common.limits import CONTROL_MESSAGE_BYTES, MESSAGE_ITEMS, PROMPT_CHARACTERS
from common.sampling import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams

ROLES = ("system", "user", "assistant")
ERROR_CHARACTERS = 500

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_FIELDS = {
    name: TypeAdapter(hint, config=_STRICT)
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
}
# What a misspelt name or value looks like.
_WORD = re.compile(r"[\w.+-]{1,32}", re.ASCII)
_DIGITS = re.compile(r"[0-9]{1,19}")
_TUPLE_FIELDS = ("stop", "stop_token_ids")
# What msgpack makes of an id at most, and of all else in a message but ids and text.
_ID_BYTES = 5
_ENVELOPE_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that may be accepted. prompt_digest: of `prompt_ids`, 32 hex digits."""

    prompt_ids: tuple[int, ...]
    prompt_digest: str
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TextAndIds:
    """What a TOKENIZE asked for. text: of the ids, if it gave ids; else empty."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not. `detail` says what was wrong and what would be right; it holds no prompt text."""

    code: ErrorCode
    detail: str


def prepare(
    prompt: str | None,
    messages: Sequence[dict[str, str]] | None,
    prompt_ids: Sequence[int] | None,
    sampling: dict[str, Any],
    tokenizer: Tokenizer,
    token_limit: int,
) -> Prepared | Refusal:
    """Turn a SUBMIT body into a job, or say why it cannot be one.

    Exactly one of `prompt` (text), `messages` (chat) and `prompt_ids` (taken as they are) is not None.
    `sampling` holds fields of `SamplingParams` by name; those left out have their defaults. `token_limit` is
    the most tokens a job may have, prompt and answer together. Never raises for anything a client can send.
    """
    refusal = _not_one_of(prompt=prompt, messages=messages, prompt_ids=prompt_ids)
    if refusal:
        return refusal
    params = _sampling_params(sampling, tokenizer)
    if isinstance(params, Refusal):
        return params
    token_ids = prompt_ids if prompt_ids is not None else _encoded(prompt, messages, tokenizer)
    if isinstance(token_ids, Refusal):
        return token_ids
    refusal = _wrong_prompt_ids(token_ids, params.max_tokens, tokenizer.vocab_size, token_limit)
    return refusal or Prepared(tuple(token_ids), prompt_digest(token_ids), params)


def tokenize(
    prompt: str | None,
    messages: Sequence[dict[str, str]] | None,
    token_ids: Sequence[int] | None,
    tokenizer: Tokenizer,
) -> TextAndIds | Refusal:
    """Carry out a TOKENIZE, or say why not. Exactly one of the three is not None.

    Never answers more than a message can hold. Never raises for anything a client can send.
    """
    refusal = _not_one_of(prompt=prompt, messages=messages, token_ids=token_ids)
    if refusal:
        return refusal
    if token_ids is None:
        ids, text = _encoded(prompt, messages, tokenizer), ""
        if isinstance(ids, Refusal):
            return ids
    else:
        refusal = _wrong_ids(token_ids, "token_ids", tokenizer.vocab_size)
        if refusal:
            return refusal
        ids, text = token_ids, tokenizer.decode(list(token_ids))
    size = _ENVELOPE_BYTES + _ID_BYTES * len(ids) + len(text.encode("utf-8"))
    if len(ids) > MESSAGE_ITEMS or size > CONTROL_MESSAGE_BYTES:
        return _invalid(f"the answer of {len(ids)} ids does not fit one message: send the text in parts")
    return TextAndIds(tuple(ids), text)


def _not_one_of(**sources: object) -> Refusal | None:
    given = [name for name, value in sources.items() if value is not None]
    if len(given) == 1:
        return None
    *names, last = sources
    found = " and ".join(given) or "none of them"
    return _invalid(f"give exactly one of {', '.join(names)} and {last}, not {found}")


def _encoded(prompt: object, messages: object, tokenizer: Tokenizer) -> list[int] | Refusal:
    if prompt is None:
        return _encode_messages(messages, tokenizer)
    return _wrong_text(prompt, "prompt") or tokenizer.encode(prompt)


def _invalid(detail: str) -> Refusal:
    return Refusal(ErrorCode.INVALID_REQUEST, detail)


def _invalid_sampling(detail: str) -> Refusal:
    return Refusal(ErrorCode.INVALID_SAMPLING, detail)


def _sampling_params(sampling: object, tokenizer: Tokenizer) -> SamplingParams | Refusal:
    if not isinstance(sampling, dict):
        return _invalid_sampling(f"sampling must be a map of fields, not {_kind(sampling)}")
    values = {}
    for name, value in sampling.items():
        if not isinstance(name, str) or name not in _FIELDS:
            return _invalid_sampling(f"unknown field {_quoted(name)}; known are {', '.join(_FIELDS)}")
        if name in _TUPLE_FIELDS and isinstance(value, list | tuple) and len(value) > MAX_STOP_TOKEN_IDS:
            return _invalid_sampling(f"{name}: at most {MAX_STOP_TOKEN_IDS} items, not {len(value)}")
        if name == "logit_bias":
            value = _bias_pairs(value)
            if isinstance(value, Refusal):
                return value
        try:
            values[name] = _FIELDS[name].validate_python(_as_tuple(name, value))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = "".join(f"[{part}]" for part in first["loc"])
            return _invalid_sampling(f"{name}{where}: {first['msg']}, not {_quoted(value)}")
    params = SamplingParams(**values)
    return _wrong_together(params, tokenizer) or params


def _bias_pairs(value: object) -> tuple[tuple[object, object], ...] | Refusal:
    """A map of biases as pairs. JSON knows no other keys than strings."""
    if not isinstance(value, dict):
        return _invalid_sampling(f"logit_bias must be a map of token ids to biases, not {_kind(value)}")
    if len(value) > MAX_LOGIT_BIASES:
        return _invalid_sampling(f"logit_bias: at most {MAX_LOGIT_BIASES} entries, not {len(value)}")
    biases = {}
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and _DIGITS.fullmatch(key) else key
        if type(token_id) is not int:
            return _invalid_sampling(f"logit_bias: {_quoted(key)} is not a token id, which is a whole number")
        if token_id in biases:
            return _invalid_sampling(f"logit_bias: token {token_id} has two biases, it needs one")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            return _invalid_sampling(
                f"logit_bias: token {_quoted(token_id)} needs a number from -100 to 100, not {_quoted(bias)}"
            )
        biases[token_id] = float(bias)
    return tuple(biases.items())


def _wrong_together(params: SamplingParams, tokenizer: Tokenizer) -> Refusal | None:
    """What only all fields, or the model's vocabulary, can tell."""
    vocab_size = tokenizer.vocab_size
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                return _invalid_sampling(f"{name}: {_not_a_token(token_id, vocab_size)}")
    if params.min_tokens > params.max_tokens:
        return _invalid_sampling(
            f"min_tokens is {params.min_tokens}, it must be at most max_tokens, {params.max_tokens}"
        )
    if params.min_tokens and len(tokenizer.eos_token_ids.union(params.stop_token_ids)) >= vocab_size:
        return _invalid_sampling("min_tokens with every token a stop token leaves none: name fewer of them")
    return None


def _as_tuple(name: str, value: object) -> object:
    """Messages know lists only, and OpenAI's API lets one stop string stand alone."""
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name in _TUPLE_FIELDS and isinstance(value, list):
        return tuple(value)
    return value


def _encode_messages(messages: object, tokenizer: Tokenizer) -> list[int] | Refusal:
    if not isinstance(messages, list | tuple) or not messages:
        return _invalid("messages must be a list of at least one map of role and content")
    for position, message in enumerate(messages):
        refusal = _wrong_message(message, f"messages[{position}]")
        if refusal:
            return refusal
    try:
        return tokenizer.encode_chat(list(messages))
    except ValueError as error:
        return _invalid(f"messages do not fit the model's chat template: {str(error)[:ERROR_CHARACTERS]}")


def _wrong_message(message: object, name: str) -> Refusal | None:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        return _invalid(f"{name} must be a map of role and content and nothing else")
    # A free role would let a client write the template's own control text.
    if message["role"] not in ROLES:
        return _invalid(f"{name}: role must be one of {', '.join(ROLES)}, not {_quoted(message['role'])}")
    return _wrong_text(message["content"], f"{name}: content")


def _wrong_text(text: object, name: str) -> Refusal | None:
    if not isinstance(text, str):
        return _invalid(f"{name} must be text, not {_kind(text)}")
    if len(text) > PROMPT_CHARACTERS:
        return _invalid(
            f"{name} has {len(text)} characters and at most {PROMPT_CHARACTERS} are tokenised here:"
            " send prompt_ids"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return _invalid(f"{name} must be valid Unicode, but character {error.start} is a lone surrogate")
    return None


def _wrong_prompt_ids(
    token_ids: object, max_tokens: int, vocab_size: int, token_limit: int
) -> Refusal | None:
    if not isinstance(token_ids, list | tuple):
        return _invalid(f"prompt_ids must be a list of token ids, not {_kind(token_ids)}")
    if not token_ids:
        return Refusal(ErrorCode.EMPTY_PROMPT, "the prompt has no tokens, it needs at least one")
    # The length comes first: it bounds the work of looking at every id.
    total = len(token_ids) + max_tokens
    if total > token_limit:
        return Refusal(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {len(token_ids)} tokens and max_tokens is {max_tokens}, "
            f"together {total}; the limit is {token_limit}",
        )
    return _wrong_ids(token_ids, "prompt_ids", vocab_size)


def _wrong_ids(token_ids: object, name: str, vocab_size: int) -> Refusal | None:
    if not isinstance(token_ids, list | tuple):
        return _invalid(f"{name} must be a list of token ids, not {_kind(token_ids)}")
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            return _invalid(f"{name}[{position}] must be a whole number, not {_kind(token_id)}")
        if not 0 <= token_id < vocab_size:
            return Refusal(
                ErrorCode.TOKEN_OUT_OF_RANGE, f"{name}[{position}]: {_not_a_token(token_id, vocab_size)}"
            )
    return None


def _not_a_token(token_id: int, vocab_size: int) -> str:
    return f"{_quoted(token_id)} is not a token id of this model, they are 0 to {vocab_size - 1}"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _quoted(value: object) -> str:
    """The value as a client would know it, if it is a word or a number; else what it is."""
    if isinstance(value, list | tuple | dict | bytes):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str) and not _WORD.fullmatch(value):
        return f"a text of {len(value)} characters"  # it may be somebody's prompt in the wrong place
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    return ascii(value)
