"""Records of the prefill core: its settings, a slot of the slab, a production in a slot.

Decides nothing by itself but whether a PREFILL can be computed at all; read and changed by
`prefill_node.core` alone. It must never hold KV bytes or know a session's socket.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from common.data_planes import SHM
from common.digests import PrefixIdentity
from common.errors import ErrorCode
from common.kv_layout import chunk_bounds
from common.lifecycle import SOURCE_TRANSITIONS, SourceEvent, SourceState, advance
from common.messages import NodeProfile, Prefill, PrefillDone, PrefillFailed, ShmPlane
from common.prefix_index import HeldPrefix
from prefill_node.events import ChunkComputed, RunChunk


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """What the core needs to know of this process.

    plane: the slab as shared memory, None when it is not shared. token_bytes: KV bytes of one token.
    decode_nodes: how many may have a session at once. planes: data planes to offer. prefix_places: blocks
    that the prefix cache holds, 0 without one.
    """

    incarnation: str
    profile: NodeProfile
    slot_count: int
    plane: ShmPlane | None
    token_bytes: int
    lease_ms: int
    stall_ms: int
    drain_ms: int
    decode_nodes: int
    slots_per_session: int
    planes: tuple[str, ...] = (SHM,)
    prefix_places: int = 0
    prefix_block_tokens: int = 16
    prefix_identity: PrefixIdentity | None = None


@dataclass(slots=True)
class Production:
    """One PREFILL from arrival to its completion.

    prefix, cached_tokens: what is copied from the prefix cache, held until it is, and how much that is.
    offered, let_go: chunks handed to the data plane, and of these the ones that no longer read the slot.
    outcome: the completion, once nothing but sends is between it and the decode node. urgent: a lane waits
    for it.
    """

    request: Prefill
    arrived_ms: int
    bounds: list[tuple[int, int]] = field(default_factory=list)
    prefix: HeldPrefix | None = None
    cached_tokens: int = 0
    started_ms: int | None = None
    offered_ms: int | None = None
    computed_ms: int | None = None
    busy_us: int = 0
    convert_us: int = 0
    digests: list[bytes] = field(default_factory=list)
    cancelled: bool = False
    offered: int = 0
    let_go: int = 0
    outcome: PrefillDone | PrefillFailed | None = None
    urgent: bool = False

    @property
    def sends(self) -> bool:
        """Whether something that was sent may still read the slot."""
        return self.let_go < self.offered

    @property
    def deadline_ms(self) -> int:
        """When the decode node no longer wants it."""
        return self.arrived_ms + self.request.budget_ms


@dataclass(slots=True)
class SourceSlot:
    """One slot of the slab.

    `session` is None in the pool; `production` from PREFILL to its completion. sending_for: the ended session
    whose sends may still read an ABANDONED slot.
    """

    index: int
    state: SourceState = SourceState.POOL
    session: str | None = None
    last_epoch: int = 0
    production: Production | None = None
    since_ms: int = 0
    sending_for: str | None = None

    def advance(self, event: SourceEvent, now_ms: int) -> None:
        """Follow the table."""
        self.state = advance(SOURCE_TRANSITIONS, self.state, event)
        self.since_ms = now_ms

    def status(self, now_ms: int) -> dict[str, Any]:
        """Plain values for STATUS."""
        job_id = None if self.production is None else self.production.request.job_id
        age_ms = None if self.state is SourceState.POOL else now_ms - self.since_ms
        return {
            "slot": self.index,
            "state": str(self.state),
            "session": self.session,
            "epoch": self.last_epoch,
            "job": job_id,
            "age_ms": age_ms,
        }


def refusal(request: Prefill, max_tokens: int, draining: bool) -> tuple[ErrorCode, str] | None:
    """Why a well-formed PREFILL is answered with a failure at once, if it is."""
    token_count = len(request.prompt) // 4
    if draining:
        return ErrorCode.DRAINING, "this prefill node is draining"
    if len(request.prompt) % 4 or token_count == 0:
        return ErrorCode.EMPTY_PROMPT, "the prompt is empty or not a row of 32-bit ids"
    if token_count > max_tokens:
        return (
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{token_count} tokens do not fit a slot of {max_tokens} tokens",
        )
    if request.send_from >= token_count:
        return ErrorCode.INVALID_REQUEST, f"nothing of {token_count} tokens is to be sent"
    return None


def bounds_of(request: Prefill, cached_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The chunks of a production. Each is wanted, or is not: `send_from` is a border.

    What is neither cached nor wanted is computed all the same, for what comes behind it.
    """
    bounds = []
    if cached_tokens < request.send_from:
        bounds = chunk_bounds(cached_tokens, request.send_from, chunk_tokens)
    return bounds + chunk_bounds(request.send_from, len(request.prompt) // 4, chunk_tokens)


def next_chunk(production: Production) -> RunChunk:
    """What compute is to do next for a production that is not finished."""
    request = production.request
    done = len(production.digests)
    start, end = production.bounds[done]
    return RunChunk(
        request.job_id,
        request.slot,
        request.epoch,
        request.prompt,
        request.prompt_digest,
        start,
        end,
        tuple(production.bounds[:done]),
        tuple(production.digests),
        production.cached_tokens,
        () if done or production.prefix is None else production.prefix.places,
    )


def terminal_record(production: Production, last: ChunkComputed, settings: PrefillSettings) -> PrefillDone:
    """The record of a finished production, whose last chunk carries the logits."""
    request = production.request
    token_count = len(request.prompt) // 4
    wanted = [
        digest
        for (start, _), digest in zip(production.bounds, production.digests, strict=True)
        if start >= request.send_from
    ]
    return PrefillDone(
        job_id=request.job_id,
        slot=request.slot,
        epoch=request.epoch,
        prompt_digest=request.prompt_digest,
        token_count=token_count,
        chunk_tokens=settings.profile.chunk_tokens,
        byte_count=(token_count - request.send_from) * settings.token_bytes,
        chunk_digests=tuple(wanted),
        logits=last.logits or b"",
        logits_digest=last.logits_digest or b"",
        queue_us=1_000 * (production.started_ms - production.arrived_ms),
        compute_us=production.busy_us,
        cached_tokens=production.cached_tokens,
        convert_us=production.convert_us,
    )


def timed(production: Production, now_ms: int) -> PrefillDone:
    """The record of a production, with the times that only its end tells."""
    record, offered_ms = production.outcome, production.offered_ms
    if offered_ms is None:
        return record
    return replace(
        record,
        transfer_us=1_000 * (now_ms - offered_ms),
        transfer_exposed_us=1_000 * (now_ms - production.computed_ms),
    )
