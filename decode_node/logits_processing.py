"""What a job's fields do to its logits before a token is taken, and what is told of them.

Decides the logits that the sampler draws from, where a job has a bias, a penalty or `min_tokens`, and the
logprobs that its client gets. Called by `decode_node.sampler` alone, which keeps one processor for each job
that needs one. It must never change the logits it is given: they may be a view of somebody else's memory.

Meaning of the fields: that of vLLM's V1 sampler. Biases come first, then the repetition penalty, then
frequency and presence, and whatever is forbidden stays forbidden; temperature and the rest see the result.
"""

import math
from collections.abc import Iterable

import numpy as np

from common.sampling import SamplingParams

Logprobs = tuple[tuple[int, float], ...]
"""(token id, logprob): of the token that was taken, then of the likeliest ones, best first."""

_GREATEST = np.finfo(np.float32).max


def is_needed(params: SamplingParams) -> bool:
    """Whether any field changes logits. Most jobs have none, and must not pay for it."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    )


def raw_logprobs(logits: np.ndarray, token_id: int, count: int) -> Logprobs:
    """Log-softmax of finite `logits` (float32, `[vocab_size]`) at `token_id` and at the `count` greatest.

    Of equal logits the lowest ids come first.
    """
    greatest = logits.max()
    # An extreme row may spread beyond what float32 can hold.
    with np.errstate(over="ignore"):
        total = np.exp(logits - greatest).sum(dtype=np.float64)
    top: list[int] = []
    if count := min(count, logits.size):
        smallest_kept = np.partition(logits, logits.size - count)[logits.size - count]
        candidates = np.flatnonzero(logits >= smallest_kept)
        top = candidates[np.lexsort((candidates, -logits[candidates]))[:count]].tolist()
    told = (token_id, *top)
    return tuple((one, float(logits[one]) - float(greatest) - math.log(total)) for one in told)


class LogitsProcessor:
    """Biases, penalties and forbidden tokens of one job. `note` tells it each token of the answer."""

    def __init__(self, params: SamplingParams, forbidden_ids: Iterable[int], prompt_ids: np.ndarray) -> None:
        """forbidden_ids: may not come before `min_tokens`. prompt_ids: `[token]`, for the repetition."""
        self._params = params
        self._forbidden_ids = np.array(sorted(forbidden_ids), dtype=np.int64)
        self._biased_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._prompt_ids = prompt_ids
        self._counts: dict[int, int] = {}
        self._token_count = 0
        self._seen: np.ndarray | None = None
        self._taken_off: np.ndarray | None = None

    def note(self, token_id: int) -> None:
        """The job has taken this token."""
        params = self._params
        self._token_count += 1
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self._seen is not None:
            self._seen[token_id] = True
        if self._taken_off is not None:
            self._taken_off[token_id] = params.frequency_penalty * count + params.presence_penalty

    def processed(self, logits: np.ndarray) -> np.ndarray:
        """The logits to draw from: a new array, finite but for -inf where a token is forbidden."""
        params = self._params
        scores = logits.copy()
        with np.errstate(over="ignore"):
            scores[self._biased_ids] += self._biases
            if params.repetition_penalty != 1:
                self._repeat(scores)
            if params.frequency_penalty or params.presence_penalty:
                if self._taken_off is None:
                    self._taken_off = np.zeros(logits.size, dtype=np.float32)
                scores -= self._taken_off
        np.clip(scores, -_GREATEST, _GREATEST, out=scores)
        if self._token_count < params.min_tokens:
            # A tokenizer may name ends that the model cannot say.
            scores[self._forbidden_ids[self._forbidden_ids < scores.size]] = -np.inf
        return scores

    def _repeat(self, scores: np.ndarray) -> None:
        if self._seen is None:
            self._seen = np.zeros(scores.size, dtype=np.bool_)
            self._seen[self._prompt_ids] = True
        seen = np.flatnonzero(self._seen)
        values = scores[seen].astype(np.float64)
        penalty = self._params.repetition_penalty
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
