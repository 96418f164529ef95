"""The JSON of answers: whole ones and chunks, of chat and of text completions.

Decides the shape that OpenAI's clients read, and what Tandem adds (`tandem`: path, timings, cached tokens of
either node). Pure; called by the response of a request. What does not change from chunk to chunk is encoded
once, because a chunk is made for every token.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.client_messages import Finished, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one request's answer repeats."""

    identity: str
    created_s: int
    model: str
    chat: bool


def usage_of(usage: Usage) -> dict[str, Any]:
    """Tokens as OpenAI counts them; cached: of the prompt, found in either node's prefix cache."""
    cached = max(usage.cached_tokens_decode, usage.cached_tokens_prefill)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(cached, usage.prompt_tokens)},
    }


def tandem_of(end: Finished) -> dict[str, Any]:
    """Where the answer came from and where its time went."""
    return {
        "path": end.path,
        "timings": asdict(end.timings),
        "cached_tokens_decode": end.usage.cached_tokens_decode,
        "cached_tokens_prefill": end.usage.cached_tokens_prefill,
    }


def reasons_of(end: Finished) -> Sequence[str]:
    """One finish reason for each choice."""
    return end.reasons or (end.reason,)


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + _encoded(value).encode() + b"\n\n"


class Chunks:
    """Makes the chunks of one stream."""

    def __init__(self, head: Head, includes_usage: bool) -> None:
        self._head = head
        self._offsets: dict[int, int] = {}
        kind = "chat.completion.chunk" if head.chat else "text_completion"
        self._frame = {
            "id": head.identity,
            "object": kind,
            "created": head.created_s,
            "model": head.model,
        }
        self._before = "data: " + _encoded(self._frame)[:-1] + ',"choices":[{"index":'
        self._text_key = ',"delta":{"content":' if head.chat else ',"text":'
        after = '"logprobs":null,"finish_reason":null}]' + (',"usage":null' if includes_usage else "")
        self._after = ("}," if head.chat else ",") + after + "}\n\n"
        self._tail = {"usage": None} if includes_usage else {}

    def role(self, choice: int) -> bytes:
        """The first chunk of a choice of a chat."""
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def text(self, choice: int, text: str) -> bytes:
        """A piece of a choice's text."""
        encoded = json.dumps(text)
        return f"{self._before}{choice}{self._text_key}{encoded}{self._after}".encode()

    def text_with_logprobs(self, choice: int, text: str, tokens: Sequence[TokenLogprob]) -> bytes:
        """A piece of text and the logprobs of its tokens."""
        if self._head.chat:
            return self._chunk(choice, {"content": text}, chat_logprobs(tokens), None)
        offset = self._offsets.get(choice, 0)
        self._offsets[choice] = offset + sum(len(token.text) for token in tokens)
        return self._chunk(choice, text, text_logprobs(tokens, offset), None)

    def finish(self, choice: int, reason: str, **added: Any) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(choice, {} if self._head.chat else "", None, reason, **added)

    def usage(self, end: Finished) -> bytes:
        """The chunk after all choices."""
        return event({**self._frame, "choices": [], "usage": usage_of(end.usage), "tandem": tandem_of(end)})

    def _chunk(self, choice: int, content: Any, logprobs: Any, reason: str | None, **added: Any) -> bytes:
        part = {"index": choice, "delta" if self._head.chat else "text": content}
        part |= {"logprobs": logprobs, "finish_reason": reason}
        return event({**self._frame, "choices": [part], **self._tail, **added})


def whole(head: Head, texts: Sequence[str], logprobs: Sequence[Any], end: Finished) -> dict[str, Any]:
    """The answer to a request without streaming; texts and logprobs by choice."""
    choices = []
    for index, (text, told, reason) in enumerate(zip(texts, logprobs, reasons_of(end), strict=True)):
        said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": index, **(said if head.chat else {"text": text})}
        choices.append({**choice, "logprobs": told, "finish_reason": reason})
    return {
        "id": head.identity,
        "object": "chat.completion" if head.chat else "text_completion",
        "created": head.created_s,
        "model": head.model,
        "choices": choices,
        "usage": usage_of(end.usage),
        "tandem": tandem_of(end),
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Logprobs of a chat."""
    content = []
    for token in tokens:
        top = [_token(other.text, other.logprob) for other in token.top]
        content.append({**_token(token.text, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Logprobs of a text completion; offset: characters of the answer before the first token."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.text: other.logprob for other in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    # A token that is a part of a character has no bytes of its own in its text.
    known = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known}


def _encoded(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
