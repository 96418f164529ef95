"""Sessions and core of a decode node as one pure object.

Decides how effects of one layer become events of another, and whether a prefill node that said yes is one to
work with; stepped by the node's wiring and by simulation alike. It must never do I/O: what has to happen
outside comes back as an effect. Frames of the two sides are told apart by `FromWorker` and `ToWorker`.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from common.compatibility import describe_difference, differing_fields
from common.messages import HelloOk, HelloRefused
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
    """Something from the socket to the prefill node: FrameReceived, BadFrame or RouteLost."""

    item: Any


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Something for the socket to the prefill node: SendFrame, OpenSocket or CloseSocket."""

    item: Any


@dataclass(frozen=True, slots=True)
class MapSlab:
    """Map the slab of a session that is about to be used; answered by SlabMapped or SlabRefused."""

    hello_ok: HelloOk


@dataclass(frozen=True, slots=True)
class SlabMapped:
    """The slab can be read."""

    hello_ok: HelloOk


@dataclass(frozen=True, slots=True)
class SlabRefused:
    """The slab cannot be mapped."""

    hello_ok: HelloOk
    detail: str


class DecodeStack:
    """A listener for clients, a connector for the prefill node if there is one, and the decode core."""

    def __init__(self, listener: Listener, connector: Connector | None, core: DecodeCore) -> None:
        self.listener = listener
        self.connector = connector
        self.core = core
        self._open_worker: str | None = None

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Takes events of the wire, of the core, and Tick."""
        outside: list[Any] = []
        pending: deque[Any] = deque([event])
        while pending:
            item = pending.popleft()
            if isinstance(item, Tick):
                pending.extend(self.listener.step(item, now_ms))
                pending.extend(self._step_connector(item, now_ms))
                pending.extend(self.core.step(ev.TimePassed(), now_ms))
            elif isinstance(item, (FrameReceived, BadFrame, RouteLost)):
                pending.extend(self.listener.step(item, now_ms))
            elif isinstance(item, FromWorker):
                pending.extend(self._step_connector(item.item, now_ms))
            elif (outward := _to_listener(item)) is not None:
                pending.extend(self.listener.step(outward, now_ms))
            elif (outward := _to_connector(item)) is not None:
                pending.extend(self._step_connector(outward, now_ms))
            elif (inward := self._inward(item)) is not None:
                if isinstance(item, SlabRefused):
                    ending = EndSession(item.hello_ok.session, item.detail)
                    pending.extend(self._step_connector(ending, now_ms))
                pending.extend(self.core.step(inward, now_ms))
                if isinstance(inward, _NEWS):
                    outside.append(inward)
            else:
                outside.append(item)
        return outside

    def deadline_ms(self) -> int | None:
        """When `step(Tick)` is due at the latest."""
        deadlines = [self.listener.deadline_ms(), self.core.deadline_ms()]
        if self.connector is not None:
            deadlines.append(self.connector.deadline_ms())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _step_connector(self, event: Any, now_ms: int) -> list[Any]:
        if self.connector is None:
            return []
        effects: list[Any] = []
        for effect in self.connector.step(event, now_ms):
            match effect:
                case SendFrame() | OpenSocket() | CloseSocket():
                    effects.append(ToWorker(effect))
                case SessionOpened(hello_ok=hello_ok):
                    effects.append(self._judge(hello_ok))
                case SessionEnded(session=session, cause=cause):
                    # A session that was turned down before the core heard of it ends in silence.
                    if session == self._open_worker:
                        self._open_worker = None
                        effects.append(ev.WorkerLost(session, cause))
                case Delivered(session=session, message=message):
                    effects.append(ev.WorkerMessage(session, message))
                case Suspected(session=session, silent=silent):
                    effects.append(ev.WorkerSuspected(session, silent))
                case AttemptRefused(refusal=refusal):
                    effects.append(ev.WorkerRefused(refusal))
        return effects

    def _judge(self, hello_ok: HelloOk) -> Any:
        """Whether this node can work with what the prefill node offers."""
        settings = self.core.settings
        fields = differing_fields(settings.profile, hello_ok.profile)
        if fields:
            difference = describe_difference(settings.profile, hello_ok.profile, fields)
            return SlabRefused(hello_ok, f"decode node and prefill node differ in {difference}")
        if hello_ok.lease_ms <= settings.dead_after_ms:
            return SlabRefused(
                hello_ok,
                f"the prefill node's lease of {hello_ok.lease_ms} ms is not longer than this node's"
                f" --dead-after-ms {settings.dead_after_ms}",
            )
        if hello_ok.plane is None:
            return SlabRefused(hello_ok, "the prefill node offers no data plane")
        return MapSlab(hello_ok)

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
            case SlabMapped(hello_ok=hello_ok):
                self._open_worker = hello_ok.session
                return ev.WorkerOpened(hello_ok)
            case SlabRefused(detail=detail):
                return ev.WorkerRefused(HelloRefused(False, detail))
        return item if isinstance(item, _CORE_EVENTS) else None


def _to_listener(effect: Any) -> Any | None:
    match effect:
        case ev.AnswerHello(route=route, message=message):
            return Answer(route, message)
        case ev.SendToClient(session=session, message=message):
            return Post(session, message)
        case ev.CloseClient(session=session, reason=reason):
            return EndSession(session, reason)
    return None


def _to_connector(effect: Any) -> Any | None:
    match effect:
        case ev.SendToWorker(session=session, message=message):
            return Post(session, message)
        case ev.CloseWorker(session=session, reason=reason):
            return EndSession(session, reason)
        case ev.LeaveWorker(reason=reason):
            return StopConnecting(reason)
    return None


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
