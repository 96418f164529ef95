"""The production line: every PREFILL from its arrival to its one completion.

Decides what compute does next, when a chunk is offered to the data plane, and which completion answers a
PREFILL. Part of the prefill core, called by it alone. Between two chunks it looks again at cancels and
deadlines, which is why compute is asked for one chunk at a time. A completion goes out only when neither
compute nor anything sent reads the slot; it must never hand a slot on before that, so an ended session leaves
its slot ABANDONED meanwhile.
"""

from collections import deque
from typing import Any

from common import limits
from common.errors import ErrorCode, check
from common.lifecycle import SourceEvent, SourceState
from common.messages import Cancel, Hurry, Prefill, PrefillDone, PrefillFailed, Release
from common.prefix_commands import BlocksStored, StoreBlocks
from common.prefix_index import HeldPrefix, PrefixIndex
from prefill_node.events import (
    ChunkComputed,
    CloseSession,
    ComputeFailed,
    PrefixCorrupt,
    RunChunk,
    SendMessage,
)
from prefill_node.grants import Grants
from prefill_node.production import (
    PrefillSettings,
    Production,
    SourceSlot,
    bounds_of,
    next_chunk,
    refusal,
    terminal_record,
    timed,
)
from transport.bulk import ChunkOffered, ChunksLetGo, PiecesMoved, SendsDropped

COUNTERS = ("prefills_done", "prefills_failed", "prefills_cancelled", "prefills_paused")


class ProductionLine:
    """All productions; `progress` counts chunks computed, and chunks that have left, since start."""

    def __init__(self, settings: PrefillSettings, grants: Grants) -> None:
        self._settings = settings
        self._grants = grants
        self._bulk_sessions: set[str] = set()
        self.cache = PrefixIndex(settings.prefix_places, settings.prefix_block_tokens)
        self.queue: deque[int] = deque()
        self.computing: SourceSlot | None = None
        self.keeping = False
        self.chunk_started_ms = 0
        self.progress = 0
        self.counters = dict.fromkeys(COUNTERS, 0)

    def check(self) -> None:
        """Raise `InvariantViolation` when the prefix cache contradicts itself or the productions."""
        if self.cache.places:
            self.cache.check()
        held = [slot for slot in self._grants if slot.production and slot.production.prefix is not None]
        check(self.cache.status()["locks"] == len(held), "INV-4: a prefix is locked for nobody")

    @property
    def busy(self) -> bool:
        """Whether compute owes an answer."""
        return self.computing is not None or self.keeping

    def deadlines_ms(self) -> list[int]:
        """When productions that wait, for compute or for the way to the decode node, have waited too long."""
        sending = [slot.production.deadline_ms for slot in self._sending() if self._is_wanted(slot)]
        return sending + [self._grants[index].production.deadline_ms for index in self.queue]

    def session_opened(self, session: str, bulk: bool) -> None:
        """A decode node has a session; `bulk`: its KV is sent."""
        if bulk:
            self._bulk_sessions.add(session)

    def session_lost(self, session: str, now_ms: int) -> None:
        """The session has ended: its work stops, its slots go back as soon as nothing uses them."""
        held = self._grants.held_by(session)
        indices = {slot.index for slot in held}
        self.queue = deque(index for index in self.queue if index not in indices)
        self._grants.close(session, now_ms)
        for slot in held:
            if slot.state is not SourceState.ABANDONED:
                continue
            if session in self._bulk_sessions:
                slot.sending_for = session
            self._return_to_pool(slot, now_ms)
        self._bulk_sessions.discard(session)

    def on_prefill(self, session: str, request: Prefill, now_ms: int, draining: bool) -> list[Any]:
        slot = self._grants.find(session, request.slot)
        if slot is None or slot.state is not SourceState.IDLE:
            return protocol_error(session, f"PREFILL into slot {request.slot}, which is not idle")
        if not slot.last_epoch < request.epoch <= slot.last_epoch + limits.EPOCH_STEP:
            return protocol_error(session, f"PREFILL with epoch {request.epoch} after {slot.last_epoch}")
        slot.last_epoch = request.epoch
        profile = self._settings.profile
        problem = refusal(request, profile.max_tokens, draining)
        if problem is not None:
            self.counters["prefills_failed"] += 1
            return [SendMessage(session, _failure(request, *problem))]
        slot.advance(SourceEvent.PREFILL, now_ms)
        slot.production = Production(request, now_ms, urgent=request.urgent)
        self.queue.append(slot.index)
        return []

    def on_cancel(self, session: str, message: Cancel, now_ms: int) -> list[Any]:
        slot = self._grants.find(session, message.slot)
        if slot is None:
            return protocol_error(session, f"CANCEL for slot {message.slot}, which is not granted")
        if message.epoch > slot.last_epoch:
            return protocol_error(session, f"CANCEL for epoch {message.epoch}, which was never used")
        if message.epoch < slot.last_epoch or slot.production is None:
            return []
        if slot.production.outcome is not None and slot.state is SourceState.QUEUED:
            return []
        if slot.state is SourceState.QUEUED:
            return self._abort_queued(slot, ErrorCode.CANCELLED, "cancelled while it waited", now_ms)
        if slot.state is SourceState.SENDING:
            return self._give_up(slot, ErrorCode.CANCELLED, "cancelled while it was sent", now_ms)
        slot.production.cancelled = True
        return []

    def on_hurry(self, session: str, message: Hurry, now_ms: int) -> list[Any]:
        slot = self._grants.find(session, message.slot)
        if slot is None or message.epoch > slot.last_epoch:
            return protocol_error(session, f"HURRY for slot {message.slot}, epoch {message.epoch}: not used")
        if slot.production is not None and message.epoch == slot.last_epoch:
            slot.production.urgent = True
        return []

    def on_release(self, session: str, message: Release, now_ms: int) -> list[Any]:
        slot = self._grants.find(session, message.slot)
        if slot is None or slot.state is not SourceState.HELD or slot.last_epoch != message.epoch:
            detail = f"RELEASE of slot {message.slot}, epoch {message.epoch}: not held"
            return protocol_error(session, detail)
        slot.advance(SourceEvent.RELEASE, now_ms)
        return []

    def start_next(self, now_ms: int) -> list[Any]:
        """Give compute the first production that waits, if it has none: of the urgent ones, if there are any.

        What the last one leaves in the prefix cache comes first: the next may begin with the same.
        """
        if self.busy or not self.queue:
            return []
        index = next((index for index in self.queue if self._is_urgent(index)), self.queue[0])
        self.queue.remove(index)
        slot = self._grants[index]
        slot.advance(SourceEvent.COMPUTE_STARTED, now_ms)
        self.computing = slot
        if slot.production.started_ms is not None:
            return [self._run_chunk(slot, now_ms)]
        slot.production.started_ms = now_ms
        return [self._begin(slot.production, now_ms)]

    def _is_urgent(self, index: int) -> bool:
        return self._grants[index].production.urgent

    def _begin(self, production: Production, now_ms: int) -> RunChunk:
        """Compute's first chunk, with what the prefix cache has of the prompt."""
        request = production.request
        match = self.cache.match(self._root(request), request.prompt)
        production.prefix = HeldPrefix(self.cache.lock(match), match)
        production.cached_tokens = production.prefix.tokens
        chunk_tokens = self._settings.profile.chunk_tokens
        production.bounds = bounds_of(request, production.cached_tokens, chunk_tokens)
        self.chunk_started_ms = now_ms
        return next_chunk(production)

    def _root(self, request: Prefill) -> bytes:
        """Before the first block: KV is shared where the decode node says so, and of this engine alone."""
        identity = self._settings.prefix_identity
        return b"" if identity is None else identity.root(request.cache_digest.hex())

    def on_chunk_computed(self, event: ChunkComputed, now_ms: int) -> list[Any]:
        slot = self._answered(event.slot, event.epoch)
        production = slot.production
        self._let_go_of_prefix(production)
        if slot.state is SourceState.ABANDONED:
            return self._compute_let_go(slot, now_ms)
        start, end = production.bounds[len(production.digests)]
        production.digests.append(event.digest)
        production.busy_us += event.busy_us
        production.convert_us += event.convert_us
        if production.cancelled:
            return self._give_up(slot, ErrorCode.CANCELLED, "cancelled between chunks", now_ms)
        offers = self._offer(slot, start, end, now_ms)
        if len(production.digests) < len(production.bounds):
            if now_ms >= production.deadline_ms:
                return offers + self._expire(slot, now_ms)
            if not production.urgent and any(self._is_urgent(index) for index in self.queue):
                self._pause(slot, now_ms)
                return offers
            return [*offers, self._run_chunk(slot, now_ms)]
        finished = self._finish(slot, terminal_record(production, event, self._settings), now_ms)
        return offers + finished + self._keep(slot, production.request, now_ms)

    def _pause(self, slot: SourceSlot, now_ms: int) -> None:
        """A prompt that a lane waits for goes first; this one goes on behind it, at its old place."""
        slot.advance(SourceEvent.PREEMPTED, now_ms)
        self.counters["prefills_paused"] += 1
        self.computing = None
        self.queue.appendleft(slot.index)

    def on_compute_failed(self, event: ComputeFailed, now_ms: int) -> list[Any]:
        slot = self._answered(event.slot, event.epoch)
        self._let_go_of_prefix(slot.production)
        if slot.state is SourceState.ABANDONED:
            return self._compute_let_go(slot, now_ms)
        return self._give_up(slot, event.code, event.detail, now_ms)

    def on_prefix_corrupt(self, event: PrefixCorrupt, now_ms: int) -> list[Any]:
        """Nothing was computed yet: begin again without what is damaged."""
        slot = self._answered(event.slot, event.epoch)
        production = slot.production
        match = production.prefix.match
        self.cache.forget(match.entries[match.places.index(event.place)])
        self._let_go_of_prefix(production)
        if slot.state is SourceState.ABANDONED:
            return self._compute_let_go(slot, now_ms)
        if production.cancelled:
            return self._give_up(slot, ErrorCode.CANCELLED, "cancelled before it began", now_ms)
        return [self._begin(production, now_ms)]

    def on_blocks_stored(self, event: BlocksStored, now_ms: int) -> list[Any]:
        self.keeping = False
        for entry_id in event.stored:
            self.cache.stored(entry_id)
        for entry_id in event.abandoned:
            self.cache.abandon(entry_id)
        return []

    def _let_go_of_prefix(self, production: Production) -> None:
        """Compute has copied what it was told to, or never will."""
        held, production.prefix = production.prefix, None
        if held is not None:
            self.cache.unlock(held.lock)

    def on_chunks_let_go(self, event: ChunksLetGo, now_ms: int) -> list[Any]:
        """The data plane is through with what it was offered so far."""
        slot = self._grants[event.slot]
        production = slot.production
        if production is None or (slot.session, slot.last_epoch) != (event.session, event.epoch):
            return []
        self.progress += 1
        production.let_go = event.chunks
        if production.outcome is None or production.sends or slot.state is SourceState.ABANDONED:
            return []
        return self._complete(slot, now_ms)

    def on_pieces_moved(self, event: PiecesMoved, now_ms: int) -> list[Any]:
        """A slow way is progress, too."""
        self.progress += 1
        return []

    def on_bulk_released(self, session: str, now_ms: int) -> None:
        """Nothing sent in that ended session reads the slab any more."""
        for slot in self._grants:
            if slot.sending_for == session:
                slot.sending_for = None
                self._return_to_pool(slot, now_ms)

    def expire(self, now_ms: int) -> list[Any]:
        """Fail what has waited for longer than its decode node wanted to."""
        waiting = [self._grants[index] for index in self.queue]
        effects = []
        for slot in waiting:
            if now_ms >= slot.production.deadline_ms:
                detail = "waited for compute until its budget was over"
                effects += self._abort_queued(slot, ErrorCode.PREFILL_TIMEOUT, detail, now_ms)
        for slot in self._sending():
            if self._is_wanted(slot) and now_ms >= slot.production.deadline_ms:
                effects += self._expire(slot, now_ms)
        return effects

    def _sending(self) -> list[SourceSlot]:
        return [slot for slot in self._grants if slot.state is SourceState.SENDING]

    def _is_wanted(self, slot: SourceSlot) -> bool:
        """Whether a production that is being sent was not given up."""
        return isinstance(slot.production.outcome, PrefillDone)

    def _run_chunk(self, slot: SourceSlot, now_ms: int) -> RunChunk:
        self.chunk_started_ms = now_ms
        return next_chunk(slot.production)

    def _offer(self, slot: SourceSlot, start: int, end: int, now_ms: int) -> list[Any]:
        production = slot.production
        if slot.session not in self._bulk_sessions or start < production.request.send_from:
            return []
        if not production.offered:
            production.offered_ms = now_ms
        production.offered += 1
        return [ChunkOffered(slot.session, slot.index, slot.last_epoch, start, end)]

    def _abort_queued(self, slot: SourceSlot, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        self.queue.remove(slot.index)
        return self._give_up(slot, code, detail, now_ms)

    def _expire(self, slot: SourceSlot, now_ms: int) -> list[Any]:
        detail = f"not finished within {slot.production.request.budget_ms} ms"
        return self._give_up(slot, ErrorCode.PREFILL_TIMEOUT, detail, now_ms)

    def _give_up(self, slot: SourceSlot, code: ErrorCode, detail: str, now_ms: int) -> list[Any]:
        """Nothing comes of the production; whatever of it waits to be sent is dropped."""
        production = slot.production
        failure = _failure(production.request, code, detail)
        dropped = []
        if production.sends:
            dropped = [SendsDropped(slot.session, slot.index, slot.last_epoch)]
        return dropped + self._finish(slot, failure, now_ms)

    def _finish(self, slot: SourceSlot, outcome: PrefillDone | PrefillFailed, now_ms: int) -> list[Any]:
        """Compute, if it had the slot, is through with it: the completion follows when the sends are."""
        slot.production.outcome = outcome
        slot.production.computed_ms = now_ms
        if self.computing is slot:
            self.computing = None
        if not slot.production.sends:
            return self._complete(slot, now_ms)
        if slot.state is SourceState.COMPUTING:
            slot.advance(SourceEvent.COMPUTE_ENDED, now_ms)
        return []

    def _complete(self, slot: SourceSlot, now_ms: int) -> list[Any]:
        """The one completion of a slot's production."""
        production, slot.production = slot.production, None
        outcome = production.outcome
        if isinstance(outcome, PrefillDone):
            slot.advance(SourceEvent.DONE, now_ms)
            self.counters["prefills_done"] += 1
            return [SendMessage(slot.session, timed(production, now_ms))]
        cancelled = outcome.code is ErrorCode.CANCELLED
        slot.advance(SourceEvent.CANCELLED if cancelled else SourceEvent.FAILED, now_ms)
        self.counters["prefills_cancelled" if cancelled else "prefills_failed"] += 1
        return [SendMessage(slot.session, outcome)]

    def _keep(self, slot: SourceSlot, request: Prefill, now_ms: int) -> list[Any]:
        """Have what was computed stored, before compute does anything else to the slot."""
        token_count = len(request.prompt) // 4
        stores = self.cache.plan_insert(self._root(request), request.prompt, token_count)
        if not stores:
            return []
        self.keeping = True
        self.chunk_started_ms = now_ms
        return [StoreBlocks(slot.index, tuple(stores))]

    def _answered(self, index: int, epoch: int) -> SourceSlot:
        slot = self.computing
        check(slot is not None and slot.index == index, "compute answered for a slot it does not have")
        check(slot.production.request.epoch == epoch, "compute answered for another epoch")
        self.progress += 1
        return slot

    def _compute_let_go(self, slot: SourceSlot, now_ms: int) -> list[Any]:
        self.computing = None
        self._return_to_pool(slot, now_ms)
        return []

    def _return_to_pool(self, slot: SourceSlot, now_ms: int) -> None:
        """An abandoned slot is free again, unless compute or a send still has it."""
        if slot is self.computing or slot.sending_for is not None:
            return
        slot.production = None
        slot.advance(SourceEvent.LET_GO, now_ms)


def protocol_error(session: str, detail: str) -> list[Any]:
    """The end of a session whose decode node said what it must not say."""
    return [CloseSession(session, f"{ErrorCode.PROTOCOL_ERROR}: {detail}")]


def _failure(request: Prefill, code: ErrorCode, detail: str) -> PrefillFailed:
    cut = detail[: limits.DETAIL_CHARACTERS]
    return PrefillFailed(request.job_id, request.slot, request.epoch, code, cut)
