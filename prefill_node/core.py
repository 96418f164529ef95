"""The prefill node's decisions.

Decides which peer is served, how KV gets to it, and when the node may go. Called by the node's stack through
`step`; it must never touch a socket, a clock, a thread or KV bytes. Its parts: who holds which slot is kept
by `prefill_node.grants`, what is computed and answered by `prefill_node.line`.

A slot is written by compute alone, and compute is told (slot, epoch). A slot is handed on only when compute
has answered and nothing sent reads it any more. Tables: `common.lifecycle`. Rules: docs/protocol.md.
"""

from collections.abc import Callable
from typing import Any

from common import limits
from common.compatibility import mismatch_refusal
from common.data_planes import SHM, common_planes
from common.errors import ErrorCode, ExitStatus, check
from common.lifecycle import SourceState
from common.messages import (
    Cancel,
    ClientError,
    Draining,
    Grant,
    GrantLimit,
    Hello,
    HelloOk,
    HelloRefused,
    Hurry,
    Prefill,
    Release,
    ReturnSlots,
    Role,
    StatusReply,
    StatusRequest,
    TcpPlane,
)
from common.prefix_commands import BlocksStored
from prefill_node.events import (
    AnswerHello,
    BulkReleased,
    ChunkComputed,
    ClientMistake,
    CloseSession,
    ComputeFailed,
    ExitNode,
    HelloReceived,
    MessageReceived,
    PlanePrepared,
    PrefixCorrupt,
    PreparePlane,
    SendMessage,
    SessionLost,
    StopRequested,
    TimePassed,
)
from prefill_node.grants import Grants
from prefill_node.line import ProductionLine, protocol_error
from prefill_node.production import PrefillSettings
from prefill_node.status import prefill_status
from transport.bulk import ChunksLetGo, PiecesMoved


class PrefillCore:
    """All state of the prefill node; `step` is the only way to change it."""

    def __init__(self, settings: PrefillSettings, new_session_id: Callable[[], str]) -> None:
        self.settings = settings
        self.grants = Grants(settings.slot_count, settings.slots_per_session)
        self.line = ProductionLine(settings, self.grants)
        self.clients: dict[str, int] = {}
        self.hellos_refused = 0
        self._new_session_id = new_session_id
        self._drain_deadline_ms: int | None = None
        self._exited = False
        self._handlers = {
            HelloReceived: self._on_hello,
            PlanePrepared: self._on_plane_prepared,
            SessionLost: self._on_session_lost,
            MessageReceived: self._on_message,
            ClientMistake: self._on_client_mistake,
            ChunkComputed: self.line.on_chunk_computed,
            ComputeFailed: self.line.on_compute_failed,
            PrefixCorrupt: self.line.on_prefix_corrupt,
            BlocksStored: self.line.on_blocks_stored,
            ChunksLetGo: self.line.on_chunks_let_go,
            PiecesMoved: self.line.on_pieces_moved,
            BulkReleased: self._on_bulk_released,
            StopRequested: self._on_stop_requested,
            TimePassed: self._on_time_passed,
        }

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Effects: those of `prefill_node.events`."""
        if self._exited:
            return []
        effects = self._handlers[type(event)](event, now_ms)
        if self._exited:
            return effects
        effects += self._share_pool(now_ms)
        effects += self.line.start_next(now_ms)
        effects += self._exit_when_drained()
        return effects

    def deadline_ms(self) -> int | None:
        """When `step(TimePassed)` is due at the latest."""
        deadlines = self.line.deadlines_ms()
        if self.line.busy:
            deadlines.append(self.line.chunk_started_ms + self.settings.stall_ms)
        if self._drain_deadline_ms is not None:
            deadlines.append(self._drain_deadline_ms)
        return min(deadlines, default=None)

    @property
    def draining(self) -> bool:
        return self._drain_deadline_ms is not None

    def progress_count(self) -> int:
        """Chunks finished since start, for PONG."""
        return self.line.progress

    def check(self) -> None:
        """Raise `InvariantViolation` when the parts of the state contradict each other."""
        self.grants.check()
        queued = [
            slot.index
            for slot in self.grants
            if slot.state is SourceState.QUEUED and slot.production.outcome is None
        ]
        check(sorted(queued) == sorted(self.line.queue), "INV-1: the queue and the slots disagree")
        for slot in self.grants:
            abandoned = slot.state is SourceState.ABANDONED
            computing = slot is self.line.computing
            if slot.state is SourceState.COMPUTING or (abandoned and slot.sending_for is None):
                check(computing, "INV-2: a slot waits for compute that does not have it")
            elif computing:
                check(abandoned, "INV-4: compute has a slot that is in other use")
        self.line.check()
        sessions = len(self.grants.sessions)
        check(sessions <= self.settings.decode_nodes, "INV-6: more decode nodes than may be served")

    def status(self, now_ms: int) -> dict[str, Any]:
        """Plain values for STATUS; docs/operations.md lists the keys."""
        return prefill_status(self, now_ms)

    def _on_hello(self, event: HelloReceived, now_ms: int) -> list[Any]:
        problem = self._hello_problem(event.hello)
        if problem is not None:
            self.hellos_refused += 1
            return [AnswerHello(event.route, problem)]
        session = self._new_session_id()
        if event.hello.role is Role.CLIENT:
            self.clients[session] = 0
            return [AnswerHello(event.route, self._hello_ok(session))]
        planes = common_planes(self.settings.planes, event.hello.planes)
        if planes == (SHM,):
            return self._open(session, event.route, None, now_ms)
        probe = event.hello.memory_probe if SHM in planes else None
        return [PreparePlane(session, event.route, probe)]

    def _on_plane_prepared(self, event: PlanePrepared, now_ms: int) -> list[Any]:
        if event.problem:
            self.hellos_refused += 1
            return [AnswerHello(event.route, HelloRefused(True, event.problem))]
        return self._open(event.session, event.route, event.bulk, now_ms)

    def _open(self, session: str, route: bytes, bulk: TcpPlane | None, now_ms: int) -> list[Any]:
        """A decode node has a session; without `bulk` it reads the slab."""
        grants = self.grants.open(session, now_ms)
        self.line.session_opened(session, bulk is not None)
        plane = self.settings.plane if bulk is None else None
        return [AnswerHello(route, self._hello_ok(session, grants=grants, plane=plane, bulk=bulk))]

    def _hello_ok(self, session: str, **of_decode_nodes: Any) -> HelloOk:
        settings = self.settings
        return HelloOk(
            session,
            settings.incarnation,
            settings.lease_ms,
            settings.stall_ms,
            settings.profile,
            **of_decode_nodes,
        )

    def _hello_problem(self, hello: Hello) -> HelloRefused | None:
        if hello.role is Role.CLIENT:
            return None
        if self.draining:
            return HelloRefused(True, "this prefill node is draining")
        mismatch = mismatch_refusal(self.settings.profile, hello.profile)
        if mismatch is not None:
            return mismatch
        if not common_planes(self.settings.planes, hello.planes):
            ours, theirs = " or ".join(self.settings.planes), " or ".join(hello.planes) or "none"
            detail = f"this prefill node gives KV over {ours}, the decode node takes it over {theirs}"
            return HelloRefused(False, f"{detail}: start both with the same --kv-plane", ("kv_plane",))
        if len(self.grants.sessions) >= self.settings.decode_nodes:
            return HelloRefused(True, self._full())
        return None

    def _full(self) -> str:
        """Why a further decode node cannot be served."""
        if self.settings.decode_nodes == 1:
            return (
                "another decode node holds this prefill node until its lease ends; start it with"
                " --source-slots 2 or more to serve several"
            )
        return (
            f"{self.settings.decode_nodes} decode nodes hold a slot each: start this prefill node with more"
            " --source-slots"
        )

    def _share_pool(self, now_ms: int) -> list[Any]:
        limits_told = self.grants.changed_shares()
        granted = self.grants.share(now_ms)
        return [
            *(SendMessage(session, GrantLimit(share)) for session, share in limits_told.items()),
            *(SendMessage(session, Grant(grants)) for session, grants in granted.items()),
        ]

    def _on_session_lost(self, event: SessionLost, now_ms: int) -> list[Any]:
        self.clients.pop(event.session, None)
        if event.session in self.grants.sessions:
            self.line.session_lost(event.session, now_ms)
        return []

    def _on_bulk_released(self, event: BulkReleased, now_ms: int) -> list[Any]:
        self.line.on_bulk_released(event.session, now_ms)
        return []

    def _on_message(self, event: MessageReceived, now_ms: int) -> list[Any]:
        message = event.message
        if event.session in self.grants.sessions:
            return self._on_order(event.session, message, now_ms)
        if isinstance(message, StatusRequest):
            return [SendMessage(event.session, StatusReply(self.status(now_ms)))]
        detail = f"a prefill node takes no {type(message).__name__} from a client: ask the decode node"
        return self._mistake(event.session, detail)

    def _on_order(self, session: str, message: Any, now_ms: int) -> list[Any]:
        """A message of a decode node."""
        match message:
            case Prefill():
                return self.line.on_prefill(session, message, now_ms, self.draining)
            case Cancel():
                return self.line.on_cancel(session, message, now_ms)
            case Hurry():
                return self.line.on_hurry(session, message, now_ms)
            case Release():
                return self.line.on_release(session, message, now_ms)
            case ReturnSlots(slots=slots):
                if self.grants.take_back(session, slots, now_ms):
                    return []
                return protocol_error(session, "RETURN_SLOTS of a slot that is not granted, or not idle")
        return protocol_error(session, f"{type(message).__name__} is not for a prefill node")

    def _on_client_mistake(self, event: ClientMistake, now_ms: int) -> list[Any]:
        return self._mistake(event.session, event.detail)

    def _mistake(self, session: str, detail: str) -> list[Any]:
        if session not in self.clients:
            return []
        self.clients[session] += 1
        if self.clients[session] > limits.BAD_MESSAGES_PER_CLIENT:
            return [CloseSession(session, "too many messages that a prefill node does not take")]
        return [SendMessage(session, ClientError(ErrorCode.BAD_MESSAGE, detail))]

    def _on_stop_requested(self, event: StopRequested, now_ms: int) -> list[Any]:
        if self.draining:
            return []
        self._drain_deadline_ms = now_ms + self.settings.drain_ms
        return [SendMessage(session, Draining()) for session in self.grants.sessions]

    def _exit_when_drained(self) -> list[Any]:
        if not self.draining or self.grants.sessions or self.line.computing is not None:
            return []
        return self._leave(ExitStatus.OK, "drained")

    def _on_time_passed(self, event: TimePassed, now_ms: int) -> list[Any]:
        stall_ms = self.settings.stall_ms
        if self.line.busy and now_ms >= self.line.chunk_started_ms + stall_ms:
            return self._leave(ExitStatus.HUNG, f"compute made no progress for {stall_ms} ms")
        if self.draining and now_ms >= self._drain_deadline_ms:
            return self._leave(ExitStatus.DRAIN_INCOMPLETE, "the drain deadline passed")
        return self.line.expire(now_ms)

    def _leave(self, status: ExitStatus, reason: str) -> list[Any]:
        self._exited = True
        sessions = (*self.clients, *self.grants.sessions)
        return [*(CloseSession(session, reason) for session in sessions), ExitNode(status, reason)]
