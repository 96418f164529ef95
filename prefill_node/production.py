"""Records of the prefill core: its settings, a slot of the slab, a production in a slot.

Decides nothing by itself but whether a PREFILL can be computed at all; read and changed by
`prefill_node.core` alone. It must never hold KV bytes or know a session's socket.
"""

from dataclasses import dataclass, field
from typing import Any

from common.errors import ErrorCode
from common.lifecycle import SOURCE_TRANSITIONS, SourceEvent, SourceState, advance
from common.messages import NodeProfile, Prefill, PrefillDone, ShmPlane
from prefill_node.events import ChunkComputed, RunChunk


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """What the core needs to know of this process.

    token_bytes: KV bytes of one token. decode_nodes: how many may have a session at once.
    """

    incarnation: str
    profile: NodeProfile
    plane: ShmPlane
    token_bytes: int
    lease_ms: int
    stall_ms: int
    drain_ms: int
    decode_nodes: int
    slots_per_session: int


@dataclass(slots=True)
class Production:
    """One PREFILL from arrival to its completion."""

    request: Prefill
    arrived_ms: int
    bounds: list[tuple[int, int]]
    started_ms: int | None = None
    busy_us: int = 0
    digests: list[bytes] = field(default_factory=list)
    cancelled: bool = False

    @property
    def deadline_ms(self) -> int:
        """When the decode node no longer wants it."""
        return self.arrived_ms + self.request.budget_ms


@dataclass(slots=True)
class SourceSlot:
    """One slot of the slab. `session` is None in the pool; `production` from PREFILL to its completion."""

    index: int
    state: SourceState = SourceState.POOL
    session: str | None = None
    last_epoch: int = 0
    production: Production | None = None
    since_ms: int = 0

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
    if request.send_from != 0:
        return ErrorCode.INVALID_REQUEST, "this prefill node has no prefix to start from"
    return None


def next_chunk(production: Production) -> RunChunk:
    """What compute is to do next for a production that is not finished."""
    request = production.request
    start, end = production.bounds[len(production.digests)]
    digests = tuple(production.digests)
    return RunChunk(
        request.job_id,
        request.slot,
        request.epoch,
        request.prompt,
        request.prompt_digest,
        request.send_from,
        start,
        end,
        digests,
    )


def terminal_record(production: Production, last: ChunkComputed, settings: PrefillSettings) -> PrefillDone:
    """The record of a finished production, whose last chunk carries the logits."""
    request = production.request
    token_count = len(request.prompt) // 4
    return PrefillDone(
        job_id=request.job_id,
        slot=request.slot,
        epoch=request.epoch,
        prompt_digest=request.prompt_digest,
        token_count=token_count,
        chunk_tokens=settings.profile.chunk_tokens,
        byte_count=(token_count - request.send_from) * settings.token_bytes,
        chunk_digests=tuple(production.digests),
        logits=last.logits,
        logits_digest=last.logits_digest,
        queue_us=1_000 * (production.started_ms - production.arrived_ms),
        compute_us=production.busy_us,
    )
