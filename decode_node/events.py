"""What the decode core is told and what it asks for.

Decides nothing: frozen values between the core, the session layer, the compute thread and the text thread.
Events are in the past tense, effects are verbs. KV bytes never appear here, only (session, slot, epoch) and
lane numbers.
"""

from dataclasses import dataclass
from typing import Any

from common.client_messages import TokenLogprob
from common.errors import ErrorCode
from common.messages import Failed, Finished, Hello, HelloOk, HelloRefused
from common.sampling import SamplingParams
from decode_node.logits_processing import Logprobs


@dataclass(frozen=True, slots=True)
class ClientHello:
    """A client wants a session."""

    route: bytes
    hello: Hello


@dataclass(frozen=True, slots=True)
class ClientLost:
    """A client's session has ended, for whatever cause."""

    session: str
    cause: str


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A message of a client's live session."""

    session: str
    message: Any


@dataclass(frozen=True, slots=True)
class ClientMistake:
    """A client's session sent something that is not a valid message."""

    session: str
    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class WorkerOpened:
    """There is a session with a prefill node, and its slab is mapped. `worker`: its name."""

    worker: str
    hello_ok: HelloOk


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """A prefill node, or the mapping of its slab, said no. `worker`: its name."""

    worker: str
    refusal: HelloRefused


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A session with a prefill node has ended, for whatever cause. `worker`: its name."""

    worker: str
    session: str
    cause: str


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """A prefill node has been silent for a while, or (`silent` False) has spoken again."""

    session: str
    silent: bool


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A message of a live session with a prefill node."""

    session: str
    message: Any


@dataclass(frozen=True, slots=True)
class SubmissionPrepared:
    """The text thread has validated and tokenised a job.

    prompt: int32 little-endian ids. shorter_digest: that of all of them but the last.
    """

    job_id: str
    prompt: bytes
    prompt_digest: str
    sampling: SamplingParams
    shorter_digest: str = ""


@dataclass(frozen=True, slots=True)
class SubmissionRefused:
    """The text thread found the job wanting."""

    job_id: str
    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class TextTokenized:
    """What a TOKENIZE asked for: the ids, and, if it gave ids, their text."""

    session: str
    label: str
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class TokenizeRefused:
    """The text thread could not carry out a TOKENIZE."""

    session: str
    label: str
    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class TextProduced:
    """Text of tokens pushed so far. `token_ids` are those it accounts for.

    stopped: a stop string is complete, and the job ends with the last of `token_ids`. final: this answers the
    push of the job's last token, nothing is held back any more. logprobs: one for each id, if asked for.
    choice: which of the job's answers it is, if there are several; `stopped` and `final` are then that one's.
    """

    job_id: str
    token_ids: tuple[int, ...]
    text: str
    stopped: bool
    final: bool
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TextFailed:
    """The tokenizer raised on the job's tokens."""

    job_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class FirstTokenSampled:
    """The first token came out of the record's verified logits. logprobs: None when not asked for."""

    job_id: str
    token_id: int
    finish_reason: str | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class LogitsRefused:
    """The record's logits do not match their digest, or cannot be sampled from."""

    job_id: str
    code: ErrorCode
    detail: str


@dataclass(frozen=True, slots=True)
class ImportEnded:
    """The copy into a lane has ended; `code` is None when every digest and the epoch matched.

    corrupt_place: the place of the prefix cache that did not hold what was put there.

    decoding: compute goes on to decode in the lane, which it does unless the copy was bad or it was told to
    forget the job.
    """

    job_id: str
    lane: int
    code: ErrorCode | None
    detail: str
    copy_us: int
    digest_us: int
    convert_us: int
    decoding: bool
    corrupt_place: int | None = None


@dataclass(frozen=True, slots=True)
class LocalChunkComputed:
    """One chunk of a local prefill is done, more follow."""

    job_id: str
    lane: int


@dataclass(frozen=True, slots=True)
class LocalPrefillEnded:
    """A local prefill is done. token_id is None when the job kept a token it already had.

    cached_tokens: how much of the prompt was not computed. corrupt_place: see ImportEnded; all of it was
    computed then.
    """

    job_id: str
    lane: int
    token_id: int | None
    finish_reason: str | None
    busy_us: int
    cached_tokens: int = 0
    corrupt_place: int | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """One decode step of a lane is done. With a finish reason, compute has let go of the lane.

    choice: which of the job's answers the token belongs to.
    """

    job_id: str
    lane: int
    token_id: int
    finish_reason: str | None
    busy_us: int
    lane_gap_us: int | None
    logprobs: Logprobs | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class LaneStopped:
    """Compute has let go of a lane that it was told to stop, whatever it was doing there."""

    lane: int


@dataclass(frozen=True, slots=True)
class LaneFailed:
    """Compute raised while it worked in a lane, and has let go of it."""

    job_id: str
    lane: int
    detail: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The operator wants the node to drain and exit."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A deadline of the core may have come."""


@dataclass(frozen=True, slots=True)
class AnswerHello:
    """Accept or refuse the client of this route."""

    route: bytes
    message: HelloOk | HelloRefused


@dataclass(frozen=True, slots=True)
class SendToClient:
    """Send a message in a client's session."""

    session: str
    message: Any


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Send a message in a session with a prefill node."""

    session: str
    message: Any


@dataclass(frozen=True, slots=True)
class CloseClient:
    """End a client's session, with a reason for it."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class CloseWorker:
    """End a session with a prefill node; a new attempt follows."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveWorkers:
    """End the sessions with all prefill nodes, and make no further attempts."""

    reason: str


@dataclass(frozen=True, slots=True)
class ClosePlane:
    """No slot of that ended session is read any more: close its mapping."""

    session: str


@dataclass(frozen=True, slots=True)
class ReportEnd:
    """A job has ended, for the log. answer: what its client was told, None when the client is gone."""

    job_id: str
    answer: Finished | Failed | None
    cause: str


@dataclass(frozen=True, slots=True)
class ExitNode:
    """Leave with this status; nothing is left to do."""

    status: int
    reason: str
