"""Every message of the control protocol, with its number.

Decides what may be said between nodes and to clients; docs/protocol.md says who may say it when. `transport`
alone turns these into bytes and validates what arrives; the cores only build and read them. Durations travel,
never instants. Nothing here may name a class by a string that came from a peer: `MESSAGE_TYPES` is closed and
written out by hand.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, dataclass_transform

from annotated_types import Ge, Le, MaxLen

from common import limits
from common.errors import ErrorCode

Count = Annotated[int, Ge(0), Le(2**63 - 1)]
Name = Annotated[str, MaxLen(64)]
Digest = Annotated[str, MaxLen(128)]
Label = Annotated[str, MaxLen(limits.LABEL_CHARACTERS)]
Detail = Annotated[str, MaxLen(2 * limits.DETAIL_CHARACTERS)]
Epoch = Annotated[int, Ge(0), Le(limits.EPOCH)]
SlotIndex = Annotated[int, Ge(0), Le(limits.SOURCE_SLOTS - 1)]


@dataclass_transform(frozen_default=True)
def wire(cls: type) -> type:
    """A frozen slotted dataclass; `transport.strict_types` reads its field types and coerces nothing."""
    return dataclass(frozen=True, slots=True)(cls)


class Role(StrEnum):
    """What the connecting side of a session is."""

    DECODE = "decode"
    CLIENT = "client"


@wire
class NodeProfile:
    """What a node can do, compared at HELLO: see `common.compatibility` for what must be equal."""

    model_id: Annotated[str, MaxLen(256)]
    weights_digest: Digest
    tokenizer_digest: Digest
    layers: Count
    kv_heads: Count
    head_dim: Count
    vocab_size: Count
    dtype: Name
    rope_form: Name
    max_tokens: Count
    chunk_tokens: Count


@wire
class SlotGrant:
    """One source slot lent to a session; its next epoch must be greater than `last_epoch`."""

    slot: SlotIndex
    last_epoch: Epoch


@wire
class ShmPlane:
    """Where the slab lies: a POSIX shared memory object of `slot_count` slots (see transport/slab.py)."""

    name: Name
    slot_count: Count
    slot_bytes: Count


@wire
class Hello:
    """First message of a socket. `attempt` grows with every socket of one incarnation."""

    incarnation: Name
    attempt: Count
    role: Role
    profile: NodeProfile | None = None


@wire
class HelloOk:
    """Opens the session. `stall_ms`: no progress for so long, with work, means the node hangs."""

    session: Name
    incarnation: Name
    lease_ms: Count
    stall_ms: Count
    profile: NodeProfile
    grants: tuple[SlotGrant, ...] = ()
    plane: ShmPlane | None = None


@wire
class HelloRefused:
    """No session. Temporary: try again after a while. Otherwise `fields` names what differs."""

    temporary: bool
    detail: Detail
    fields: tuple[Name, ...] = ()


@wire
class SessionGone:
    """Answer to a message of a session that is not, or no longer, known."""

    session: Name


@wire
class Ping:
    """Sign of life of the connecting side."""


@wire
class Pong:
    """Answer to PING from the socket thread. `progress` counts finished chunks or steps since start."""

    last_sequence: Count
    progress: Count


@wire
class Bye:
    """Orderly end of a session."""

    reason: Detail


@wire
class Grant:
    """More slots for an open session."""

    grants: tuple[SlotGrant, ...]


@wire
class Draining:
    """The prefill node is about to stop: no more PREFILL, please."""


@wire
class Prefill:
    """Compute the KV of `prompt` (int32 little-endian ids) into a slot; exactly one completion answers."""

    job_id: Name
    slot: SlotIndex
    epoch: Epoch
    prompt: bytes
    prompt_digest: Name
    send_from: Count
    budget_ms: Count


@wire
class PrefillDone:
    """The terminal record: what was produced, and the digests that the decode node verifies.

    chunk_digests: one per chunk of `chunk_tokens` positions cut from position 0. logits: float32
    little-endian, of the last position. Times: waiting at the prefill node, and busy in compute.
    """

    job_id: Name
    slot: SlotIndex
    epoch: Epoch
    prompt_digest: Name
    token_count: Count
    chunk_tokens: Count
    byte_count: Count
    chunk_digests: tuple[bytes, ...]
    logits: bytes
    logits_digest: bytes
    queue_us: Count
    compute_us: Count


@wire
class PrefillFailed:
    """The other completion. CANCELLED and DRAINING are codes like any other."""

    job_id: Name
    slot: SlotIndex
    epoch: Epoch
    code: ErrorCode
    detail: Detail


@wire
class Cancel:
    """Stop producing into (slot, epoch). A no-op once that epoch was answered."""

    slot: SlotIndex
    epoch: Epoch


@wire
class Release:
    """The decode node has let go of a slot whose PREFILL_DONE it got."""

    slot: SlotIndex
    epoch: Epoch


@wire
class Submit:
    """A client's job. Exactly one of prompt (text), messages (chat) and prompt_ids is given."""

    label: Label
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


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
class Tokens:
    """A piece of the answer. Text may lag behind ids while a character or a stop string is undecided."""

    label: Label
    token_ids: tuple[int, ...]
    text: str


@wire
class Usage:
    """What the job consumed, in tokens."""

    prompt_tokens: Count
    completion_tokens: Count


@wire
class Timings:
    """Where a job's time went. The `stages_ms` are disjoint, ordered as `JobState`, and sum to `total_ms`.

    The rest explains them and is not part of the sum: busy times of the compute threads in chunks and steps,
    copy and digest of the import, and the lane's idle time before this job's first step (None: no
    predecessor).
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


@wire
class Finished:
    """The job's terminal answer. reason: `stop` or `length`; path: `remote` or `local`."""

    label: Label
    reason: Name
    path: Name
    usage: Usage
    timings: Timings


@wire
class Failed:
    """The job's other terminal answer; `definite` says that no token was or will be produced."""

    label: Label
    code: ErrorCode
    detail: Detail
    definite: bool


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


MESSAGE_TYPES: dict[int, type] = {
    1: Hello,
    2: HelloOk,
    3: HelloRefused,
    4: SessionGone,
    5: Ping,
    6: Pong,
    7: Bye,
    8: Grant,
    9: Draining,
    20: Prefill,
    21: PrefillDone,
    22: PrefillFailed,
    23: Cancel,
    24: Release,
    40: Submit,
    41: CancelJob,
    42: Accepted,
    43: Rejected,
    44: Tokens,
    45: Finished,
    46: Failed,
    47: StatusRequest,
    48: StatusReply,
    49: ClientError,
}

UNNUMBERED = (Hello, HelloOk, HelloRefused, SessionGone)
"""Messages without a sequence number: they open a session or deny one."""
