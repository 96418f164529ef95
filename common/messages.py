"""Every message of the control protocol, with its number.

Decides what may be said between nodes and to clients; docs/protocol.md says who may say it when. `transport`
alone turns these into bytes and validates what arrives; the cores only build and read them. Durations travel,
never instants. Nothing here may name a class by a string that came from a peer: `MESSAGE_TYPES` is closed and
written out by hand.
"""

from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Le, MaxLen

from common.client_messages import (
    Accepted,
    CacheOrder,
    CacheReply,
    CancelJob,
    ClientError,
    Failed,
    Finished,
    Rejected,
    StatusReply,
    StatusRequest,
    Submit,
    Tokenize,
    Tokenized,
    Tokens,
)
from common.data_planes import SHM
from common.endpoints import PORT_MAX
from common.errors import ErrorCode
from common.wire_types import Count, Detail, Digest, Epoch, Name, SlotIndex, wire


class Role(StrEnum):
    """What the connecting side of a session is."""

    DECODE = "decode"
    CLIENT = "client"


@wire
class NodeProfile:
    """What a node can do, compared at HELLO: see `common.compatibility` for what must be equal.

    dtype, rope_form, head_order, rotary_dim: how its engine writes KV, see `common.kv_convert`. wire_dtype:
    the number format in which it sends KV, empty for the engine's own. answers_logits: those of a prompt's
    last position. keeps_prefixes: it has a prefix cache, so prompts that begin alike had better go there.
    """

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
    wire_dtype: Name = ""
    head_order: tuple[Count, ...] = ()
    rotary_dim: Count = 0
    answers_logits: bool = True
    keeps_prefixes: bool = False


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
class TcpPlane:
    """Where KV is sent from: a port of the host that HELLO went to, for this session alone."""

    port: Annotated[int, Ge(1), Le(PORT_MAX)]


@wire
class Hello:
    """First message of a socket. `attempt` grows with every socket of one incarnation.

    planes: data planes that a decode node can use, see `common.data_planes`. memory_probe: name of a shared
    memory object that exists while the HELLO is on its way; who can open it shares the memory.
    """

    incarnation: Name
    attempt: Count
    role: Role
    profile: NodeProfile | None = None
    planes: tuple[Name, ...] = (SHM,)
    memory_probe: Name | None = None


@wire
class HelloOk:
    """Opens the session. `stall_ms`: no progress for so long, with work, means the node hangs.

    A decode node gets exactly one data plane: `plane` or `bulk`.
    """

    session: Name
    incarnation: Name
    lease_ms: Count
    stall_ms: Count
    profile: NodeProfile
    grants: tuple[SlotGrant, ...] = ()
    plane: ShmPlane | None = None
    bulk: TcpPlane | None = None


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
class GrantLimit:
    """The session's share of the slots: those beyond come back by RETURN_SLOTS, each once it is FREE."""

    slots: Count


@wire
class ReturnSlots:
    """The decode node gives back slots that are FREE; they are not its own any more."""

    slots: tuple[SlotIndex, ...]


@wire
class Draining:
    """The prefill node is about to stop: no more PREFILL, please."""


@wire
class Prefill:
    """Compute the KV of `prompt` (int32 little-endian ids) into a slot; exactly one completion answers.

    send_from: KV of earlier positions is not wanted. cache_digest: prompts of which this is the same may
    share KV; empty for none. urgent: a lane waits for it, so it goes before those that are not.
    """

    job_id: Name
    slot: SlotIndex
    epoch: Epoch
    prompt: bytes
    prompt_digest: Name
    send_from: Count
    budget_ms: Count
    cache_digest: bytes = b""
    urgent: bool = False


@wire
class Hurry:
    """A lane has come to wait for (slot, epoch): it is urgent now. A no-op once that epoch was answered."""

    slot: SlotIndex
    epoch: Epoch


@wire
class PrefillDone:
    """The terminal record: what was produced, and the digests that the decode node verifies.

    chunk_digests: one per chunk of `chunk_tokens` positions cut from position 0, those before `send_from`
    left out. logits: float32 little-endian, of the last position. cached_tokens: not computed, but found.
    Times: waiting at the prefill node, busy in compute, converting, sending in all, and sending after compute
    had ended.
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
    cached_tokens: Count = 0
    convert_us: Count = 0
    transfer_us: Count = 0
    transfer_exposed_us: Count = 0


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
class BulkOpen:
    """First message of a bulk socket, from the decode node: whose it is, and how much may be under way."""

    credit_bytes: Count


@wire
class Credit:
    """KV of so many bytes has arrived, wanted or not: as much again may follow."""

    byte_count: Count


@wire
class KvPiece:
    """Positions `[start, end)` of `layer_count` layers of (slot, epoch); the bytes follow as further frames.

    One frame for each layer's K and V, as they lie in the slot. Pieces of a production come in order: chunk
    after chunk, within it layer after layer. One that holds a part of a chunk's positions is of one layer.
    """

    slot: SlotIndex
    epoch: Epoch
    start: Count
    end: Count
    layer: Count
    layer_count: Count


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
    10: GrantLimit,
    11: ReturnSlots,
    20: Prefill,
    21: PrefillDone,
    22: PrefillFailed,
    23: Cancel,
    24: Release,
    25: Hurry,
    30: BulkOpen,
    31: Credit,
    32: KvPiece,
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
    50: CacheOrder,
    51: CacheReply,
    52: Tokenize,
    53: Tokenized,
}

UNNUMBERED = (Hello, HelloOk, HelloRefused, SessionGone)
"""Messages without a sequence number: they open a session or deny one."""
