"""Sessions and core of a decode node as one pure object.

Decides how effects of one layer become events of another, and whether a prefill node that said yes is one to
work with; stepped by the node's wiring and by simulation alike. It must never do I/O: what has to happen
outside comes back as an effect. Frames of the two sides are told apart by `FromWorker` and `ToWorker`, which
name the prefill node.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from common.compatibility import describe_difference, differing_fields
from common.messages import HelloOk, HelloRefused, StatusReply
from decode_node import events as ev
from decode_node.core import DecodeCore
from transport.connector import Connector
from transport.listener import Listener
from transport.peers import (
    Answer,
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
class MapSlab:
    """Map the slab of a session that is about to be used; answered by SlabMapped or SlabRefused."""

    worker: str
    hello_ok: HelloOk


@dataclass(frozen=True, slots=True)
class SlabMapped:
    """The slab can be read."""

    worker: str
    hello_ok: HelloOk


@dataclass(frozen=True, slots=True)
class SlabRefused:
    """The slab cannot be mapped."""

    worker: str
    hello_ok: HelloOk
    detail: str


class DecodeStack:
    """A listener for clients, a connector for each prefill node, and the decode core."""

    def __init__(self, listener: Listener, connectors: dict[str, Connector], core: DecodeCore) -> None:
        self.listener = listener
        self.connectors = connectors
        self.core = core
        self._open: dict[str, str] = {}

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Takes events of the wire, of the core, and Tick."""
        outside: list[Any] = []
        pending: deque[Any] = deque([event])
        while pending:
            item = pending.popleft()
            if isinstance(item, Tick):
                pending.extend(self.listener.step(item, now_ms))
                for worker in self.connectors:
                    pending.extend(self._step_connector(worker, item, now_ms))
                pending.extend(self.core.step(ev.TimePassed(), now_ms))
            elif isinstance(item, (FrameReceived, BadFrame, RouteLost)):
                pending.extend(self.listener.step(item, now_ms))
            elif isinstance(item, FromWorker):
                pending.extend(self._step_connector(item.worker, item.item, now_ms))
            elif (outward := self._to_listener(item, now_ms)) is not None:
                pending.extend(self.listener.step(outward, now_ms))
            elif isinstance(item, _FOR_CONNECTORS):
                pending.extend(self._to_connectors(item, now_ms))
            elif (inward := self._inward(item)) is not None:
                if isinstance(item, SlabRefused):
                    ending = EndSession(item.hello_ok.session, item.detail)
                    pending.extend(self._step_connector(item.worker, ending, now_ms))
                pending.extend(self.core.step(inward, now_ms))
                if isinstance(inward, _NEWS):
                    outside.append(inward)
            else:
                outside.append(item)
        return outside

    def deadline_ms(self) -> int | None:
        """When `step(Tick)` is due at the latest."""
        deadlines = [self.listener.deadline_ms(), self.core.deadline_ms()]
        deadlines += [connector.deadline_ms() for connector in self.connectors.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _step_connector(self, worker: str, event: Any, now_ms: int) -> list[Any]:
        effects: list[Any] = []
        for effect in self.connectors[worker].step(event, now_ms):
            match effect:
                case SendFrame() | OpenSocket() | CloseSocket():
                    effects.append(ToWorker(worker, effect))
                case SessionOpened(hello_ok=hello_ok):
                    effects.append(self._judge(worker, hello_ok))
                case SessionEnded(session=session, cause=cause):
                    # A session that was turned down before the core heard of it ends in silence.
                    if self._open.get(worker) == session:
                        del self._open[worker]
                        effects.append(ev.WorkerLost(worker, session, cause))
                case Delivered(session=session, message=message):
                    effects.append(ev.WorkerMessage(session, message))
                case Suspected(session=session, silent=silent):
                    effects.append(ev.WorkerSuspected(session, silent))
                case AttemptRefused(refusal=refusal):
                    effects.append(ev.WorkerRefused(worker, refusal))
        return effects

    def _to_connectors(self, effect: Any, now_ms: int) -> list[Any]:
        if isinstance(effect, ev.LeaveWorkers):
            leaving = StopConnecting(effect.reason)
            return [
                out for worker in self.connectors for out in self._step_connector(worker, leaving, now_ms)
            ]
        worker = next((name for name, session in self._open.items() if session == effect.session), None)
        if worker is None:
            return []  # the session has ended meanwhile
        if isinstance(effect, ev.CloseWorker):
            return self._step_connector(worker, EndSession(effect.session, effect.reason), now_ms)
        return self._step_connector(worker, Post(effect.session, effect.message), now_ms)

    def _to_listener(self, effect: Any, now_ms: int) -> Any | None:
        match effect:
            case ev.AnswerHello(route=route, message=message):
                return Answer(route, message)
            case ev.SendToClient(session=session, message=StatusReply(body=status)):
                return Post(session, StatusReply({**status, **self._session_status(now_ms)}))
            case ev.SendToClient(session=session, message=message):
                return Post(session, message)
            case ev.CloseClient(session=session, reason=reason):
                return EndSession(session, reason)
        return None

    def _session_status(self, now_ms: int) -> dict[str, Any]:
        """What the sessions add to STATUS."""
        status = self.listener.status(now_ms)
        status["stale_messages"] += sum(peer.stale_messages for peer in self.connectors.values())
        return status

    def _judge(self, worker: str, hello_ok: HelloOk) -> Any:
        """Whether this node can work with what the prefill node offers."""
        settings = self.core.settings
        fields = differing_fields(settings.profile, hello_ok.profile)
        if fields:
            difference = describe_difference(settings.profile, hello_ok.profile, fields)
            return SlabRefused(worker, hello_ok, f"decode node and prefill node differ in {difference}")
        if hello_ok.lease_ms <= settings.dead_after_ms:
            return SlabRefused(
                worker,
                hello_ok,
                f"the prefill node's lease of {hello_ok.lease_ms} ms is not longer than this node's"
                f" --dead-after-ms {settings.dead_after_ms}",
            )
        if hello_ok.plane is None:
            return SlabRefused(worker, hello_ok, "the prefill node offers no data plane")
        if self.core.workers.of(hello_ok.session) is not None:
            return SlabRefused(worker, hello_ok, "the prefill node names a session that is in use")
        return MapSlab(worker, hello_ok)

    def _inward(self, item: Any) -> Any | None:
        """What an effect of the sessions, or an event from outside, is to the core."""
        match item:
            case HelloArrived(route=route, hello=hello):
                return ev.ClientHello(route, hello)
            case SessionEnded(session=session, cause=cause):
                return ev.ClientLost(session, cause)
            case Delivered(session=session, message=message):
                return ev.ClientMessage(session, message)
            case Mistake(session=session, code=code, detail=detail):
                return ev.ClientMistake(session, code, detail)
            case SlabMapped(worker=worker, hello_ok=hello_ok):
                self._open[worker] = hello_ok.session
                return ev.WorkerOpened(worker, hello_ok)
            case SlabRefused(worker=worker, detail=detail):
                return ev.WorkerRefused(worker, HelloRefused(False, detail))
        return item if isinstance(item, _CORE_EVENTS) else None


_FOR_CONNECTORS = (ev.SendToWorker, ev.CloseWorker, ev.LeaveWorkers)
_NEWS = (ev.WorkerOpened, ev.WorkerLost, ev.WorkerRefused, ev.ClientLost)
_CORE_EVENTS = (
    ev.WorkerLost,
    ev.WorkerMessage,
    ev.WorkerRefused,
    ev.WorkerSuspected,
    ev.SubmissionPrepared,
    ev.SubmissionRefused,
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
    ev.StopRequested,
)
