"""The prefill node's decisions.

Decides which peer is served, what compute does next, and the one completion that answers each PREFILL. Called
by the node's stack through `step`; it must never touch a socket, a clock, a thread or KV bytes. Between two
chunks it looks again at cancels, deadlines and the session, which is why compute is asked for one chunk at a
time. Who holds which slot is kept by `prefill_node.grants`.

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
from common.lifecycle import SourceEvent, SourceState
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
from prefill_node.grants import Grants
from prefill_node.production import (
    PrefillSettings,
    Production,
    SourceSlot,
    next_chunk,
    refusal,
    terminal_record,
)
from prefill_node.status import prefill_status

_COUNTERS = ("prefills_done", "prefills_failed", "prefills_cancelled", "hellos_refused")


class PrefillCore:
    """All state of the prefill node; `step` is the only way to change it."""

    def __init__(self, settings: PrefillSettings, new_session_id: Callable[[], str]) -> None:
        self.settings = settings
        self.grants = Grants(settings.plane.slot_count, settings.slots_per_session)
        self.clients: dict[str, int] = {}
        self.queue: deque[int] = deque()
        self.computing: SourceSlot | None = None
        self.chunk_started_ms = 0
        self.progress = 0
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._new_session_id = new_session_id
        self._drain_deadline_ms: int | None = None
        self._exited = False
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
        effects = self._handlers[type(event)](event, now_ms)
        if self._exited:
            return effects
        effects += self._share_pool(now_ms)
        effects += self._start_next(now_ms)
        effects += self._exit_when_drained()
        return effects

    def deadline_ms(self) -> int | None:
        """When `step(TimePassed)` is due at the latest."""
        deadlines = [self.grants[index].production.deadline_ms for index in self.queue]
        if self.computing is not None:
            deadlines.append(self.chunk_started_ms + self.settings.stall_ms)
        if self._drain_deadline_ms is not None:
            deadlines.append(self._drain_deadline_ms)
        return min(deadlines, default=None)

    @property
    def draining(self) -> bool:
        return self._drain_deadline_ms is not None

    def progress_count(self) -> int:
        """Chunks finished since start, for PONG."""
        return self.progress

    def check(self) -> None:
        """Raise `InvariantViolation` when the parts of the state contradict each other."""
        self.grants.check()
        queued = [slot.index for slot in self.grants if slot.state is SourceState.QUEUED]
        check(sorted(queued) == sorted(self.queue), "INV-1: the queue and the slots disagree")
        busy = [slot for slot in self.grants if slot.state in (SourceState.COMPUTING, SourceState.ABANDONED)]
        check(busy == ([] if self.computing is None else [self.computing]), "INV-2: compute has one slot")
        sessions = len(self.grants.sessions)
        check(sessions <= self.settings.decode_nodes, "INV-6: more decode nodes than may be served")

    def status(self, now_ms: int) -> dict[str, Any]:
        """Plain values for STATUS; docs/operations.md lists the keys."""
        return prefill_status(self, now_ms)

    def _on_hello(self, event: HelloReceived, now_ms: int) -> list[Any]:
        problem = self._hello_problem(event.hello)
        if problem is not None:
            self.counters["hellos_refused"] += 1
            return [AnswerHello(event.route, problem)]
        session = self._new_session_id()
        settings = self.settings
        grants: tuple[SlotGrant, ...] = ()
        plane = None
        if event.hello.role is Role.DECODE:
            grants, plane = self.grants.open(session, now_ms), settings.plane
        else:
            self.clients[session] = 0
        answer = HelloOk(
            session,
            settings.incarnation,
            settings.lease_ms,
            settings.stall_ms,
            settings.profile,
            grants,
            plane,
        )
        return [AnswerHello(event.route, answer)]

    def _hello_problem(self, hello: Hello) -> HelloRefused | None:
        if hello.role is Role.CLIENT:
            return None
        if self.draining:
            return HelloRefused(True, "this prefill node is draining")
        mismatch = mismatch_refusal(self.settings.profile, hello.profile)
        if mismatch is not None:
            return mismatch
        if len(self.grants.sessions) >= self.settings.decode_nodes:
            return HelloRefused(True, "another decode node holds this prefill node until its lease ends")
        return None

    def _share_pool(self, now_ms: int) -> list[Any]:
        shares = self.grants.share(now_ms)
        return [SendMessage(session, Grant(grants)) for session, grants in shares.items()]

    def _on_session_lost(self, event: SessionLost, now_ms: int) -> list[Any]:
        self.clients.pop(event.session, None)
        if event.session in self.grants.sessions:
            held = {slot.index for slot in self.grants.held_by(event.session)}
            self.queue = deque(index for index in self.queue if index not in held)
            self.grants.close(event.session, now_ms)
        return []

    def _on_message(self, event: MessageReceived, now_ms: int) -> list[Any]:
        message = event.message
        if event.session in self.grants.sessions:
            handler = self._message_handlers.get(type(message))
            if handler is None:
                detail = f"{type(message).__name__} is not for a prefill node"
                return _protocol_error(event.session, detail)
            return handler(event.session, message, now_ms)
        if isinstance(message, StatusRequest):
            return [SendMessage(event.session, StatusReply(self.status(now_ms)))]
        detail = f"a prefill node takes no {type(message).__name__} from a client: ask the decode node"
        return self._mistake(event.session, detail)

    def _on_client_mistake(self, event: ClientMistake, now_ms: int) -> list[Any]:
        return self._mistake(event.session, event.detail)

    def _mistake(self, session: str, detail: str) -> list[Any]:
        if session not in self.clients:
            return []
        self.clients[session] += 1
        if self.clients[session] > limits.BAD_MESSAGES_PER_CLIENT:
            return [CloseSession(session, "too many messages that a prefill node does not take")]
        return [SendMessage(session, ClientError(ErrorCode.BAD_MESSAGE, detail))]

    def _on_prefill(self, session: str, request: Prefill, now_ms: int) -> list[Any]:
        slot = self.grants.find(session, request.slot)
        if slot is None or slot.state is not SourceState.IDLE:
            return _protocol_error(session, f"PREFILL into slot {request.slot}, which is not idle")
        if not slot.last_epoch < request.epoch <= slot.last_epoch + limits.EPOCH_STEP:
            return _protocol_error(session, f"PREFILL with epoch {request.epoch} after {slot.last_epoch}")
        slot.last_epoch = request.epoch
        profile = self.settings.profile
        problem = refusal(request, profile.max_tokens, self.draining)
        if problem is not None:
            self.counters["prefills_failed"] += 1
            return [_failed(session, request, *problem)]
        bounds = chunk_bounds(request.send_from, len(request.prompt) // 4, profile.chunk_tokens)
        slot.advance(SourceEvent.PREFILL, now_ms)
        slot.production = Production(request, now_ms, bounds)
        self.queue.append(slot.index)
        return []

    def _on_cancel(self, session: str, message: Cancel, now_ms: int) -> list[Any]:
        slot = self.grants.find(session, message.slot)
        if slot is None:
            return _protocol_error(session, f"CANCEL for slot {message.slot}, which is not granted")
        if message.epoch > slot.last_epoch:
            return _protocol_error(session, f"CANCEL for epoch {message.epoch}, which was never used")
        if message.epoch < slot.last_epoch or slot.production is None:
            return []
        if slot.state is SourceState.QUEUED:
            return [self._abort_queued(slot, ErrorCode.CANCELLED, "cancelled before it began", now_ms)]
        slot.production.cancelled = True
        return []

    def _on_release(self, session: str, message: Release, now_ms: int) -> list[Any]:
        slot = self.grants.find(session, message.slot)
        if slot is None or slot.state is not SourceState.HELD or slot.last_epoch != message.epoch:
            detail = f"RELEASE of slot {message.slot}, epoch {message.epoch}: not held"
            return _protocol_error(session, detail)
        slot.advance(SourceEvent.RELEASE, now_ms)
        return []

    def _abort_queued(self, slot: SourceSlot, code: ErrorCode, detail: str, now_ms: int) -> SendMessage:
        self.queue.remove(slot.index)
        return self._fail(slot, code, detail, now_ms)

    def _fail(self, slot: SourceSlot, code: ErrorCode, detail: str, now_ms: int) -> SendMessage:
        """The failing completion of a slot's production; the slot is idle afterwards."""
        cancelled = code is ErrorCode.CANCELLED
        slot.advance(SourceEvent.CANCELLED if cancelled else SourceEvent.FAILED, now_ms)
        request, slot.production = slot.production.request, None
        self.counters["prefills_cancelled" if cancelled else "prefills_failed"] += 1
        return _failed(slot.session, request, code, detail)

    def _start_next(self, now_ms: int) -> list[Any]:
        if self.computing is not None or not self.queue:
            return []
        slot = self.grants[self.queue.popleft()]
        slot.advance(SourceEvent.COMPUTE_STARTED, now_ms)
        slot.production.started_ms = now_ms
        self.computing = slot
        return [self._run_chunk(slot, now_ms)]

    def _run_chunk(self, slot: SourceSlot, now_ms: int) -> RunChunk:
        self.chunk_started_ms = now_ms
        return next_chunk(slot.production)

    def _on_chunk_computed(self, event: ChunkComputed, now_ms: int) -> list[Any]:
        slot = self._answered(event.slot, event.epoch)
        production = slot.production
        if slot.state is SourceState.ABANDONED:
            return self._return_to_pool(slot, now_ms)
        production.digests.append(event.digest)
        production.busy_us += event.busy_us
        if production.cancelled:
            self.computing = None
            return [self._fail(slot, ErrorCode.CANCELLED, "cancelled between chunks", now_ms)]
        if len(production.digests) < len(production.bounds):
            if now_ms >= production.deadline_ms:
                return [self._expire(slot, now_ms)]
            return [self._run_chunk(slot, now_ms)]
        self.computing = None
        slot.advance(SourceEvent.DONE, now_ms)
        slot.production = None
        self.counters["prefills_done"] += 1
        return [SendMessage(slot.session, terminal_record(production, event, self.settings))]

    def _expire(self, slot: SourceSlot, now_ms: int) -> SendMessage:
        self.computing = None
        detail = f"not finished within {slot.production.request.budget_ms} ms"
        return self._fail(slot, ErrorCode.PREFILL_TIMEOUT, detail, now_ms)

    def _on_compute_failed(self, event: ComputeFailed, now_ms: int) -> list[Any]:
        slot = self._answered(event.slot, event.epoch)
        if slot.state is SourceState.ABANDONED:
            return self._return_to_pool(slot, now_ms)
        self.computing = None
        return [self._fail(slot, event.code, event.detail, now_ms)]

    def _answered(self, index: int, epoch: int) -> SourceSlot:
        slot = self.computing
        check(slot is not None and slot.index == index, "compute answered for a slot it does not have")
        check(slot.production.request.epoch == epoch, "compute answered for another epoch")
        self.progress += 1
        return slot

    def _return_to_pool(self, slot: SourceSlot, now_ms: int) -> list[Any]:
        self.computing = None
        slot.production = None
        slot.advance(SourceEvent.COMPUTE_STOPPED, now_ms)
        return []

    def _on_stop_requested(self, event: StopRequested, now_ms: int) -> list[Any]:
        if self.draining:
            return []
        self._drain_deadline_ms = now_ms + self.settings.drain_ms
        return [SendMessage(session, Draining()) for session in self.grants.sessions]

    def _exit_when_drained(self) -> list[Any]:
        if not self.draining or self.grants.sessions or self.computing is not None:
            return []
        return self._leave(ExitStatus.OK, "drained")

    def _on_time_passed(self, event: TimePassed, now_ms: int) -> list[Any]:
        if self.computing is not None and now_ms >= self.chunk_started_ms + self.settings.stall_ms:
            return self._leave(ExitStatus.HUNG, f"compute made no progress for {self.settings.stall_ms} ms")
        if self.draining and now_ms >= self._drain_deadline_ms:
            return self._leave(ExitStatus.DRAIN_INCOMPLETE, "the drain deadline passed")
        waiting = [self.grants[index] for index in self.queue]
        late = [slot for slot in waiting if now_ms >= slot.production.deadline_ms]
        detail = "waited for compute until its budget was over"
        return [self._abort_queued(slot, ErrorCode.PREFILL_TIMEOUT, detail, now_ms) for slot in late]

    def _leave(self, status: ExitStatus, reason: str) -> list[Any]:
        self._exited = True
        sessions = (*self.clients, *self.grants.sessions)
        return [*(CloseSession(session, reason) for session in sessions), ExitNode(status, reason)]


def _protocol_error(session: str, detail: str) -> list[Any]:
    return [CloseSession(session, f"{ErrorCode.PROTOCOL_ERROR}: {detail}")]


def _failed(session: str, request: Prefill, code: ErrorCode, detail: str) -> SendMessage:
    cut = detail[: limits.DETAIL_CHARACTERS]
    return SendMessage(session, PrefillFailed(request.job_id, request.slot, request.epoch, code, cut))
