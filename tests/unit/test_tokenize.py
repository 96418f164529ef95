"""TOKENIZE: texts and chats to ids, ids to text, refusals, and how much of it is under way at once."""

import io
from typing import Any

import pytest

from common.engines.byte_tokenizer import BOS, END_OF_TURN, EOS, VOCAB_SIZE, ByteTokenizer
from common.engines.registry import EngineSettings
from common.errors import ErrorCode
from common.hooks import HoldPoints
from common.limits import MESSAGE_ITEMS, PROMPT_CHARACTERS, TOKENIZE_REQUESTS
from common.log import NodeLog
from common.messages import Rejected, Tokenize, Tokenized
from decode_node import commands
from decode_node import events as ev
from decode_node.submission import Refusal, TextAndIds, tokenize
from decode_node.text_thread import TextThread
from tests.cores import Pair
from transport.loop import Mailbox, Wakeup

MARKER = "unmistakable-secret"


def answer(prompt: Any = None, messages: Any = None, token_ids: Any = None) -> TextAndIds | Refusal:
    return tokenize(prompt, messages, token_ids, ByteTokenizer())


def refused(code: ErrorCode, refusal: TextAndIds | Refusal) -> str:
    assert isinstance(refusal, Refusal), refusal
    assert refusal.code is code
    assert MARKER not in refusal.detail
    return refusal.detail


def test_a_text_becomes_its_ids_and_ids_become_their_text() -> None:
    assert answer(prompt="né") == TextAndIds((110, 195, 169), "")
    assert answer(token_ids=(110, 195, 169)) == TextAndIds((110, 195, 169), "né")
    assert answer(prompt="") == TextAndIds((), "")
    assert answer(token_ids=()) == TextAndIds((), "")
    assert answer(token_ids=[BOS, 97, 195, EOS]).text == "a\ufffd"


def test_a_chat_becomes_the_ids_that_a_job_would_have() -> None:
    ids = answer(messages=[{"role": "user", "content": "hi"}]).token_ids
    assert ids == (BOS, *b"user: hi", END_OF_TURN, *b"assistant: ")


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({}, "exactly one of prompt, messages and token_ids, not none"),
        ({"prompt": "a", "token_ids": ()}, "not prompt and token_ids"),
        ({"prompt": 5}, "must be text"),
        ({"prompt": MARKER + "\ud800"}, "lone surrogate"),
        ({"prompt": "x" * (PROMPT_CHARACTERS + 1)}, f"at most {PROMPT_CHARACTERS}"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "robot", "content": MARKER}]}, "role must be one of"),
        ({"messages": [{"role": "user", "content": MARKER, "x": 1}]}, "and nothing else"),
        ({"token_ids": "abc"}, "list of token ids"),
        ({"token_ids": [1, True]}, "token_ids[1] must be a whole number"),
        ({"prompt": "\U0001f600" * 500_000}, "send the text in parts"),
        ({"token_ids": [97] * (MESSAGE_ITEMS + 1)}, "send the text in parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_tokenised_or_answered_is_refused(sources: dict[str, Any], words: str) -> None:
    assert words in refused(ErrorCode.INVALID_REQUEST, answer(**sources))


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    detail = refused(ErrorCode.TOKEN_OUT_OF_RANGE, answer(token_ids=(1, token_id)))
    assert "token_ids[1]" in detail
    assert f"0 to {VOCAB_SIZE - 1}" in detail


class Panic(BaseException):
    """What a tokenizer written in another language raises when it breaks."""


class BrokenTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        raise Panic(text)

    def decode(self, token_ids: list[int]) -> str:
        raise ValueError(str(token_ids))


@pytest.mark.parametrize("sources", [{"prompt": MARKER}, {"token_ids": (1, 2)}], ids=str)
def test_a_tokenizer_that_raises_is_a_refusal_without_the_text(sources: dict[str, Any]) -> None:
    wakeup = Wakeup()
    mailbox = Mailbox(wakeup)
    log = NodeLog(node="decode", incarnation="test", stream=io.StringIO())
    thread = TextThread(EngineSettings(backend="emulated", model=""), mailbox, HoldPoints(None, log))
    thread._tokenizer = BrokenTokenizer()
    thread._tokenize(commands.TokenizeText("session", Tokenize("one", **sources)))
    (event,) = mailbox.take()
    wakeup.close()
    assert isinstance(event, ev.TokenizeRefused)
    assert (event.session, event.label, event.code) == ("session", "one", ErrorCode.INVALID_REQUEST)
    assert MARKER not in event.detail


def test_a_client_gets_an_answer_to_each_request_and_no_job_is_made() -> None:
    pair = Pair()
    pair.client.say(Tokenize("text", prompt="abc"))
    pair.client.say(Tokenize("chat", messages=({"role": "user", "content": "ba"},)))
    pair.client.say(Tokenize("ids", token_ids=(2, 1)))
    pair.client.say(Tokenize("bad", token_ids=(99,)))
    assert pair.client.received[:3] == [
        Tokenized("text", (0, 1, 2), ""),
        Tokenized("chat", (1, 0), ""),
        Tokenized("ids", (2, 1), "cb"),
    ]
    (rejected,) = pair.client.of("bad", Rejected)
    assert (rejected.code, rejected.retry_ms) == (ErrorCode.TOKEN_OUT_OF_RANGE, None)
    assert pair.core.idle
    assert not any(pair.core.counters.values())


def test_a_label_may_be_that_of_a_live_job() -> None:
    pair = Pair()
    pair.client.submit("same", [1, 2, 3])
    pair.client.say(Tokenize("same", prompt="a"))
    assert pair.client.of("same", Tokenized) == [Tokenized("same", (0,), "")]
    pair.finish()
    assert len(pair.client.tokens("same")) == 4


def test_so_many_at_once_and_the_next_is_told_to_come_back() -> None:
    pair = Pair()
    other = pair.add_client("client-2")
    pair.tick()
    pair.hold_text = True
    for number in range(TOKENIZE_REQUESTS):
        pair.client.say(Tokenize(str(number), prompt="a"))
    other.say(Tokenize("more", prompt="a"))
    (rejected,) = other.of("more", Rejected)
    assert rejected.code is ErrorCode.BUSY
    assert rejected.retry_ms > 0
    pair.hold_text = False
    pair.deliver()
    assert all(pair.client.of(str(number), Tokenized) for number in range(TOKENIZE_REQUESTS))
    assert not other.of("more", Tokenized)
    pair.client.say(Tokenize("again", prompt="a"))
    assert pair.client.of("again", Tokenized)


def test_who_has_left_gets_no_answer_and_holds_no_place() -> None:
    pair = Pair()
    leaving = pair.add_client("client-2")
    pair.tick()
    pair.hold_text = True
    for number in range(TOKENIZE_REQUESTS):
        leaving.say(Tokenize(str(number), **({"prompt": "a"} if number % 2 else {"token_ids": (99,)})))
    leaving.leave()
    pair.hold_text = False
    pair.deliver()
    assert not [item for item in leaving.received if isinstance(item, Tokenized | Rejected)]
    pair.client.say(Tokenize("mine", prompt="a"))
    assert pair.client.of("mine", Tokenized)


def test_a_node_that_leaves_takes_no_more_and_does_not_wait_for_them() -> None:
    pair = Pair()
    pair.client.submit("job", [1, 2, 3])
    pair.stop_decode()
    pair.client.say(Tokenize("late", prompt="a"))
    (rejected,) = pair.client.of("late", Rejected)
    assert rejected.code is ErrorCode.SHUTTING_DOWN
    pair.finish()
    assert pair.exit is not None
