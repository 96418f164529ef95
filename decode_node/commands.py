"""What the decode core has its two threads do.

Decides nothing: frozen values from the core to the compute thread and to the text thread, each answered by
an event of `decode_node.events` as it says. KV bytes never appear here, only (session, slot, epoch), lanes
and places of the prefix cache.
"""

from dataclasses import dataclass

from common.messages import PrefillDone, Submit, Tokenize
from common.sampling import SamplingParams
from decode_node.logits_processing import Logprobs


@dataclass(frozen=True, slots=True)
class PrepareSubmission:
    """Text thread: validate and tokenise. Answered by SubmissionPrepared or SubmissionRefused."""

    job_id: str
    submit: Submit
    token_limit: int


@dataclass(frozen=True, slots=True)
class TokenizeText:
    """Text thread: carry out a TOKENIZE. Answered by TextTokenized or TokenizeRefused."""

    session: str
    request: Tokenize


@dataclass(frozen=True, slots=True)
class PushTokens:
    """Text thread: turn the job's next token into text. Answered by TextProduced.

    choice: a greater one than before begins a text of its own.
    """

    job_id: str
    token_id: int
    final: bool
    logprobs: Logprobs | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """Text thread, and compute where it knows the job: drop what you hold for a job that has ended."""

    job_id: str
    known_to_compute: bool


@dataclass(frozen=True, slots=True)
class SampleFirst:
    """Compute: verify the record's logits and sample. Answered by FirstTokenSampled or LogitsRefused.

    prompt: int32 little-endian ids, if a penalty wants them.
    """

    job_id: str
    record: PrefillDone
    sampling: SamplingParams
    prompt: bytes = b""


@dataclass(frozen=True, slots=True)
class StartImport:
    """Compute: copy a slot into a lane, verify it, and decode from `token_id` on if it is good.

    A job of several answers is not decoded, but its logits are verified and kept: StartChoice follows.

    The first `send_from` tokens are copied from `places` of the prefix cache instead. With `sampling`,
    `token_id` is the prompt's last token, and the first step tells the first token of the answer, unless
    that is `known_token` already. prompt: as in SampleFirst.
    Answered by ImportEnded, then as StartDecode is. Compute does not wait for another word in between: the
    lane would stand idle while the loop is busy with the end of the job before.
    """

    job_id: str
    lane: int
    session: str
    record: PrefillDone
    token_id: int
    send_from: int = 0
    places: tuple[int, ...] = ()
    sampling: SamplingParams | None = None
    known_token: int | None = None
    prompt: bytes = b""


@dataclass(frozen=True, slots=True)
class StartLocalPrefill:
    """Compute: prefill in a lane. Answered by LocalPrefillEnded or LaneFailed, chunks in between.

    keep_token: the job has its first token already, do not sample another. The first `cached_tokens` are
    copied from `places` of the prefix cache.
    """

    job_id: str
    lane: int
    prompt: bytes
    sampling: SamplingParams
    keep_token: bool
    cached_tokens: int = 0
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Compute: generate in a lane from `token_id` on. Each step is answered by TokenSampled."""

    job_id: str
    lane: int
    token_id: int


@dataclass(frozen=True, slots=True)
class StartChoice:
    """Compute: generate one of several answers to a prompt whose KV is in the lane, whatever went on there.

    All of them begin with the logits of the prompt's last position, which compute keeps for the job, and each
    with a sampler of its own: the seed, if there is one, is `seed + choice`. Each token is answered by
    TokenSampled, the first one at once.
    """

    job_id: str
    lane: int
    choice: int
    prompt: bytes
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class StopLane:
    """Compute: let go of a lane. Answered by LaneStopped."""

    lane: int
