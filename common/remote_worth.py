"""When it pays to have a prompt computed by the prefill node: arithmetic on measured times.

Decides, from costs that are straight lines over the prompt's length, for which lengths the remote way is the
faster one. Called by the benchmark that measures a pair, and by whoever turns its figures into
`--min-remote-prompt-tokens`. It must never measure anything itself, and never speak of prompts longer than it
was told to: lines that meet beyond the longest prompt do not meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A time of `fixed_ms`, and of `token_ms` more for each token of the prompt."""

    fixed_ms: float
    token_ms: float

    def at(self, tokens: int) -> float:
        """The time for a prompt of that length, in ms."""
        return self.fixed_ms + self.token_ms * tokens

    def plus(self, other: "LinearCost") -> "LinearCost":
        """Both, one after the other."""
        return LinearCost(self.fixed_ms + other.fixed_ms, self.token_ms + other.token_ms)


def fit(samples: Sequence[tuple[int, float]]) -> LinearCost:
    """The straight line of the least squared error through (tokens, ms).

    Raises ValueError for fewer than two different lengths: they are no line.
    """
    count = len(samples)
    if len({tokens for tokens, _ in samples}) < 2:
        raise ValueError("a line needs prompts of at least two different lengths")
    mean_tokens = sum(tokens for tokens, _ in samples) / count
    mean_ms = sum(ms for _, ms in samples) / count
    covariance = sum((tokens - mean_tokens) * (ms - mean_ms) for tokens, ms in samples)
    variance = sum((tokens - mean_tokens) ** 2 for tokens, _ in samples)
    token_ms = covariance / variance
    return LinearCost(mean_ms - token_ms * mean_tokens, token_ms)


def paying_lengths(local: LinearCost, remote: LinearCost, max_tokens: int) -> range:
    """The lengths of 1 to `max_tokens` tokens for which `remote` costs less; empty for never.

    A draw is local: nothing need be sent for it.
    """
    lead_ms = local.fixed_ms - remote.fixed_ms
    gain_ms = local.token_ms - remote.token_ms
    if gain_ms == 0:
        return range(1, max_tokens + 1 if lead_ms > 0 else 1)
    meeting = -lead_ms / gain_ms
    if gain_ms > 0:
        return _between(floor(meeting) + 1, max_tokens, max_tokens)
    return _between(1, ceil(meeting) - 1, max_tokens)


def paying_lengths_with_prefetch(
    local: LinearCost, producer: LinearCost, lane: LinearCost, decode_ms: float, max_tokens: int
) -> range:
    """The lengths for which an endless row of equal jobs is done faster with the prefill node working ahead.

    Then the slower of two sides sets the pace: the producer, with its link, or the lane, which imports
    (`lane`) and decodes for `decode_ms`. Without the prefill node the lane does everything.
    """
    decode = LinearCost(decode_ms, 0.0)
    alone = local.plus(decode)
    by_producer = paying_lengths(alone, producer, max_tokens)
    by_lane = paying_lengths(alone, lane.plus(decode), max_tokens)
    return _between(
        max(by_producer.start, by_lane.start), min(by_producer.stop, by_lane.stop) - 1, max_tokens
    )


def min_remote_prompt_tokens(paying: range, max_tokens: int) -> int | None:
    """The shortest prompt to send to the prefill node, if from there on it is always worth it."""
    return paying.start if paying and paying.stop == max_tokens + 1 else None


def _between(first: int, last: int, max_tokens: int) -> range:
    """Lengths from first to last, of those that there are; `range(1, 1)` for none."""
    lengths = range(max(first, 1), min(last, max_tokens) + 1)
    return lengths if lengths else range(1, 1)
