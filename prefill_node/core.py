"""The prefill node's decisions.

Decides which decode node is served, which slot is granted to whom, what compute does next, and the one
completion that answers each PREFILL. Called by the node's stack through `step`; it must never touch a socket,
a clock, a thread or KV bytes. Between two chunks it looks again at cancels, deadlines and the session, which
is why compute is asked for one chunk at a time.

A slot is written by compute alone, and compute is told (slot, epoch). The core hands a slot on only when
compute has answered: an ended session leaves its computing slot ABANDONED until then. Tables:
`common.lifecycle`. Rules: docs/protocol.md.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from common import limits
from common.compatibility import mismatch_refusal
from common.errors import ErrorCode, ExitStatus, check
from common.kv_layout import chunk_bounds
from common.lifecycle import SOURCE_TRANSITIONS, SourceEvent, SourceState, advance
from common.messages import (
    Cancel,
    ClientError,
    Draining,
    Grant,
    Hello,
    HelloOk,
    HelloRefused,
    Prefill,
    PrefillFailed,
    Release,
    Role,
    SlotGrant,
    StatusReply,
    StatusRequest,
)
from prefill_node.events import (
    AnswerHello,
    ChunkComputed,
    ClientMistake,
    CloseSession,
    ComputeFailed,
    ExitNode,
    HelloReceived,
    MessageReceived,
    RunChunk,
    SendMessage,
    SessionLost,
    StopRequested,
    TimePassed,
)
from prefill_node.production import (
    PrefillSettings,
    Production,
    SourceSlot,
    next_chunk,
    refusal,
    terminal_record,
)


class PrefillCore:
    """All state of the prefill node; `step` is the only way to change it."""

    def __init__(self, settings: PrefillSettings, new_session_id: Callable[[], str]) -> None:
        self._settings = settings
        self._new_session_id = new_session_id
        self._slots = [SourceSlot(index) for index in range(settings.plane.slot_count)]
        self._decode_session: str | None = None
        self._clients: dict[str, int] = {}
        self._queue: deque[int] = deque()
        self._computing: SourceSlot | None = None
        self._chunk_started_ms = 0
        self._drain_deadline_ms: int | None = None
        self._exited = False
        self._now_ms = 0
        self.progress = 0
        names = ("prefills_done", "prefills_failed", "prefills_cancelled", "hellos_refused")
        self.counters = dict.fromkeys(names, 0)
        self._handlers = {
            HelloReceived: self._on_hello,
            SessionLost: self._on_session_lost,
            MessageReceived: self._on_message,
            ClientMistake: self._on_client_mistake,
            ChunkComputed: self._on_chunk_computed,
            ComputeFailed: self._on_compute_failed,
            StopRequested: self._on_stop_requested,
            TimePassed: self._on_time_passed,
        }
        self._message_handlers = {
            Prefill: self._on_prefill,
            Cancel: self._on_cancel,
            Release: self._on_release,
        }

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Effects: those of `prefill_node.events`."""
        if self._exited:
            return []
        self._now_ms = now_ms
        effects = self._handlers[type(event)](event, now_ms)
        effects += self._start_next(now_ms)
        effects += self._exit_when_drained()
        return effects

    def deadline_ms(self) -> int | None:
        """When `step(TimePassed)` is due at the latest."""
        deadlines = [
            slot.production.arrived_ms + slot.production.request.budget_ms for slot in self._waiting()
        ]
        if self._computing is not None:
            deadlines.append(self._chunk_started_ms + self._settings.stall_ms)
        if self._drain_deadline_ms is not None:
            deadlines.append(self._drain_deadline_ms)
        return min(deadlines, default=None)

    def check(self) -> None:
        """Raise `InvariantViolation` when the parts of the state contradict each other."""
        queued = [slot.index for slot in self._slots if slot.state is SourceState.QUEUED]
        check(sorted(queued) == sorted(self._queue), "INV-1: the queue and the slots disagree")
        busy = [slot for slot in self._slots if slot.state in (SourceState.COMPUTING, SourceState.ABANDONED)]
        check(busy == ([] if self._computing is None else [self._computing]), "INV-2: compute has one slot")
        for slot in self._slots:
            granted = slot.state not in (SourceState.POOL, SourceState.ABANDONED)
            check((slot.session is not None) == granted, "INV-4: a slot is granted to a session or to nobody")
            check(slot.session in (None, self._decode_session), "INV-5: a slot belongs to the open session")
            producing = slot.state in (SourceState.QUEUED, SourceState.COMPUTING, SourceState.ABANDONED)
            check((slot.production is not None) == producing, "INV-4: production and state disagree")

    def status(self, now_ms: int) -> dict[str, Any]:
        """Plain values for STATUS; docs/operations.md lists the keys."""
        profile = self._settings.profile
        return {
            "role": "prefill",
            "accepting": self._drain_deadline_ms is None,
            "draining": self._drain_deadline_ms is not None,
            "incarnation": self._settings.incarnation,
            "model": profile.model_id,
            "max_tokens": profile.max_tokens,
            "decode_session": self._decode_session,
            "clients": len(self._clients),
            "progress": self.progress,
            "slots": [slot.status(now_ms) for slot in self._slots],
            "queued": len(self._queue),
            "counters": dict(self.counters),
        }

    def _waiting(self) -> list[SourceSlot]:
        return [self._slots[index] for index in self._queue]

    def _on_hello(self, event: HelloReceived, now_ms: int) -> list[Any]:
        refusal = self._refusal(event.hello)
        if refusal is not None:
            self.counters["hellos_refused"] += 1
            return [AnswerHello(event.route, refusal)]
        session = self._new_session_id()
        grants: tuple[SlotGrant, ...] = ()
        plane = None
        if event.hello.role is Role.DECODE:
            self._decode_session = session
            grants = self._grant_pool()
            plane = self._settings.plane
        else:
            self._clients[session] = 0
        answer = HelloOk(
            session,
            self._settings.incarnation,
            self._settings.lease_ms,
            self._settings.stall_ms,
            self._settings.profile,
            grants,
            plane,
        )
        return [AnswerHello(event.route, answer)]

    def _refusal(self, hello: Hello) -> HelloRefused | None:
        if hello.role is Role.CLIENT:
            return None
        if self._drain_deadline_ms is not None:
            return HelloRefused(True, "this prefill node is draining")
        mismatch = mismatch_refusal(self._settings.profile, hello.profile)
        if mismatch is not None:
            return mismatch
        if self._decode_session is not None:
            return HelloRefused(True, "another decode node holds this prefill node until its lease ends")
        return None

    def _grant_pool(self) -> tuple[SlotGrant, ...]:
        grants = []
        for slot in self._slots:
            if slot.state is SourceState.POOL:
                self._advance(slot, SourceEvent.GRANTED)
                slot.session = self._decode_session
                grants.append(SlotGrant(slot.index, slot.last_epoch))
        return tuple(grants)

    def _on_session_lost(self, event: SessionLost, now_ms: int) -> list[Any]:
        self._clients.pop(event.session, None)
        if event.session != self._decode_session:
            return []
        self._decode_session = None
        self._queue.clear()
        for slot in self._slots:
            if slot.state in (SourceState.POOL, SourceState.ABANDONED):
                continue
            self._advance(slot, SourceEvent.SESSION_ENDED)
            slot.session = None
            if slot.state is not SourceState.ABANDONED:
                slot.production = None
        return []

    def _on_message(self, event: MessageReceived, now_ms: int) -> list[Any]:
        message = event.message
        if event.session == self._decode_session:
            handler = self._message_handlers.get(type(message))
            if handler is None:
                return self._protocol_error(f"{type(message).__name__} is not for a prefill node")
            return handler(message, now_ms)
        if isinstance(message, StatusRequest):
            return [SendMessage(event.session, StatusReply(self.status(now_ms)))]
        detail = f"a prefill node takes no {type(message).__name__} from a client: ask the decode node"
        return self._mistake(event.session, detail)

    def _on_client_mistake(self, event: ClientMistake, now_ms: int) -> list[Any]:
        return self._mistake(event.session, event.detail)

    def _mistake(self, session: str, detail: str) -> list[Any]:
        if session not in self._clients:
            return []
        self._clients[session] += 1
        if self._clients[session] > limits.BAD_MESSAGES_PER_CLIENT:
            return [CloseSession(session, "too many messages that a prefill node does not take")]
        return [SendMessage(session, ClientError(ErrorCode.BAD_MESSAGE, detail))]

    def _protocol_error(self, detail: str) -> list[Any]:
        check(self._decode_session is not None, "a protocol error needs a session")
        return [CloseSession(self._decode_session, f"{ErrorCode.PROTOCOL_ERROR}: {detail}")]

    def _granted(self, index: int) -> SourceSlot | None:
        slot = self._slots[index] if index < len(self._slots) else None
        return slot if slot is not None and slot.session is not None else None

    def _on_prefill(self, request: Prefill, now_ms: int) -> list[Any]:
        slot = self._granted(request.slot)
        if slot is None or slot.state is not SourceState.IDLE:
            return self._protocol_error(f"PREFILL into slot {request.slot}, which is not idle")
        if not slot.last_epoch < request.epoch <= slot.last_epoch + limits.EPOCH_STEP:
            return self._protocol_error(f"PREFILL with epoch {request.epoch} after {slot.last_epoch}")
        slot.last_epoch = request.epoch
        draining = self._drain_deadline_ms is not None
        problem = refusal(request, self._settings.profile.max_tokens, draining)
        if problem is not None:
            self.counters["prefills_failed"] += 1
            return [self._failed(request, *problem)]
        token_count = len(request.prompt) // 4
        bounds = chunk_bounds(request.send_from, token_count, self._settings.profile.chunk_tokens)
        self._advance(slot, SourceEvent.PREFILL)
        slot.production = Production(request, now_ms, bounds)
        self._queue.append(slot.index)
        return []

    def _on_cancel(self, message: Cancel, now_ms: int) -> list[Any]:
        slot = self._granted(message.slot)
        if slot is None:
            return self._protocol_error(f"CANCEL for slot {message.slot}, which is not granted")
        if message.epoch > slot.last_epoch:
            return self._protocol_error(f"CANCEL for epoch {message.epoch}, which was never used")
        if message.epoch < slot.last_epoch or slot.production is None:
            return []
        if slot.state is SourceState.QUEUED:
            return [self._abort_queued(slot, ErrorCode.CANCELLED, "cancelled before it began")]
        slot.production.cancelled = True
        return []

    def _on_release(self, message: Release, now_ms: int) -> list[Any]:
        slot = self._granted(message.slot)
        if slot is None or slot.state is not SourceState.HELD or slot.last_epoch != message.epoch:
            return self._protocol_error(f"RELEASE of slot {message.slot}, epoch {message.epoch}: not held")
        self._advance(slot, SourceEvent.RELEASE)
        return []

    def _abort_queued(self, slot: SourceSlot, code: ErrorCode, detail: str) -> SendMessage:
        self._queue.remove(slot.index)
        event = SourceEvent.CANCELLED if code is ErrorCode.CANCELLED else SourceEvent.FAILED
        return self._fail(slot, event, code, detail)

    def _fail(self, slot: SourceSlot, event: SourceEvent, code: ErrorCode, detail: str) -> SendMessage:
        """The failing completion of a slot's production; the slot is idle afterwards."""
        self._advance(slot, event)
        request = slot.production.request
        slot.production = None
        self.counters["prefills_cancelled" if code is ErrorCode.CANCELLED else "prefills_failed"] += 1
        return self._failed(request, code, detail)

    def _failed(self, request: Prefill, code: ErrorCode, detail: str) -> SendMessage:
        cut = detail[: limits.DETAIL_CHARACTERS]
        failure = PrefillFailed(request.job_id, request.slot, request.epoch, code, cut)
        return SendMessage(self._decode_session, failure)

    def _start_next(self, now_ms: int) -> list[Any]:
        if self._computing is not None or not self._queue:
            return []
        slot = self._slots[self._queue.popleft()]
        self._advance(slot, SourceEvent.COMPUTE_STARTED)
        slot.production.started_ms = now_ms
        self._computing = slot
        return [self._run_chunk(slot, now_ms)]

    def _run_chunk(self, slot: SourceSlot, now_ms: int) -> RunChunk:
        self._chunk_started_ms = now_ms
        return next_chunk(slot.production)

    def _on_chunk_computed(self, event: ChunkComputed, now_ms: int) -> list[Any]:
        slot = self._answered(event.slot, event.epoch)
        production = slot.production
        if slot.state is SourceState.ABANDONED:
            return self._return_to_pool(slot)
        production.digests.append(event.digest)
        production.busy_us += event.busy_us
        if production.cancelled:
            self._computing = None
            return [self._fail(slot, SourceEvent.CANCELLED, ErrorCode.CANCELLED, "cancelled between chunks")]
        if len(production.digests) < len(production.bounds):
            if now_ms >= production.arrived_ms + production.request.budget_ms:
                return [self._expire(slot)]
            return [self._run_chunk(slot, now_ms)]
        self._computing = None
        self._advance(slot, SourceEvent.DONE)
        slot.production = None
        self.counters["prefills_done"] += 1
        return [SendMessage(self._decode_session, terminal_record(production, event, self._settings))]

    def _expire(self, slot: SourceSlot) -> SendMessage:
        self._computing = None
        detail = f"not finished within {slot.production.request.budget_ms} ms"
        return self._fail(slot, SourceEvent.FAILED, ErrorCode.PREFILL_TIMEOUT, detail)

    def _on_compute_failed(self, event: ComputeFailed, now_ms: int) -> list[Any]:
        slot = self._answered(event.slot, event.epoch)
        if slot.state is SourceState.ABANDONED:
            return self._return_to_pool(slot)
        self._computing = None
        return [self._fail(slot, SourceEvent.FAILED, event.code, event.detail)]

    def _answered(self, index: int, epoch: int) -> SourceSlot:
        slot = self._computing
        check(slot is not None and slot.index == index, "compute answered for a slot it does not have")
        check(slot.production.request.epoch == epoch, "compute answered for another epoch")
        self.progress += 1
        return slot

    def _return_to_pool(self, slot: SourceSlot) -> list[Any]:
        self._computing = None
        slot.production = None
        self._advance(slot, SourceEvent.COMPUTE_STOPPED)
        if self._decode_session is None:
            return []
        return [SendMessage(self._decode_session, Grant(self._grant_pool()))]

    def _on_stop_requested(self, event: StopRequested, now_ms: int) -> list[Any]:
        if self._drain_deadline_ms is not None:
            return []
        self._drain_deadline_ms = now_ms + self._settings.drain_ms
        return [] if self._decode_session is None else [SendMessage(self._decode_session, Draining())]

    def _exit_when_drained(self) -> list[Any]:
        if self._drain_deadline_ms is None or self._decode_session is not None or self._computing is not None:
            return []
        return self._leave(ExitStatus.OK, "drained")

    def _on_time_passed(self, event: TimePassed, now_ms: int) -> list[Any]:
        stalled = self._computing is not None and now_ms >= self._chunk_started_ms + self._settings.stall_ms
        if stalled:
            return self._leave(ExitStatus.HUNG, f"compute made no progress for {self._settings.stall_ms} ms")
        if self._drain_deadline_ms is not None and now_ms >= self._drain_deadline_ms:
            return self._leave(ExitStatus.DRAIN_INCOMPLETE, "the drain deadline passed")
        late = [
            slot
            for slot in self._waiting()
            if now_ms >= slot.production.arrived_ms + slot.production.request.budget_ms
        ]
        return [
            self._abort_queued(
                slot, ErrorCode.PREFILL_TIMEOUT, "waited for compute until its budget was over"
            )
            for slot in late
        ]

    def _leave(self, status: ExitStatus, reason: str) -> list[Any]:
        self._exited = True
        sessions = [*self._clients, *([self._decode_session] if self._decode_session is not None else [])]
        return [*(CloseSession(session, reason) for session in sessions), ExitNode(status, reason)]

    def _advance(self, slot: SourceSlot, event: SourceEvent) -> None:
        slot.state = advance(SOURCE_TRANSITIONS, slot.state, event)
        slot.since_ms = self._now_ms
