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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling fields of one job.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. seed: None draws fresh
    entropy. stop: texts that end the answer and are not part of it. stop_token_ids: ids that end it.
    ignore_eos: go on after the end-of-sequence token. max_tokens: most tokens to generate.
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
