"""Sessions, bulk sockets and core of a decode node as one pure object.

Decides how effects of one layer become events of another, and whether a prefill node that said yes is one to
work with; stepped by the node's wiring and by simulation alike. It must never do I/O: what has to happen
outside comes back as an effect. Frames of the two sides are told apart by `FromWorker` and `ToWorker`, which
name the prefill node, KV by `FromBulk` and `ToBulk`, which name the session.
"""

from dataclasses import dataclass
from typing import Any

from common.compatibility import mismatch_refusal, wire_layout
from common.data_planes import SHM, TCP
from common.messages import Cancel, HelloOk, HelloRefused, Prefill, Release
from common.prefix_commands import BlocksStored, CacheFileEnded, CacheHeadsRead
from decode_node import events as ev
from decode_node.core import DecodeCore
from transport.bulk import (
    BulkReceiver,
    ChunksLanded,
    CloseBulk,
    ExpectChunks,
    ForgetChunks,
    FromBulk,
    PiecesMoved,
    ToBulk,
)
from transport.connector import Connector
from transport.listener import Listener
from transport.peers import (
    AttemptRefused,
    BadFrame,
    CloseSocket,
    Delivered,
    EndSession,
    FrameReceived,
    HelloArrived,
    Mistake,
    OpenSocket,
    Post,
    RouteLost,
    SendFrame,
    SessionEnded,
    SessionOpened,
    StopConnecting,
    Suspected,
    Tick,
)
from transport.stack import Stack


@dataclass(frozen=True, slots=True)
class FromWorker:
    """Something from the socket to a prefill node: FrameReceived, BadFrame or RouteLost."""

    worker: str
    item: Any


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Something for the socket to a prefill node: SendFrame, OpenSocket or CloseSocket."""

    worker: str
    item: Any


@dataclass(frozen=True, slots=True)
class OpenPlane:
    """Be ready to read the KV of a session that is about to be used: map the slab, or open the bulk socket.

    Answered by PlaneOpened or PlaneRefused.
    """

    worker: str
    hello_ok: HelloOk


@dataclass(frozen=True, slots=True)
class PlaneOpened:
    """KV of the session can be read."""

    worker: str
    hello_ok: HelloOk


@dataclass(frozen=True, slots=True)
class PlaneRefused:
    """KV of the session cannot be read, or must not be."""

    worker: str
    hello_ok: HelloOk
    detail: str


class DecodeStack(Stack):
    """A listener for clients, a connector for each prefill node, the decode core, and a bulk receiver for
    each session whose KV comes over a socket."""

    def __init__(self, listener: Listener, connectors: dict[str, Connector], core: DecodeCore) -> None:
        self.connectors = connectors
        self.receivers: dict[str, BulkReceiver] = {}
        self._open: dict[str, str] = {}
        handlers = {
            Tick: self._on_tick,
            FrameReceived: self._to_listener,
            BadFrame: self._to_listener,
            RouteLost: self._to_listener,
            HelloArrived: self._on_hello,
            SessionEnded: self._on_client_ended,
            Delivered: self._on_delivered,
            Mistake: self._on_mistake,
            FromWorker: self._on_from_worker,
            FromBulk: self._on_from_bulk,
            PlaneOpened: self._on_plane_opened,
            PlaneRefused: self._on_plane_refused,
            ev.AnswerHello: self._on_answer,
            ev.SendToClient: self._on_send,
            ev.CloseClient: self._on_close,
            ev.SendToWorker: self._on_send_to_worker,
            ev.CloseWorker: self._on_close_worker,
            ev.LeaveWorkers: self._on_leave_workers,
            **dict.fromkeys(_CORE_EVENTS, self._to_core),
        }
        super().__init__(listener, core, handlers)

    def deadline_ms(self) -> int | None:
        """When `step(Tick)` is due at the latest."""
        deadlines = [self.listener.deadline_ms(), self.core.deadline_ms()]
        deadlines += [connector.deadline_ms() for connector in self.connectors.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _on_tick(self, event: Tick, now_ms: int) -> list[Any]:
        effects = self.listener.step(event, now_ms)
        for worker in self.connectors:
            effects += self._step_connector(worker, event, now_ms)
        return effects + self.core.step(ev.TimePassed(), now_ms)

    def _on_hello(self, event: HelloArrived, now_ms: int) -> list[Any]:
        return self.core.step(ev.ClientHello(event.route, event.hello), now_ms)

    def _on_client_ended(self, event: SessionEnded, now_ms: int) -> list[Any]:
        # At once: a HELLO that ended this session follows, and must find it ended.
        return self.core.step(ev.ClientLost(event.session, event.cause), now_ms)

    def _news(self, item: Any) -> list[Any]:
        if isinstance(item, SessionEnded):
            return [ev.ClientLost(item.session, item.cause)]
        return [item] if isinstance(item, (ev.WorkerOpened, ev.WorkerLost, ev.WorkerRefused)) else []

    def _on_delivered(self, event: Delivered, now_ms: int) -> list[Any]:
        return self.core.step(ev.ClientMessage(event.session, event.message), now_ms)

    def _on_mistake(self, event: Mistake, now_ms: int) -> list[Any]:
        return self.core.step(ev.ClientMistake(event.session, event.code, event.detail), now_ms)

    def _session_status(self, now_ms: int) -> dict[str, Any]:
        status = super()._session_status(now_ms)
        status["stale_messages"] += sum(peer.stale_messages for peer in self.connectors.values())
        return status

    def _on_from_worker(self, event: FromWorker, now_ms: int) -> list[Any]:
        return self._step_connector(event.worker, event.item, now_ms)

    def _step_connector(self, worker: str, event: Any, now_ms: int) -> list[Any]:
        effects: list[Any] = []
        for effect in self.connectors[worker].step(event, now_ms):
            match effect:
                case SendFrame() | OpenSocket() | CloseSocket():
                    effects.append(ToWorker(worker, effect))
                case SessionOpened(hello_ok=hello_ok):
                    effects.append(self._judge(worker, hello_ok))
                case SessionEnded(session=session, cause=cause):
                    effects += self._on_worker_ended(worker, session, cause)
                case Delivered(session=session, message=message):
                    effects.append(ev.WorkerMessage(session, message))
                case Suspected(session=session, silent=silent):
                    effects.append(ev.WorkerSuspected(session, silent))
                case AttemptRefused(refusal=refusal):
                    effects.append(ev.WorkerRefused(worker, refusal))
        return effects

    def _on_worker_ended(self, worker: str, session: str, cause: str) -> list[Any]:
        # A session that was turned down before the core heard of it ends in silence.
        if self._open.get(worker) != session:
            return []
        del self._open[worker]
        lost = ev.WorkerLost(worker, session, cause)
        if self.receivers.pop(session, None) is None:
            return [lost]
        return [ToBulk(session, CloseBulk()), lost]

    def _judge(self, worker: str, hello_ok: HelloOk) -> Any:
        """Whether this node can work with what the prefill node offers."""
        settings = self.core.settings
        mismatch = mismatch_refusal(hello_ok.profile, settings.profile)
        if mismatch is not None:
            return PlaneRefused(worker, hello_ok, mismatch.detail)
        if hello_ok.lease_ms <= settings.dead_after_ms:
            return PlaneRefused(
                worker,
                hello_ok,
                f"the prefill node's lease of {hello_ok.lease_ms} ms is not longer than this node's"
                f" --dead-after-ms {settings.dead_after_ms}",
            )
        offered = {SHM: hello_ok.plane, TCP: hello_ok.bulk}
        given = [plane for plane, where in offered.items() if where is not None]
        if len(given) != 1 or given[0] not in settings.planes:
            return PlaneRefused(
                worker, hello_ok, "the prefill node does not offer exactly one data plane that was asked for"
            )
        if self.core.workers.of(hello_ok.session) is not None:
            return PlaneRefused(worker, hello_ok, "the prefill node names a session that is in use")
        return OpenPlane(worker, hello_ok)

    def _on_plane_opened(self, event: PlaneOpened, now_ms: int) -> list[Any]:
        hello_ok = event.hello_ok
        session = hello_ok.session
        self._open[event.worker] = session
        opened: list[Any] = [ev.WorkerOpened(event.worker, hello_ok)]
        if hello_ok.bulk is None:
            return opened
        profile = hello_ok.profile
        receiver = BulkReceiver(session, wire_layout(profile), profile.chunk_tokens)
        self.receivers[session] = receiver
        return [ToBulk(session, receiver.open()), *opened]

    def _on_plane_refused(self, event: PlaneRefused, now_ms: int) -> list[Any]:
        ending = EndSession(event.hello_ok.session, event.detail)
        refused = ev.WorkerRefused(event.worker, HelloRefused(False, event.detail))
        return [refused, *self._step_connector(event.worker, ending, now_ms)]

    def _on_send_to_worker(self, event: ev.SendToWorker, now_ms: int) -> list[Any]:
        worker = self._worker_of(event.session)
        if worker is None:
            return []  # the session has ended meanwhile
        effects = self._tell_receiver(event.session, event.message, now_ms)
        return effects + self._step_connector(worker, Post(event.session, event.message), now_ms)

    def _on_close_worker(self, event: ev.CloseWorker, now_ms: int) -> list[Any]:
        worker = self._worker_of(event.session)
        if worker is None:
            return []
        return self._step_connector(worker, EndSession(event.session, event.reason), now_ms)

    def _on_leave_workers(self, event: ev.LeaveWorkers, now_ms: int) -> list[Any]:
        leaving = StopConnecting(event.reason)
        return [out for worker in self.connectors for out in self._step_connector(worker, leaving, now_ms)]

    def _worker_of(self, session: str) -> str | None:
        return next((name for name, known in self._open.items() if known == session), None)

    def _tell_receiver(self, session: str, message: Any, now_ms: int) -> list[Any]:
        """What an order to a prefill node means for the KV that comes from it."""
        receiver = self.receivers.get(session)
        if receiver is None:
            return []
        match message:
            case Prefill(slot=slot, epoch=epoch, send_from=start, prompt=prompt):
                expected = ExpectChunks(slot, epoch, start, len(prompt) // 4)
                return [ToBulk(session, expected), *receiver.step(expected, now_ms)]
            case Cancel(slot=slot, epoch=epoch) | Release(slot=slot, epoch=epoch):
                return receiver.step(ForgetChunks(slot, epoch), now_ms)
        return []

    def _on_from_bulk(self, event: FromBulk, now_ms: int) -> list[Any]:
        receiver = self.receivers.get(event.session)
        if receiver is None:
            return []  # the session has ended meanwhile
        effects: list[Any] = []
        for effect in receiver.step(event.item, now_ms):
            match effect:
                case ChunksLanded() | PiecesMoved():
                    effects.append(effect)
                case EndSession(reason=reason):
                    effects.append(ev.CloseWorker(event.session, reason))
                case _:
                    effects.append(ToBulk(event.session, effect))
        return effects


_CORE_EVENTS = (
    ev.WorkerOpened,
    ChunksLanded,
    PiecesMoved,
    ev.WorkerLost,
    ev.WorkerMessage,
    ev.WorkerRefused,
    ev.WorkerSuspected,
    ev.SubmissionPrepared,
    ev.SubmissionRefused,
    ev.TextTokenized,
    ev.TokenizeRefused,
    ev.TextProduced,
    ev.TextFailed,
    ev.FirstTokenSampled,
    ev.LogitsRefused,
    ev.ImportEnded,
    ev.LocalChunkComputed,
    ev.LocalPrefillEnded,
    ev.TokenSampled,
    ev.LaneStopped,
    ev.LaneFailed,
    BlocksStored,
    CacheHeadsRead,
    CacheFileEnded,
    ev.StopRequested,
)
