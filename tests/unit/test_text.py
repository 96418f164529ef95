"""Streamed text: exact, never half a character, never a part of a stop string, bounded in cost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.text import CONTEXT_TOKENS, WINDOW_TOKENS, TextDelta, TextStream

SPECIAL = 256
PIECES = [
    b"the ",
    b"DEF",
    b"FGH",
    "né".encode(),
    "日本".encode(),
    "日本".encode()[:4],
    "日本".encode()[2:5],
    b"\x80" * 5,
    b"\xf0\x9f",
    "\ufffd".encode(),
    "\ufffd".encode() * 20,
    b"a" * 300,
]
VOCAB_SIZE = SPECIAL + 1 + len(PIECES)


class ByteTokenizer:
    """Ids below 256 are bytes, 256 is special and has no text, the rest are byte strings as in BPE."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({SPECIAL})

    def __init__(self) -> None:
        self.decoded_tokens: list[int] = []

    def decode(self, token_ids: list[int]) -> str:
        self.decoded_tokens.append(len(token_ids))
        pieces = [
            b"" if one == SPECIAL else bytes([one]) if one < 256 else PIECES[one - 257] for one in token_ids
        ]
        return b"".join(pieces).decode("utf-8", errors="replace")


class ContextTokenizer:
    """As sentencepiece: a space before each word but the first; a run of bytes is text only as a whole."""

    vocab_size = 0
    eos_token_ids = frozenset()

    def __init__(self, tokens: list[str | int]) -> None:
        self._tokens = tokens

    def decode(self, token_ids: list[int]) -> str:
        text, run = "", bytearray()
        for token in [*(self._tokens[one] for one in token_ids), ""]:
            if isinstance(token, int):
                run.append(token)
                continue
            try:
                text += run.decode("utf-8")
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run.clear()
            text += token.replace("▁", " ")
        return text.removeprefix(" ")


def stream_text(
    token_ids: list[int], stop: tuple[str, ...] = (), group: int = 1, min_tokens: int = 0
) -> tuple[list[str], TextDelta]:
    """Texts of all deltas, and the last delta."""
    stream = TextStream(ByteTokenizer(), stop, min_tokens=min_tokens)
    deltas = [stream.push(token_ids[start : start + group]) for start in range(0, len(token_ids), group)]
    deltas.append(stream.finish())
    return [delta.text for delta in deltas], deltas[-1]


def whole_text(token_ids: list[int]) -> str:
    return ByteTokenizer().decode(token_ids)


TEXTS = [
    "plain words, nothing more",
    "naïve café, Straße, Ελλάδα",
    "日本語のテキスト、漢字",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 tone",
    "e\u0301a\u0308 combining, \u202eright to left, zero\u200bwidth",
    "genuine \ufffd\ufffd replacement \ufffd",
    "\x00\x01 control \r\n\t",
]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_a_text_come_out_as_its_whole_characters(text: str) -> None:
    texts, last = stream_text(list(text.encode()))
    assert "".join(texts) == text
    assert (last.stopped, last.token_count) == (False, len(text.encode()))
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in texts)
        # A character leaves with its last byte, not later.
        stream, sent = TextStream(ByteTokenizer(), ()), ""
        for character in text:
            sent += stream.push(list(character.encode())).text
            assert text.startswith(sent)
            assert len(sent) == text.index(sent) + len(sent)
        assert sent == text


def test_a_character_split_after_the_first_token_waits_for_the_second() -> None:
    for character in ("é", "€", "👍"):
        stream = TextStream(ByteTokenizer(), ())
        *early, last = character.encode()
        assert [stream.push([byte]).text for byte in early] == [""] * len(early)
        assert stream.push([last]).text == character


TOKEN_IDS = st.lists(
    st.one_of(
        st.integers(0, VOCAB_SIZE - 1),
        st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xED, 0xA0, 0xF0, 0x9F, 0x98, 0xF4, 0xFF, SPECIAL]),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(token_ids=TOKEN_IDS, group=st.integers(1, 9))
def test_deltas_joined_equal_the_whole_decoding_for_any_tokens(token_ids: list[int], group: int) -> None:
    assert "".join(stream_text(token_ids, group=group)[0]) == whole_text(token_ids)


def test_ten_thousand_random_sequences_decode_exactly() -> None:
    numbers = random.Random(5)
    for _ in range(10_000):
        token_ids = numbers.choices(range(VOCAB_SIZE), k=numbers.randrange(1, 14))
        assert "".join(stream_text(token_ids)[0]) == whole_text(token_ids)


def test_long_runs_of_invalid_bytes_and_of_special_tokens_are_exact() -> None:
    for run in ([0x80] * 400, [0xF0, 0x9F, 0x98] * 150, [0xE2, 0x82] * 200, [0xEF, 0xBF, 0xBD] * 150):
        assert "".join(stream_text([*run, *b"end"])[0]) == whole_text([*run, *b"end"])
        mixed = [one for byte in run for one in (byte, SPECIAL, SPECIAL, SPECIAL)]
        assert "".join(stream_text([*mixed, *b"end"])[0]) == whole_text([*mixed, *b"end"])
    apart = [0xF0, *[SPECIAL] * 100, 0x9F, *[SPECIAL] * 100, 0x98, *[SPECIAL] * 100, 0x80]
    assert "".join(stream_text([*[SPECIAL] * 50, *apart])[0]) == "😀"
    assert "".join(stream_text([*b"text ", *apart])[0]) == "text 😀"


def test_tokens_that_never_end_where_a_character_ends_still_stream() -> None:
    encoded = "日本語".encode() * 60
    tokenizer = ByteTokenizer()
    # 日 and two bytes of 本, then its last byte, 語 and ... : no token border is a character border.
    tokenizer.decode = lambda ids: b"".join(encoded[2 + 3 * one : 5 + 3 * one] for one in ids).decode(
        errors="replace"
    )
    stream, lag = TextStream(tokenizer, ()), []
    sent = ""
    for token_id in range(150):
        sent += stream.push([token_id]).text
        lag.append(token_id + 1 - len(sent))
    sent += stream.finish().text
    assert sent == tokenizer.decode(list(range(150)))
    assert max(lag) <= 2


@pytest.mark.parametrize("byte", [0x80, 0xF0, 0xFF])
def test_what_is_held_back_of_an_endless_invalid_text_is_bounded(byte: int) -> None:
    stream, sent = TextStream(ByteTokenizer(), ()), 0
    for count in range(1, 1_000):
        sent += len(stream.push([byte]).text)
        assert count - sent <= 8


def test_each_token_costs_a_short_decoding_however_long_the_text_is() -> None:
    numbers = random.Random(1)
    for choices in (range(VOCAB_SIZE), [0x80], [SPECIAL], [97, SPECIAL]):
        tokenizer = ByteTokenizer()
        stream = TextStream(tokenizer, ("never seen",))
        for _ in range(3_000):
            stream.push([numbers.choice(choices)])
        assert max(tokenizer.decoded_tokens) <= WINDOW_TOKENS
        assert len(tokenizer.decoded_tokens) <= 3_000 * (2 + 1 / CONTEXT_TOKENS)


def test_text_is_final_once_sent_and_a_cut_character_becomes_a_replacement_at_the_end() -> None:
    stream = TextStream(ByteTokenizer(), ())
    assert stream.push(list("ab€".encode()[:-1])).text == "ab"
    assert stream.finish() == TextDelta("\ufffd", False, 4)
    assert stream.finish().text == ""


def test_words_spelled_by_context_and_characters_made_of_byte_tokens_stream_whole() -> None:
    tokens = ["▁", "▁hello", "▁world", "s", *"€🙂é".encode(), "▁end"]
    last = len(tokens) - 1
    for token_ids in (
        list(range(len(tokens))),
        [0, 0, 1, 2, 3] * 30,
        [1, *range(4, last), *range(4, last), *range(4, last), 2] * 10,
        [*range(4, last)] * 10,
    ):
        tokenizer = ContextTokenizer(tokens)
        stream = TextStream(tokenizer, ())
        texts = [stream.push([token_id]).text for token_id in token_ids] + [stream.finish().text]
        assert "".join(texts) == tokenizer.decode(token_ids)
        assert all("\ufffd" not in text for text in texts)


def test_silent_tokens_count_but_yield_no_text() -> None:
    stream = TextStream(ByteTokenizer(), (), silent_token_ids={ord("!"), SPECIAL})
    assert stream.push(list(b"hi!")) == TextDelta("hi", False, 3)
    assert stream.push([SPECIAL]) == TextDelta("", False, 4)
    assert TextStream(ByteTokenizer(), ()).push([SPECIAL]) == TextDelta("", False, 1)


def reference_stop(text: str, stop: tuple[str, ...], min_tokens: int = 0) -> tuple[str, int | None]:
    """Text up to the stop string that is complete first (of those, the longest), and where it ends.

    One that is complete with the first `min_tokens` characters is none.
    """
    for end in range(min_tokens + 1, len(text) + 1):
        lengths = [len(word) for word in stop if text[:end].endswith(word)]
        if lengths:
            return text[: end - max(lengths)], end
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=60),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple),
    group=st.integers(1, 7),
    min_tokens=st.just(0) | st.integers(0, 30),
)
def test_stop_strings_cut_where_the_reference_cuts(
    text: str, stop: tuple[str, ...], group: int, min_tokens: int
) -> None:
    expected, end = reference_stop(text, stop, min_tokens)
    texts, last = stream_text(list(text.encode()), stop, group, min_tokens)
    assert "".join(texts) == expected
    assert last.stopped == (end is not None)
    assert last.token_count == (len(text) if end is None else end)


@settings(max_examples=150, deadline=None)
@given(
    token_ids=TOKEN_IDS,
    group=st.integers(1, 9),
    stop=st.sampled_from(["é", "\ufffd", "aa", "本", "EFG", " "]),
)
def test_stop_strings_are_found_in_any_text_however_it_is_grouped(
    token_ids: list[int], group: int, stop: str
) -> None:
    expected, end = reference_stop(whole_text(token_ids), (stop,))
    texts, last = stream_text(token_ids, (stop,), group)
    assert "".join(texts) == expected
    assert last.stopped == (end is not None)
    assert last == stream_text(token_ids, (stop,))[1]


def test_a_stop_string_over_several_tokens_never_leaks_and_ends_the_count() -> None:
    stream = TextStream(ByteTokenizer(), ("DEFGHIJ",))
    assert stream.push(list(b"abc DE")) == TextDelta("abc ", False, 6)
    assert stream.push(list(b"FGHI")) == TextDelta("", False, 10)
    assert stream.push(list(b"J and more")) == TextDelta("", True, 11)
    assert stream.push(list(b"still more")) == TextDelta("", True, 11)
    assert stream.finish() == TextDelta("", True, 11)


def test_a_stop_string_that_is_complete_too_early_is_text_and_released_at_once() -> None:
    stream = TextStream(ByteTokenizer(), ("ab",), min_tokens=2)
    assert stream.push(list(b"a")) == TextDelta("", False, 1)
    assert stream.push(list(b"b")) == TextDelta("ab", False, 2)
    assert stream.push(list(b"cab")) == TextDelta("c", True, 5)
    # What began before may still become whole after, and its own end may begin another.
    stream = TextStream(ByteTokenizer(), ("aXa",), min_tokens=3)
    assert stream.push(list(b"aXa")) == TextDelta("aX", False, 3)
    assert stream.push(list(b"Xa")) == TextDelta("", True, 5)
    assert TextStream(ByteTokenizer(), ("cd",), min_tokens=3).push(list(b"abcd")) == TextDelta("ab", True, 4)


def test_a_stop_string_may_be_the_first_token_or_end_inside_a_token() -> None:
    assert TextStream(ByteTokenizer(), ("D",)).push([257 + 1, 97]) == TextDelta("", True, 1)
    assert TextStream(ByteTokenizer(), ("EF",)).push([97, 257 + 1, 97]) == TextDelta("aD", True, 2)


def test_text_that_only_began_to_match_is_released() -> None:
    stream = TextStream(ByteTokenizer(), ("DEFGHIJ", "EFX"))
    assert stream.push(list(b"DEFG")).text == ""
    assert stream.push(list(b"Z")).text == "DEFGZ"
    assert stream.push(list(b"DEF")).text == ""
    assert stream.push(list(b"DEFX")) == TextDelta("DEFD", True, 12)


def test_a_match_that_begins_inside_a_failed_one_is_found() -> None:
    for text, word in (
        ("aaab", "aab"),
        ("aabaaabaaaa", "aabaaaa"),
        ("abababac", "ababac"),
        ("xxyxxxyxx", "xxxy"),
    ):
        start = text.index(word)
        texts, last = stream_text(list(text.encode()), (word,))
        assert "".join(texts) == text[:start]
        assert (last.stopped, last.token_count) == (True, start + len(word))


def test_held_back_text_is_flushed_when_the_job_ends_before_the_stop_string() -> None:
    stream = TextStream(ByteTokenizer(), ("DEFGHIJ" * 30,))
    assert stream.push(list(b"DEF")).text == ""
    assert stream.finish() == TextDelta("DEF", False, 3)


def test_of_overlapping_stop_strings_the_first_to_be_complete_wins() -> None:
    def cut(*stop: str) -> str:
        return "".join(stream_text(list(b"xabcdef"), stop, group=7)[0])

    assert cut("abcdef", "cd") == "xab"
    assert cut("bcd", "cd") == "xa"
    assert cut("cd", "bcd") == "xa"


def test_a_stop_string_is_found_in_a_character_split_over_tokens() -> None:
    token_ids = list("sum: 5€ due".encode())
    texts, last = stream_text(token_ids, ("€",))
    assert "".join(texts) == "sum: 5"
    assert (last.stopped, last.token_count) == (True, 9)
