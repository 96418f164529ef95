"""What clients and a decode node say to each other, as frozen dataclasses.

Decides the fields of these messages; `common.messages` numbers them and says how all messages travel. Nothing
here may name a class by a string that came from a peer.
"""

from dataclasses import field
from typing import Any

from common.errors import ErrorCode
from common.wire_types import Count, Detail, Label, Name, wire


@wire
class Submit:
    """A client's job. Exactly one of prompt (text), messages (chat) and prompt_ids is given.

    cache_salt: jobs with another one, or none, share no KV with this one.
    """

    label: Label
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    cache_salt: Name | None = None


@wire
class CancelJob:
    """The client no longer wants a job of its own."""

    label: Label


@wire
class Accepted:
    """The job will get exactly one FINISHED or FAILED."""

    label: Label
    job_id: Name
    prompt_tokens: Count


@wire
class Rejected:
    """The job was never taken. `retry_ms` hints when a BUSY node may have room."""

    label: Label
    code: ErrorCode
    detail: Detail
    retry_ms: Count | None = None


@wire
class TopLogprob:
    """A token that could have come, and the logarithm of its probability."""

    token_id: Count
    text: str
    logprob: float


@wire
class TokenLogprob:
    """A token of the answer as its model saw it, before penalties and temperature; `top`: the likeliest."""

    token_id: Count
    text: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@wire
class Tokens:
    """A piece of the answer. Text may lag behind ids while a character or a stop string is undecided.

    choice: which of the job's answers, if it asked for several. logprobs: one for each id, if asked for.
    """

    label: Label
    token_ids: tuple[int, ...]
    text: str
    choice: Count = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@wire
class Usage:
    """What the job consumed, in tokens. cached: of the prompt, found at the decode or prefill node."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens_decode: Count = 0
    cached_tokens_prefill: Count = 0


@wire
class Timings:
    """Where a job's time went. The `stages_ms` are disjoint, ordered as `JobState`, and sum to `total_ms`.

    The rest explains them and is not part of the sum: busy times of the compute threads in chunks and steps,
    conversion on both sides, the way of the KV over a socket, in all and after compute had ended, digest and
    copy of the import, and the lane's idle time before this job's first step (None: no predecessor).
    """

    total_ms: Count
    first_token_ms: Count | None
    stages_ms: dict[str, int]
    prefill_queue_us: Count
    prefill_busy_us: Count
    decode_busy_us: Count
    copy_us: Count
    digest_us: Count
    lane_gap_us: Count | None
    convert_us: Count = 0
    transfer_us: Count = 0
    transfer_exposed_us: Count = 0


@wire
class Finished:
    """The job's terminal answer. reason: `stop` or `length`; path: `remote` or `local`.

    reasons: one for each of the job's answers, if it asked for several.
    """

    label: Label
    reason: Name
    path: Name
    usage: Usage
    timings: Timings
    reasons: tuple[Name, ...] = ()


@wire
class Failed:
    """The job's other terminal answer; `definite` says that no token was or will be produced."""

    label: Label
    code: ErrorCode
    detail: Detail
    definite: bool


@wire
class Tokenize:
    """Ask for the ids of a text or a chat, or for the text of ids. Exactly one of them is given."""

    label: Label
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None


@wire
class Tokenized:
    """Answer to TOKENIZE; REJECTED is the other one."""

    label: Label
    token_ids: tuple[int, ...]
    text: str


@wire
class StatusRequest:
    """Ask a node for its state; both nodes answer every client."""


@wire
class StatusReply:
    """The node's state as a tree of plain values; docs/operations.md lists the keys."""

    body: dict[str, Any]


@wire
class ClientError:
    """The client's last message could not be understood; after a few of them the session ends."""

    code: ErrorCode
    detail: Detail


@wire
class CacheOrder:
    """Save the prefix cache of a decode node, or load it, under a name; `action`: save or load."""

    action: Name
    name: Name


@wire
class CacheReply:
    """What came of a CACHE_ORDER: the file and the blocks saved or loaded, or a code and why not."""

    blocks: Count
    size_bytes: Count
    path: Detail
    code: ErrorCode | None = None
    detail: Detail = ""
