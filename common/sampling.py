"""What a job may ask of the sampler.

Decides the fields, their defaults and ranges; the decode node's text thread validates a client's map against
this class, its sampler obeys it. Names are those of vLLM and the OpenAI API. It must never hold state: the
state of a running job lives in the sampler.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIASES = 300
MAX_CHOICES = 16
MAX_LOGPROBS = 20

Penalty = Annotated[float, Ge(-2), Le(2)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling fields of one job.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. seed: None draws fresh
    entropy. stop: texts that end the answer and are not part of it. stop_token_ids: ids that end it.
    ignore_eos: go on after the end-of-sequence token. max_tokens: most tokens to generate. min_tokens: no
    end-of-sequence token, stop token or stop string ends the answer before so many. presence_penalty,
    frequency_penalty: taken off the logits of generated tokens, once and per occurrence. repetition_penalty:
    divides positive and multiplies negative logits of tokens of prompt and answer; 1 is off. logit_bias:
    (token id, what is added to its logit). logprobs: how many of the likeliest tokens are told with each
    token and its own logprob; None tells none. n: how many answers, each with a seed of its own.
    """

    max_tokens: Annotated[int, Ge(1)] = 16
    temperature: Annotated[float, Ge(0), Le(2)] = 0.0
    top_k: Annotated[int, Ge(0)] = 0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] | None = None
    stop: Annotated[
        tuple[Annotated[str, MinLen(1), MaxLen(MAX_STOP_CHARACTERS)], ...], MaxLen(MAX_STOP_STRINGS)
    ] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Ge(0)], ...], MaxLen(MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    n: Annotated[int, Ge(1), Le(MAX_CHOICES)] = 1
    min_tokens: Annotated[int, Ge(0)] = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Gt(0), Le(2)] = 1.0
    logit_bias: Annotated[
        tuple[tuple[Annotated[int, Ge(0)], Annotated[float, Ge(-100), Le(100)]], ...],
        MaxLen(MAX_LOGIT_BIASES),
    ] = ()
    logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None
