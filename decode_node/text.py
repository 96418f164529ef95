"""Turns one job's generated tokens into text, piece by piece, and finds its stop strings.

Decides which characters are final and may leave; called by the decode node's text thread, which makes one
`TextStream` per job. It must never emit prompt text (it is given none), part of a character or of a stop
string, and its result must never depend on how tokens were grouped into pushes.

Shape: a `_Detokenizer` decodes a short window of the newest tokens and passes on what later tokens cannot
change; a `_StopMatcher` runs over those characters. For tokenizers whose text is the UTF-8 decoding of their
tokens' joined bytes, the pieces joined equal the decoding of all tokens, whatever the bytes. Sentencepiece
models, whose tokens are spelled by context, are decoded with the tokens before them in the window; only
bytes that never become a character may come out there as another number of U+FFFD.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from common.client_messages import TokenLogprob, TopLogprob
from common.engines.interface import Tokenizer
from decode_node.logits_processing import Logprobs

REPLACEMENT = "\ufffd"
WINDOW_TOKENS = 48
CONTEXT_TOKENS = 12
# A character has at most four bytes, so four tokens that add no settled text hold something invalid.
UNSETTLED_TOKENS = 4
# What an incomplete character may look like: one U+FFFD, or with byte-fallback tokens one for each byte.
INCOMPLETE_CHARACTERS = 3


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a job.

    stopped: a stop string has matched, no text follows. token_count: the job's tokens consumed so far; once
    stopped, it ends with the token that completed the stop string, whatever was pushed after it.
    """

    text: str
    stopped: bool
    token_count: int


def spelled_logprobs(logprobs: Logprobs | None, tokenizer: Tokenizer) -> tuple[TokenLogprob, ...]:
    """Logprobs of one token as clients get them: each token with its text when it stands alone.

    A token that is a part of a character has U+FFFD in its text, one without text an empty one.
    """
    if logprobs is None:
        return ()
    (token_id, logprob), *others = logprobs
    top = tuple(TopLogprob(other, tokenizer.decode([other]), value) for other, value in others)
    return (TokenLogprob(token_id, tokenizer.decode([token_id]), logprob, top),)


class TextStream:
    """Text of one job.

    silent_token_ids: ids that count but yield no text, the job's `ending_token_ids`. Stop rule: reading
    character by character, the first stop string to be complete ends the text, where it begins; if several
    are complete at one character, the longest. The stop string is not part of the text. One that is complete
    with the first `min_tokens` tokens ends nothing, and is text like any other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        silent_token_ids: Collection[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = _Detokenizer(tokenizer)
        self._matcher = _StopMatcher(stop)
        self._silent_token_ids = silent_token_ids
        self._min_tokens = min_tokens
        self._token_count = 0
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the job's next tokens; return the text that has become final. Cost per token is bounded."""
        pieces = []
        for token_id in token_ids:
            if self._stopped:
                break
            self._token_count += 1
            if token_id not in self._silent_token_ids:
                pieces.append(self._match(self._detokenizer.add(token_id)))
        return TextDelta("".join(pieces), self._stopped, self._token_count)

    def finish(self) -> TextDelta:
        """Return what was held back, once no more tokens come; an incomplete character becomes U+FFFD."""
        text = ""
        if not self._stopped:
            text = self._match(self._detokenizer.flush())
        if not self._stopped:
            text += self._matcher.flush()
        return TextDelta(text, self._stopped, self._token_count)

    def _match(self, text: str) -> str:
        released, self._stopped = self._matcher.feed(text, self._token_count > self._min_tokens)
        return released


class _Detokenizer:
    """Decodes a window of the newest tokens; `_emitted` characters of the window's text have left.

    The window begins where the text was once complete, and at least `CONTEXT_TOKENS` before its end. In text
    that is never complete it is cut anywhere: that may spoil its first characters, but those have left long
    ago and are merely counted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._next_start = 0
        self._text = ""
        self._emitted = 0
        self._unsettled_tokens = 0

    def add(self, token_id: int) -> str:
        """Append one token; return the characters that no later token can change."""
        window = [*self._window, token_id]
        text = self._decode(window)
        if text and text == self._text and not self._decode([token_id]):
            # Special tokens have no text; in the window they would push out bytes still needed.
            return ""
        self._window, self._text = window, text
        complete = not text.endswith(REPLACEMENT)
        piece = self._take(self._settled_length())
        if complete and len(window) - self._next_start >= CONTEXT_TOKENS:
            self._shorten(self._next_start)
            self._next_start = len(self._window)
        elif len(window) >= WINDOW_TOKENS:
            self._shorten(len(window) - CONTEXT_TOKENS)
            self._next_start = 0
        return piece

    def flush(self) -> str:
        """Return the rest of the text, complete or not."""
        return self._take(len(self._text))

    def _take(self, settled: int) -> str:
        if settled <= self._emitted:
            self._unsettled_tokens += 1
            return ""
        piece = self._text[self._emitted : settled]
        self._emitted = settled
        self._unsettled_tokens = 0
        return piece

    def _settled_length(self) -> int:
        settled = len(self._text.rstrip(REPLACEMENT))
        if self._unsettled_tokens < UNSETTLED_TOKENS:
            return settled
        return max(settled, len(self._text) - INCOMPLETE_CHARACTERS)

    def _shorten(self, start: int) -> None:
        if start == 0:
            return
        unsent = max(0, len(self._text) - self._emitted)
        self._window = self._window[start:]
        self._text = self._decode(self._window)
        self._emitted = max(0, len(self._text) - unsent)


class _StopMatcher:
    """Knuth-Morris-Pratt over several stop strings: one state for each, carried from piece to piece.

    A state is the length of the longest beginning of the stop string that ends the text so far. The greatest
    state is what must be held back, and one that reaches the stop string's length is a match.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._borders = [_borders(word) for word in self._stop]
        self._states = [0] * len(self._stop)
        self._held = ""

    def feed(self, text: str, may_match: bool) -> tuple[str, bool]:
        """Return the text that may leave, and whether a stop string has matched (nothing is held then).

        may_match: whether a stop string that is complete in `text` counts.
        """
        if not self._stop:
            return text, False
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            matched = self._advance(buffer[end - 1])
            if matched and may_match:
                self._held = ""
                return buffer[: end - matched], True
        keep_from = len(buffer) - max(self._states)
        self._held = buffer[keep_from:]
        return buffer[:keep_from], False

    def flush(self) -> str:
        """Return what was held back in case it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Read one character; length of the longest stop string it completes, or 0."""
        matched = 0
        for position, word in enumerate(self._stop):
            state = self._states[position]
            while state and word[state] != character:
                state = self._borders[position][state - 1]
            state += word[state] == character
            if state == len(word):
                matched = max(matched, state)
                # It may not count, and then it is held back no longer; its end may begin another one.
                state = self._borders[position][-1]
            self._states[position] = state
        return matched


def _borders(word: str) -> list[int]:
    """For each beginning of `word`: length of its longest proper beginning that is also its end."""
    borders = [0]
    for character in word[1:]:
        length = borders[-1]
        while length and word[length] != character:
            length = borders[length - 1]
        borders.append(length + (word[length] == character))
    return borders
