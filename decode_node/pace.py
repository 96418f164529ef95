"""How fast prompts and lanes go, as measured on the jobs themselves.

Decides the depth of prefetch that `--pd-prefetch-next auto` stands for, and the shortest prompt that
`--min-remote-prompt-tokens auto` has computed elsewhere. Told by the decode core what each job took, and
asked by its scheduler. It must never look at a clock, and never let one odd job decide: it keeps running
means and the last few samples.

Depth: a prefetch has to begin one production before a lane becomes free for it. If a production takes p and
one of the lanes is released every r, then p / r lanes are released meanwhile, and as many further prompts
have to be under way (Little's law). Queueing is no part of p: it is what too great a depth would add.
"""

from collections import deque
from math import floor

from common.remote_worth import LinearCost, fit, min_remote_prompt_tokens, paying_lengths

_WEIGHT = 0.2  # of the newest job in a running mean
_SAMPLES = 64


class _RunningMean:
    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else self.value + _WEIGHT * (sample - self.value)


class Pace:
    """Measured times of one decode node and its prefill nodes.

    chunk_us, chunk_tokens: what the engine took for a chunk of a local prefill when it was loaded; 0 for not
    known, and then nothing is said about local prefill before one was seen.
    """

    def __init__(self, chunk_us: int = 0, chunk_tokens: int = 1) -> None:
        self._production_us = _RunningMean()
        self._occupied_ms = _RunningMean()
        self._local_token_us = _RunningMean()
        self._remote_ms: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)
        if chunk_us:
            self._local_token_us.add(chunk_us / chunk_tokens)

    def produced(self, busy_us: int, exposed_us: int) -> None:
        """A prefill node computed a prompt, and its KV was not here until `exposed_us` later."""
        self._production_us.add(busy_us + exposed_us)

    def lane_released(self, occupied_ms: int) -> None:
        """A job has had a lane for so long."""
        self._occupied_ms.add(occupied_ms)

    def computed_locally(self, tokens: int, busy_us: int) -> None:
        """This node computed so many tokens of a prompt."""
        if tokens:
            self._local_token_us.add(busy_us / tokens)

    def imported(self, tokens: int, elapsed_ms: int) -> None:
        """So many tokens were in a lane so long after their PREFILL, waits for compute and lane left out."""
        if tokens:
            self._remote_ms.append((tokens, float(elapsed_ms)))

    def depth(self, lane_count: int) -> int:
        """Prefetches that keep `lane_count` busy lanes fed; 1 while nothing is known."""
        if self._production_us.value is None or not self._occupied_ms.value:
            return 1
        released_every_ms = self._occupied_ms.value / lane_count
        return 1 + floor(self._production_us.value / 1_000 / released_every_ms)

    def min_remote_tokens(self, max_tokens: int) -> int:
        """The shortest prompt that is computed sooner by a prefill node; 0, all, while nothing is known."""
        if self._local_token_us.value is None or len({tokens for tokens, _ in self._remote_ms}) < 2:
            return 0
        local = LinearCost(0.0, self._local_token_us.value / 1_000)
        paying = paying_lengths(local, fit(self._remote_ms), max_tokens)
        shortest = min_remote_prompt_tokens(paying, max_tokens)
        return max_tokens + 1 if shortest is None else shortest
