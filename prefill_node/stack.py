"""Sessions and core of a prefill node as one pure object.

Decides how effects of one layer become events of the other; stepped by the node's wiring and by simulation
alike. It must never do I/O: what has to happen outside comes back as `SendFrame`, `RunChunk` or `ExitNode`,
and `SessionLost` as news for the log.
"""

from collections import deque
from typing import Any

from common.messages import StatusReply
from prefill_node import events as ev
from prefill_node.core import PrefillCore
from transport.listener import Listener
from transport.peers import (
    Answer,
    BadFrame,
    Delivered,
    EndSession,
    FrameReceived,
    HelloArrived,
    Mistake,
    Post,
    RouteLost,
    SessionEnded,
    Tick,
)


class PrefillStack:
    """A listener and the prefill core."""

    def __init__(self, listener: Listener, core: PrefillCore) -> None:
        self.listener = listener
        self.core = core

    def step(self, event: Any, now_ms: int) -> list[Any]:
        """The only door. Takes events of the wire, of the core, and Tick."""
        outside: list[Any] = []
        pending = deque([event])
        while pending:
            item = pending.popleft()
            if isinstance(item, Tick):
                pending.extend(self.listener.step(item, now_ms))
                pending.extend(self.core.step(ev.TimePassed(), now_ms))
            elif isinstance(item, (FrameReceived, BadFrame, RouteLost)):
                pending.extend(self.listener.step(item, now_ms))
            elif (inward := self._inward(item)) is not None:
                pending.extend(self.core.step(inward, now_ms))
                if isinstance(inward, ev.SessionLost):
                    outside.append(inward)
            elif (outward := self._outward(item, now_ms)) is not None:
                pending.extend(self.listener.step(outward, now_ms))
            elif isinstance(item, _CORE_EVENTS):
                pending.extend(self.core.step(item, now_ms))
            else:
                outside.append(item)
        return outside

    def deadline_ms(self) -> int | None:
        """When `step(Tick)` is due at the latest."""
        deadlines = (self.listener.deadline_ms(), self.core.deadline_ms())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _inward(self, effect: Any) -> Any | None:
        """What an effect of the sessions is to the core."""
        match effect:
            case HelloArrived(route=route, hello=hello):
                return ev.HelloReceived(route, hello)
            case SessionEnded(session=session, role=role, cause=cause):
                return ev.SessionLost(session, role, cause)
            case Delivered(session=session, message=message):
                return ev.MessageReceived(session, message)
            case Mistake(session=session, detail=detail):
                return ev.ClientMistake(session, detail)
        return None

    def _outward(self, effect: Any, now_ms: int) -> Any | None:
        """What an effect of the core is to the sessions."""
        match effect:
            case ev.AnswerHello(route=route, message=message):
                return Answer(route, message)
            case ev.SendMessage(session=session, message=StatusReply(body=status)):
                return Post(session, StatusReply({**status, **self.listener.status(now_ms)}))
            case ev.SendMessage(session=session, message=message):
                return Post(session, message)
            case ev.CloseSession(session=session, reason=reason):
                return EndSession(session, reason)
        return None


_CORE_EVENTS = (ev.ChunkComputed, ev.ComputeFailed, ev.StopRequested)
