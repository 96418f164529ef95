"""The only sampler in the system: one per job, every token of the job goes through it.

Decides the next token and whether it ends the job (EOS, stop token, length). Called by the compute thread,
for the first token (whose logits come from a prefill node) exactly as for all others. Its state, a random
generator and counts of tokens, belongs to the job: it must never be shared between jobs or tied to a lane, so
that neighbours, lanes and retries cannot change what a seed gives.

Meaning of the fields: that of vLLM's V1 sampler (`vllm/v1/sample/sampler.py`, its `MinPLogitsProcessor` and
`apply_top_k_top_p`): biases and penalties (`decode_node/logits_processing.py`), then temperature, then min_p,
then top_k, then top_p, where top_p looks at the probabilities that are left, made to sum to 1 again. Below
`GREEDY_TEMPERATURE` the best token is taken. Logprobs are those of the logits as they came. Equal scores at
the edge of top_k all stay, as there; elsewhere the lowest ids come first, so that a seed always gives the
same.

The token that ends a job by EOS or stop token counts as a generated token and is in the job's token ids; it
yields no text (`decode_node/text.py`).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.errors import check
from common.sampling import SamplingParams
from decode_node.logits_processing import LogitsProcessor, Logprobs, is_needed, raw_logprobs

GREEDY_TEMPERATURE = 1e-5
SUM_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token. finish_reason: None while the job goes on; `stop` wins when both reasons hold.

    logprobs: None when not asked for.
    """

    token_id: int
    finish_reason: Literal["stop", "length"] | None
    logprobs: Logprobs | None = None


def ending_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Ids that end this job with reason `stop`. `ignore_eos` does not cancel an explicit stop token."""
    stop_token_ids = frozenset(params.stop_token_ids)
    return stop_token_ids if params.ignore_eos else stop_token_ids | eos_token_ids


class JobSampler:
    """Sampler of one job.

    A seeded job is reproducible; one without a seed starts from `entropy`, or, when that is None, from fresh
    entropy of the operating system. Sampling takes exactly one random number per token, greedy takes none.
    prompt: int32 little-endian ids, which the repetition penalty counts as seen.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        entropy: int | None = None,
        prompt: bytes = b"",
    ) -> None:
        self._params = params
        self._processor = None
        if is_needed(params):
            forbidden_ids = eos_token_ids.union(params.stop_token_ids)
            self._processor = LogitsProcessor(params, forbidden_ids, np.frombuffer(prompt, dtype="<i4"))
        self._ending_token_ids = ending_token_ids(params, eos_token_ids)
        self._random = np.random.Generator(np.random.PCG64(entropy if params.seed is None else params.seed))
        self._token_count = 0
        self._finished = False

    @property
    def token_count(self) -> int:
        """Tokens sampled so far, an ending token included."""
        return self._token_count

    def sample(self, logits: np.ndarray) -> Sampled:
        """Take the next token from `logits` (float32, `[vocab_size]`), which is only read.

        Raises ValueError when `logits` is not one float32 row or holds a NaN or an infinity: no token is
        taken, and no random number. Raises InvariantViolation when the job has already finished.
        """
        check(not self._finished, "sampled a job that has finished")
        best = _best_token(logits)
        scores = logits
        if self._processor is not None:
            scores = self._processor.processed(logits)
            best = int(scores.argmax())
        if self._params.temperature < GREEDY_TEMPERATURE:
            token_id = best
        else:
            token_id = _draw(scores, scores[best], self._params, self._random.random())
        self._token_count += 1
        if self._processor is not None:
            self._processor.note(token_id)
        reason = self._finish_reason(token_id)
        self._finished = reason is not None
        if self._params.logprobs is None:
            return Sampled(token_id, reason)
        return Sampled(token_id, reason, raw_logprobs(logits, token_id, self._params.logprobs))

    def _finish_reason(self, token_id: int) -> Literal["stop", "length"] | None:
        if token_id in self._ending_token_ids:
            return "stop"
        return "length" if self._token_count >= self._params.max_tokens else None


def _best_token(logits: np.ndarray) -> int:
    """Lowest id among the greatest logits; raises ValueError unless every logit is finite."""
    if logits.ndim != 1 or logits.size == 0 or logits.dtype != np.float32:
        raise ValueError(f"logits must be one row of float32, not {logits.dtype} {logits.shape}")
    best = int(logits.argmax())
    # argmax stops at the first NaN and finds +inf, min finds -inf: two passes cheaper than isfinite.
    if not (np.isfinite(logits[best]) and np.isfinite(logits.min())):
        raise ValueError("logits must be finite, but hold a NaN or an infinity")
    return best


def _draw(logits: np.ndarray, greatest: np.float32, params: SamplingParams, uniform: float) -> int:
    """Token id at the point `uniform` in [0, 1) of the distribution that `params` makes of `logits`."""
    token_ids = None
    # Both min_p and top_k keep an upper part of the ranking, so their order does not matter: top_k first
    # spares the exponentials of what it removes.
    if 0 < params.top_k < logits.size:
        smallest_kept = np.partition(logits, logits.size - params.top_k)[logits.size - params.top_k]
        token_ids = np.flatnonzero(logits >= smallest_kept)
        logits = logits[token_ids]
    with np.errstate(over="ignore"):
        weights = np.exp((logits - greatest) / np.float32(params.temperature))
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p)
        if kept.size < weights.size:
            weights = weights[kept]
            token_ids = kept if token_ids is None else token_ids[kept]
    if params.top_p < 1:
        position = _draw_nucleus(weights, params.top_p, uniform)
    else:
        position = _locate(weights, uniform, side="right")
    return position if token_ids is None else int(token_ids[position])


def _draw_nucleus(weights: np.ndarray, top_p: float, uniform: float) -> int:
    """Position drawn from the smallest set of greatest weights that holds `top_p` of their sum.

    Values are sorted, not positions (five times faster); equal weights rank by position.
    """
    total = weights.sum(dtype=np.float64)
    # All weights below this together are less than 1 - top_p of the sum: none is in the nucleus.
    floor = np.float32((1 - top_p) * total / weights.size)
    ranked = np.sort(-weights.compress(weights >= floor))
    np.negative(ranked, out=ranked)
    share = min(1.0, top_p * total / ranked.sum(dtype=np.float64))
    nucleus_size = _locate(ranked, share, side="left") + 1
    rank = _locate(ranked[:nucleus_size], uniform, side="right")
    rank_among_equals = rank - np.count_nonzero(ranked > ranked[rank])
    return int(np.flatnonzero(weights == ranked[rank])[rank_among_equals])


def _locate(weights: np.ndarray, share: float, side: Literal["left", "right"]) -> int:
    """First position whose running sum reaches (`left`) or passes (`right`) `share` of the whole sum.

    Sums blocks first, then looks into one: six times faster than a running sum of all. With `share` below 1
    (or at 1 with `left`) the position has a weight above zero: `share * total < total` holds in floating
    point too when share <= 1 - 2**-53, and the last line keeps rounding inside the block's weights.
    """
    starts = np.arange(0, weights.size, SUM_BLOCK)
    running = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    point = share * running[-1]
    block = int(running.searchsorted(point, side=side))
    before = running[block - 1] if block else 0.0
    start = block * SUM_BLOCK
    inner = weights[start : start + SUM_BLOCK].astype(np.float64).cumsum()
    return start + int(min(inner.searchsorted(point - before, side=side), inner.searchsorted(inner[-1])))
