"""What the emulated model must answer, computed a second time.

Decides the expected token ids of one job in one process, for the unit, contract and process tests. Written
from the definition at the head of `common/engines/emulated.py` in plain integers, with its own constants: it
must never import that module, or both could be wrong together. Nor the sampler: what a job's fields do to
logits is stated here once more.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import xxhash

MODULUS = 1 << 64
GOLDEN = 11400714819323198485
LAYERS, HEADS = 4, 2
END_OF_SEQUENCE = 257
VOCABULARY = 259


def scramble(number: int) -> int:
    """The definition's `mix`."""
    for shift, factor in ((30, 13787848793156543929), (27, 10723151780598845931)):
        number ^= number >> shift
        number = number * factor % MODULUS
    return number ^ number >> 31


def bias_of(token_id: int) -> float:
    """How much likelier than a lower-case letter an id is."""
    if token_id == END_OF_SEQUENCE:
        return -2.125
    character = chr(token_id)
    if character == " ":
        return 2.0
    return 0.0 if "a" <= character <= "z" else -24.0


class Conversation:
    """All tokens of one job so far, and the KV bytes that they make."""

    def __init__(self, seed: int) -> None:
        self.start = scramble((seed + GOLDEN) % MODULUS)
        self.digest = self.start
        self.length = 0
        # One run of bytes for each layer's K and V, positions in order, heads inside a position.
        self.runs = [bytearray() for _ in range(LAYERS * 2)]

    def feed(self, token_id: int) -> None:
        """Append one token's KV."""
        self.digest = scramble((self.digest + (token_id + 1) * GOLDEN) % MODULUS)
        for run_index, run in enumerate(self.runs):
            for head in range(HEADS):
                counter = ((run_index * HEADS + head) << 32) + self.length + 1
                key = scramble(self.start ^ counter * GOLDEN % MODULUS)
                run += scramble(self.digest ^ key).to_bytes(8, "little")
        self.length += 1

    def logits(self) -> list[float]:
        """Logits of the next token, one for each id."""
        lane_hash = xxhash.xxh3_64_intdigest(b"".join(self.runs), seed=self.start)
        answer = []
        for token_id in range(VOCABULARY):
            factor = scramble((token_id + 1) * GOLDEN % MODULUS) | 1
            noise = lane_hash * factor % MODULUS >> 50
            answer.append((512 * noise + token_id) / 2**18 + bias_of(token_id))
        return answer


def oracle_kv(token_ids: Sequence[int], seed: int = 0) -> bytes:
    """KV bytes of the tokens: by layer, K before V, position, head, as a lane of exactly that length."""
    conversation = Conversation(seed)
    for token_id in token_ids:
        conversation.feed(token_id)
    return b"".join(conversation.runs)


def oracle_logits(token_ids: Sequence[int], seed: int = 0) -> list[float]:
    """Logits of the token that follows all of `token_ids` (prompt and what was generated)."""
    conversation = Conversation(seed)
    for token_id in token_ids:
        conversation.feed(token_id)
    return conversation.logits()


def expected_tokens(
    prompt_ids: Sequence[int],
    max_tokens: int,
    seed: int = 0,
    ignore_eos: bool = False,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    """Greedy token ids of one job, at most `max_tokens`.

    The end-of-sequence token (unless `ignore_eos`) or a stop token that ends the job is the last of the list.
    """
    conversation = Conversation(seed)
    for token_id in prompt_ids:
        conversation.feed(token_id)
    ends = set(stop_token_ids) | (set() if ignore_eos else {END_OF_SEQUENCE})
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        logits = conversation.logits()
        token_id = logits.index(max(logits))
        tokens.append(token_id)
        if token_id in ends:
            break
        conversation.feed(token_id)
    return tokens


LOGIT_FIELDS = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


def processed_logits(
    logits: Sequence[float],
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    ends: Collection[int],
    *,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_tokens: int = 0,
) -> list[float]:
    """What the next token is drawn from; `answer`: what came so far, `ends`: ids that may end a job."""
    scores = list(logits)
    for token_id, bias in (logit_bias or {}).items():
        scores[int(token_id)] += bias
    for token_id in {*prompt_ids, *answer}:
        if scores[token_id] > 0:
            scores[token_id] /= repetition_penalty
        else:
            scores[token_id] *= repetition_penalty
    for token_id in set(answer):
        scores[token_id] -= frequency_penalty * list(answer).count(token_id)
        scores[token_id] -= presence_penalty
    if len(answer) < min_tokens:
        for token_id in ends:
            scores[token_id] = -math.inf
    return scores


def logprobs_of(logits: Sequence[float]) -> list[float]:
    """Logarithm of each token's probability."""
    greatest = max(logits)
    total = greatest + math.log(math.fsum(math.exp(logit - greatest) for logit in logits))
    return [logit - total for logit in logits]


def answer_to(
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    uniforms: Sequence[float] = (),
    stop_token_ids: Collection[int] = (),
    ignore_eos: bool = False,
    **fields: Any,
) -> list[int]:
    """Token ids of a job with `LOGIT_FIELDS`: greedy, or drawn with one of `uniforms` for each token."""
    conversation = Conversation(0)
    for token_id in prompt_ids:
        conversation.feed(token_id)
    forbidden = {END_OF_SEQUENCE, *stop_token_ids}
    ends = set(stop_token_ids) | (set() if ignore_eos else {END_OF_SEQUENCE})
    answer: list[int] = []
    while len(answer) < max_tokens:
        scores = processed_logits(conversation.logits(), prompt_ids, answer, forbidden, **fields)
        if temperature:
            weights = [math.exp(value) for value in logprobs_of([score / temperature for score in scores])]
            running = list(accumulate(weights))
            point = uniforms[len(answer)] * running[-1]
            answer.append(next(token_id for token_id, upper in enumerate(running) if upper > point))
        else:
            answer.append(scores.index(max(scores)))
        if answer[-1] in ends:
            break
        conversation.feed(answer[-1])
    return answer
